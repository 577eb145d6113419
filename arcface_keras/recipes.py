"""Recipes: named settings of a training, one frozen dataclass each; its fields are names of `RunConfig`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["RECIPES", "Baseline", "Strong", "Titles", "recipe_values"]


@dataclass(frozen=True)
class Baseline:
    """The public notebook: everything is trained at once from pretrained weights, with a constant margin.

    Pooled features go to ArcFace as they are (s = 30, m = .5). Adam; the learning rate rises over five epochs
    from 1e-6 to 5e-6 for each photo of a batch and then falls to .8 of itself every epoch. Photos are
    flipped both ways, with hue moved by up to .01, saturation .7 to 1.3, contrast .8 to 1.2 and brightness by
    up to .1 of the range. Batch statistics of the backbone move, as in that notebook.

    Reference:
        R. Sandeep (ragnar123), "Shopee EfficientNetB3 ArcMarginProduct", Kaggle, 2021.
    """

    head: str = "arc"
    s: float = 30.0
    m: float = 0.5
    pooling: str = "avg"
    embedding_size: int = 0
    neck_batch_norm: bool = False
    dropout: float = 0.0
    top_epochs: int = 0
    epochs: int = 20
    learning_rate_per_photo: float = 5e-6
    lr_schedule: str = "exponential"
    ramp_epochs: int = 5
    lr_start: float = 1e-6
    lr_min: float = 1e-6
    lr_decay: float = 0.8
    augment: str = "notebook"
    clip_norm: float = 0.0
    batch_norm: str = "update"


@dataclass(frozen=True)
class Strong:
    """What the best of that competition's image models had in common, after a start on frozen features.

    Pooled features -> batch normalisation -> unit length, nothing in between. Neck and head learn first on
    cached features, while the margin rises from .2; then the whole network does, the head at a higher rate,
    with clipped gradients, weight decay, horizontal flips, CutMix for one photo in ten (the margin stays on
    the label with the larger part), margins that fall with the size of the class, an average of the weights
    over the steps, and frozen batch statistics in the backbone.

    Reference:
        Y. Lee (harangdev) and limerobot, first place of Shopee - Price Match Guarantee, Kaggle, 2021.
    """

    head: str = "arc"
    s: float = 30.0
    m: float = 0.5
    m_start: float = 0.2
    margin_epochs: int = 5
    margin_power: float = 0.1
    pooling: str = "avg"
    embedding_size: int = 0
    neck_batch_norm: bool = True
    dropout: float = 0.0
    views: int = 2
    top_epochs: int = 20
    top_learning_rate: float = 1e-3
    epochs: int = 10
    learning_rate: float = 1e-3
    lr_schedule: str = "cosine"
    ramp_epochs: int = 1
    lr_start: float = 1e-6
    head_lr_factor: float = 10.0
    clip_norm: float = 10.0
    weight_decay: float = 0.01
    ema: float = 0.99
    augment: str = "flip"
    cutmix: float = 0.1
    batch_norm: str = "frozen"


@dataclass(frozen=True)
class Titles:
    """The same for an encoder of titles, whose rate is small and whose batches hold no views.

    Mean of the hidden states -> batch normalisation -> unit length. Neck and head learn first on cached
    features, while the margin rises from .2; then the whole encoder does for three epochs, with a tenth of
    them as warm-up, clipped gradients, weight decay and margins that fall with the size of the class.

    Reference:
        Y. Lee (harangdev) and limerobot, first place of Shopee - Price Match Guarantee, Kaggle, 2021.
    """

    head: str = "arc"
    s: float = 30.0
    m: float = 0.3
    m_start: float = 0.2
    margin_epochs: int = 5
    margin_power: float = 0.1
    embedding_size: int = 0
    neck_batch_norm: bool = True
    dropout: float = 0.0
    top_epochs: int = 60
    top_learning_rate: float = 1e-3
    epochs: int = 3
    learning_rate: float = 1e-4
    lr_schedule: str = "cosine"
    clip_norm: float = 10.0
    weight_decay: float = 0.01


RECIPES: dict[str, Baseline | Strong | Titles] = {
    "baseline": Baseline(),
    "strong": Strong(),
    "titles": Titles(),
}


def recipe_values(name: str, batch_size: int) -> dict[str, Any]:
    """The settings of a recipe by their names in `RunConfig`; a rate for each photo becomes that of a batch.

    Raises:
        ValueError: an unknown name; the valid ones are listed.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}. Received: recipe={name!r}.")
    values = dataclasses.asdict(RECIPES[name])
    rate = values.pop("learning_rate_per_photo", None)
    return values if rate is None else values | {"learning_rate": rate * batch_size}
