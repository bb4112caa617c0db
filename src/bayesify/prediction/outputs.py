"""From means and variances of a network's outputs to predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bayesify.likelihoods import Likelihood
from bayesify.likelihoods.categorical import independent_variances
from bayesify.likelihoods.prediction import Prediction

__all__ = ["OutputMoments", "independent_variances", "prediction_of"]


@dataclass(frozen=True)
class OutputMoments:
    """Gaussian outputs of one component of a posterior.

    Attributes:
        mean: (B, ...), as the network returns them.
        variance: The same shape, where outputs count as independent; else None.
        predictor: Where they come from, in words.
        covariance: (B, ..., F, F) of the last dimension's outputs, where it is known; else None.
        weight: The component's share of the posterior.
    """

    mean: Tensor
    variance: Tensor | None
    predictor: str
    covariance: Tensor | None = None
    weight: float = 1.0

    def times(self, scale: float) -> OutputMoments:
        """Multiply variances and covariances by a number."""
        if scale == 1:
            return self
        variance = None if self.variance is None else self.variance * scale
        return replace(self, variance=variance, covariance=None if self.covariance is None else self.covariance * scale)


def prediction_of(
    likelihood: Likelihood, components: Sequence[OutputMoments], *, num_draws: int | None, seed: int
) -> Prediction:
    """Return the prediction of a mixture of Gaussian outputs.

    Args:
        likelihood: What the outputs mean.
        components: The components' moments.
        num_draws: As in `Likelihood.from_gaussian`, of each component, or in proportion to unequal weights.
        seed: Of the draws.
    """
    total = sum(one.weight for one in components)
    weights = [one.weight / total for one in components]
    if num_draws is None:
        made = Prediction.mixture(
            [likelihood.from_gaussian(one.mean, one.variance, covariance=one.covariance) for one in components], weights
        )
    else:
        stream = likelihood.stream()
        for one, weight in zip(components, weights, strict=True):
            number = max(1, round(num_draws * len(components) * weight)) if num_draws > 0 else num_draws
            stream.add_gaussian(one.mean, one.variance, one.covariance, num_draws=number, seed=seed)
        made = stream.result()
    return replace(made, predictor=components[0].predictor)  # type: ignore[call-arg]
