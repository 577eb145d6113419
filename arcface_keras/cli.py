"""The command line: one sub-command a stage, `run` for all of them, `demo` for the bundled photos."""

import argparse
import dataclasses
import importlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from arcface_keras._fields import choices_of, type_of
from arcface_keras._native_log import load_tensorflow_quietly
from arcface_keras._on_ray import without_idle_address
from arcface_keras._version import __version__
from arcface_keras.config import RunConfig

__all__ = ["main"]

_DATA = ("train", "images", "test", "test_images", "missing_images", "gallery", "gallery_images")
_MATCHING = ("k", "engine", "address", "target_recall", "steps", "threshold", "memory_mb")
_LISTINGS = ("test", "images", "test_images", "missing_images")
_EMBEDDING_ONLY = ("embed_engine", "embed_dtype", "shard_rows")
_EMBEDDING = (*_LISTINGS, "batch_size", "flip_average", "compute_phash", "workers", *_EMBEDDING_ONLY)
_RANKING = ("format", "gallery", "gallery_images")
_SEARCH = ("k", "engine", "address", "target_recall", "memory_mb")
_WITH_KERAS = ("demo", "run", "train", "embed", "export", "bundle")
_ALL = tuple(spec.name for spec in dataclasses.fields(RunConfig))
_NOT_TRAINING = {"k", "engine", "target_recall", "steps", "ablate", "test", "test_images", "missing_images"}
_NOT_TRAINING |= {*_RANKING, *_EMBEDDING_ONLY, "address", "new_share"}
_TRAINING = tuple(name for name in _ALL if name not in _NOT_TRAINING)

COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "demo": (
        "the whole job on the bundled photos, with its scores",
        tuple(n for n in _ALL if n not in _DATA),
    ),
    "run": ("all stages: train, embed, match, evaluate (with labels), submit", _ALL),
    "train": ("train an embedder on labelled listings", _TRAINING),
    "embed": (
        "embed the listings to match with the run's embedder",
        ("out", *_EMBEDDING, "engine", "address", *_RANKING),
    ),
    "match": ("match the embedded listings", ("out", *_MATCHING)),
    "evaluate": (
        "score the matches of labelled listings beside the floors",
        ("out", *_LISTINGS, "ablate", "engine", "address", "target_recall", "memory_mb"),
    ),
    "submit": (
        "write submission.csv: the matches, or ranked lists by --format",
        ("out", *_RANKING, "new_share", *_SEARCH),
    ),
    "report": (
        "write report.html, one page to look at: scores, pictures and galleries of the matches",
        ("out", "test", "images", "test_images", "memory_mb", "workers"),
    ),
    "export": (
        "write the embedder as a TensorFlow SavedModel that takes uint8 photos of any size",
        ("out", "flip_average"),
    ),
    "rehearse": (
        "try the scored run on 0, 1, 3 and 70,000 fabricated rows: seconds, memory, valid files",
        ("out", "images", "test", "test_images", "batch_size", "workers", *_MATCHING),
    ),
    "bundle": (
        "write folders ready for upload to Kaggle: dataset with the wheel, model, two kernels",
        (),
    ),
}

_STAGES = {"rehearse": "arcface_keras.rehearse", "bundle": "arcface_keras.bundle"}
"""Where a command's function lies, if not in `arcface_keras.pipeline`."""

