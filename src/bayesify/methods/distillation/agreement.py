"""How well a posterior agrees with the bank it was distilled from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bayesify.laws import Posterior
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from bayesify.prediction import predict

__all__ = ["Agreement", "agreement"]


@dataclass(frozen=True)
class Agreement:
    """How far a posterior's predictions are from a reference's, per example.

    Attributes:
        divergence: Mean KL(reference || posterior) of the predictive distributions, in nats; Gaussian for regression.
        epistemic_error: Mean absolute difference of the epistemic uncertainties, in nats, or relative to the
            reference's predictive variance.
        same_label: Share of equal labels; None for regression.
    """

    divergence: float
    epistemic_error: float
    same_label: float | None

    @property
    def total(self) -> float:
        """Return what early stopping looks at: the divergence and the epistemic error."""
        return self.divergence + self.epistemic_error


def agreement(
    posterior: Posterior, reference: Prediction, inputs: Any, *, num_samples: int | None = None, seed: int = 0
) -> Agreement:
    """Compare a posterior's predictions with a reference's on the same inputs."""
    found = predict(posterior, inputs, num_samples=num_samples, seed=seed)
    if isinstance(reference, ClassificationPrediction) and isinstance(found, ClassificationPrediction):
        terms = reference.probs * (reference.log_probs - found.log_probs)
        divergence = terms.nan_to_num(0.0).sum(-1).mean()  # 0 ln 0 = 0
        error = (reference.epistemic - found.epistemic).abs().mean()
        same = (reference.label == found.label).double().mean()
        return Agreement(float(divergence), float(error), float(same))
    assert isinstance(reference, RegressionPrediction)
    assert isinstance(found, RegressionPrediction)
    ratio = reference.variance / found.variance
    shift = (reference.mean - found.mean).square() / found.variance
    divergence = 0.5 * (ratio + shift - 1 - ratio.log()).mean()
    error = ((reference.epistemic - found.epistemic).abs() / reference.variance).mean()
    return Agreement(float(divergence), float(error), None)
