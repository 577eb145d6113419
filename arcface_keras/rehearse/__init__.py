"""The scored run, tried before it counts."""

from arcface_keras.rehearse.fabricate import fabricate_catalogue
from arcface_keras.rehearse.faults import submission_faults
from arcface_keras.rehearse.rehearsal import Rehearsal, rehearse
from arcface_keras.rehearse.trial import Trial, parse_duration

__all__ = [
    "Rehearsal",
    "Trial",
    "fabricate_catalogue",
    "parse_duration",
    "rehearse",
    "submission_faults",
]
