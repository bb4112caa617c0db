"""The table of a report, and what was random in each of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from bayesify.evaluation.comparison import FIT_UNITS, Column, columns, ood_names
from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.report._summary import summary
from bayesify.evaluation.report.content import Cell, Paragraph, Section, Table

__all__ = ["comparison_section", "conversion_section"]

REGRESSION = (
    "RMSE is the typical error. NLL and CRPS judge the whole predicted distribution, lower is better. Coverage is the "
    "share of targets inside 95% intervals, width the mean width of these: of two methods with the right coverage "
    "prefer the narrower."
)
CLASSIFICATION = (
    "NLL, Brier and ECE are lower for better probabilities: NLL (nats) punishes confident mistakes most, Brier is the "
    "squared error of the probabilities, ECE the mean gap between confidence and accuracy. AURC is the mean error rate "
    "over all shares of inputs that are answered, most confident first; coverage at 1% risk the largest of these "
    "shares with at most 1% of the answers wrong."
)
DETECTION = (
    "AUROC is the probability that an OOD input looks more uncertain than a test input: 1 is perfect, 0.5 is guessing, "
    "which is also what a network without randomness has by its epistemic uncertainty of zero."
)
INTERVALS = (
    "Intervals are quantiles over test sets (and OOD sets) whose examples are drawn from these with replacement: how "
    "far chance in the choice of the examples reaches, with the network and its draws as they are."
)


def comparison_section(evaluations: Sequence[Evaluation], level: float | None, notes: Sequence[str]) -> Section:
    """Return what was found, and the comparison, with epistemic detection beside the other and intervals of a level."""
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
    cells = [
        [Cell(text, span, "best" if best else "") for text, span, best in zip(c.texts, spans, c.best, strict=True)]
        for c in found
        for spans in [blank if level is None else c.ranges(evaluations, level)]
    ]
    legend = "★ best of its column, as far as the digits show."
    table = Table(
        "Comparison table",
        ["method", *(column.title for column in found)],
        [(e.name, row) for e, *row in zip(evaluations, *cells, strict=True)],
        legend if level is None else f"{legend} In brackets: {100 * level:g}% bootstrap intervals.",
    )
    reading = [CLASSIFICATION if evaluations[0].prediction.classes else REGRESSION]
    reading += [DETECTION] if ood_names(evaluations) else []
    reading += [] if level is None else [INTERVALS]
    units = [FIT_UNITS[e.cost.fit_unit] for e in evaluations if e.cost.fit is not None]
    reading += [f"Fit is the time of training in multiples of {units[0]}."] if units else []
    if any(column.title == "predict" for column in found):
        reading.append("Predict is the time of a prediction in multiples of one plain pass.")
    return Section(
        key="comparison",
        title="The comparison",
        summary=summary(evaluations),
        findings=[Paragraph("", aside=note) for note in notes],
        tables=[table],
        reading=" ".join(reading),
    )


def conversion_section(evaluations: Sequence[Evaluation]) -> Section:
    """Return what was random in each evaluation's network, module by module, as tables to open."""
    missing = [e.name for e in evaluations if e.conversion is None]
    return Section(
        key="conversion",
        title="What was made random?",
        findings=[Paragraph(f"Not recorded: {', '.join(missing)}.")] if missing else [],
        tables=[table for e in evaluations for table in _conversion(e)],
        reading="One row for each module of the network: whether the method made it random, and how or why not.",
    )


def _conversion(evaluation: Evaluation) -> list[Table]:
    found = evaluation.conversion
    if found is None:
        return []
    rows = [
        (
            row.name or "(network)",
            [Cell(row.type), Cell(f"{row.parameters:,}"), Cell("yes" if row.converted else "no"), Cell(row.reason)],
        )
        for row in found.rows
    ]
    return [
        Table(
            f"Conversion table of {evaluation.name}",
            ["module", "type", "parameters", "random", "why"],
            rows,
            texts=(0, 3),
            folded=(evaluation.name, f"{len(found.converted)} of {len(found.rows)} modules"),
        )
    ]
