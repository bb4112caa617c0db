"""A picture of the components of a mixture."""

from __future__ import annotations

from pathlib import Path

from bayesify._core.optional import require
from bayesify.evaluation.components import Components
from bayesify.evaluation.report._svg import METHOD_COLOURS, SETTINGS, new_figure

__all__ = ["plot_components"]


def plot_components(components: Components, path: str | Path) -> Path:
    """Draw where the components' weights lie around the shared ones, and how often each pair disagrees.

    Args:
        components: From `bayesify.components.look_at_components`.
        path: The file; its ending says the format. Needs matplotlib (`bayesify[report]`).

    Returns:
        The path.
    """
    matplotlib = require("matplotlib", extra="report", purpose="drawing")
    with matplotlib.rc_context({**SETTINGS, "text.parse_math": False}):
        figure = new_figure(8.0, 3.4)
        plane, pairs = figure.subplots(1, 2)
        points = components.positions.numpy()
        plane.scatter(points[:-1, 0], points[:-1, 1], color=METHOD_COLOURS[1], label="components", zorder=3)
        for index, (x, y) in enumerate(points[:-1]):
            plane.annotate(f" {index}: {float(components.accuracy[index]):.1%}", (x, y))
        plane.scatter(*points[-1:].T, color=METHOD_COLOURS[5], marker="*", s=120, label="U", zorder=3)
        share = [f"{float(value):.0%} of the variance" for value in components.explained]
        plane.set(xlabel=share[0], ylabel=share[1], title="Weights of the components, and their accuracy")
        plane.legend(frameon=False)
        shown = pairs.imshow(components.disagreement.numpy(), cmap="Blues", vmin=0)
        pairs.grid(visible=False)
        pairs.set(title="Share of examples with different labels", xlabel="component", ylabel="component")
        figure.colorbar(shown, ax=pairs)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
    return target
