"""Where the stages of a run find each other's work."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunFolder"]


@dataclass(frozen=True)
class RunFolder:
    """The files of a run; a stage names the missing file and the stage that writes it."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def embedder(self) -> Path:
        return self.path / "embedder.keras"

    @property
    def history(self) -> Path:
        return self.path / "history.csv"

    @property
    def calibration(self) -> Path:
        return self.path / "calibration"

    @property
    def embeddings(self) -> Path:
        return self.path / "embeddings"

    @property
    def untrained_embeddings(self) -> Path:
        return self.path / "embeddings_untrained"

    @property
    def unreadable(self) -> Path:
        return self.path / "unreadable.json"

    @property
    def neighbors(self) -> Path:
        return self.path / "neighbors.npz"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.json"

    @property
    def submission(self) -> Path:
        return self.path / "submission.csv"

    def require(self, path: Path, stage: str) -> Path:
        """Return `path` if it is there; otherwise say which stage writes it."""
        if not path.exists():
            raise ValueError(
                f"the run folder must hold {path.name}, which the stage `{stage}` writes. "
                f"Received: out={self.path}."
            )
        return path
