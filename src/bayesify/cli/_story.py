"""The story of the demo in numbers: a network's mistakes, who answers, one pass beside draws, what it is worth."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesify.choosing import Candidate, Choice
from bayesify.cli._comparison import Task
from bayesify.decide.guard import Guard
from bayesify.decide.verdicts import ANSWER, VERDICTS
from bayesify.evaluation.evaluation import Cost, Evaluation, evaluate, measure_cost
from bayesify.evaluation.mistakes import Mistakes, find_mistakes
from bayesify.laws import Posterior
from bayesify.prediction import capabilities, predict

__all__ = ["MAX_RISK", "Decided", "Gain", "Story", "best_of", "decide_all", "gain_of", "in_one_pass", "tell"]

MAX_RISK = 0.05


@dataclass(frozen=True)
class Decided:
    """What a posterior's guard does about each input.

    Attributes:
        name: Of the posterior.
        verdicts: How many digits, and of each OOD set how many images, get each verdict, by the set's name.
        answered: Share of the digits that are answered.
        wrong: Share of wrong answers among them; NaN if none is answered.
        handed: How many of the network's mistakes are not answered.
        caught: Share of the images of each OOD set that are not answered.
        codes: The verdict of each digit, by its place in `decide.verdicts.VERDICTS`.
    """

    name: str
    verdicts: dict[str, dict[str, int]]
    answered: float
    wrong: float
    handed: int
    caught: dict[str, float]
    codes: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        rest = {"answered": self.answered, "wrong": self.wrong, "handed": self.handed, "caught": self.caught}
        return {"name": self.name, "verdicts": self.verdicts, **rest}


@dataclass(frozen=True)
class Gain:
    """How much lower the NLL of one evaluation is than that of another, on the same examples.

    Attributes:
        name: Of the one that is hoped to be better.
        other: Of the other.
        nll: Both NLLs.
        value: Their difference, positive where the first is better.
        error: The standard error of the difference, paired.
        cost: What a prediction of the first costs, in plain passes; None if not measured.
    """

    name: str
    other: str
    nll: tuple[float, float]
    value: float
    error: float
    cost: float | None = None

    @property
    def clear(self) -> bool:
        """Whether it is more than two standard errors."""
        return self.value > 2 * self.error


@dataclass(frozen=True)
class Story:
    """What the demo tells before it compares.

    Attributes:
        ours: The posterior that the validation digits prefer.
        mistakes: The network's mistakes as this posterior sees them; None where there are none.
        mistaken: How many mistakes there are.
        num_test: Of how many digits.
        decided: What guards do, the network's with a temperature first; empty where none could promise anything.
        refusal: Why not.
        pairs: Evaluations by draws and in one pass, of the posteriors that have both.
        choice: What `choose` tried within two passes, and took; None where it failed.
        gains: What the posterior of the story and that of `choose` gain over the network with a temperature.
    """

    ours: str
    mistakes: Mistakes | None
    mistaken: int
    num_test: int
    decided: list[Decided]
    refusal: str | None
    pairs: list[tuple[Evaluation, Evaluation]]
    choice: Choice | None
    gains: list[Gain]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        before, after = (0, 0) if self.mistakes is None else self.mistakes.sure()
        return {
            "posterior": self.ours,
            "mistakes": self.mistaken,
            "test": self.num_test,
            "sure": {"network": before, self.ours: after},
            "decided": [one.to_dict() for one in self.decided],
            "refusal": self.refusal,
            "one_pass": [{"draws": a.to_dict(), "one pass": b.to_dict()} for a, b in self.pairs],
            "chosen": None if self.choice is None else self.choice.chosen,
            "gains": [{**vars(gain), "clear": gain.clear} for gain in self.gains],
        }

    @property
    def mirrored(self) -> Candidate | None:
        """The network on the image and its mirror image, as `choose` judged it."""
        candidates = () if self.choice is None else self.choice.candidates
        return next((one for one in candidates if "mirror" in one.name and one.reason is None), None)


def best_of(task: Task, posteriors: Mapping[str, Posterior]) -> str:
    """Return the name of the posterior with the least NLL on the task's validation data."""
    assert task.val is not None
    found = {}
    for name, posterior in posteriors.items():
        scores = [-predict(posterior, x, seed=task.seed).log_prob(y).double() for x, y in task.val]
        found[name] = float(torch.cat(scores).mean())
    return min(found, key=lambda name: found[name])


