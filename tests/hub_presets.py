"""Tiny preset folders of keras_hub, made on the spot; tests that need the package are skipped without it."""

import warnings
from pathlib import Path
from typing import Any

import keras
import pytest

PIECES = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("thing", "red", "shoe", "##s", "-", ".", "mug", "big"),
    *"0123456789",
    *(f"##{digit}" for digit in range(10)),
]


def keras_hub_or_skip() -> Any:
    with warnings.catch_warnings():
        # Its dependencies deprecate things of each other.
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "keras_hub", reason="keras-hub is not installed (extra hub)", exc_type=ImportError
        )


def bert_preset(folder: Path, *, lowercase: bool = True) -> Path:
    """A BERT of two small layers with its tokenizer, as `save_to_preset` writes them."""
    keras_hub = keras_hub_or_skip()
    keras.utils.set_random_seed(0)
    encoder = keras_hub.models.BertBackbone(
        vocabulary_size=len(PIECES),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=24,
        max_sequence_length=12,
    )
    encoder.save_to_preset(str(folder))
    keras_hub.tokenizers.BertTokenizer(PIECES, lowercase=lowercase).save_to_preset(str(folder))
    return folder
