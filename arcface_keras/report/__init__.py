"""report.html: one self-contained page that shows the matches of a run."""

from arcface_keras.report.build import write_report

__all__ = ["write_report"]
