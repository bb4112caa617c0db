"""The figures of a regression report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from bayesify.evaluation import measures
from bayesify.evaluation.comparison import LEVEL
from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.report._figures import PANEL, WIDE, method_style, percent_axis, thinned
from bayesify.evaluation.report.drawing import METHOD_COLOURS, new_figure
from bayesify.likelihoods.prediction import RegressionPrediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["interval_figure", "residual_figure"]


def interval_figure(evaluations: Sequence[Evaluation]) -> Figure:
    """Draw the share of targets inside central intervals against the intervals' level."""
    figure = new_figure(*WIDE)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="#8a9099", linestyle="--", linewidth=1)
    levels = np.linspace(0.05, 0.95, 19)
    for index, evaluation in enumerate(evaluations):
        prediction = evaluation.prediction
        assert isinstance(prediction, RegressionPrediction)
        shares = [
            measures.interval_coverage(*prediction.interval(float(level)), evaluation.targets) for level in levels
        ]
        axes.plot(levels, shares, markersize=4, **method_style(index))
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="level of the interval", ylabel="targets inside")
    percent_axis(axes, "xy")
    return figure


def residual_figure(evaluation: Evaluation) -> Figure:
    """Draw residuals in the order of their predicted deviation, over the predicted interval."""
    prediction = evaluation.prediction
    assert isinstance(prediction, RegressionPrediction)
    order = torch.argsort(prediction.std.flatten(), stable=True)
    residual = thinned((evaluation.targets - prediction.mean).flatten()[order])
    upper = thinned((prediction.interval(LEVEL)[1] - prediction.mean).flatten()[order])
    rank = np.linspace(0, 1, len(residual))
    figure = new_figure(*PANEL)
    axes = figure.add_subplot()
    axes.fill_between(rank, -upper, upper, color="#d7dbe0", linewidth=0)
    axes.plot(rank, residual, "o", markersize=2.6, color=METHOD_COLOURS[0])
    axes.set(xlim=(-0.02, 1.02), xlabel="examples, most certain first", ylabel="target − prediction")
    percent_axis(axes, "x")
    return figure
