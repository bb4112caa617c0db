"""Figures as inline SVG: text stays text, and several drawings can share one page."""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["METHOD_COLOURS", "SETTINGS", "SET_COLOURS", "new_figure", "style", "to_svg"]

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow, too faint on white.
METHOD_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#555555")
SET_COLOURS = ("#D55E00", "#E69F00", "#CC79A7", "#009E73")

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # the page's own font, sharp at every size
    "svg.hashsalt": "bayesify",  # the same drawing gives the same bytes
    "text.parse_math": False,  # a name may hold a dollar sign
    "axes.unicode_minus": True,
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a9099",
    "axes.labelcolor": "#333a42",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#8a9099",
    "ytick.color": "#8a9099",
    "xtick.labelcolor": "#333a42",
    "ytick.labelcolor": "#333a42",
    "text.color": "#1c2127",
}


def style() -> AbstractContextManager[None]:
    """Return a context in which figures look as those of the report do; outside of it nothing changes."""
    import matplotlib

    return matplotlib.rc_context(SETTINGS)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, outside any global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: Figure, key: str, label: str) -> str:
    """Return a figure as an `<svg>` element.

    Args:
        figure: The figure.
        key: Unique in the page; begins every id.
        label: What a screen reader says; nothing where the text beside it does.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in root.iter():
        for child in [c for c in parent if c.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    referred = {name for node in root.iter() for value in node.attrib.values() for name in _references(value)}
    for node in root.iter():
        node.tag = _plain(node.tag)
        attributes = {_plain(name): _with_key(value, key) for name, value in node.attrib.items()}
        identity = attributes.pop("id", None)
        if identity in referred:
            attributes["id"] = f"{key}-{identity}"
        node.attrib.clear()
        node.attrib.update(attributes)
    for name in ("width", "height", "version"):  # the page decides the size; the viewBox keeps the shape
        root.attrib.pop(name, None)
    root.attrib.update({"role": "img", "aria-label": label} if label else {"aria-hidden": "true"})
    return ElementTree.tostring(root, encoding="unicode")


def _plain(name: str) -> str:
    """Drop the namespace, which HTML knows."""
    return name.rpartition("}")[2]


def _references(value: str) -> list[str]:
    return re.findall(r"url\(#([^)]+)\)", value) + re.findall(r"^#(.+)$", value)


def _with_key(value: str, key: str) -> str:
    if re.fullmatch(r"#[0-9a-fA-F]{3,8}", value):
        return value  # a colour
    return re.sub(r"^#(?=.)|(?<=url\()#", f"#{key}-", value)
