"""What a guard does, as sections of a report: operating points, the curve of abstention, set sizes, and drift."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bayesify.decide.monitor import Monitor
from bayesify.decide.verdicts import ANSWER, OOD, Verdicts
from bayesify.evaluation import measures
from bayesify.evaluation.report.content import Cell, Drawing, Paragraph, Section, Table
from bayesify.evaluation.report.drawing import METHOD_COLOURS, new_figure, style, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["guard_sections", "operating_points"]

RISKS = (0.005, 0.01, 0.02, 0.05, 0.1)
PANEL = (2.9, 2.6)  # as the other panels of a report
POINTS = 200  # of a curve
GREY, OWN, LIMIT = "#8a9099", METHOD_COLOURS[0], METHOD_COLOURS[5]


def guard_sections(
    verdicts: Verdicts, targets: Tensor, *, stream: Verdicts | None = None, false_alarm: float = 0.01
) -> list[Section]:
    """Return sections for `write_report(..., sections=...)` that show what a guard does.

    Args:
        verdicts: Of labelled examples that the guard was not fitted on.
        targets: Their targets, (N,).
        stream: Verdicts of inputs in the order in which they came, for the section on drift.
        false_alarm: Of the monitor that looks at the stream.

    Example:
        >>> from bayesify import convert
        >>> from bayesify.decide import Guard
        >>> x = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
        >>> network = torch.nn.Linear(2, 2, bias=False)
        >>> _ = network.weight.data.copy_(20 * torch.eye(2))
        >>> guard = Guard.fit(convert(network, "map"), [(x, x.argmax(1))], max_risk=0.05)
        >>> [section.title for section in guard_sections(guard(x), x.argmax(1), stream=guard(x))]
        ['What does the guard answer?', 'Have the data left?']
    """
    if len(targets) != len(verdicts):
        raise ValueError(f"There are {len(verdicts)} verdicts and {len(targets)} targets: give one for each.")
    with style():
        return [_answers(verdicts, targets), *([] if stream is None else [_drift(stream, false_alarm)])]


def operating_points(verdicts: Verdicts, correct: Tensor) -> list[tuple[float, float, float]]:
    """Return, for several risks, the largest share that could be answered with at most that many errors.

    Among the inputs that are not OOD, those below a threshold of the uncertainty are answered; of all thresholds the
    one with the most answers is taken whose share of wrong answers is at most the risk *on these very examples*: what
    hindsight would have chosen, without any promise.

    Args:
        verdicts: Of N examples.
        correct: Whether each answer is right, (N,).

    Returns:
        Risk allowed, share answered, and share of wrong answers among them.
    """
    coverage, risk = _curve(verdicts, correct)
    found = []
    for allowed in RISKS:
        fits = (risk <= allowed).nonzero().flatten()
        last = int(fits[-1]) if len(fits) else None
        found.append((allowed, 0.0, 0.0) if last is None else (allowed, float(coverage[last]), float(risk[last])))
    return found


def _curve(verdicts: Verdicts, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of all inputs that is answered, and the risk, for each threshold; OOD ones never are."""
    passed = verdicts.codes != OOD
    if not bool(passed.any()):
        return torch.zeros(0), torch.zeros(0)
    curve = measures.risk_coverage(verdicts.uncertainty[passed], correct[passed])
    return curve.coverage * float(passed.double().mean()), curve.risk


def _right(verdicts: Verdicts, targets: Tensor) -> Tensor | None:
    """Return whether each answer is right; None where no risk is promised."""
    if verdicts.in_set is not None:
        return verdicts.label.cpu() == targets.cpu()
    limit = verdicts.rules.limit
    if verdicts.rules.max_risk is None or limit is None:
        return None
    return (verdicts.mean.cpu().double() - targets.cpu().double().reshape(-1)).abs() <= limit


def _held(verdicts: Verdicts, targets: Tensor) -> Tensor:
    if verdicts.in_set is not None:
        return verdicts.in_set.cpu().gather(1, targets.cpu()[:, None])[:, 0]
    assert verdicts.low is not None
    assert verdicts.high is not None
    flat = targets.cpu().reshape(-1)
    return (verdicts.low.cpu() <= flat) & (flat <= verdicts.high.cpu())


