"""How a search of shards is cut into tasks: blocks of rows, and waves of pairs of blocks.

With k, a row that has met t blocks keeps about k / t candidates of the next, if it knows its k-th similarity
so far. So pairs come in waves that grow by a factor, and between waves every row block merges what it has:
files hold a few k a row in all, whatever the number of blocks.
"""

from dataclasses import dataclass
from pathlib import Path

from arcface_keras.neighbors.exact import even_part
from arcface_keras.neighbors.join import BYTES_PER_ENTRY, STRIP_ELEMENTS

TILE = 2400
MOST_ROWS = 65_536
"""Of a block: a row number within it takes 16 bits."""

_FEWEST_ROWS = 4096
_TASKS_PER_CPU = 4
_GROWTH = 4
_WORKSPACE = 4 * TILE**2 + 48 * STRIP_ELEMENTS
# Candidates that a row of a task may have waiting, over k: enough that they are seldom sorted.
_WAITING = 3

Pair = tuple[int, int]
"""Block of rows and block of columns; of a self-join the smaller number first."""


@dataclass(frozen=True)
class Job:
    """One search of shards, as every task of it is told.

    Attributes:
        source, gallery: folders of embedding shards; no gallery: the source among itself.
        work: folder of the files that tasks leave each other.
        destination: folder of the graph.
        rows, columns: of the whole graph.
        k, threshold: as asked, k at most the number of columns.
        block_rows: rows of a block, but for the last, and of a shard of the graph.
        memory_mb: of one task.
        threads: of one task.
        plan: digest of the plan of the graph's folder, once that is open.
    """

    source: str
    gallery: str | None
    work: str
    destination: str
    rows: int
    columns: int
    k: int | None
    threshold: float | None
    block_rows: int
    memory_mb: float
    threads: int = 1
    plan: str = ""

    @property
    def is_self(self) -> bool:
        """Whether every row is compared with all others, and holds itself first."""
        return self.gallery is None

    @property
    def row_blocks(self) -> int:
        """Number of blocks of rows; no rows at all still make one."""
        return max(1, -(-self.rows // self.block_rows))

    @property
    def column_blocks(self) -> int:
        """Number of blocks of columns, of the same size."""
        return -(-self.columns // self.block_rows)

    def rows_of(self, number: int) -> slice:
        """The rows of a block."""
        return slice(number * self.block_rows, min((number + 1) * self.block_rows, self.rows))

    def columns_of(self, number: int) -> slice:
        """The columns of a block."""
        return slice(number * self.block_rows, min((number + 1) * self.block_rows, self.columns))

    def pair_file(self, pair: Pair) -> Path:
        """Candidates of a pair of blocks."""
        return Path(self.work) / f"pair-{pair[0]:05d}-{pair[1]:05d}.npy"

    def best_file(self, number: int, wave: int) -> Path:
        """Candidates that the rows of a block have left after a wave."""
        return Path(self.work) / f"best-{wave:02d}-{number:05d}.npy"

    def limits_file(self, number: int, wave: int) -> Path:
        """Limits of the rows of a block after a wave."""
        return Path(self.work) / f"limits-{wave:02d}-{number:05d}.npy"


def waves_of(job: Job) -> list[list[Pair]]:
    """All pairs of blocks, once each; a self-join begins with the diagonal."""
    n, m = job.row_blocks, job.column_blocks
    if job.is_self:
        shifts = [
            [(min(i, (i + s) % n), max(i, (i + s) % n)) for i in range(n if 2 * s != n else s)]
            for s in range(n // 2 + 1)
        ]
        waves = [shifts[:1], *_grown(shifts[1:], 3, job.k is not None)]
    else:
        waves = _grown([[(i, j) for i in range(n)] for j in range(m)], 4, job.k is not None)
    return [[pair for step in wave for pair in step] for wave in waves if wave]


def block_size(rows: int, columns: int, dim: int, k: int | None, memory_mb: float, cpus: int) -> int:
    """Rows of a block: as many as fit in the memory of a task, but few enough to keep all processors busy.

    Raises:
        ValueError: not even small blocks fit.
    """
    blocks = 1
    while _pairs(rows, columns, blocks) < _TASKS_PER_CPU * cpus:
        blocks += 1
    size = max(rows, columns, 1)
    wanted = max(min(_FEWEST_ROWS, size), -(-size // blocks))
    size = min(wanted, MOST_ROWS)
    budget = memory_mb * 2**20
    while needed_bytes(size, dim, k) > budget and size > 256:
        size //= 2
    if needed_bytes(size, dim, k) > budget:
        enough = int(needed_bytes(size, dim, k) / 2**20) + 1
        raise ValueError(
            f"memory_mb must be at least {enough} for rows of {dim} columns and k={k}. "
            f"Received: memory_mb={memory_mb}."
        )
    blocks = -(-max(rows, columns, 1) // size)
    return even_part(max(rows, columns, 1), -(-max(rows, columns, 1) // blocks))


def needed_bytes(block_rows: int, dim: int, k: int | None) -> int:
    """Of the task of a pair of such blocks."""
    side = min(TILE, block_rows)
    return 2 * block_rows * (4 * dim + _WAITING * (k or 0) * BYTES_PER_ENTRY) + min(_WORKSPACE, 52 * side**2)


def _pairs(rows: int, columns: int, blocks: int) -> int:
    """Pairs where the longer side is cut into so many blocks."""
    if rows == columns:
        return blocks * (blocks + 1) // 2
    return blocks * max(1, blocks * min(rows, columns) // max(rows, columns, 1))


def _grown(steps: list[list[Pair]], first: int, bounded: bool) -> list[list[list[Pair]]]:
    """Deal steps to waves, each wave `_GROWTH` times the one before; all to one where nothing is bounded."""
    waves, start, size = [], 0, first if bounded else len(steps)
    while start < len(steps):
        waves.append(steps[start : start + size])
        start, size = start + size, size * _GROWTH
    return waves
