"""How well a posterior agrees with the bank it was distilled from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bayesify._core.deprecation import renamed
from bayesify.laws import Posterior
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction
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


@renamed(num_samples="num_draws")
def agreement(
    posterior: Posterior, reference: Prediction, inputs: Any, *, num_draws: int | None = None, seed: int = 0
) -> Agreement:
    """Compare a posterior's predictions with a reference's on the same inputs."""
    found = predict(posterior, inputs, num_draws=num_draws, seed=seed)
    if type(found) is not type(reference):
        raise TypeError(f"A {type(found).__name__} cannot agree with a {type(reference).__name__}.")
    error = (reference.score("epistemic") - found.score("epistemic")).abs()
    same = None
    if isinstance(found, ClassificationPrediction):
        same = float(reference.correct(found.label).double().mean())  # type: ignore[union-attr]
    else:
        error = error / reference.score("total")
    return Agreement(float(reference.divergence(found).mean()), float(error.mean()), same)
