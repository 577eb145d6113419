"""What each step adds on identities that nobody trained or tuned on: a table and a picture."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._files import atomic_path
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import evaluate_matches, format_table
from arcface_keras.held_out import HeldOut
from arcface_keras.listings import Listings
from arcface_keras.match import Matches, match_listings
from arcface_keras.metrics import row_f1
from arcface_keras.signals import SearchOptions

__all__ = [
    "ablate",
    "ablate_listings",
    "ablation_table",
    "draw_if_possible",
    "draw_waterfall",
    "waterfall",
]

logger = logging.getLogger(__name__)

_DRAWS = 2000
_ENDS = ("gain_low", "gain_high")
_METRICS = ("row_f1", "row_precision", "row_recall", "recall@1", "map@5")


def ablate(
    embeddings: Embeddings,
    held_out: Sequence[HeldOut],
    labels: Any,
    steps: Sequence[Any],
    k: int = 50,
    *,
    memory_mb: int = 1024,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure every step by itself, and all of them one after the other; see `ablate_listings`.

    Args:
        embeddings: n listings of groups that the network never saw.
        held_out, labels, steps, seed: as for `ablate_listings`.
        k: candidates of each listing, self counted.
        memory_mb: for the searches.

    Example:
        >>> rows = ablate(embeddings, held_out, labels, ["k_reciprocal", "mutual_filter"])  # doctest: +SKIP
    """
    check_count("k", k)
    search = SearchOptions(k=k, memory_mb=memory_mb)
    return ablate_listings(Listings(embeddings), held_out, labels, steps, search=search, seed=seed)


def ablate_listings(
    listings: Listings,
    held_out: Sequence[HeldOut],
    labels: Any,
    steps: Sequence[Any],
    *,
    search: SearchOptions | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure every step by itself, and all of them one after the other.

    Every way of matching is fitted on the held-out groups, its threshold and what its steps leave open; the
    labels only score it. A step that decides by itself (`min2`, `chisel`, `target_mean_size`) has no
    threshold.

    Args:
        listings: n listings of groups that the network never saw.
        held_out: other groups that it never saw.
        labels: (n,) true groups of the listings.
        steps: as for `match_listings`, in their order.
        search: how candidates are found.
        seed: of the bootstrap.

    Returns:
        Rows for `format_table` and `waterfall`: first no step, then each step `alone`, then the steps `in
        order`. Columns: `how`, `step`, `threshold`, `expected_f1` (promised by the held-out groups),
        `row_f1`, `gain` (of row_f1, over no step where alone, over the row before where in order), `gain_low`
        and `gain_high` (90 % interval from drawing whole groups anew), `row_precision`, `row_recall`,
        `recall@1`, `map@5`.

    Raises:
        ValueError: labels do not fit, there are no listings or held-out rows, or a step or option is unknown.
    """
    labels = np.asarray(labels)
    if labels.shape != (len(listings),) or not len(listings):
        raise ValueError(
            f"labels must be one for each of the embeddings, one at least. "
            f"Received: labels of shape {labels.shape} for {listings.embeddings!r}."
        )
    steps = list(steps)

    def measure(how: str, name: str, chosen: Sequence[Any]) -> _Measured:
        matches = match_listings(listings, held_out, search=search, steps=chosen)
        row = {
            "how": how,
            "step": name,
            "threshold": matches.threshold,
            "expected_f1": matches.expected_f1,
        }
        return _score(row, matches, labels)

    base = measure("no step", "", [])
    alone = [measure("alone", _name(step), [step]) for step in steps]
    ordered = [
        _Measured({**alone[0].row, "how": "in order"}, alone[0].f1)
        if stop == 1
        else measure("in order", _name(steps[stop - 1]), steps[:stop])
        for stop in range(1, len(steps) + 1)
    ]
    draws = _group_draws(labels, seed)
    rows = [_with_gain(base, None, draws)]
    rows += [_with_gain(each, base, draws) for each in alone]
    rows += [
        _with_gain(each, before, draws) for before, each in zip([base, *ordered[:-1]], ordered, strict=False)
    ]
    return rows


@dataclass(frozen=True)
class _Measured:
    """A row of the table so far, and (n,) the F1 of every listing."""

    row: dict[str, Any]
    f1: np.ndarray


def _score(row: dict[str, Any], matches: Matches, labels: np.ndarray) -> _Measured:
    values = evaluate_matches(matches.graph, labels, neighbors=matches.ranking)
    scores = {name: None if np.isnan(values[name]) else values[name] for name in _METRICS}
    return _Measured({**row, **scores}, row_f1(matches.graph, labels))


def _group_draws(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The group of each listing, and how often each group is in each bootstrap sample (draws, groups)."""
    group = np.unique(labels, return_inverse=True)[1].reshape(-1)
    n_groups = int(group.max()) + 1
    rng = np.random.default_rng(seed)
    return group, rng.multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=_DRAWS)


