"""What rows of the scoreboard differ by, and what is worth its passes.

`python -m experiments.scoreboard --work work` compares each row with the bar of its task, on the examples that
`experiments.run` kept in that folder, and keeps differences with their intervals in `results/<name>_pairs.json`. It
then draws NLL, AURC and the NLL under shift against the passes of a prediction into `docs/pictures/<name>.svg`; without
`--work` it only draws. Examples are paired: both rows of a pair are measured on the same ones, drawn anew with
replacement.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.board import Board
from experiments.configs.scoreboard import EXPERIMENTS
from experiments.examples import figures, intervals, load_columns
from experiments.records import PICTURES, RESULTS, Records
from experiments.run import examples_path

__all__ = ["BARS", "Point", "compare", "draw", "front", "points"]

# The first of them that a task has is what its rows are compared with; a mirrored shoe points the other way.
BARS = ("plain + mirror, log-probabilities", "plain + temperature", "plain + scale of the variance")
NO_MIRROR = ("scoreboard_fashion", "scoreboard_scenes")
QUALITIES: dict[str, tuple[str, str]] = {
    "NLL": ("test", "nll"), "AURC": ("test", "aurc"), "NLL under shift": ("shift", "nll"), "RMSE": ("test", "rmse"),
    "CRPS": ("test", "crps"),
}  # fmt: skip
FAMILIES = {
    "plain": "#333333", "BayesAdapter": "#0072B2", "iBNN": "#009E73", "ABNN": "#D55E00", "dropout": "#CC79A7",
    "Laplace": "#E69F00", "chosen": "#56B4E9",
}  # fmt: skip


class Point(NamedTuple):
    """A row in a picture: the passes of a prediction, and a quality, less of which is better."""

    name: str
    passes: float
    value: float


def compare(name: str, *, work: Path, results: Path = RESULTS, resamples: int | None = None) -> None:
    """Keep the difference of every figure of every row from the bar's, for seeds of which the examples are there.

    Args:
        name: Of the experiment.
        work: Where the examples are.
        results: The folder of the results.
        resamples: Of the intervals; None takes as many as the intervals of the task's rows have.
    """
    if resamples is None:
        resamples = next(one.resamples for one in EXPERIMENTS[name][0].measures if isinstance(one, Board))
    rows = Records(results / f"{name}.json").read()
    records = Records(results / f"{name}_pairs.json")
    bars = BARS[1:] if name in NO_MIRROR else BARS
    bar = next((bar for bar in bars if any(row["name"] == bar for row in rows)), None)
    beside = {row["seed"]: row for row in rows if row["name"] == bar}
    for row in rows:
        if row["seed"] not in beside or row["name"] == bar:
            continue
        hashes = {"of": row["hash"], "bar": beside[row["seed"]]["hash"]}
        paths = [examples_path(work, hashed, row["seed"]) for hashed in hashes.values()]
        if not all(path.exists() for path in paths):
            continue

        def made(paths: Sequence[Path] = paths) -> dict[str, Any]:
            ours, theirs = (_own(load_columns(path)) for path in paths)
            both = figures(ours), figures(theirs)
            apart = intervals(ours, theirs, resamples=resamples)
            return {
                key: {"difference": round(both[0][key] - both[1][key], 5), "interval": [round(end, 5) for end in ends]}
                for key, ends in apart.items()
            }

        records.row(row["name"], made, config={**hashes, "bar row": bar, "resamples": resamples}, seed=row["seed"])


def _own(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the figures, without scores, which other sets have too."""
    return {name: column for name, column in columns.items() if name.split("/")[0] not in ("total", "epistemic")}


def points(rows: Sequence[Mapping[str, Any]], place: tuple[str, str]) -> list[Point]:
    """Return the rows that have a quality, by name, as means over seeds of the configuration that was made last."""
    made = []
    for name in dict.fromkeys(row["name"] for row in rows):
        named = [row for row in rows if row["name"] == name]
        kept = [row["measures"] for row in named if row["hash"] == named[-1]["hash"]]
        if all(place[1] in one.get(place[0], {}) and one.get("passes") for one in kept):
            values = [one[place[0]][place[1]] for one in kept]
            made.append(Point(name, statistics.mean(one["passes"] for one in kept), statistics.mean(values)))
    return made


