"""How the neighbours are searched that the steps begin with."""

from dataclasses import dataclass

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.postprocess.checks import blank_entries


@dataclass(frozen=True)
class SearchOptions:
    """Options of `find_neighbors` for listings among themselves.

    Attributes:
        k: candidates of each listing, itself included.
        engine: a name in `arcface_keras.neighbors.ENGINES`.
        target_recall: what an approximate engine has to reach.
        memory_mb: for the search, and for the neighbours of titles.
        progress: show a bar.
    """

    k: int = 50
    engine: str = "exact"
    target_recall: float = 0.99
    memory_mb: int = 1024
    progress: bool = False

    def neighbors(self, embeddings: Embeddings) -> NeighborGraph:
        """The candidates; a zero row has itself alone, its cosine of 0 with everybody says nothing."""
        graph = find_neighbors(
            embeddings,
            k=self.k,
            engine=self.engine,
            memory_mb=self.memory_mb,
            target_recall=self.target_recall,
            progress=self.progress,
        )
        return graph.keep(~blank_entries(graph, embeddings))
