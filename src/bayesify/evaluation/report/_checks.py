"""Whether predictions without draws can be trusted, as a section of the report."""

from __future__ import annotations

from collections.abc import Mapping

from bayesify.evaluation.checking import Check
from bayesify.evaluation.report.content import Cell, Paragraph, Section, Table

__all__ = ["check_section"]

TITLES = [
    "method",
    "variance ratio",
    "rank correlation",
    "of two halves",
    "epistemic ratio",
    "NLL difference",
    "cost",
    "cost of draws",
]


def check_section(checks: Mapping[str, Check]) -> list[Section]:
    """Return a table with a row for each check, and what to do; nothing without checks."""
    for name, found in checks.items():
        if not isinstance(found, Check):
            raise TypeError(f"checks[{name!r}] must come from bayesify.check, but it is a {type(found).__name__}.")
    if not checks:
        return []
    table = Table(
        "Predictions without draws",
        TITLES,
        [(name, [Cell(text) for text in _cells(found)]) for name, found in checks.items()],
    )
    section = Section(
        key="check",
        title="Can a prediction without draws be trusted?",
        findings=[Paragraph(found.advice, name, _origin(found)) for name, found in checks.items()],
        tables=[table],
        reading="A prediction in one pass, beside one that averages draws, which is the target. The variance ratio "
        "compares the sizes of the outputs' variances, the rank correlation the order of the examples by them; no "
        "predictor can be told from a perfect one beyond the correlation of two halves of the draws. The NLL "
        "difference is in nats, below zero where one pass is better. Costs are in multiples of one plain pass.",
    )
    return [section]


def _cells(found: Check) -> list[str]:
    nll = "no targets" if found.nll_difference is None else f"{found.nll_difference:+.4f}".replace("-", "−")
    return [
        f"{found.variance_ratio:.2f}",
        f"{found.rank_correlation:.2f}".replace("-", "−"),
        f"{found.noise_ceiling:.2f}".replace("-", "−"),
        f"{found.epistemic_ratio:.2f}",
        nll,
        f"{found.cost:.1f}×",
        f"{found.sampling_cost:.1f}×",
    ]


def _origin(found: Check) -> str:
    name = found.predictor[:1].upper() + found.predictor[1:]
    return f"{name}; against {found.draws:,} draws on {found.examples:,} examples."
