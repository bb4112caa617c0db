"""What a comparison found, in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.evaluation import measures
from bayesify.evaluation.comparison import LEVEL, ood_names
from bayesify.evaluation.evaluation import Evaluation, right_or_wrong
from bayesify.evaluation.report._figures import priced
from bayesify.likelihoods.prediction import ClassificationPrediction

__all__ = ["Finding", "calibration", "cost", "detection", "intervals", "quality", "selection", "summary"]


@dataclass(frozen=True)
class Finding:
    """A sentence, the evaluations it praises, and what for."""

    text: str
    winners: list[Evaluation]
    respect: str


def summary(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return sentences: what was compared, which is best at what, and where randomness brought nothing."""
    first = evaluations[0]
    findings = [
        quality(evaluations),
        calibration(evaluations) if first.prediction.classes else intervals(evaluations),
        *(detection(evaluations, name) for name in ood_names(evaluations)),
    ]
    found = [finding for finding in findings if finding is not None]
    sentences = [_compared(evaluations), *(finding.text for finding in found)]
    unbeaten = [finding.respect for finding in found if any(e.deterministic for e in finding.winners)]
    if unbeaten and not all(e.deterministic for e in evaluations):
        sentences.append(f"In {_listed(unbeaten)}, no Bayesian method improved on a single network without randomness.")
    return sentences


def _compared(evaluations: Sequence[Evaluation]) -> str:
    first = evaluations[0].prediction
    text = _listed([e.name for e in evaluations]) if len(evaluations) <= 6 else f"{len(evaluations)} predictions"
    text += " were compared" if len(evaluations) > 1 else " was evaluated"
    text += f" on {len(first):,} test examples"
    if first.classes:
        text += f" of {first.classes} classes"
    sizes = {name: len(e.ood[name]) for e in reversed(evaluations) for name in e.ood}
    ood = [f"{name} ({sizes[name]:,})" for name in ood_names(evaluations)]
    return text + (f", and on OOD inputs: {_listed(ood)}." if ood else ".")


def quality(evaluations: Sequence[Evaluation]) -> Finding | None:
    """Say who has the lowest NLL, and whether that is more than chance."""
    winners, nll = _best(evaluations, "nll")
    if not winners:
        return None
    text = f"{_named(winners, 'gives', 'give')} the best probabilities: " if len(evaluations) > 1 else ""
    text += f"{'the' if text else 'The'} NLL is {nll:.3f}"
    plain = next((e for e in evaluations if e.deterministic and "nll" in e.metrics), winners[0])
    if plain not in winners:
        text += f", that of {plain.name} {plain.metrics['nll']:.3f}"
        if not _clearly_better(winners[0], plain):
            text += f"; {len(plain.prediction):,} examples are too few to be sure of this difference"
    return Finding(f"{text}.", winners, "the quality of probabilities")


def calibration(evaluations: Sequence[Evaluation]) -> Finding | None:
    """Say whose confidence is closest to its accuracy."""
    winners, ece = _best(evaluations, "ece")
    if not winners:
        return None
    text = f"{_named(winners, 'is', 'are')} the best calibrated: " if len(evaluations) > 1 else ""
    text += f"{'the' if text else 'The'} confidence is off by {100 * ece:.1f} percentage points on average"
    return Finding(f"{text} (ECE {ece:.3f}).", winners, "calibration")


def detection(evaluations: Sequence[Evaluation], name: str) -> Finding | None:
    """Say who tells an OOD set best from the test set, and by which uncertainty."""
    keys = {f"auroc/{name}": evaluations[0].score, f"auroc-epistemic/{name}": "epistemic"}
    found = {key: _best(evaluations, key, highest=True) for key in keys}
    key = max(found, key=lambda key: found[key][1] if found[key][0] else -math.inf)
    winners, value = found[key]
    if not winners:
        return None
    by = f"by {keys[key].replace('_', ' ')} uncertainty (AUROC {value:.3f})"
    if value < 0.6:
        text = f"Nothing here tells {name} from the test examples: the best AUROC is {value:.3f}, and guessing has 0.5."
    else:
        best = " best" if len(evaluations) > 1 else ""
        text = f"{_named(winners, 'recognises', 'recognise')} {name} as OOD{best}, {by}."
    return Finding(text, winners, f"the detection of {name}")


