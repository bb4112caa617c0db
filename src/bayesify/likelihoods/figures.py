"""Figures of one prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from bayesify._core.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_classes", "draw_density", "draw_maps", "new_axes"]

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#8a9099"  # of Okabe and Ito's palette, but for the grey
POINTS = 301
MOST_COUNTS = 400


def _new_figure(width: float) -> Figure:
    """Return a figure outside any global state."""
    module = require("matplotlib.figure", extra="report", purpose="A figure")
    figure: Figure = module.Figure(figsize=(width, 3.2), layout="constrained")
    return figure


def new_axes() -> Axes:
    """Return axes of a figure of their own."""
    return _new_figure(5.2).add_subplot()


def draw_maps(prediction: Any, example: int) -> Figure:
    """Draw the answers of one example's places, (H, W), and their aleatoric and epistemic uncertainty."""
    classes = prediction.classes
    figure = _new_figure(10.0)
    for axes, name in zip(
        figure.subplots(1, 3), ("label" if classes else "mean", "aleatoric", "epistemic"), strict=True
    ):
        values = getattr(prediction, name)[example].detach().cpu()
        if name == "label":
            colours = require("matplotlib", extra="report", purpose="A figure").colormaps["tab20"].resampled(classes)
            shown = axes.imshow(values.numpy(), cmap=colours, vmin=-0.5, vmax=classes - 0.5, interpolation="nearest")
            axes.set_title("class", fontsize="medium")
        else:
            shown = axes.imshow(values.double().numpy(), cmap="viridis", interpolation="nearest")
            axes.set_title(f"{name}, on average {values.double().mean().item():.3g}", fontsize="medium")
        axes.set_xticks([])
        axes.set_yticks([])
        figure.colorbar(shown, ax=axes, shrink=0.8)
    return figure


def draw_classes(axes: Axes, prediction: Any, place: tuple[int, ...], names: Sequence[str], top: int) -> None:
    """Draw bars of the most probable classes, and the draws as dots."""
    probs = prediction.probs[place].detach().cpu()
    best = probs.argsort(descending=True)[: max(1, top)]
    rows = range(len(best))
    axes.barh(rows, probs[best].numpy(), color=BLUE, alpha=0.75, height=0.65)
    if prediction.samples is not None:
        draws = prediction.samples[(slice(None), *place)].detach().cpu()[:, best]
        # Dots of one class lie beside each other, in the order of the draws, and not on top of each other.
        beside = torch.linspace(-0.25, 0.25, len(draws)) if len(draws) > 1 else torch.zeros(1)
        heights = torch.arange(len(best), dtype=beside.dtype) + beside[:, None]
        style: dict[str, Any] = {"s": 9, "color": ORANGE, "edgecolors": "black", "linewidths": 0.3, "zorder": 3}
        axes.scatter(draws.flatten().numpy(), heights.flatten().numpy(), label=f"each of {len(draws)} draws", **style)
        axes.legend(loc="lower right", frameon=False)
    axes.set_yticks(rows, [_plain(names[index]) for index in best.tolist()])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("probability")
    axes.set_ylabel("class" if len(best) == len(probs) else f"class (the first {len(best)} of {len(probs)})")
    figures = (f"{name} {float(getattr(prediction, name)[place]):.3f}" for name in ("total", "aleatoric", "epistemic"))
    axes.set_title(", ".join(figures) + " nats", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def draw_density(axes: Axes, prediction: Any, place: tuple[int, ...], level: float) -> None:
    """Draw the predictive density of a number, or the probabilities of counts, with mean and interval."""
    mean, std = (float(getattr(prediction, name)[place]) for name in ("mean", "std"))
    low, high = (float(end[place]) for end in prediction.interval(level))
    reach = 4 * std or 1.0  # without variance there is no density, but still a mean
    start, end = mean - reach, mean + reach
    if prediction.discrete:
        first, last = max(0, int(start)), int(end) + 1
        grid = torch.arange(first, last + 1, max(1, (last - first) // MOST_COUNTS), dtype=torch.float64)
    else:
        grid = torch.linspace(start, end, POINTS, dtype=torch.float64)
    own = prediction[place[0]]  # one example, of which a position is repeated for each point
    one = own._map(lambda name, t: t[(slice(None), 0, *place[1:])] if name == "samples" else t[(0, *place[1:])])
    repeated = one._map(lambda name, t: t if name == "samples" else t.cpu().expand(len(grid)))
    if std > 0:
        density = repeated.log_prob(grid).exp().numpy()
        inside = (grid >= low) & (grid <= high)
        x = grid.numpy()
        if prediction.discrete:
            axes.bar(x, density, width=0.9, color=[BLUE if each else GREY for each in inside], alpha=0.75)
        else:
            axes.plot(x, density, color=BLUE)
            axes.fill_between(x, density, where=inside.tolist(), color=BLUE, alpha=0.25, linewidth=0)
    axes.axvline(mean, color="black", linewidth=1)
    if prediction.samples is not None:
        means = prediction.samples[(slice(None), *place)].detach().cpu().numpy()
        axes.plot(means, [0.0] * len(means), "|", color=ORANGE, markersize=14, label=f"means of {len(means)} draws")
        axes.legend(loc="upper right", frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("target")
    axes.set_ylabel("probability" if prediction.discrete else "density")
    axes.set_title(f"mean {mean:.3f}, {100 * level:g} % from {low:.3f} to {high:.3f}", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def _plain(name: str) -> str:
    """Return a name that matplotlib does not take for mathematics."""
    return name.replace("$", r"\$")
