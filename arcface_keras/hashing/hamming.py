"""Matches from nearly equal hashes: all pairs within a Hamming radius, exactly.

Hashes are cut into radius + 1 pieces. Two hashes within the radius differ in at most `radius` of them, so
they agree in one piece at least (the pigeonhole principle of multi-index hashing; Norouzi, Punjani and Fleet,
Fast Exact Search in Hamming Space With Multi-Index Hashing, 2014): only those are compared.
"""

import itertools
import re
import threading
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.hashing.members import Groups, expand_to_rows, group_rows
from arcface_keras.neighbors.collect import BlockCollector
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.workers import run_tasks

_HEX = re.compile(r"[0-9a-f]+")
_BLOCK_PAIRS = 1 << 18
_BYTES_PER_PAIR = 64
_BLOCK_ROWS = 4096
_TILE = 512
_BYTES_PER_ENTRY = 64
# A pair of a tile lies in memory beside the next one; a pair with an equal piece is gathered.
_GATHER_COST = 5


class _Piece(NamedTuple):
    """Hashes sorted by one of their pieces.

    Attributes:
        order: (n,) positions of the hashes.
        words: (w, n) the hashes in this order.
        partners: (n,) how many that follow have the same piece.
    """

    order: np.ndarray
    words: np.ndarray
    partners: np.ndarray


