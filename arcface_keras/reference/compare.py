"""The report of a comparison: how far, where, and whether that is within the tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arcface_keras.reference.core import Floats

QUIET = 1e-2


@dataclass(frozen=True)
class Difference:
    """The largest differences between two arrays.

    Attributes:
        max_abs: largest absolute difference of the entries compared.
        max_rel: largest relative one; see `difference` for what it is relative to.
        where: index of the entry with the largest relative difference.
        got, want: the layer's and the expected value there.
        tolerance: bound on `max_rel`.
        checked, total: number of entries compared, and of all entries.
    """

    max_abs: float
    max_rel: float
    where: tuple[int, ...]
    got: float
    want: float
    tolerance: float
    checked: int
    total: int

    @property
    def ok(self) -> bool:
        """Whether the relative difference is within the tolerance."""
        return self.max_rel <= self.tolerance

    def __str__(self) -> str:
        line = (
            f"{'ok  ' if self.ok else 'FAIL'} max abs {self.max_abs:.2e}, max rel {self.max_rel:.2e} "
            f"(tolerance {self.tolerance:.0e}) at {self.where}: got {self.got:.8g}, want {self.want:.8g}"
        )
        return line if self.checked == self.total else f"{line}; {self.checked} of {self.total} entries"


@dataclass(frozen=True)
class GradientReport:
    """What `check_gradients` found. True in a condition if everything is within its tolerance.

    Attributes:
        layer: class name of the layer.
        method: what the layer was compared with.
        values: difference of the logits, shape (B, C).
        dX: difference of the gradients with respect to the embeddings, shape (B, D).
        dW: difference of the gradients with respect to the class matrix, shape (D, C * K).
        notes: options used, and everything that was not compared.
    """

    layer: str
    method: str
    values: Difference
    dX: Difference  # noqa: N815
    dW: Difference  # noqa: N815
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether values and both gradients are within their tolerances."""
        return self.values.ok and self.dX.ok and self.dW.ok

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [
            f"{self.layer} against {self.method}: {'ok' if self.ok else 'FAIL'}",
            f"  values {self.values}",
            f"  dX     {self.dX}",
            f"  dW     {self.dW}",
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def difference(
    got: Floats, want: Floats, tolerance: float, *, axis: int | None = None, allowance: Floats | float = 0.0
) -> Difference:
    """Compare two arrays; entries where `want` is NaN were not computed and do not count.

    Relative means: to the largest expected entry of the same row (`axis=1`), column (`axis=0`) or of the
    array (None). A row or column is not held to less than 1 % of the array's largest entry, because the
    rounding of a sum does not shrink with its result. `allowance` is subtracted from the absolute
    difference first. A value that is not finite where a finite one is expected is an infinite difference.
    """
    known = ~np.isnan(want)
    size = np.abs(np.where(known, want, 0.0))
    top = float(size.max(initial=0.0))
    scale = (
        np.full(want.shape, top)
        if axis is None
        else np.broadcast_to(size.max(axis, keepdims=True), want.shape)
    )
    scale = np.maximum(scale, QUIET * top)
    gap = np.where(known, np.abs(got - want), 0.0)
    gap = np.where(known & ~np.isfinite(got), np.inf, gap)
    relative = np.maximum(gap - allowance, 0.0) / np.where(scale > 0, scale, 1.0)
    where = np.unravel_index(int(relative.argmax()), relative.shape)
    return Difference(
        max_abs=float(gap.max()),
        max_rel=float(relative.max()),
        where=tuple(int(i) for i in where),
        got=float(got[where]),
        want=float(want[where]),
        tolerance=tolerance,
        checked=int(known.sum()),
        total=want.size,
    )
