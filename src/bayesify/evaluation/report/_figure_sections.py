"""The sections of a report that are made of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from bayesify.evaluation.comparison import ood_names
from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.report import _summary
from bayesify.evaluation.report._figures import (
    cost_figure,
    histogram_figure,
    method_swatch,
    priced,
    reliability_figure,
    risk_coverage_figure,
    set_swatch,
)
from bayesify.evaluation.report._regression import interval_figure, residual_figure
from bayesify.evaluation.report._summary import Finding
from bayesify.evaluation.report.content import Drawing, Paragraph, Section
from bayesify.evaluation.report.drawing import to_svg

__all__ = ["figure_sections"]


def figure_sections(evaluations: Sequence[Evaluation]) -> list[Section]:
    """Return the sections that these evaluations have figures for."""
    if evaluations[0].prediction.classes:
        found = [_reliability(evaluations), *_histograms(evaluations), _risk_coverage(evaluations)]
    else:
        spread = [e for e in evaluations if "coverage" in e.metrics]
        found = [_intervals(spread), _residuals(spread)] if spread else []
        found += _histograms(evaluations)
    if any(map(priced, evaluations)):
        found.append(_cost(evaluations))
    return found


def _reliability(evaluations: Sequence[Evaluation]) -> Section:
    drawings = [
        Drawing(
            f"{e.name}, ECE {e.metrics['ece']:.3f}",
            to_svg(reliability_figure(e), f"reliability-{index}", f"Reliability diagram of {e.name}"),
        )
        for index, e in enumerate(evaluations)
    ]
    return Section(
        key="reliability",
        title="Is it right as often as it says?",
        findings=_texts(_summary.calibration(evaluations)),
        rows={"": drawings},
        reading="Reliability diagrams. Each point is a group of predictions with similar confidence and stands on the "
        "dashed line if that confidence is deserved; below it the network is overconfident. Grey bars are the "
        "share of predictions in each group, whiskers the 95% intervals that its size allows.",
    )


def _histograms(evaluations: Sequence[Evaluation]) -> list[Section]:
    names = ood_names(evaluations)
    if not evaluations[0].prediction.classes and not names:
        return []
    rows = {}
    for kind in ("total", "epistemic"):
        shown = [e for e in evaluations if kind == "total" or not e.deterministic]
        if shown:
            rows[f"{kind.capitalize()} uncertainty"] = _histogram_row(shown, kind, names)
    silent = [e.name for e in evaluations if e.deterministic]
    note = Paragraph(f"No epistemic uncertainty, as nothing in them is random: {', '.join(silent)}.")
    section = Section(
        key="histograms",
        title="Does it detect OOD inputs?" if names else "Is it unsure where it is wrong?",
        findings=_texts(*(_summary.detection(evaluations, name) for name in names)) + [note] * bool(silent),
        legend=_sets(["test", *names] if names else ["right", "wrong"]),
        rows=rows,
        reading="Histograms of uncertainty. The less the outlines overlap with the grey area, the better a threshold "
        "can tell the groups apart. Epistemic uncertainty is what the model does not know, total uncertainty "
        "adds what the data leave open. Heights are on a square-root scale, so that small groups can be seen.",
    )
    return [section]


def _histogram_row(evaluations: Sequence[Evaluation], kind: str, names: Sequence[str]) -> list[Drawing]:
    unit = evaluations[0].prediction.unit
    grouped = [_groups(e, kind, names) for e in evaluations]
    limit = max(_upper(values) for groups in grouped for values in groups) or 1.0
    return [
        Drawing(
            e.name,
            to_svg(
                histogram_figure(groups, f"{kind} uncertainty ({unit})", limit),
                f"histogram-{kind}-{index}",
                f"Histogram of the {kind} uncertainty of {e.name}",
            ),
        )
        for index, (e, groups) in enumerate(zip(evaluations, grouped, strict=True))
    ]


def _groups(evaluation: Evaluation, kind: str, names: Sequence[str]) -> list[Tensor]:
    """Return uncertainties on the test set and on each OOD set; without any, where it is right and wrong."""
    prediction, targets, ood = evaluation.prediction, evaluation.targets, evaluation.ood
    scores, correct = prediction.deviation(kind), prediction.correct(targets)
    if correct is not None and not names:
        return [scores[correct], scores[~correct & prediction.counted(targets)]]
    return [scores, *(ood[name].deviation(kind) if name in ood else scores[:0] for name in names)]


def _upper(values: Tensor) -> float:
    """Return where the axis may end: the value below which nearly all lie."""
    flat = values.double().flatten().sort().values
    return float(flat[int(0.995 * (len(flat) - 1))]) if len(flat) else 0.0


def _risk_coverage(evaluations: Sequence[Evaluation]) -> Section:
    return Section(
        key="risk-coverage",
        title="Can it leave the hard cases to a person?",
        findings=_texts(_summary.selection(evaluations)),
        rows={"": [Drawing("", to_svg(risk_coverage_figure(evaluations), "risk", "Risk-coverage curves"))]},
        reading="Risk-coverage curves. Going left, more of the uncertain predictions are left to a person; the height "
        "is the error rate among those that remain. The lower the curve, the better the uncertainty ranks "
        "mistakes; left of 5% too few examples remain to say anything.",
        legend=_methods(evaluations, "risk", marker=False),
        wide=True,
    )


def _cost(evaluations: Sequence[Evaluation]) -> Section:
    return Section(
        key="cost",
        title="What does it cost?",
        findings=_texts(_summary.cost(evaluations)),
        rows={"": [Drawing("", to_svg(cost_figure(evaluations), "cost-nll", "Cost of a prediction against NLL"))]},
        reading="Cost against quality. Left is cheaper and down is better; the horizontal axis is logarithmic, in "
        "multiples of one pass of the plain network measured in the same run.",
        legend=_methods(evaluations, "cost-nll", line=False),
        wide=True,
    )


def _intervals(evaluations: Sequence[Evaluation]) -> Section:
    return Section(
        key="intervals",
        title="Do its intervals hold what they promise?",
        findings=_texts(_summary.intervals(evaluations)),
        rows={"": [Drawing("", to_svg(interval_figure(evaluations), "intervals", "Calibration of intervals"))]},
        reading="Calibration of intervals. On the dashed line, intervals of a level hold exactly that share of the "
        "targets; below it they are too narrow, above it too wide.",
        legend=_methods(evaluations, "intervals"),
        wide=True,
    )


def _residuals(evaluations: Sequence[Evaluation]) -> Section:
    drawings = [
        Drawing(e.name, to_svg(residual_figure(e), f"residuals-{index}", f"Sorted residuals of {e.name}"))
        for index, e in enumerate(evaluations)
    ]
    return Section(
        key="residuals",
        title="Are errors larger where it is less sure?",
        findings=[],
        rows={"": drawings},
        reading="Sorted residuals. Examples stand in the order of their predicted uncertainty; the grey band is the "
        "95% interval. Good uncertainty has a band that widens with the spread of the points, and 5% of them "
        "outside.",
    )


def _texts(*findings: Finding | None) -> list[Paragraph]:
    return [Paragraph(finding.text) for finding in findings if finding is not None]


def _methods(evaluations: Sequence[Evaluation], key: str, *, line: bool = True, marker: bool = True) -> list[Drawing]:
    return [
        Drawing(e.name, to_svg(method_swatch(index, line=line, marker=marker), f"{key}-key-{index}", ""))
        for index, e in enumerate(evaluations)
        if line or priced(e)
    ]


def _sets(names: Iterable[str]) -> list[Drawing]:
    return [Drawing(name, to_svg(set_swatch(index), f"set-key-{index}", "")) for index, name in enumerate(names)]
