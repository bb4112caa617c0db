"""What a `Guard` says of each input."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayesify.likelihoods.display import ROWS, Displayed, require_pandas
from bayesify.likelihoods.prediction import Prediction

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["ANSWER", "ASK", "OOD", "VERDICTS", "Rules", "Verdicts"]

VERDICTS = ("answer", "ask", "ood")
ANSWER, ASK, OOD = range(3)


@dataclass(frozen=True)
class Rules:
    """What a guard's verdicts follow, for their reasons.

    Attributes:
        score: The name of the score that finds OOD inputs.
        known: How many known inputs it was calibrated on.
        id_acceptance: The share of known inputs that are not called OOD.
        uncertainty: The name of the uncertainty that decides whether to answer.
        threshold: Answered are inputs with less.
        max_risk: The share of wrong answers that is promised; None where the width of intervals decides.
        confidence: With which probability.
        limit: Of numbers: the largest error of an answer that is right, or the widest interval of an answer.
        classes: Names of the classes; empty for numbers.
    """

    score: str
    known: int
    id_acceptance: float
    uncertainty: str
    threshold: float
    max_risk: float | None = None
    confidence: float | None = None
    limit: float | None = None
    classes: tuple[str, ...] = ()

    @property
    def promise(self) -> str:
        """What answers promise, in words."""
        if self.max_risk is None:
            return f"its interval is at most {self.limit:g} wide"
        wrong = "are wrong" if self.limit is None else f"are off by more than {self.limit:g}"
        return (
            f"at most {100 * self.max_risk:g} % of such answers {wrong}, with a confidence of "
            f"{100 * (self.confidence or 0):g} %"
        )

    def scaled(self, std: float) -> Rules:
        """Return the rules of numbers that were divided by `std`, in their own units; the uncertainty is a variance."""
        limit = None if self.limit is None else self.limit * std
        return dataclasses.replace(self, threshold=self.threshold * std**2, limit=limit)


@dataclass(frozen=True, repr=False)
class Verdicts(Displayed):
    """A verdict for each input, and why.

    Attributes:
        codes: 0 answer, 1 ask a person, 2 OOD, (B,); `verdict` has their names.
        prediction: What was predicted: `label`, `confidence`, `total`, ... are its.
        p_value: Conformal p-value of the score, (B,), small = OOD.
        score: The score that finds OOD inputs, (B,).
        uncertainty: What decides whether to answer, (B,).
        in_set: Which classes are in each prediction set, (B, C); None for numbers.
        low: Lower ends of the intervals, (B,); None for classes.
        high: Upper ends.
        rules: What the verdicts follow.
    """

    codes: Tensor
    prediction: Prediction
    p_value: Tensor
    score: Tensor
    uncertainty: Tensor
    in_set: Tensor | None
    low: Tensor | None
    high: Tensor | None
    rules: Rules

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of what a table shows."""
        own = ("mean", "std", "low", "high") if self.in_set is None else ("label", "confidence", "prediction_set")
        return ("verdict", *own, "total", "aleatoric", "epistemic", "p_value", "reason")

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of the scores that decided."""
        return ("score", "uncertainty")

    @property
    def classes(self) -> int | None:
        """The number of classes; None for numbers."""
        return self.prediction.classes

    @property
    def verdict(self) -> list[str]:
        """The verdicts' names: "answer", "ask" or "ood"."""
        return [VERDICTS[code] for code in self.codes.tolist()]

    @property
    def label(self) -> Tensor:
        """The most probable class, (B,)."""
        return self._of_prediction("label")

    @property
    def confidence(self) -> Tensor:
        """Its probability, (B,)."""
        return self._of_prediction("confidence")

    @property
    def mean(self) -> Tensor:
        """The predictive mean, (B,)."""
        return self._of_prediction("mean")

    @property
    def std(self) -> Tensor:
        """The predictive standard deviation, (B,)."""
        return self._of_prediction("std")

    @property
    def total(self) -> Tensor:
        """The prediction's total uncertainty, (B,)."""
        return self._of_prediction("total")

    @property
    def aleatoric(self) -> Tensor:
        """The part of it that the data leave open, (B,)."""
        return self._of_prediction("aleatoric")

    @property
    def epistemic(self) -> Tensor:
        """The part of it that the model leaves open, (B,)."""
        return self._of_prediction("epistemic")

    @property
    def prediction_set(self) -> list[list[int]]:
        """The classes in each prediction set, the most probable first."""
        if self.in_set is None:
            raise AttributeError("Numbers have no prediction set: low and high are the ends of the intervals.")
        order = self.prediction.log_probs.argsort(dim=-1, descending=True, stable=True)  # type: ignore[attr-defined]
        member = self.in_set.to(order.device).gather(-1, order)
        pairs = zip(order.tolist(), member.tolist(), strict=True)
        return [[index for index, there in zip(*pair, strict=True) if there] for pair in pairs]

    @property
    def reason(self) -> list[str]:
        """Why, in one sentence for each input; made when it is asked for."""
        columns = [self.codes, self.score, self.uncertainty, self.p_value]
        sets: Sequence[Any] = [None] * len(self) if self.in_set is None else self.prediction_set
        rows = zip(*(column.tolist() for column in columns), sets, strict=True)
        return [self._sentence(*row) for row in rows]

    def _sentence(self, code: int, score: float, uncertainty: float, p_value: float, members: Any) -> str:
        rules = self.rules
        if math.isnan(score) or math.isnan(uncertainty):
            return "The network's outputs are not numbers for this input, which no known input had."
        if code == OOD:
            share = (1 - p_value) * (1 + 1 / rules.known)
            return (
                f"The {rules.score} of {score:.3g} is above that of {100 * share:.4g} % of {rules.known} known inputs, "
                f"of which {100 * rules.id_acceptance:g} % are to pass (p = {p_value:.3g})."
            )
        if code == ANSWER and rules.threshold == math.inf:
            return f"Whatever the {rules.uncertainty} of a known input, {rules.promise}."
        if code == ANSWER:
            return f"The {rules.uncertainty} of {uncertainty:.3g} is below {rules.threshold:.3g}: {rules.promise}."
        if uncertainty < rules.threshold:
            return f"The {rules.score} of {score:.3g} is as high as known inputs' may be, where nothing is promised."
        found = f"The {rules.uncertainty} of {uncertainty:.3g} is not below {rules.threshold:.3g}"
        if members is None:
            return f"{found}: a person should look at it."
        names = [rules.classes[index] for index in members[:3]]
        among = " or ".join(names) + (f" or {len(members) - 3} others" if len(members) > 3 else "")
        return f"{found}: a person should say what it is{f', perhaps {among}' if names else ', no class fits'}."

    # -- as predictions -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of inputs."""
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Verdicts:
        """Take some of the inputs, by a slice, a mask or a tensor of positions."""
        if isinstance(rows, int):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"There is no input {rows}: there are {len(self)}.")
            rows = slice(rows, rows + 1 or None)
        own: dict[str, Any] = {name: tensor[rows] for name, tensor in self._fields()}
        return dataclasses.replace(self, prediction=self.prediction[rows], **own)

    @classmethod
    def join(cls, parts: Sequence[Verdicts]) -> Verdicts:
        """Put verdicts of successive batches together."""
        if not parts:
            raise ValueError("There are no verdicts to join: the list is empty.")
        own: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name, _ in parts[0]._fields()
        }
        return dataclasses.replace(parts[0], prediction=Prediction.join([part.prediction for part in parts]), **own)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON has: lists by name, None where a number is not finite."""
        found: dict[str, Any] = {"kind": "Verdicts"}
        for name in self.columns:
            values = getattr(self, name)
            found[name] = [_finite(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]
        return found

    def to_records(self) -> list[dict[str, Any]]:
        """Return plain values that JSON has, a dictionary for each input."""
        found = self.to_dict()
        return [{name: found[name][row] for name in self.columns} for row in range(len(self))]

    def to_pandas(self, *, class_names: Sequence[str] | None = None, level: float = 0.95) -> DataFrame:
        """Return a table with one row for each input; needs pandas.

        Args:
            class_names: What the classes are called; None takes the guard's names, if it has any.
            level: Not used: intervals are the guard's.
        """
        del level

        columns = {name: list(values) for name, values in self.to_dict().items() if name != "kind"}
        names = self.rules.classes if class_names is None else self._class_names(class_names)
        if self.in_set is not None and names and tuple(names) != tuple(map(str, range(len(names)))):
            columns["label"] = [names[index] for index in columns["label"]]
            columns["prediction_set"] = [[names[index] for index in row] for row in columns["prediction_set"]]
        pandas = require_pandas()
        table: DataFrame = pandas.DataFrame(columns, index=pandas.RangeIndex(len(self), name="example"))
        return table

    def _of_prediction(self, name: str) -> Tensor:
        found: Tensor = getattr(self.prediction, name)
        return found

    def _fields(self) -> list[tuple[str, Tensor]]:
        pairs = ((one.name, getattr(self, one.name)) for one in dataclasses.fields(self))
        return [(name, value) for name, value in pairs if isinstance(value, Tensor)]

    def _array(self, name: str) -> np.ndarray[Any, Any]:
        if name == "verdict":
            return np.array(self.verdict)
        if name == "reason":
            return np.array(self.reason)
        if name == "prediction_set":
            shown = [[self.rules.classes[index] for index in members] for members in self.prediction_set]
            return np.array(["{" + ", ".join(members) + "}" for members in shown])
        return super()._array(name)

    def _narrow(self) -> list[str]:
        return [name for name in self.columns if name not in ("reason", "aleatoric")]

    def _first_rows(self) -> tuple[list[str], list[list[str]]]:
        if len(self) <= ROWS:
            return super()._first_rows()
        return self[:ROWS]._first_rows()

    def _summary(self) -> list[str]:
        text = f"Verdicts of {len(self):,} input{'' if len(self) == 1 else 's'}"
        counts = [f"{int((self.codes == code).sum()):,} {name}" for code, name in enumerate(VERDICTS)]
        return [f"{text}: {', '.join(counts)}"]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
