"""What numbers a configuration may hold, and which values only together."""

import math
from typing import Any

from arcface_keras._on_ray import check_address

RANGES: tuple[tuple[str, float, float], ...] = (
    ("image_size", 32, 4096),
    ("title_tokens", 3, 100_000),
    ("embedding_size", 0, 65536),
    ("dropout", 0.0, 0.95),
    ("s", 1e-3, 1e4),
    ("views", 1, 1000),
    ("top_epochs", 0, 100_000),
    ("top_learning_rate", 1e-9, 10.0),
    ("top_batch_size", 2, 1_000_000),
    ("epochs", 0, 100_000),
    ("learning_rate", 1e-9, 10.0),
    ("batch_size", 1, 1_000_000),
    ("folds", 2, 1000),
    ("shard_rows", 1, 65_536),
    ("seed", 0, 2**31 - 1),
    ("k", 1, 10_000),
    ("target_recall", 0.01, 1.0),
    ("threshold", -1.0, 1.0),
    ("memory_mb", 16, 1e7),
    ("new_share", 0.0, 1.0),
    ("workers", 1, 4096),
    ("m", 0.0, math.pi / 2),
    ("m_start", 0.0, math.pi / 2),
    ("s_start", 1e-3, 1e4),
    ("ramp_epochs", 0.0, 1e5),
    ("lr_start", 0.0, 10.0),
    ("lr_min", 0.0, 10.0),
    ("lr_decay", 1e-3, 1.0),
    ("head_lr_factor", 1e-3, 1e4),
    ("margin_epochs", 0.0, 1e5),
    ("margin_power", 0.0, 4.0),
    ("sample_weight_power", 0.0, 4.0),
    ("clip_norm", 0.0, 1e6),
    ("weight_decay", 0.0, 10.0),
    ("ema", 0.0, 0.99999),
    ("cutmix", 0.0, 1.0),
    ("accumulate", 1, 100_000),
    ("validation_rows", 0.0, 0.5),
    ("patience", 0, 100_000),
    ("reduce_on_plateau", 0, 100_000),
    ("checkpoint_steps", 0, 10**9),
)
"""Name, lowest and highest value of each number of `RunConfig`."""


def check_ranges(config: Any) -> None:
    """Raise ValueError for the first value of a configuration that is out of its range or place."""
    for name, low, high in RANGES:
        value = getattr(config, name)
        if value is not None and not (low <= value <= high):
            raise ValueError(f"{name} must lie in {low:g}..{high:g}. Received: {name}={value!r}.")
    check_address(config.address, config.engine)
