"""The report: one HTML file that compares posteriors and needs nothing else to be read."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed
from bayesify._core.files import write_atomically
from bayesify._core.optional import require
from bayesify._moved import missing
from bayesify.evaluation.checking import Check
from bayesify.evaluation.comparison import FIT_UNITS, Column, check_comparable, columns, ood_names
from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.report._checks import check_rows
from bayesify.evaluation.report._differences import differences
from bayesify.evaluation.report._gallery import Gallery, check_images, choose, galleries
from bayesify.evaluation.report._sections import sections
from bayesify.evaluation.report._summary import summary
from bayesify.evaluation.report._svg import SETTINGS

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    """Say where a name went that is no longer here."""
    raise missing(__name__, name)


@renamed(foreign_images="ood_images")
def write_report(
    evaluations: Sequence[Evaluation],
    path: str | Path,
    *,
    title: str = "How sure is it, and should it be?",
    images: Tensor | None = None,
    class_names: Sequence[str] | None = None,
    ood_images: Mapping[str, Tensor] | None = None,
    notes: str | Sequence[str] = (),
    checks: Mapping[str, Check] | None = None,
    intervals: float | None = None,
) -> Path:
    """Write evaluations as one self-contained HTML file, with nothing to load and no scripts.

    Images are shown as the best random posterior among those that saw the first evaluation's examples in the same order
    sees them. The same evaluations give the same bytes. Needs matplotlib and Jinja (`bayesify[report]`).

    Args:
        evaluations: From `evaluate`, of one task.
        path: The file to write, in one step.
        title: The heading.
        images: Test images (N, C, H, W) in the order of the first evaluation's examples.
        class_names: What to call the classes.
        ood_images: Images of OOD sets, by their names in the evaluations.
        notes: Paragraphs to print under the summary.
        checks: What `bayesify.check` found about predictions without draws, by the names to show.
        intervals: The level of bootstrap intervals to show, such as 0.95: of all values, and of the paired differences
            to the first evaluation of those that saw the same examples; None shows none. See `Evaluation.interval`.

    Returns:
        The path.

    Example:
        >>> import tempfile
        >>> from bayesify import convert
        >>> from bayesify.evaluation.evaluation import evaluate
        >>> result = evaluate(convert(torch.nn.Identity(), "map"), [(torch.eye(3), torch.arange(3))])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report([result], Path(folder) / "report.html").stat().st_size > 10_000
        True
    """
    matplotlib = require("matplotlib", extra="report", purpose="drawing the report's figures")
    jinja = require("jinja2", extra="report", purpose="writing the report")
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file in it, such as {path / 'report.html'}.")
    check_comparable(evaluations)
    _check_names(evaluations, class_names)
    shown = choose(evaluations)
    pictures = _galleries(shown, images, ood_images or {}, class_names)
    folder = resources.files("bayesify.evaluation.report")
    environment = jinja.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja.StrictUndefined
    )
    with matplotlib.rc_context(SETTINGS):
        text = environment.from_string(folder.joinpath("report.html.j2").read_text(encoding="utf-8")).render(
            title=title,
            style=jinja.utils.markupsafe.Markup(folder.joinpath("report.css").read_text(encoding="utf-8")),
            summary=summary(evaluations),
            notes=[notes] if isinstance(notes, str) else list(notes),
            table=_table(evaluations, intervals),
            differences=None if intervals is None else differences(evaluations, intervals),
            sections=sections(evaluations),
            checks=check_rows(checks or {}),
            shown=shown,
            galleries=pictures,
            evaluations=evaluations,
            fit_unit=_fit_unit(evaluations),
            versions=_versions(),
        )
    write_atomically(path, text.encode())
    return path


def _table(evaluations: Sequence[Evaluation], level: float | None) -> dict[str, Any]:
    """Return the comparison as rows of (text, interval, whether best), with epistemic detection beside the other."""
    found: list[Column] = []
    for column in columns(evaluations, selective=True):
        found.append(column)
        name = column.title.removeprefix("AUROC ")
        if name != column.title:
            key = f"auroc-epistemic/{name}"
            values = tuple(e.metrics.get(key) for e in evaluations)
            found.append(Column(f"{column.title}, epistemic", values, "higher", name=key))
    for evaluation in evaluations if level is not None else ():
        evaluation.replicates()  # all at once, on the same resampled sets
    blank = [""] * len(evaluations)
    rows = [
        list(zip(c.texts, blank if level is None else c.ranges(evaluations, level), c.best, strict=True)) for c in found
    ]
    return {
        "titles": [column.title for column in found],
        "rows": [(e.name, cells) for e, *cells in zip(evaluations, *rows, strict=True)],
        "level": None if level is None else f"{100 * level:g}",
        "regression": not evaluations[0].prediction.classes,
        "ood": ood_names(evaluations),
    }


def _galleries(
    shown: Evaluation,
    images: Tensor | None,
    ood_images: Mapping[str, Tensor],
    class_names: Sequence[str] | None,
) -> list[Gallery]:
    if images is not None:
        check_images(images, shown.prediction, "images")
    for name, pictures in ood_images.items():
        if name not in shown.ood:
            raise ValueError(f"ood_images has {name!r}, but the evaluations' OOD sets are {list(shown.ood)}.")
        check_images(pictures, shown.ood[name], f"ood_images[{name!r}]")
    return galleries(shown, images, ood_images, class_names)


def _check_names(evaluations: Sequence[Evaluation], class_names: Sequence[str] | None) -> None:
    classes = evaluations[0].prediction.classes
    if class_names is not None and classes is not None and len(class_names) != classes:
        raise ValueError(f"There are {classes} classes and {len(class_names)} class_names; give one for each class.")


def _fit_unit(evaluations: Sequence[Evaluation]) -> str | None:
    units = [FIT_UNITS[e.cost.fit_unit] for e in evaluations if e.cost.fit is not None]
    return units[0] if units else None


def _versions() -> str:
    return f"bayesify {version('bayesify')}, PyTorch {torch.__version__}, Python {platform.python_version()}"
