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
from bayesify.evaluation.comparison import check_comparable
from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.report._checks import check_section
from bayesify.evaluation.report._comparison import comparison_section, conversion_section
from bayesify.evaluation.report._differences import difference_section
from bayesify.evaluation.report._figure_sections import figure_sections
from bayesify.evaluation.report._gallery import aligned, gallery_section
from bayesify.evaluation.report._mistakes import mistakes_section
from bayesify.evaluation.report.content import Section
from bayesify.evaluation.report.drawing import style

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
    introduction: str | Sequence[str] = (),
    shown: str | None = None,
    verdicts: Sequence[str] | None = None,
    opening: Sequence[Section] = (),
    sections: Sequence[Section] = (),
) -> Path:
    """Write evaluations as one self-contained HTML file, with nothing to load and no scripts.

    It opens with the mistakes that the network without randomness is surest of, and what a posterior says of them; the
    comparison comes after it. The same evaluations give the same bytes. Needs matplotlib and Jinja
    (`bayesify[report]`).

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
        introduction: Paragraphs to print under the heading.
        shown: The name of the evaluation whose view of mistakes and images is shown; None takes the best random one of
            those that saw the first one's examples in the same order.
        verdicts: What is done about each test example, such as `guard(images).verdict`; it is shown beside mistakes.
        opening: Sections of your own before the comparison; see `bayesify.evaluation.report.content`.
        sections: Sections of your own behind the figures.

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
    require("matplotlib", extra="report", purpose="drawing the report's figures")
    jinja = require("jinja2", extra="report", purpose="writing the report")
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file in it, such as {path / 'report.html'}.")
    check_comparable(evaluations)
    _check_names(evaluations, class_names)
    _check_verdicts(evaluations, verdicts)
    seen = aligned(evaluations, shown)
    pictures = gallery_section(seen, images, ood_images or {}, class_names)
    folder = resources.files("bayesify.evaluation.report")
    environment = jinja.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja.StrictUndefined
    )
    with style():
        everything = [
            *mistakes_section(evaluations, seen, images, class_names, verdicts),
            *opening,
            comparison_section(evaluations, intervals, [notes] if isinstance(notes, str) else list(notes)),
            *difference_section(evaluations, intervals),
            *figure_sections(evaluations),
            *sections,
            *check_section(checks or {}),
            *pictures,
            conversion_section(evaluations),
        ]
        _check_keys(everything)
        text = environment.from_string(folder.joinpath("report.html.j2").read_text(encoding="utf-8")).render(
            title=title,
            style=jinja.utils.markupsafe.Markup(folder.joinpath("report.css").read_text(encoding="utf-8")),
            introduction=[introduction] if isinstance(introduction, str) else list(introduction),
            sections=everything,
            versions=_versions(),
        )
    write_atomically(path, text.encode())
    return path


def _check_keys(sections: Sequence[Section]) -> None:
    keys = [section.key for section in sections]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"Several sections have the keys {twice}. Give each its own.")


def _check_verdicts(evaluations: Sequence[Evaluation], verdicts: Sequence[str] | None) -> None:
    number = len(evaluations[0].prediction)
    if verdicts is not None and len(verdicts) != number:
        raise ValueError(f"There are {len(verdicts)} verdicts and {number} test examples; give one for each.")


def _check_names(evaluations: Sequence[Evaluation], class_names: Sequence[str] | None) -> None:
    classes = evaluations[0].prediction.classes
    if class_names is not None and classes is not None and len(class_names) != classes:
        raise ValueError(f"There are {classes} classes and {len(class_names)} class_names; give one for each class.")


def _versions() -> str:
    return f"bayesify {version('bayesify')}, PyTorch {torch.__version__}, Python {platform.python_version()}"