def intervals(evaluations: Sequence[Evaluation]) -> Finding | None:
    """Say whose intervals hold what they promise."""
    gaps = {e.name: round(abs(e.metrics["coverage"] - LEVEL), 4) for e in evaluations if "coverage" in e.metrics}
    winners = [e for e in evaluations if e.name in gaps and gaps[e.name] == min(gaps.values())]
    if not winners:
        return None
    text = f"{_named(winners, 'is', 'are')} the best calibrated: " if len(evaluations) > 1 else ""
    shares = _listed(sorted({f"{100 * e.metrics['coverage']:.1f}%" for e in winners}))
    text += f"{100 * LEVEL:.0f}% intervals hold {shares} of the targets."
    return Finding(text, winners, "calibration")


def selection(evaluations: Sequence[Evaluation]) -> Finding | None:
    """Say what is gained by leaving the most uncertain tenth to a person."""
    winners, _ = _best(evaluations, "aurc", digits=6)
    if not winners:
        return None
    best = winners[0].prediction
    assert isinstance(best, ClassificationPrediction)
    kept = measures.accuracy_after_rejection(*right_or_wrong(best, winners[0].targets), fractions=[0.0, 0.1])
    before, after = (100 * (1 - float(value)) for value in kept)
    text = (
        f"With {winners[0].name}, leaving the most uncertain 10% of the inputs to a person changes the error rate on "
        f"the rest from {before:.1f}% to {after:.1f}%."
    )
    return Finding(text, winners, "ranking predictions")


def cost(evaluations: Sequence[Evaluation]) -> Finding | None:
    """Say what the lowest NLL costs."""
    winners, nll = _best(list(filter(priced, evaluations)), "nll")
    if not winners:
        return None
    cheapest = min(winners, key=lambda e: e.cost.predict or math.inf)
    price = f"{cheapest.cost.predict:.1f} times as long as a plain pass"
    text = f"The lowest NLL, {nll:.3f}, is that of {cheapest.name}, whose predictions take {price}."
    return Finding(text, [cheapest], "cost")


def _best(
    evaluations: Sequence[Evaluation], key: str, *, highest: bool = False, digits: int = 3
) -> tuple[list[Evaluation], float]:
    """Return all evaluations that have the best value, as it is written, and that value."""
    values = {e.name: e.metrics[key] for e in evaluations if math.isfinite(e.metrics.get(key, math.nan))}
    if not values:
        return [], math.nan
    best = max(values.values()) if highest else min(values.values())
    names = {name for name, value in values.items() if f"{value:.{digits}f}" == f"{best:.{digits}f}"}
    return [e for e in evaluations if e.name in names], best


def _named(evaluations: Sequence[Evaluation], one: str, several: str) -> str:
    return f"{_listed([e.name for e in evaluations])} {one if len(evaluations) == 1 else several}"


def _clearly_better(winner: Evaluation, other: Evaluation) -> bool:
    """Whether the difference of the mean NLLs is beyond two standard errors, paired where the examples are."""
    a, b = _surprises(winner), _surprises(other)
    if torch.equal(winner.targets, other.targets):
        variance = (b - a).var() / len(a)
    else:
        variance = a.var() / len(a) + b.var() / len(b)
    return float(b.mean() - a.mean()) > 2 * math.sqrt(float(variance))


def _surprises(evaluation: Evaluation) -> Tensor:
    """Return -ln p(target) of every position that counts."""
    prediction, targets = evaluation.prediction, evaluation.targets
    return -prediction.log_prob(targets)[prediction.counted(targets)]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
