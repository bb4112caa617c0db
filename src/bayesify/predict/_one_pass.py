"""Predictors that need no draws."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bayesify.posteriors import Posterior
from bayesify.predict._laws import Law, laws
from bayesify.predict._outputs import OutputMoments, prediction_of
from bayesify.predict.linearised import LinearisedPass, Plan, make_plan
from bayesify.predict.linearised._outputs import all_variances
from bayesify.prediction import Prediction

__all__ = ["OnePass"]


class OnePass:
    """A predictor for one posterior; what it learns about the network serves all batches.

    Args:
        posterior: The posterior.
        how: "linearised".
        inputs: A batch to learn from.
        variance_scale: Multiplies the outputs' variances.
    """

    def __init__(self, posterior: Posterior, how: str, inputs: Any, variance_scale: float = 1.0) -> None:
        self.posterior = posterior
        self.how = how
        self.scale = variance_scale
        self.laws = laws(posterior)
        self.plan: Plan = make_plan(posterior, self.laws[0], inputs)

    def moments(self, inputs: Any) -> list[OutputMoments]:
        """Return the outputs' moments for each component of the posterior."""
        return [self._scaled(self._component(law, inputs)) for law in self.laws]

    def _component(self, law: Law, inputs: Any) -> OutputMoments:
        found = LinearisedPass(self.posterior, law, self.plan, inputs)
        variance: Tensor = all_variances(found, self.posterior.likelihood)
        return OutputMoments(found.outputs, variance, "linearised, one backward pass for each output")

    def _scaled(self, moments: OutputMoments) -> OutputMoments:
        if self.scale == 1:
            return moments
        return OutputMoments(moments.mean, moments.variance * self.scale, moments.predictor)

    def predict(self, inputs: Any, *, num_samples: int | None, seed: int) -> Prediction:
        """Return the prediction for a batch."""
        return prediction_of(self.posterior.likelihood, self.moments(inputs), num_samples=num_samples, seed=seed)
