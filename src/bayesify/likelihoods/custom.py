"""Any log-probability a user writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesify.likelihoods.gaussian import Gaussian
from bayesify.likelihoods.gaussian_draws import gaussian_draws
from bayesify.likelihoods.likelihood import Likelihood, Stream
from bayesify.likelihoods.prediction import Prediction, RegressionPrediction

__all__ = ["Custom"]

DRAWS = 128  # of Gaussian outputs, for what has no formula


class Custom(Likelihood):
    """A likelihood given by a function `log_prob(output, target) -> (B, ...)`.

    Predictions are the mean and variance of the outputs over draws, without noise; pass `predictive`, a function of
    outputs (S, B, ...), for anything else.

    Example:
        >>> laplace = Custom(lambda output, target: -(target - output[:, 0]).abs() - torch.tensor(2.0).log())
        >>> laplace.log_prob(torch.zeros(1, 1), torch.zeros(1))
        tensor([-0.6931])
    """

    kind = "custom"

    def __init__(
        self,
        log_prob: Callable[[Tensor, Tensor], Tensor],
        *,
        predictive: Callable[[Tensor], Prediction] | None = None,
    ) -> None:
        super().__init__()
        self._log_prob = log_prob
        self._predictive = predictive

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the user's ln p(target | output)."""
        return self._log_prob(output, target)

    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector of draws."""
        return _CustomStream(self._predictive, keep_samples)

    def integrate(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, part: int = 0
    ) -> Prediction:
        """Return the mean and variance of the outputs, without noise; or what `predictive` makes of their draws."""
        del part
        if self._predictive is not None:
            return self._predictive(self._draws(mean, variance, covariance))
        found = Gaussian(1.0).integrate(mean, variance, covariance)
        return RegressionPrediction(found.mean, torch.zeros_like(found.mean), found.epistemic)

    def gaussian_log_prob(
        self, target: Tensor, mean: Tensor, variance: Tensor | None = None, *, covariance: Tensor | None = None
    ) -> Tensor:
        """Return ln of the average of p(target | output) over draws of the outputs: predictions are without noise."""
        return self.mixture_log_prob(self._draws(mean, variance, covariance), target)

    def _draws(self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None) -> Tensor:
        return torch.cat(list(gaussian_draws(mean, variance, covariance, num_draws=DRAWS, seed=0)))

    def config(self) -> dict[str, Any]:
        """Refuse: a function is not data."""
        raise ValueError(
            "A custom likelihood is a function and cannot be saved. Set another before saving: "
            "posterior.set_likelihood('classification'), and set the function again after loading."
        )


class _CustomStream(Stream):
    def __init__(self, predictive: Callable[[Tensor], Prediction] | None, keep_samples: bool) -> None:
        self.predictive = predictive
        self.keep_samples = keep_samples
        self.outputs: list[Tensor] = []
        self.moments = Gaussian(1.0).stream(keep_samples=keep_samples)

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        if self.predictive is not None:  # a function of all draws needs all draws
            self.outputs.append(outputs)
        else:
            self.moments.add(outputs, part=part, view=view)

    def result(self) -> Prediction:
        if self.predictive is not None:
            return self.predictive(torch.cat(self.outputs))
        found = self.moments.result()
        assert isinstance(found, RegressionPrediction)
        return replace(found, aleatoric=torch.zeros_like(found.mean))