def _answers(verdicts: Verdicts, targets: Tensor) -> Section:
    right, answered = _right(verdicts, targets), (verdicts.codes == ANSWER).cpu()
    share, outside = float(answered.double().mean()), float((verdicts.codes == OOD).double().mean())
    numbers = [
        (_percent(share), "of the inputs are answered"),
        (_percent(1 - share - outside), "go to a person"),
        (_percent(outside), "are called OOD"),
    ]
    findings = [Paragraph(f"{verdicts.rules.promise[0].upper()}{verdicts.rules.promise[1:]}.", lead="Promised")]
    drawings, tables = [], []
    if right is not None:
        wrong, number = int((~right[answered]).sum()), int(answered.sum())
        risk = wrong / number if number else 0.0
        numbers.append((f"{wrong} of {number:,}", "answers are wrong"))
        findings.append(Paragraph(f"{_percent(risk)} of the answers are wrong.", lead="Found"))
        drawings.append(
            Drawing("Errors by the share answered", to_svg(_abstention(verdicts, right, share, risk), "abstention", ""))
        )
        tables.append(_points(verdicts, right, share, risk))
    held = float(_held(verdicts, targets).double().mean())
    title = "How many classes a set has" if verdicts.in_set is not None else "How wide intervals are"
    drawings.append(Drawing(title, to_svg(_sizes(verdicts), "sets", "")))
    numbers.append(
        (_percent(held), "of the sets hold the label" if verdicts.in_set is not None else "of the intervals hold")
    )
    return Section(
        key="guard",
        title="What does the guard answer?",
        findings=findings,
        numbers=numbers,
        tables=tables,
        rows={"": drawings},
        reading="An input that is not OOD is answered where its uncertainty is below the guard's threshold. The curve "
        "shows what other thresholds would have done on these examples, and the point the guard's own, which was found "
        "on other examples and carries the promise; the dashed line is the risk allowed. The rows of the table are "
        "what hindsight would have chosen here, and promise nothing. Sets are of all inputs, not of those answered.",
    )


def _points(verdicts: Verdicts, right: Tensor, share: float, risk: float) -> Table:
    rows = [("the guard", [Cell(_percent(share)), Cell(_percent(risk)), Cell("before, on other examples")])]
    rows += [
        (
            f"at most {100 * allowed:g}% wrong",
            [Cell(_percent(part)), Cell(_percent(wrong)), Cell("in hindsight, on these")],
        )
        for allowed, part, wrong in operating_points(verdicts, right)
    ]
    return Table(
        "operating points", ["operating point", "answered", "wrong among them", "how it was found"], rows, texts=(2,)
    )


def _abstention(verdicts: Verdicts, right: Tensor, share: float, risk: float) -> Figure:
    coverage, errors = _curve(verdicts, right)
    figure = new_figure(*PANEL)
    axes = figure.add_subplot()
    shown = coverage >= min(0.02, float(coverage[-1])) if len(coverage) else torch.zeros(0, dtype=torch.bool)
    axes.plot(_thinned(coverage[shown]), _thinned(errors[shown]), color=OWN, linewidth=1.8)
    if verdicts.rules.max_risk is not None:
        axes.axhline(verdicts.rules.max_risk, color=LIMIT, linestyle="--", linewidth=1)
        axes.annotate(
            "allowed", (0.01, verdicts.rules.max_risk), xytext=(0, 3), textcoords="offset points", color=LIMIT
        )
    axes.plot([share], [risk], "o", color=OWN, markeredgecolor="white", markersize=9, clip_on=False, zorder=4)
    axes.annotate("the guard", (share, risk), xytext=(-8, 7), textcoords="offset points", ha="right")
    top = max([*errors[shown].tolist(), risk, 1.6 * (verdicts.rules.max_risk or 0.0), 1e-3])
    axes.set(xlim=(0, 1), ylim=(0, 1.08 * top), xlabel="share answered", ylabel="wrong among them")
    _in_percent(axes.xaxis)
    _in_percent(axes.yaxis)
    return figure