def _with_gain(
    measured: _Measured, before: _Measured | None, draws: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    row = dict(measured.row)
    gain: tuple[Any, Any, Any] = (None, None, None)
    if before is not None:
        group, counts = draws
        difference = measured.f1 - before.f1
        sums, sizes = np.bincount(group, weights=difference), np.bincount(group)
        means = (counts @ sums) / (counts @ sizes)
        low, high = np.quantile(means, [0.05, 0.95])
        gain = (float(difference.mean()), float(low), float(high))
    names = list(row)
    at = names.index("row_f1") + 1
    columns = {name: row[name] for name in names[:at]}
    columns |= dict(zip(("gain", "gain_low", "gain_high"), gain, strict=True))
    return columns | {name: row[name] for name in names[at:]}


def _name(step: Any) -> str:
    """The step as the command line writes it."""
    if isinstance(step, str):
        return step
    name, options = step
    written = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{name}:{written}" if written else name


def ablation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What `ablate` measured as text, without the columns that only pictures need."""
    columns = ("how", "step", "threshold", "row_f1", "gain", "gain_low", "gain_high", "recall@1", "map@5")
    return format_table([{name: row[name] for name in columns} for row in rows])


def draw_if_possible(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """`waterfall`, or a line in the log where matplotlib is missing."""
    try:
        waterfall(rows, path)
    except ImportError as error:
        logger.warning("no picture of the steps: %s", error)


def waterfall(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw what `ablate` measured as a PNG; returns its path.

    Bars show what each step adds or costs in its order, with its 90 % interval, from the score without steps
    to that with all; diamonds show what it adds alone.

    Raises:
        ValueError: the path does not end in .png, or the rows are not those of `ablate`.
        ImportError: matplotlib is missing.
    """
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"The picture must be a file that ends in .png. Received: path={path}.")
    in_order = len(_by_how(rows)["in order"])
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "waterfall needs matplotlib: pip install 'arcface-keras[report]' (or matplotlib>=3.8)."
        ) from error
    figure = Figure(figsize=(9, 1.6 + 0.5 * (in_order + 2)), layout="constrained")
    draw_waterfall(figure.add_subplot(), rows)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def _by_how(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    by_how = {how: [row for row in rows if row.get("how") == how] for how in ("no step", "alone", "in order")}
    if len(by_how["no step"]) != 1 or len(by_how["alone"]) != len(by_how["in order"]):
        raise ValueError("rows must be those of `ablate`. Received: others.")
    return by_how


def draw_waterfall(axes: Any, rows: Sequence[Mapping[str, Any]], *, ink: str = "black") -> None:
    """Draw what `waterfall` draws into matplotlib axes, with lines and marks in the colour `ink`."""
    by_how = _by_how(rows)
    (base,), alone, ordered = by_how["no step"], by_how["alone"], by_how["in order"]
    names = ["no step", *(row["step"] for row in ordered), "all steps"]
    start = base["row_f1"]
    final = ordered[-1]["row_f1"] if ordered else start
    before = [start, *(row["row_f1"] for row in ordered)]
    gains = [row["row_f1"] - level for row, level in zip(ordered, before, strict=False)]
    axes.barh([0, len(names) - 1], [start, final], color="0.6")
    colors = ["tab:green" if gain >= 0 else "tab:red" for gain in gains]
    lines = range(1, len(ordered) + 1)
    axes.barh(lines, gains, left=before[:-1], color=colors)
    for line, row, level in zip(lines, ordered, before, strict=False):
        axes.plot([level + row["gain_low"], level + row["gain_high"]], [line, line], color=ink, lw=1)
    axes.plot([row["row_f1"] for row in alone], lines, "D", ms=5, mfc="white", mec=ink)
    for line, (value, gain) in enumerate(zip([*before, final], [None, *gains, None], strict=True)):
        text = f" {value:.3f}" if gain is None else f" {gain:+.3f}"
        axes.annotate(text, (1.0, line), xycoords=("axes fraction", "data"), va="center")
    seen = [*before, *(row["row_f1"] for row in alone)]
    seen += [level + row[side] for row, level in zip(ordered, before, strict=False) for side in _ENDS]
    margin = max(0.05 * (max(seen) - min(seen)), 0.005)
    axes.set_xlim(min(seen) - margin, max(seen) + margin)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(
        "mean row F1 on unseen identities\n(lines: 90 % interval of the gain; diamonds: the step alone)"
    )
