"""Thresholds chosen on groups the network never saw, for the number of listings it will be used on."""

from arcface_keras.calibrate.expected import expected_row_f1
from arcface_keras.calibrate.parts import RankedPart, mean_group_size
from arcface_keras.calibrate.threshold import (
    Calibration,
    best_threshold,
    calibrate_threshold,
    expected_score,
    expected_score_interval,
)
from arcface_keras.calibrate.transfer import Transfer

__all__ = [
    "Calibration",
    "RankedPart",
    "Transfer",
    "best_threshold",
    "calibrate_threshold",
    "expected_row_f1",
    "expected_score",
    "expected_score_interval",
    "mean_group_size",
]