_EXTRAS: dict[str, dict[str, dict[str, Any]]] = {
    "embed": {
        "--embeddings-from": {
            "metavar": "PARQUET",
            "help": "take rows that others computed, from a parquet file or a folder of them with the "
            "columns posting_id and embedding (lists of numbers), instead of computing them",
        }
    },
    "export": {
        "--to": {"metavar": "FOLDER", "help": "folder to write (default: saved_model in the run folder)"},
        "--embeddings-to": {
            "metavar": "FOLDER",
            "help": "write the embeddings as parquet files (posting_id, and a list of float32) instead",
        },
    },
    "rehearse": {
        "--rows": {"type": int, "default": 70_000, "help": "listings of the scored run (default: 70000)"},
        "--sample-rows": {
            "type": int,
            "help": "embed only so many and carry the seconds on; matching still runs in full (default: all)",
        },
        "--distinct": {
            "type": int,
            "default": 2000,
            "help": "photos encoded anew, further ones are shown as they are, then as links (default: 2000)",
        },
        "--limit": {"default": "2h", "help": "what the scored run may take (default: 2h)"},
    },
    "bundle": {
        "--out": {"dest": "to", "required": True, "metavar": "FOLDER", "help": "folder to write"},
        "--owner": {"required": True, "help": "user or organisation on Kaggle"},
        "--name": {"default": "arcface-keras", "help": "what all names begin with (default: arcface-keras)"},
        "--competition": {
            "default": "shopee-product-matching",
            "help": "competition whose data the kernels read (default: shopee-product-matching)",
        },
        "--variation": {"default": "default", "help": "variation of the model (default: default)"},
        "--model-version": {
            "dest": "version",
            "type": int,
            "default": 1,
            "help": "version of the variation that the inference kernel reads (default: 1)",
        },
    },
}
"""Options of commands that no run remembers; they are arguments of the command's function."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 for an error that a message explains, 2 for usage."""
    if arguments is None:
        # A scheduler's request to end unwinds as an error does: temporary folders and children go as well.
        signal.signal(signal.SIGTERM, _end)
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser(resuming="--resume" in words).parse_args(words)
    logging.basicConfig(
        format="%(message)s",
        level=logging.WARNING if options.quiet else logging.INFO,
        stream=sys.stderr,
        force=True,
    )
    logging.captureWarnings(True)
    try:
        _run(options)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("arcface-keras: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, ImportError) as error:
        if options.traceback:
            raise
        print(f"arcface-keras: error: {error}", file=sys.stderr)
        return 1
    return 0


def _end(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _run(options: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(options).items() if name in _ALL}
    extra = {name: getattr(options, name) for name in _extra_names(options.command)}
    without_network = extra.get("embeddings_from") or (extra.get("embeddings_to") and not extra["to"])
    config = _configuration(options.command, given, new=bool(extra.get("embeddings_from")))
    from arcface_keras import pipeline

    if options.command in _WITH_KERAS and not without_network:
        load_tensorflow_quietly()
    module = importlib.import_module(_STAGES.get(options.command, "arcface_keras.pipeline"))
    stage: Callable[..., Any] = getattr(module, options.command)
    result = stage(config, progress=not options.quiet, **extra)
    if options.command in ("export", "report"):
        print(f"wrote {result}")
    if options.command == "bundle":
        print(f"wrote {result.path}; next:\n\n{result.commands}")
    if options.command == "rehearse":
        print(result.text())
        if result.problems:
            raise ValueError(
                f"the scored run must be without problems. Received: {'; '.join(result.problems)}."
            )
    if options.command in ("demo", "run", "evaluate") and result:
        print(pipeline.score_table(result))
        if config.ablate:
            print(f"\n{pipeline.ablation_text(config)}")
    if options.command in ("demo", "run", "submit"):
        print(f"wrote {Path(config.out) / 'submission.csv'}")


def _extra_names(command: str) -> list[str]:
    extras = _EXTRAS.get(command, {})
    return [spec.get("dest", flag.removeprefix("--").replace("-", "_")) for flag, spec in extras.items()]


def _configuration(command: str, given: dict[str, Any], new: bool = False) -> RunConfig:
    """What the run folder remembers, overridden by what is given; a first stage begins with defaults.

    With `new` the command may be the first stage, where there is no run yet.
    """
    if command == "demo":
        from arcface_keras.pipeline import demo_config

        return demo_config(**given)
    if command in ("run", "train"):
        return _resumed(given) if given.get("resume") else RunConfig.from_dict(given)
    file = Path(given.get("out", RunConfig().out)) / "run.json"
    remembered = RunConfig() if new and not file.exists() else RunConfig.load(file)
    return remembered.replace(**given)


def _resumed(given: dict[str, Any]) -> RunConfig:
    """What the training that was cut off was given, or one that ended; else what is given now."""
    from arcface_keras._files import read_json

    out = Path(given.get("out", RunConfig().out))
    if (out / "checkpoint" / "training.json").exists():
        stored = read_json(out / "checkpoint" / "training.json")["config"]
        remembered = RunConfig.from_dict(without_idle_address(stored))
    elif (out / "run.json").exists():
        remembered = RunConfig.load(out / "run.json")
    else:
        return RunConfig.from_dict(given)
    return remembered.replace(**given)


def _parser(resuming: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="arcface-keras",
        description="Product matching with angular-margin embeddings: listings in, submission.csv out.",
    )
    parser.add_argument("--version", action="version", version=f"arcface-keras {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, fields) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for spec in dataclasses.fields(RunConfig):
            if spec.name in fields:
                _add_option(command, spec, name, resuming)
        for flag, extra in _EXTRAS.get(name, {}).items():
            command.add_argument(flag, **extra)
        if name in _STAGES:
            # --out of `bundle` names the bundle, so the run folder needs another name there.
            command.add_argument(
                "--run", dest="out", metavar="FOLDER", default=argparse.SUPPRESS, help="run folder"
            )
        command.add_argument("--quiet", action="store_true", help="no progress bars, warnings only")
        command.add_argument("--traceback", action="store_true", help="show where an error arose")
    return parser


def _add_option(command: argparse.ArgumentParser, spec: Any, name: str, resuming: bool) -> None:
    """Add one option, absent unless given, so that only what the user gave overrides a run's own."""
    default = "runs/demo" if (name, spec.name) == ("demo", "out") else spec.default
    shown = "" if default is None else f" (default: {default})" if name in ("demo", "run", "train") else ""
    text = (spec.metadata["help"] + shown).replace("%", "%%")
    flag, kind = f"--{spec.name.replace('_', '-')}", type_of(RunConfig, spec.name)
    if kind is bool:
        command.add_argument(
            flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text, dest=spec.name
        )
        return
    flags = (flag, "--run") if (name, spec.name) == ("report", "out") else (flag,)
    command.add_argument(
        *flags,
        type=_threshold if spec.name == "threshold" else kind,
        default=argparse.SUPPRESS,
        choices=choices_of(RunConfig, spec.name) or None,
        required=name in ("run", "train") and not resuming and spec.name in _required(name),
        metavar=None if choices_of(RunConfig, spec.name) else kind.__name__.upper().replace("STR", "TEXT"),
        help=text,
        dest=spec.name,
    )


def _threshold(text: str) -> float | None:
    return None if text == "auto" else float(text)


def _required(command: str) -> tuple[str, ...]:
    # The photos are asked for by the stages that read them: titles can be trained without.
    return ("train", "test") if command == "run" else ("train",)


if __name__ == "__main__":
    sys.exit(main())
