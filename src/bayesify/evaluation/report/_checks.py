"""Whether predictions without draws can be trusted, as a table of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bayesify.evaluation.checking import Check

__all__ = ["CheckRow", "check_rows"]


@dataclass(frozen=True)
class CheckRow:
    """One checked predictor: its name, its cells, and what to do."""

    name: str
    cells: list[str]
    predictor: str
    advice: str


def check_rows(checks: Mapping[str, Check]) -> list[CheckRow]:
    """Return a row for each check, with numbers as they are printed.

    The cells are: variance ratio, rank correlation, what two halves of the draws have, epistemic ratio, NLL difference,
    cost, and the cost of the draws.
    """
    for name, found in checks.items():
        if not isinstance(found, Check):
            raise TypeError(f"checks[{name!r}] must come from bayesify.check, but it is a {type(found).__name__}.")
    return [CheckRow(name, _cells(found), _origin(found), found.advice) for name, found in checks.items()]


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
