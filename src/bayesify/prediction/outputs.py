"""From means and variances of a network's outputs to predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesify.likelihoods import Likelihood
from bayesify.likelihoods.categorical import independent_variances
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction.views import View, dense_dims, taken_back

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
        part: Which part of a mixture the component is of.
        view: Which view of the inputs it has seen.
    """

    mean: Tensor
    variance: Tensor | None
    predictor: str
    covariance: Tensor | None = None
    weight: float = 1.0
    part: int = 0
    view: int = 0

    def times(self, scale: float) -> OutputMoments:
        """Multiply variances and covariances by a number."""
        if scale == 1:
            return self
        variance = None if self.variance is None else self.variance * scale
        return replace(self, variance=variance, covariance=None if self.covariance is None else self.covariance * scale)

    def undone(self, view: View, likelihood: Likelihood, inputs: Any) -> OutputMoments:
        """Return the moments as they belong to the inputs as they are, of which the network saw a view."""
        dims = dense_dims(likelihood, self.mean, inputs)
        if dims is None and view.inverse is None:
            return self
        if self.covariance is not None:
            raise ValueError(
                "Covariances of maps of outputs cannot be taken back from a view. Use how='sampling' with views here."
            )
        assert self.variance is not None
        if view.inverse is not None:
            _require_places_alone(view.inverse, self.mean)
        mean, variance = (taken_back(view, one, likelihood, inputs, dims=dims) for one in (self.mean, self.variance))
        return replace(self, mean=mean, variance=variance)


def _require_places_alone(inverse: Callable[[Tensor], Tensor], mean: Tensor) -> None:
    """Refuse an inverse that changes numbers, with which variances change otherwise; seen in main memory."""
    if torch.compiler.is_compiling():  # values are not known, and the posterior predicted before
        return
    shape = (1, *mean.shape[1:])
    same = (torch.full(shape, float(value), dtype=mean.dtype) for value in range(2))
    if not all(bool((inverse(one) == one.flatten()[0]).all()) for one in same):
        raise ValueError(
            "The view's inverse changes the outputs' numbers, and not their places alone, so that their variances "
            "cannot be taken back. Use how='sampling' with it."
        )


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
    if num_draws is None:
        made = _integrated(likelihood, components)
    else:
        stream = likelihood.stream()
        for one in components:
            share = one.weight / total
            number = max(1, round(num_draws * len(components) * share)) if num_draws > 0 else num_draws
            stream.add_gaussian(
                one.mean, one.variance, one.covariance, num_draws=number, seed=seed, part=one.part, view=one.view
            )
        made = stream.result()
    return replace(made, predictor=components[0].predictor)  # type: ignore[call-arg]


def _integrated(likelihood: Likelihood, components: Sequence[OutputMoments]) -> Prediction:
    """Return the mixture of the components of each view, and of the views."""
    found, shares = [], []
    for view in sorted({one.view for one in components}):
        own = [one for one in components if one.view == view]
        share = sum(one.weight for one in own)
        each = [
            likelihood.from_gaussian(one.mean, one.variance, covariance=one.covariance, part=one.part) for one in own
        ]
        found.append(likelihood.mixture(each, [one.weight / share for one in own]))
        shares.append(share)
    return likelihood.mixture(found, [share / sum(shares) for share in shares], views=True)