def decide_all(
    task: Task, posteriors: Mapping[str, Posterior], plain: Evaluation, *, max_risk: float = MAX_RISK
) -> tuple[list[Decided], str | None]:
    """Fit a guard for each posterior, and count what it does about digits and OOD images.

    Args:
        task: Has the validation data that guards are fitted on, and what they decide about.
        posteriors: By name; they are left as they are.
        plain: The network's own evaluation, whose mistakes are counted.
        max_risk: The share of wrong answers that is promised.

    Returns:
        What was decided; or nothing, and why a guard could not promise the risk.
    """
    assert task.val is not None
    found = []
    for name, posterior in posteriors.items():
        try:
            guard = Guard.fit(copy.deepcopy(posterior), task.val, max_risk=max_risk, seed=task.seed)
        except ValueError as error:
            return [], f"{name}: {error}"
        found.append(_decided(name, guard, task, plain))
    return found, None


def _decided(name: str, guard: Guard, task: Task, plain: Evaluation) -> Decided:
    verdicts = guard(task.test)
    answered, mistaken = verdicts.codes == ANSWER, plain.prediction.correct(plain.targets) == 0
    wrong = (verdicts.label[answered] != plain.targets[answered]).double().mean()
    others = {key: guard(images).codes for key, images in task.ood.items()}
    return Decided(
        name=name,
        verdicts={key: _counted(codes) for key, codes in {"digits": verdicts.codes, **others}.items()},
        answered=float(answered.double().mean()),
        wrong=float(wrong),
        handed=int((~answered & mistaken).sum()),
        caught={key: float((codes != ANSWER).double().mean()) for key, codes in others.items()},
        codes=verdicts.codes,
    )


def _counted(codes: Tensor) -> dict[str, int]:
    return dict(zip(VERDICTS, torch.bincount(codes, minlength=len(VERDICTS)).tolist(), strict=True))


def in_one_pass(
    task: Task, posteriors: Mapping[str, Posterior], evaluations: Sequence[Evaluation]
) -> list[tuple[Evaluation, Evaluation]]:
    """Evaluate in one pass what was evaluated by draws, where a posterior has that and it is fewer passes.

    Args:
        task: What is measured on.
        posteriors: By the names of their evaluations.
        evaluations: By draws.
    """
    inputs, _ = next(iter(task.test))
    pairs = []
    for one in evaluations:
        posterior = posteriors.get(one.name)
        if posterior is None or posterior.law.default_draws <= posterior.law.num_parts:
            continue
        if capabilities(posterior)["streamlined"] is not True:
            continue
        options: dict[str, Any] = {"how": "streamlined", "name": f"{one.name}, one pass"}
        fast = evaluate(posterior, task.test, ood=task.ood, score=task.score, seed=task.seed, **options)
        price = measure_cost(posterior, task.network, inputs, how="streamlined")
        pairs.append((one, replace(fast, cost=Cost(one.cost.fit, price, one.cost.fit_unit))))
    return pairs


def gain_of(one: Evaluation, other: Evaluation) -> Gain:
    """Return how much lower the NLL of one evaluation is than that of another of the same examples."""
    difference = (one.prediction.log_prob(one.targets) - other.prediction.log_prob(other.targets)).double()
    error = float(difference.std()) / math.sqrt(len(difference))
    nll = (one.metrics["nll"], other.metrics["nll"])
    return Gain(one.name, other.name, nll, float(difference.mean()), error, one.cost.predict)


def tell(
    evaluations: Sequence[Evaluation],
    *,
    ours: str,
    plain: str,
    tempered: str,
    chosen: str,
    choice: Choice | None,
    decided: list[Decided],
    refusal: str | None,
    pairs: list[tuple[Evaluation, Evaluation]],
) -> Story:
    """Put the story together.

    Args:
        evaluations: All rows of the comparison.
        ours: The name of the row that the validation digits prefer.
        plain: Of the network as it is.
        tempered: Of the network with a temperature.
        chosen: Of what `choose` took.
        choice: What it tried.
        decided: What guards do.
        refusal: Why they do nothing.
        pairs: Draws and one pass.
    """
    rows = {one.name: one for one in evaluations}
    mistakes = find_mistakes(rows[plain], rows[ours])
    # What `choose` tries first is the network with a temperature itself.
    other = choice is not None and choice.chosen != choice.candidates[0].name
    better = [name for name in (ours, *([chosen] if other else [])) if {name, tempered} <= set(rows)]
    return Story(
        ours=ours,
        mistakes=mistakes,
        mistaken=0 if mistakes is None else len(mistakes),
        num_test=len(rows[plain].prediction),
        decided=decided,
        refusal=refusal,
        pairs=pairs,
        choice=choice,
        gains=[gain_of(rows[name], rows[tempered]) for name in better],
    )
