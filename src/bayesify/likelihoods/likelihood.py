"""What a likelihood is: the meaning of a network's outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from bayesify._core.maths import at_least_float32
from bayesify._core.trees import output_tensor
from bayesify._core.values import misfits
from bayesify.likelihoods.gaussian_draws import gaussian_draws
from bayesify.likelihoods.prediction import Prediction

__all__ = ["Likelihood", "Stream", "as_likelihood", "likelihood_from_dict", "variance_of"]

_KINDS: dict[str, type[Likelihood]] = {}


class Stream(ABC):
    """Collects draws one group at a time; memory does not grow with their number."""

    @abstractmethod
    def add(self, outputs: Tensor) -> None:
        """Add outputs of some draws, (S, B, ...)."""

    @abstractmethod
    def result(self) -> Prediction:
        """Return the prediction that all draws together make."""


class Likelihood(nn.Module, ABC):
    """The distribution of a target given the network's output.

    A module, since noise may be learned and calibration is kept here: `temperature`-like buffers act on
    predictions only, never on the loss.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the kind for configuration files."""
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            _KINDS[cls.kind] = cls

    @abstractmethod
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ln p(target | output) per example and position, (B, ...); ignored positions are NaN-free zeros."""

    @abstractmethod
    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector that turns outputs of draws into a prediction."""

    @abstractmethod
    def integrate(self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None) -> Prediction:
        """Return the prediction of Gaussian outputs without draws; see `from_gaussian`, which calls it."""

    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor | None = None,
        *,
        covariance: Tensor | None = None,
        num_samples: int | None = None,
        seed: int = 0,
    ) -> Prediction:
        """Return the prediction of Gaussian outputs: what all predictors without draws of a network end in.

        Args:
            mean: (B, ...), as the network returns outputs.
            variance: Of independent outputs, the same shape; or
            covariance: (B, ..., F, F), of the last dimension's F outputs.
            num_samples: None integrates, the same for every call; else how many draws of the outputs are averaged.
            seed: Of these.

        Example:
            >>> import torch
            >>> from bayesify import Gaussian
            >>> found = Gaussian(1.0).from_gaussian(torch.zeros(2, 1), torch.ones(2, 1))
            >>> found.epistemic, found.aleatoric
            (tensor([1., 1.]), tensor([1., 1.]))
        """
        if (variance is None) == (covariance is None):
            raise ValueError("Give the outputs' variance or their covariance, one of the two.")
        if num_samples is None:
            return self.integrate(mean, variance, covariance)
        stream = self.stream()
        for draws in gaussian_draws(mean, variance, covariance, num_samples=num_samples, seed=seed):
            stream.add(draws)
        return stream.result()

    def from_samples(self, outputs: Tensor, *, keep_samples: bool = False) -> Prediction:
        """Return the prediction that outputs of draws, (S, B, ...), make together."""
        stream = self.stream(keep_samples=keep_samples)
        stream.add(outputs)
        return stream.result()

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return ln p of every class for outputs of draws (S, B, ...), classes last; differentiable."""
        del outputs
        raise ValueError(f"{type(self).__name__} has no classes, so there is no mutual information of draws.")

    def weight(self, target: Tensor) -> Tensor | None:
        """Return a mask of the positions that count, (B, ...), or None when all do."""
        del target
        return None

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean negative log-likelihood, in nats per position that counts."""
        self.check(output, target)
        log_prob = self.log_prob(output, target)
        weight = self.weight(target)
        if weight is None:
            return -log_prob.mean()
        return -(log_prob * weight).sum() / weight.sum().clamp_min(1)

    def calibrate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """Fit the calibration to batches of draws' outputs (S, B, ...) and targets; return the NLL before and after."""
        raise ValueError(f"{type(self).__name__} has nothing to calibrate.")

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise, with a sentence, where output and target do not fit."""

    def read(self, output: Any, key: str | int | None) -> Tensor:
        """Find this likelihood's tensor in a structured output."""
        return output_tensor(output, key)

    def labels(self, target: Tensor) -> Tensor | None:
        """Return the classes that targets count as, -100 where none does; None for likelihoods without classes."""
        del target
        return None

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for configuration files."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values."""
        return {"kind": self.kind, **self.config()}


def variance_of(variance: Tensor | None, covariance: Tensor | None) -> Tensor:
    """Return the variances, in at least float32, of outputs of which one of the two is known.

    >>> import torch
    >>> variance_of(None, torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    tensor([2., 3.])
    """
    if variance is None:
        assert covariance is not None
        variance = covariance.diagonal(dim1=-2, dim2=-1)
    return at_least_float32(variance)


_NAMES = {"classification": "categorical", "binary": "bernoulli", "regression": "gaussian"}


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return a likelihood for its name.

    Names are classification, binary and regression, or a kind's own name.

    >>> as_likelihood("regression")
    Gaussian(noise_std=learned)
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    kind = _NAMES.get(likelihood, likelihood)
    if kind not in _KINDS or kind == "custom":
        raise ValueError(
            f"There is no likelihood {likelihood!r}. Give one of {sorted(_NAMES)}, or a Likelihood object."
        )
    return _KINDS[kind]()


def likelihood_from_dict(values: dict[str, Any]) -> Likelihood:
    """Rebuild a likelihood from its configuration."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"The file names a likelihood {kind!r}, which is unknown here; known: {sorted(_KINDS)}.")
    if kind == "custom":
        raise ValueError("The file's likelihood 'custom' has settings that do not fit it: functions are in no file.")
    settings = {key: value for key, value in values.items() if key != "kind"}
    if wrong := misfits(settings, _KINDS[kind].__init__):
        raise ValueError(f"The file's likelihood {kind!r} has settings that cannot be: {', '.join(wrong)}.")
    try:
        return _KINDS[kind](**settings)
    except TypeError as error:
        raise ValueError(f"The file's likelihood {kind!r} has settings that do not fit it: {error}.") from error