def front(found: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in passes and quality, by passes.

    >>> [point.name for point in front([Point("a", 1, 0.3), Point("b", 2, 0.2), Point("c", 4, 0.25)])]
    ['a', 'b']
    """
    kept: list[Point] = []
    for point in sorted(found, key=lambda one: (one.passes, one.value)):
        if not kept or point.value < kept[-1].value:
            kept.append(point)
    return kept


def draw(name: str, *, results: Path = RESULTS, to: Path | None = None) -> Path | None:
    """Draw every quality against passes, with its front; None where there is no row."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = Records(results / f"{name}.json").read()
    panels = {title: found for title, place in QUALITIES.items() if (found := points(rows, place))}
    if not panels:
        return None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scoreboard", "text.parse_math": False}):
        figure = Figure(figsize=(4.4 * len(panels), 4.6), layout="constrained")
        for axes, (title, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            _panel(axes, title, found)
        colours = {
            family: colour for family, colour in FAMILIES.items() if any(_family(p.name) == family for p in found)
        }
        handles = [matplotlib.lines.Line2D([], [], color=c, marker="o", linestyle="") for c in colours.values()]
        title = "filled: with the mirror image; the line is what nothing beats in passes and quality"
        options = {"loc": "outside lower center", "ncols": len(colours), "frameon": False, "title_fontsize": 9}
        figure.legend(handles, list(colours), title=title, **options)
        path = to or (PICTURES if results == RESULTS else results) / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    return path


def _panel(axes: Any, title: str, found: Sequence[Point]) -> None:
    best = front(found)
    for point in found:
        colour = FAMILIES[_family(point.name)]
        face = colour if "mirror" in point.name else "none"
        axes.scatter(_beside(point), point.value, s=42, facecolor=face, edgecolor=colour, zorder=3)
    last = max(point.passes for point in found)
    axes.step(
        [*(p.passes for p in best), last], [*(p.value for p in best), best[-1].value], where="post", color="#999999"
    )
    for number, point in enumerate(best, 1):
        axes.annotate(str(number), (_beside(point), point.value), (5, 5), textcoords="offset points", fontsize=9)
    axes.set_xscale("log", base=2)
    passes = sorted({point.passes for point in found})
    axes.set_xticks(passes, [f"{number:g}" for number in passes])
    axes.minorticks_off()
    axes.set_xlim(0.8 * passes[0], 1.45 * passes[-1])
    _limit(axes, [point.value for point in found])
    listed = "\n".join(f"{number} {point.name}" for number, point in enumerate(best, 1))
    axes.set_title(f"{title}\n", loc="left", fontsize=11)
    axes.set_xlabel(f"passes of a prediction\n\n{listed}", fontsize=9, loc="left")
    axes.grid(visible=True, color="#EEEEEE")
    axes.set_axisbelow(True)


def _beside(point: Point) -> float:
    """Return the passes, moved a little for each family, since many rows have the same."""
    family = _family(point.name)
    return point.passes * 2 ** (0.09 * (list(FAMILIES).index(family) - 3)) if point.passes >= 4 else point.passes


def _limit(axes: Any, values: Sequence[float]) -> None:
    """Leave out of the picture what is far worse than most, so that the front can be seen."""
    low, middle = min(values), statistics.median(values)
    top = middle + 2 * (middle - low)
    if max(values) > top > low:
        hidden = sum(value > top for value in values)
        axes.set_ylim(low - 0.06 * (top - low), top)
        axes.annotate(f"{hidden} above", (0.98, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=8)


def _family(name: str) -> str:
    return next((family for family in FAMILIES if name.startswith(family)), "plain")


def main(words: Sequence[str] | None = None) -> None:
    """Compare and draw the experiments that were named, or all that have results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help="names; all if there is none")
    parser.add_argument("--work", type=Path, help="folder in which the examples of the rows are")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for results")
    arguments = parser.parse_args(words)
    for name in arguments.experiments or EXPERIMENTS:
        if name not in EXPERIMENTS:
            parser.error(f"there is no experiment {name!r} of the scoreboard; they are {', '.join(EXPERIMENTS)}")
        if arguments.work is not None:
            compare(name, work=arguments.work, results=arguments.results)
        path = draw(name, results=arguments.results)
        print(f"{name}: {path or 'no rows yet'}")


if __name__ == "__main__":
    main()
