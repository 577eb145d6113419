"""The pictures of the page: what each shows, and the line below that says how to read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcface_keras.ablation import draw_waterfall
from arcface_keras.report.figures import INK, MUTED, ONE, THREE, TWO, svg
from arcface_keras.report.summaries import SizeTable, Split

__all__ = ["Picture", "candidates", "cosines", "curve", "f1_by_size", "map_of_values", "sizes", "steps"]

_BINS = 50


@dataclass(frozen=True)
class Picture:
    """A picture: `svg` is ours and safe, `title` and `text` are plain."""

    name: str
    title: str
    text: str
    svg: str


def curve(
    grid: np.ndarray,
    *,
    f1: np.ndarray | None,
    promised: np.ndarray | None,
    matches: np.ndarray,
    threshold: float | None,
    plateau: Sequence[float] | None,
) -> Picture:
    """F1 against threshold with the chosen one; without any F1 the mean number of matches."""

    def draw(axes: Any) -> None:
        if plateau is not None:
            axes.axvspan(*plateau, color=THREE, alpha=0.18, lw=0, label="plateau it is the middle of")
        if threshold is not None:
            axes.axvline(threshold, color=THREE, lw=1.5, label=f"chosen: {threshold:.3f}")
        if promised is not None:
            axes.plot(grid, promised, color=TWO, ls="--", label="expected from held-out groups")
        if f1 is not None:
            axes.plot(grid, f1, color=ONE, lw=2, label="these listings")
        if f1 is None and promised is None:
            axes.plot(grid, matches, color=ONE, lw=2, label="these listings")
            axes.set_yscale("log")
            axes.set_ylabel("mean matches of a listing")
        else:
            axes.set_ylabel("mean row F1")
            axes.set_ylim(0, None)
        axes.set_xlabel("threshold (similarity from which on a pair matches)")
        axes.legend(fontsize=9, loc="lower left")

    title = "F1 against threshold" if f1 is not None or promised is not None else "Matches against threshold"
    text = "The threshold is chosen on groups that no network saw, never on the labels of these listings."
    if f1 is not None:
        text += f" Their best would have been {f1.max():.3f}, at {grid[int(np.argmax(f1))]:.3f}."
    return Picture("curve", title, text, svg("curve", draw))


def sizes(table: SizeTable) -> Picture:
    """Histogram of the number of matches beside that of the true group sizes."""

    def draw(axes: Any) -> None:
        place = np.arange(len(table.names))
        wide = 0.42 if table.true is not None else 0.8
        if table.true is not None:
            axes.bar(place - wide / 2, table.true, wide, color=ONE, label="true group")
            axes.bar(place + wide / 2, table.predicted, wide, color=TWO, label="predicted: matches")
            axes.legend(fontsize=9, loc="best")
        else:
            axes.bar(place, table.predicted, wide, color=TWO)
        _sizes_below(axes, table.names)
        axes.set_ylabel("listings in %")

    what = "Predicted against true group size" if table.true is not None else "Predicted group size"
    text = "How many listings count so many matches, themselves included"
    text += ", beside what their groups hold." if table.true is not None else "."
    return Picture("sizes", what, text, svg("sizes", draw))


def f1_by_size(table: SizeTable) -> Picture:
    """Mean row F1 of the listings in groups of each size, with their number."""
    f1, rows = table.f1, table.rows
    if f1 is None or rows is None:
        raise ValueError("f1_by_size needs labels. Received: a table without.")

    def draw(axes: Any) -> None:
        place = np.flatnonzero(rows)
        axes.bar(place, f1[place], 0.8, color=ONE)
        for at in place:
            axes.annotate(
                f"{rows[at]:,}", (at, f1[at]), (0, 2), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set_ylim(0, 1.08)
        _sizes_below(axes, table.names)
        axes.set_ylabel("mean row F1")

    text = "Which groups the score comes from; above each bar the number of listings in groups of that size."
    return Picture("f1-by-size", "F1 by group size", text, svg("f1-by-size", draw))


def _sizes_below(axes: Any, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) > 10 else None)
    axes.set_xlabel("listings in a group, itself included")


def cosines(split: Split, labelled: bool) -> Picture:
    """Distributions of the cosines of pairs of one group and of pairs of different ones."""

    def draw(axes: Any) -> None:
        bins = _bins(split)
        for values, color, name in ((split.different, TWO, "different"), (split.same, ONE, "same")):
            if values.size:
                label = f"{name} group" if labelled else "any two listings"
                axes.hist(values, bins, density=True, color=color, alpha=0.65, label=label)
        axes.set_xlabel("cosine of the embeddings")
        axes.set_ylabel("density")
        axes.legend(fontsize=9, loc="best")

    text = "Pairs drawn at random. The less the two overlap, the better the embedder tells groups apart."
    return Picture(
        "cosines",
        "Similarity of same and different" if labelled else "Similarity of any two listings",
        text if labelled else "Pairs drawn at random; nearly all of them show different things.",
        svg("cosines", draw),
    )


def candidates(split: Split, threshold: float | None, labelled: bool) -> Picture:
    """Counts of the candidate pairs by similarity after the steps, and where the threshold cuts them."""

    def draw(axes: Any) -> None:
        bins = _bins(split)
        kinds = [(split.same, ONE, "same group"), (split.different, TWO, "different groups")]
        shown = kinds if labelled else [(split.different, ONE, "candidates")]
        axes.hist(
            [values for values, _, _ in shown],
            bins,
            stacked=True,
            color=[color for _, color, _ in shown],
            label=[name for _, _, name in shown],
        )
        if threshold is not None:
            axes.axvline(threshold, color=THREE, lw=1.5, label=f"threshold {threshold:.3f}")
        axes.set_xlabel("similarity after the steps")
        axes.set_ylabel("pairs")
        axes.legend(fontsize=9, loc="best")

    text = "The nearest candidates of every listing: the pairs among which the threshold has to decide."
    return Picture("candidates", "Candidates after the steps", text, svg("candidates", draw))


def _bins(split: Split) -> np.ndarray:
    both = np.concatenate([split.same, split.different])
    low, high = float(both.min()), float(both.max())
    return np.linspace(low, high if high > low else low + 1e-3, _BINS + 1)


def steps(rows: Sequence[dict[str, Any]]) -> Picture:
    """The waterfall of `arcface_keras.ablation`."""
    named = [{**row, "step": _two_lines(str(row["step"]))} for row in rows]
    n = sum(row["how"] == "in order" for row in rows)
    text = (
        "From the score without steps to that with all of them. Lines: 90 % interval of the gain over draws "
        "of whole groups; diamonds: the step by itself."
    )

    def draw(axes: Any) -> None:
        draw_waterfall(axes, named, ink=INK)
        axes.set_xlabel("mean row F1")

    drawn = svg("steps", draw, (5.6, 1.4 + 0.55 * (n + 2)))
    return Picture("steps", "What the steps add", text, drawn)


def _two_lines(step: str) -> str:
    """A step as written, its name and the first of its options below each other."""
    name, _, options = step.replace("engine=exact,", "").partition(":")
    lines = [name.replace("_", " "), options if len(options) <= 26 else f"{options[:25]}…"]
    return "\n".join(filter(None, lines))


def map_of_values(points: np.ndarray, values: np.ndarray, how: str, kind: str, n_rows: int) -> Picture:
    """Points (p, 2) coloured by `kind`: "group" (values are numbers of groups), "f1", or "matches"."""
    titles = {"group": "by group", "f1": "by row F1", "matches": "by number of matches"}
    shown = values if kind != "group" else np.unique(values, return_inverse=True)[1]

    def draw(axes: Any) -> None:
        style: dict[str, Any] = {"s": 12, "lw": 0}
        if kind == "group":
            for number, marker in enumerate("o^s"):
                mine = shown // 20 % 3 == number
                colors = {"c": shown[mine] % 20, "cmap": "tab20", "vmin": 0, "vmax": 19}
                axes.scatter(*points[mine].T, marker=marker, **colors, **style)
        else:
            top = 1.0 if kind == "f1" else max(float(shown.max(initial=1)), 2.0)
            low = 0.0 if kind == "f1" else 1.0
            done = axes.scatter(*points.T, c=shown, cmap="plasma", vmin=low, vmax=top, **style)
            axes.figure.colorbar(done, ax=axes, label="row F1" if kind == "f1" else "matches")
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(True)
            spine.set_color(MUTED)
            spine.set_alpha(0.4)

    text = f"{len(points):,} of {n_rows:,} listings by {how}."
    if how == "t-SNE":
        text += " Neighbours stay together; distances between far clusters mean nothing."
    if kind == "group":
        text += f" {len(np.unique(values)):,} groups by colour and mark" + (
            ", which repeat." if len(np.unique(values)) > 60 else "."
        )
    return Picture(f"map-{kind}", f"Map of the embeddings, {titles[kind]}", text, svg(f"map-{kind}", draw))
