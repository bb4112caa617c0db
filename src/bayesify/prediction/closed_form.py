"""The predictor of posteriors whose outputs are Gaussian themselves: one random linear layer that comes last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bayesify.laws import LastLayerLaplacePosterior
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction.outputs import OutputMoments, prediction_of
from bayesify.prediction.scales import Scale, check_scales

__all__ = ["ClosedForm"]


class ClosedForm:
    """What `OnePass` is for others: the network's mean, and the exact covariance of its outputs.

    Args:
        posterior: The posterior.
    """

    backward = differentiated = looped = False
    words = "closed form: the covariance of the last layer's outputs in one forward pass"

    def __init__(self, posterior: LastLayerLaplacePosterior) -> None:
        self.posterior = posterior
        self.layers = [posterior.layer]
        self.factor = 1.0

    def scaled(self, scales: Mapping[str, float]) -> ClosedForm:
        """Return the predictor of the posterior whose layers' variances are multiplied by numbers."""
        check_scales(scales, self.layers)
        made = ClosedForm(self.posterior)
        made.factor = scales.get(self.posterior.layer, 1.0)
        return made

    def moments(self, inputs: Any, *, scale: Scale = 1.0, input_variance: Tensor | None = None) -> list[OutputMoments]:
        """Return the outputs' moments."""
        if input_variance is not None:
            raise ValueError("Outputs in closed form take inputs as they are, without an input_variance.")
        if isinstance(scale, Mapping):
            return self.scaled(scale).moments(inputs)
        mean, variance, covariance = self.posterior.output_gaussian(inputs)
        return [OutputMoments(mean, variance, self.words, covariance).times(scale * self.factor)]

    def predict(
        self,
        inputs: Any,
        *,
        num_samples: int | None,
        seed: int,
        scale: Scale = 1.0,
        input_variance: Tensor | None = None,
    ) -> Prediction:
        """Return the prediction for a batch."""
        moments = self.moments(inputs, scale=scale, input_variance=input_variance)
        return prediction_of(self.posterior.likelihood, moments, num_samples=num_samples, seed=seed)
