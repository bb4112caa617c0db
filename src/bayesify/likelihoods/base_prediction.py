"""What every prediction can do, and how several become a mixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bayesify._core.deprecation import warn_renamed
from bayesify.likelihoods.display import Displayed

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = ["Prediction", "average", "nothing", "spread", "stacked"]


@dataclass(frozen=True, repr=False)
class Prediction(Displayed):
    """What every prediction can do: be counted, indexed, joined, moved, shown, and give scores.

    Where the outputs are NaN, every score is.

    Attributes:
        unit: What uncertainties are shown in, see `deviation`.
        answers: The names of what a program that was exported returns.
        details: Fields that most who predict do not look at, and that can wait until somebody does.
    """

    unit: ClassVar[str] = ""
    answers: ClassVar[tuple[str, ...]] = ()
    details: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def waiting(cls, make: Callable[[], dict[str, Tensor]], **known: Any) -> Self:
        """Return a prediction whose `details` are made when one of them is first asked for.

        Args:
            make: Makes them, by name.
            known: The other fields; those that are left out have their default.
        """
        made = object.__new__(cls)
        made.__dict__.update(known, _make=make)
        return made

    def complete(self) -> Self:
        """Make the details that wait, if any do, and let go of what they are made of; return the prediction."""
        make = self.__dict__.get("_make")
        if make is not None:  # two threads that ask at once both make them
            known = {name: value for name, value in self.__dict__.items() if name != "_make"}
            self.__dict__.update(type(self)(**{**known, **make()}).__dict__)
            self.__dict__.pop("_make", None)
        return self

    if not TYPE_CHECKING:  # which would find every name

        def __getattr__(self, name: str) -> Any:
            """Find a detail."""
            if name in self.details:
                self.complete()
            if name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle numbers."""
        return self.complete().__dict__

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.first_field())

    def __getitem__(self, rows: Any) -> Prediction:
        """Take some of the examples, by a slice, a mask or a tensor of positions."""
        if isinstance(rows, int):
            if not -len(self) <= rows < len(self):  # also what ends a loop over the examples
                raise IndexError(f"There is no example {rows}: there are {len(self)}.")
            rows = slice(rows, rows + 1 or None)
        return self._map(lambda name, t: t[:, rows] if name == "samples" else t[rows])

    def cpu(self) -> Prediction:
        """Return the prediction in main memory."""
        return self._map(lambda _, t: t.cpu())

    def to(self, device: torch.device | str) -> Prediction:
        """Return the prediction on a device."""
        return self._map(lambda _, t: t.to(device))

    @classmethod
    def join(cls, parts: Sequence[Prediction]) -> Prediction:
        """Put predictions of successive batches together."""
        if not parts:
            raise ValueError("There is no prediction to join: the list is empty.")
        first = parts[0]
        if len(parts) == 1:
            return first
        if len({(type(part), getattr(part, "exponent", 1.0)) for part in parts}) > 1:
            raise ValueError("Predictions of another kind, or whose draws were pooled differently, cannot be joined.")
        joined = {
            name: torch.cat([getattr(part, name) for part in parts], dim=1 if name == "samples" else 0)
            for name, _ in first._fields()
        }
        return dataclasses.replace(first, **joined)

    def score(self, name: str | None = None) -> Tensor:
        """Return a score per example, higher = more suspicious: one of `scores`; None takes the first, "total".

        Features have no total uncertainty, and "epistemic" is the first of theirs.
        """
        name = self.scores[0] if name is None else name
        if name == "max_probability" and "msp" in self.scores:
            warn_renamed('score("max_probability")', 'score("msp")')
            name = "msp"
        if name not in self.scores:
            raise ValueError(f"There is no score {name!r} here; there are {list(self.scores)}.")
        return torch.as_tensor(getattr(self, name))

    @property
    def scores(self) -> tuple[str, ...]:
        """Return the names of the scores that this prediction has; each kind of prediction says its own."""
        raise NotImplementedError

    # -- against targets --------------------------------------------------------------------------------------------

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return ln p(target) of every example and position under this prediction, (B, ...), in float64.

        Positions that do not count have zeros; see `counted`.
        """
        del targets
        raise ValueError(f"There is no likelihood of a {type(self).__name__}.")

    def correct(self, targets: Tensor) -> Tensor | None:
        """Return where the answer is right, (B, ...); None for predictions that are not right or wrong."""
        del targets
        return None

    def counted(self, targets: Tensor) -> Tensor:
        """Return which positions count, (B, ...)."""
        del targets
        return torch.ones_like(self.score("epistemic"), dtype=torch.bool)

    # -- each kind its own ------------------------------------------------------------------------------------------

    @property
    def classes(self) -> int | None:
        """Return the number of classes; None for predictions of anything else."""
        return None

    @property
    def output_variance(self) -> Tensor:
        """Return how much the network's outputs vary, one number for each example and position, (B, ...)."""
        return self.score("epistemic")

    def deviation(self, name: str) -> Tensor:
        """Return a score in the unit that it is shown in, which is `unit`."""
        return self.score(name)

    @staticmethod
    def mixture(parts: Sequence[Prediction], weights: Sequence[float], *, views: bool = False) -> Prediction:
        """Return the prediction of a mixture, sum_k w_k p_k, of predictions of the same inputs.

        Args:
            parts: Predictions of one kind.
            weights: Their shares, which add up to one.
            views: Whether the parts are views of the inputs, and their disagreement is `view_epistemic`.

        Example:
            >>> from bayesify import RegressionPrediction
            >>> one, zero = torch.ones(1), torch.zeros(1)
            >>> parts = [RegressionPrediction(zero, one, zero), RegressionPrediction(4 * one, one, zero)]
            >>> mixed = Prediction.mixture(parts, [0.5, 0.5])
            >>> mixed.mean, mixed.epistemic
            (tensor([2.]), tensor([4.]))
        """
        if len({type(part) for part in parts}) > 1:
            raise TypeError(f"There is no mixture of {[type(part).__name__ for part in parts]}.")
        if len(parts) == 1:
            return parts[0]
        mixed = parts[0]._mixed(parts, weights)
        return dataclasses.replace(mixed, view_epistemic=mixed._between(parts, weights)) if views else mixed  # type: ignore[call-arg]

    def _between(self, parts: Sequence[Prediction], weights: Sequence[float]) -> Tensor:
        """Return what the parts of this mixture disagree about: part of `epistemic`."""
        raise TypeError(f"There is no mixture of {[type(part).__name__ for part in parts]}.")

    def _mixed(self, parts: Sequence[Prediction], weights: Sequence[float]) -> Prediction:
        raise TypeError(f"There is no mixture of {[type(part).__name__ for part in parts]}.")

    def divergence(self, other: Any) -> Tensor:
        """Return KL(self || other) of two predictive distributions for each example and position, in nats."""
        raise ValueError(f"There is no divergence of a {type(self).__name__} from a {type(other).__name__}.")

    def first_field(self) -> Tensor:
        """Return the answers: log-probabilities, means, rates or features, (B, ...)."""
        found: Tensor = getattr(self, dataclasses.fields(self)[0].name)
        return found

    def _fields(self) -> list[tuple[str, Tensor]]:
        pairs = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(name, value) for name, value in pairs if isinstance(value, Tensor)]

    def _map(self, function: Any) -> Prediction:
        return dataclasses.replace(self, **{name: function(name, t) for name, t in self._fields()})


def nothing() -> None:
    """Return None: the default of a field that may wait, which a default of the class would answer for."""


def stacked(parts: Sequence[Prediction], name: str) -> Tensor:
    """Return a field of several predictions, (K, ...)."""
    return torch.stack([getattr(part, name) for part in parts])


def average(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return sum_k w_k v_k of values (K, ...)."""
    found: Tensor = torch.tensordot(values.new_tensor(weights), values, 1)
    return found


def spread(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return sum_k w_k (v_k - average)^2 of values (K, ...)."""
    return average((values - average(values, weights)).square(), weights)