def match_hashes(
    hashes: Sequence[str],
    radius: int = 4,
    *,
    k: int | None = None,
    memory_mb: float = 1024,
    threads: int | None = None,
    progress: bool = False,
) -> NeighborGraph:
    """Graph of the listings whose hashes differ in at most `radius` bits.

    Every listing is its own first match; the similarity of a pair is 1 - distance / bits.

    Args:
        hashes: (n,) hexadecimal strings of one length (16 digits are 64 bits), upper or lower case; an empty
            one matches only its own listing.
        radius: largest Hamming distance of a match, from 0 to the number of bits.
        k: at most so many matches a row, self included; ties by index.
        memory_mb: memory that the search and its graph may take, in MiB.
        threads: cores to use; all that the process may use by default.
        progress: show a progress bar.

    Returns:
        A `NeighborGraph` with threshold 1 - radius / bits.

    Raises:
        ValueError: for a value that is no string, not hexadecimal, or of another length than the first,
            arguments out of range, or matches that do not fit in `memory_mb` (nothing is cut silently).
    """
    values, bits = _checked(hashes)
    for name, number in (("k", k), ("threads", threads)):
        if number is not None:
            check_count(name, number)
    if (
        isinstance(radius, bool)
        or not isinstance(radius, int | np.integer)
        or not 0 <= radius <= (bits or radius)
    ):
        raise ValueError(f"radius must be an integer in 0..{bits}. Received: radius={radius!r}.")
    groups = group_rows(values)
    budget = int(memory_mb * 2**20)
    threads = min(threads or available_cores(), max(1, budget // 4 // (_BLOCK_PAIRS * _BYTES_PER_PAIR)))
    words = _as_words([values[row] for row in groups.first[: groups.n_named]], bits)
    search = _Search(words, bits, int(radius), groups, k, budget, memory_mb)
    search.run(threads, progress)
    bound = 1 - radius / bits if bits else None
    return expand_to_rows(groups, *search.finish(), k=k, threshold=bound)


class _Search:
    """Finds the pairs of different hashes within the radius; n_named of them, numbered by first row."""

    def __init__(
        self,
        words: np.ndarray,
        bits: int,
        radius: int,
        groups: Groups,
        k: int | None,
        budget: int,
        memory_mb: float,
    ) -> None:
        self.words, self.bits, self.radius, self.groups = words, bits, radius, groups
        self.k, self.memory_mb = k, memory_mb
        self.most = budget // 2 // _BYTES_PER_ENTRY
        total = len(groups.first)
        self.entries = int(np.sum(groups.sizes.astype(np.int64) ** 2)) if k is None else 0
        wanted = self.entries if k is None else len(groups.of_row) * min(k, len(groups.of_row))
        if wanted > self.most:
            self._overflow(wanted)
        slack = 0 if k is None else 4 * k
        floor = np.float32(1 - radius / bits) if bits else np.float32(0)
        self.blocks = [
            BlockCollector(a, min(a + _BLOCK_ROWS, total), floor, includes_self=True, k=k, slack=slack)
            for a in range(0, total, _BLOCK_ROWS)
        ]
        self.lock = threading.Lock()

    def run(self, threads: int, progress: bool) -> None:
        """Compare hashes with an equal piece, or all with all where that is less work."""
        n = len(self.words)
        if not self.radius or n < 2:
            return
        masks = _piece_masks(self.bits, self.radius + 1) if self.radius < self.bits else []
        work = sum(float(_sorted_by_piece(self.words, mask).partners.sum()) for mask in masks)
        if not masks or work * _GATHER_COST > n * (n - 1) / 2:
            tiles = list(itertools.combinations_with_replacement(range(0, n, _TILE), 2))
            with progress_bar(len(tiles), "hashes", "tiles", progress) as bar:
                run_tasks(lambda tile: self._keep(*self._tile(*tile)), tiles, threads, bar)
            return
        with (
            progress_bar(len(masks), "hashes", "pieces", progress) as bar,
            progress_bar(0, "", "", False) as no,
        ):
            for number, mask in enumerate(masks):
                piece = _sorted_by_piece(self.words, mask)
                do = partial(self._compare, piece, masks[:number])
                run_tasks(do, _block_spans(piece.partners), threads, no)
                bar.update(1)

    def _compare(self, piece: _Piece, earlier: list[np.ndarray], span: tuple[int, int]) -> None:
        left, right, distance = self._equal_pieces(piece, *span)
        # A pair that agrees in an earlier piece was found there.
        new = np.ones(len(left), dtype=bool)
        for mask in earlier:
            new &= ((self.words[left] ^ self.words[right]) & mask).any(axis=1)
        self._keep(left[new], right[new], distance[new])

    def _keep(self, left: np.ndarray, right: np.ndarray, distance: np.ndarray) -> None:
        """Hand pairs on, in both directions."""
        if not len(left):
            return
        if self.k is None:
            sizes = self.groups.sizes.astype(np.int64)
            with self.lock:
                self.entries += 2 * int(np.sum(sizes[left] * sizes[right]))
                if self.entries > self.most:
                    self._overflow(self.entries)
        similarities = (1 - distance / self.bits).astype(np.float32)
        for rows, columns in ((left, right), (right, left)):
            self._add(rows, columns, similarities)

    def _tile(self, top: int, left: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        a, b = self.words[top : top + _TILE], self.words[left : left + _TILE]
        distance = _distances(a.T[:, :, None], b.T[:, None, :])
        rows, columns = np.divmod(np.flatnonzero(distance <= self.radius), len(b))
        later = rows + top < columns + left
        rows, columns = rows[later], columns[later]
        return rows + top, columns + left, distance[rows, columns]

    def _equal_pieces(
        self, piece: _Piece, start: int, stop: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        partners = piece.partners[start:stop]
        ends = np.cumsum(partners)
        # Entry e of position p has the partner p + 1 + (e - first entry of p).
        shift = np.arange(start + 1, stop + 1) - (ends - partners)
        partner = np.arange(ends[-1]) + np.repeat(shift, partners)
        distance = _distances(
            [np.repeat(word[start:stop], partners) for word in piece.words],
            [word[partner] for word in piece.words],
        )
        near = np.flatnonzero(distance <= self.radius)
        position = start + np.searchsorted(ends, near, side="right")
        return piece.order[position], piece.order[partner[near]], distance[near]

    def _add(self, rows: np.ndarray, columns: np.ndarray, similarities: np.ndarray) -> None:
        place = rows // _BLOCK_ROWS
        for number in np.unique(place):
            mine = np.flatnonzero(place == number)
            block = self.blocks[number]
            limits = block.limits(int(columns[mine].min()))
            if limits is not None:
                mine = mine[similarities[mine] >= limits[rows[mine] - block.start]]
            if len(mine):
                block.add(rows[mine], columns[mine], similarities[mine])

    def finish(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(counts, columns, similarities) of the distinct hashes, each itself first."""
        parts = [block.finish() for block in self.blocks]
        empty = (np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
        counts, columns, similarities = (
            np.concatenate([empty[i], *(part[i] for part in parts)]) for i in range(3)
        )
        return counts, columns, similarities

    def _overflow(self, entries: int) -> None:
        raise ValueError(
            f"memory_mb must hold all matches: give k, a smaller one, or raise it. "
            f"Received: memory_mb={self.memory_mb}, k={self.k}, radius={self.radius}, {entries} entries."
        )


def _distances(
    left: Sequence[np.ndarray] | np.ndarray, right: Sequence[np.ndarray] | np.ndarray
) -> np.ndarray:
    """Hamming distances of hashes given word by word."""
    first, *others = (popcount(a ^ b) for a, b in zip(left, right, strict=True))
    return sum(others, first.astype(np.uint16)) if others else first


def popcount(words: np.ndarray) -> np.ndarray:
    """uint8 number of bits set in each uint64."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(words)
    halves = np.ascontiguousarray(words)[..., None].view(np.uint16)
    return _BITS_OF_UINT16[halves].sum(axis=-1, dtype=np.uint8)


_BITS_OF_UINT16 = np.array([bin(number).count("1") for number in range(1 << 16)], dtype=np.uint8)


def _checked(hashes: Sequence[str]) -> tuple[list[str], int]:
    """Lower-case hashes and their number of bits, 0 where all are empty."""
    values: list[str] = []
    length = 0
    for position, value in enumerate(hashes):
        if not isinstance(value, str):
            raise ValueError(f"hashes must be strings. Received: hashes[{position}]={value!r}.")
        value = value.lower()
        if value and not _HEX.fullmatch(value):
            raise ValueError(f"hashes must be hexadecimal. Received: hashes[{position}]={value!r}.")
        length = length or len(value)
        if value and len(value) != length:
            raise ValueError(
                f"hashes must be of one length, {length} digits as the first. "
                f"Received: hashes[{position}]={value!r} of {len(value)} digits."
            )
        values.append(value)
    return values, 4 * length


def _as_words(values: list[str], bits: int) -> np.ndarray:
    """(n, words) uint64, the first bits padded with zeros."""
    digits = -(-bits // 64) * 16
    data = bytes.fromhex("".join(value.zfill(digits) for value in values))
    return np.frombuffer(data, dtype=">u8").astype(np.uint64).reshape(len(values), -1 if values else 1)


def _piece_masks(bits: int, pieces: int) -> list[np.ndarray]:
    """For each piece the (w,) uint64 bits that belong to it."""
    width = -(-bits // 64) * 64
    masks = []
    for piece in range(pieces):
        chosen = np.zeros(width, dtype=np.uint8)
        # Every pieces-th bit: neighbouring bits of a pHash are alike, and so pieces share what tells apart.
        chosen[width - bits + piece :: pieces] = 1
        masks.append(np.packbits(chosen).view(">u8").astype(np.uint64))
    return masks


def _sorted_by_piece(words: np.ndarray, mask: np.ndarray) -> _Piece:
    masked = words & mask
    order = np.lexsort(masked.T)
    masked = masked[order]
    last = np.flatnonzero(np.append((masked[1:] != masked[:-1]).any(axis=1), True))
    ends = last[np.searchsorted(last, np.arange(len(words)))]
    return _Piece(order, np.ascontiguousarray(words[order].T), ends - np.arange(len(words)))


def _block_spans(partners: np.ndarray) -> list[tuple[int, int]]:
    """Spans of positions with about _BLOCK_PAIRS pairs each; spans without a pair are left out."""
    total = np.concatenate([[0], np.cumsum(partners)])
    spans, start = [], 0
    while start < len(partners):
        stop = int(np.searchsorted(total, total[start] + _BLOCK_PAIRS, side="right")) - 1
        stop = min(max(stop, start + 1), len(partners))
        if total[stop] > total[start]:
            spans.append((start, stop))
        start = stop
    return spans
