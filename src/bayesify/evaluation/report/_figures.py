"""The figures of a classification report, and those that every report has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayesify.evaluation import measures
from bayesify.evaluation.evaluation import Evaluation, right_or_wrong
from bayesify.evaluation.report.drawing import METHOD_COLOURS, SET_COLOURS, new_figure
from bayesify.likelihoods.prediction import ClassificationPrediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "PANEL",
    "WIDE",
    "cost_figure",
    "histogram_figure",
    "method_style",
    "method_swatch",
    "percent_axis",
    "priced",
    "reliability_figure",
    "risk_coverage_figure",
    "set_swatch",
    "thinned",
]

PANEL = (2.9, 2.6)
WIDE = (4.7, 3.4)
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", ":")
POINTS = 200  # of a curve; more cannot be seen and only make the file large
TEST_COLOUR = "#6b7480"


def reliability_figure(evaluation: Evaluation) -> Figure:
    """Draw accuracy against confidence, with 95 % intervals, over the share of examples in each bin."""
    prediction = evaluation.prediction
    assert isinstance(prediction, ClassificationPrediction)
    bins = measures.reliability(prediction.probs, evaluation.targets)
    filled = bins.count > 0
    confidence, accuracy, count = (x[filled].numpy() for x in (bins.confidence, bins.accuracy, bins.count))
    figure = new_figure(*PANEL)
    axes = figure.add_subplot()
    width = float(bins.edges[1])
    axes.bar(bins.edges[:-1][filled], count / count.sum(), width, align="edge", color="#d7dbe0", edgecolor="white")
    axes.plot([0, 1], [0, 1], color="#8a9099", linestyle="--", linewidth=1)
    low, high = _wilson(accuracy, count)
    axes.vlines(confidence, low, high, color=METHOD_COLOURS[0], linewidth=1, alpha=0.6)
    axes.scatter(confidence, accuracy, 12 + 60 * count / count.sum(), color=METHOD_COLOURS[0], clip_on=False, zorder=3)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    percent_axis(axes, "xy")
    return figure


def histogram_figure(groups: Sequence[Tensor], label: str, limit: float) -> Figure:
    """Draw how an uncertainty is distributed in several groups; the first is filled."""
    figure = new_figure(*PANEL)
    axes = figure.add_subplot()
    edges = np.linspace(0, limit, 31)
    for index, values in enumerate(groups):
        flat = values.detach().double().flatten().clamp(max=limit).numpy()
        share = np.histogram(flat, edges)[0] / max(flat.size, 1)
        colour = _set_colour(index)
        axes.stairs(share, edges, fill=index == 0, color=colour, alpha=0.55 if index == 0 else 1.0)
    axes.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
    axes.set(xlim=(0, limit), ylim=(0, 1), xlabel=label, ylabel="share of inputs")
    axes.set_yticks([0, 0.01, 0.05, 0.2, 0.5, 1])
    percent_axis(axes, "y")
    return figure


def risk_coverage_figure(evaluations: Sequence[Evaluation]) -> Figure:
    """Draw the error rate among the most certain predictions against their share."""
    figure = new_figure(*WIDE)
    axes = figure.add_subplot()
    for index, evaluation in enumerate(evaluations):
        assert isinstance(evaluation.prediction, ClassificationPrediction)
        scores, correct = right_or_wrong(evaluation.prediction, evaluation.targets)
        curve = measures.risk_coverage(scores, correct)
        shown = curve.coverage >= min(0.05, float(curve.coverage[-1]))
        coverage, risk = thinned(curve.coverage[shown]), thinned(curve.risk[shown])
        axes.plot(coverage, risk, linewidth=1.8, **method_style(index, marker=False))
    axes.set(xlim=(0, 1), xlabel="share of predictions kept, most certain first", ylabel="errors among them")
    axes.set_ylim(bottom=0)
    percent_axis(axes, "xy")
    return figure


def cost_figure(evaluations: Sequence[Evaluation]) -> Figure:
    """Draw NLL against the cost of a prediction; one evaluation at least has both."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = new_figure(*WIDE)
    axes = figure.add_subplot()
    costs = []
    for index, evaluation in enumerate(evaluations):
        if priced(evaluation):
            costs.append(evaluation.cost.predict or 0.0)
            look = method_style(index, line=False)
            axes.plot(costs[-1], evaluation.metrics["nll"], markersize=9, markeredgecolor="white", **look)
    axes.set_xscale("log")
    low, high = min(costs) / 1.5, max(costs) * 1.5
    axes.set(xlim=(low, high), xlabel="cost of a prediction, in plain passes", ylabel="NLL, lower is better")
    steps = (1, 2, 5) if high / low < 200 else (1,)
    axes.set_xticks([s * 10.0**e for e in range(-3, 6) for s in steps if low <= s * 10.0**e <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.15)
    return figure


def priced(evaluation: Evaluation) -> bool:
    """Whether an evaluation has a place in the figure of costs."""
    return bool(evaluation.cost.predict) and math.isfinite(evaluation.metrics.get("nll", math.nan))


def method_style(index: int, *, line: bool = True, marker: bool = True) -> dict[str, Any]:
    """Return one look for one method in every figure; neither colour nor shape carries the meaning alone."""
    look: dict[str, Any] = {"color": METHOD_COLOURS[index % len(METHOD_COLOURS)]}
    if marker:
        look["marker"] = MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]
    look["linestyle"] = LINES[index % len(LINES)] if line else "none"
    return look


def percent_axis(axes: Axes, which: str) -> None:
    """Write shares as percentages."""
    from matplotlib.ticker import FuncFormatter

    for name in which:
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))


def method_swatch(index: int, *, line: bool = True, marker: bool = True) -> Figure:
    """Draw the look of a method, for a legend in the page's own text, which no name is too long for."""
    figure, axes = _blank()
    axes.plot(
        [0.05, 0.5, 0.95],
        [0.5] * 3,
        markersize=5,
        linewidth=1.8,
        markevery=[1],
        **method_style(index, line=line, marker=marker),
    )
    return figure


def set_swatch(index: int) -> Figure:
    """Draw the look of a group in a histogram."""
    figure, axes = _blank()
    axes.stairs([0.7], [0.1, 0.9], fill=index == 0, color=_set_colour(index), alpha=0.55 if index == 0 else 1.0)
    return figure


def _blank() -> tuple[Figure, Axes]:
    figure = new_figure(0.4, 0.16)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, 1), ylim=(0, 1))
    axes.set_axis_off()
    return figure, axes


def _set_colour(index: int) -> str:
    return TEST_COLOUR if index == 0 else SET_COLOURS[(index - 1) % len(SET_COLOURS)]


def thinned(values: Tensor) -> Tensor:
    """Keep at most `POINTS` values, evenly, with both ends."""
    if len(values) <= POINTS:
        return values
    return values[torch.linspace(0, len(values) - 1, POINTS).round().long()]


def _wilson(share: Any, count: Any, z: float = 1.96) -> tuple[Any, Any]:
    """Return the Wilson interval of a share of `count` trials."""
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return np.minimum(centre - half, share), np.maximum(centre + half, share)