def _sizes(verdicts: Verdicts) -> Figure:
    figure = new_figure(*PANEL)
    axes = figure.add_subplot()
    if verdicts.in_set is not None:
        sizes = verdicts.in_set.sum(1).cpu()
        share = torch.bincount(sizes, minlength=3).double() / max(1, len(sizes))
        bars = axes.bar(range(len(share)), share.tolist(), color=OWN, width=0.7)
        axes.bar_label(bars, [_percent(value) if value else "" for value in share.tolist()], padding=2, fontsize=8)
        axes.set(xlabel="classes in the set", ylabel="share of inputs", ylim=(0, 1.1 * float(share.max())))
        axes.set_xticks(range(len(share)) if len(share) <= 12 else range(0, len(share), math.ceil(len(share) / 10)))
    else:
        assert verdicts.low is not None
        assert verdicts.high is not None
        widths = (verdicts.high - verdicts.low).cpu().numpy()
        counts, edges = np.histogram(widths[np.isfinite(widths)], 30)
        axes.stairs(counts / max(1, counts.sum()), edges, fill=True, color=OWN, alpha=0.8)
        axes.set(xlabel="width of the interval", ylabel="share of inputs")
        axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
    _in_percent(axes.yaxis)
    return figure


def _drift(stream: Verdicts, false_alarm: float) -> Section:
    """Show the evidence that the data have left, after each hundredth of a stream."""
    monitor = Monitor(stream.rules.known, false_alarm)
    step = max(1, len(stream) // POINTS)
    seen, evidence = [0], [0.0]
    for start in range(0, len(stream), step):
        monitor.update(stream[start : start + step])
        seen.append(monitor.seen)
        evidence.append(monitor.evidence / math.log(10))
    if monitor.alarm:
        found = (
            f"An alarm was raised after {monitor.alarmed_at:,} of {monitor.seen:,} inputs; the change seems to lie at "
            f"input {monitor.changed_at:,}."
        )
    else:
        found = f"No alarm in {monitor.seen:,} inputs."
    words = ("answered", "left to a person", "called OOD")
    counts = [(f"{count:,}", word) for word, count in zip(words, monitor.counts.values(), strict=True)]
    return Section(
        key="drift",
        title="Have the data left?",
        findings=[Paragraph(found)],
        numbers=counts,
        rows={"": [Drawing("Evidence that they have", to_svg(_evidence(monitor, seen, evidence), "drift", ""))]},
        reading="Without a change, the evidence ever reaches the dashed line with a probability of at most "
        f"{100 * false_alarm:g} %, however long one looks. It is the capital of a gambler who bets that low p-values "
        "have become more frequent than the known inputs allow, as a power of ten.",
    )


def _evidence(monitor: Monitor, seen: list[int], evidence: list[float]) -> Figure:
    figure = new_figure(*PANEL)
    axes = figure.add_subplot()
    limit = math.log10(2 / monitor.false_alarm)
    axes.plot(seen, evidence, color=OWN, linewidth=1.8)
    axes.axhline(limit, color=LIMIT, linestyle="--", linewidth=1)
    axes.annotate("alarm", (0, limit), xytext=(3, 3), textcoords="offset points", color=LIMIT)
    if monitor.changed_at is not None:
        axes.axvline(monitor.changed_at, color=GREY, linestyle=":", linewidth=1.2)
    top = max(1.3 * limit, min(max(evidence), 4 * limit))
    axes.set(xlim=(0, seen[-1]), ylim=(min(0.0, *evidence) - 0.2, top), xlabel="inputs seen", ylabel="evidence, log10")
    return figure


def _thinned(values: Tensor) -> Tensor:
    rows = torch.linspace(0, max(0, len(values) - 1), min(len(values), POINTS)).round().long()
    return values[rows]


def _in_percent(axis: object) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol="%"))  # type: ignore[attr-defined]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
