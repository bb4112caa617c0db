"""scikit-learn: a posterior as a classifier or a regressor, for arrays and tables."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from bayesify.data import Split
from bayesify.decide import conformal_quantile
from bayesify.integrations._estimator import BayesEstimator, Network
from bayesify.integrations._tables import Array, Units
from bayesify.likelihoods import ClassificationPrediction, Likelihood, RegressionPrediction, as_likelihood
from bayesify.methods import Method

try:
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise ImportError("This needs scikit-learn 1.6 or newer: pip install 'bayesify[sklearn]'.") from error

__all__ = ["BayesClassifier", "BayesRegressor"]


class BayesClassifier(ClassifierMixin, BayesEstimator):  # type: ignore[misc]
    """A Bayesian network as a classifier of scikit-learn.

    Args:
        network: A trained `torch.nn.Module`, which is left untouched; a function of the number of features and of
            outputs that makes one, which is then trained here; or None, which makes an MLP that standardises columns.
        method: What becomes random, and how it is learned: a method, or its name. None takes `Laplace()` for a network
            that was given, and `DeepEnsemble()` for one that is made here, with the epochs, rate and patience below.
        hidden: Widths of the MLP's hidden layers.
        epochs: Of plain training, before the method's own; None takes 100 for a network that is made here, and none
            for one that was given. The method's own are in it: `SWAG(epochs=10)`.
        batch_size: Of the training.
        lr: Learning rate of the plain training, by Adam.
        patience: Stop it after so many epochs without a better NLL of the validation part; None never does.
        val_fraction: The share that is held out: a half of it stops the training, chooses what the method leaves
            open, and calibrates (numbers where it has 50 examples); the other half is only counted for `predict_set`.
            With 0 sets hold everything.
        num_draws: Draws for a prediction; None takes the method's number.
        random_state: Seed of all randomness: parts, weights, noise and draws.
        progress: Whether to show progress bars.

    Attributes:
        posterior_: What was learned: a posterior for everything else that bayesify does.
        classes_: The labels, sorted.

    Example:
        >>> from bayesify import MCDropout
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> dropout = MCDropout(p=0.1, insert_before="linear")
        >>> model = BayesClassifier(method=dropout, batch_size=150, epochs=20, lr=0.1).fit(X, y)
        >>> model.predict_proba(X).shape, model.score(X, y) > 0.9
        ((150, 3), True)
        >>> sorted(model.predict_uncertainty(X))
        ['aleatoric', 'epistemic', 'total']
    """

    _fitted = (*BayesEstimator._fitted, "classes_")

    def _learn_targets(self, y: Array) -> Array:
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"There is one class only, {self.classes_[0]!r}: there must be at least two to tell apart."
            )
        self.outputs_ = len(self.classes_)
        found: Array = labels.astype(np.int64)
        return found

    def _likelihood(self) -> Likelihood:
        return as_likelihood("classification")

    def _tells(self, val: Split) -> bool:
        del val  # a temperature is raised by a few wrong answers, and lowered by enough of them only
        return True

    def _set_scores(self, split: Split) -> Array:
        probs = cast(ClassificationPrediction, self._predicted(split.inputs)).probs
        found: Array = (1 - probs.double().gather(1, split.targets[:, None])[:, 0]).numpy()
        return found

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, (N, C), in the order of `classes_`."""
        found = cast(ClassificationPrediction, self.predict_distribution(X)).probs.double()
        probs: Array = (found / found.sum(1, keepdim=True)).numpy()
        return probs

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of the probabilities, (N, C)."""
        found: Array = cast(ClassificationPrediction, self.predict_distribution(X)).log_probs.double().numpy()
        return found

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each example."""
        check_is_fitted(self)
        found: Array = self.classes_[self.predict_proba(X).argmax(1)]
        return found

    def predict_set(self, X: Any, coverage: float = 0.9) -> Any:
        """Return sets of classes that hold the true one with a probability of at least `coverage`, by split conformal.

        A class is in the set where 1 - p is at most the conformal quantile of 1 - p of the true class in the part that
        was held out for this; the most probable one always is. The promise holds on average over new examples of the
        same kind, whatever the network is worth.

        Returns:
            Which classes are in it, (N, C), true or false; a table with a column for each class if X is one.
        """
        check_is_fitted(self)
        threshold = conformal_quantile(self.scores_ or [math.inf], coverage)
        probs = self.predict_proba(X)
        inside = (1 - probs <= threshold) | (probs == probs.max(1, keepdims=True))
        return type(X)(inside, columns=self.classes_, index=X.index) if hasattr(X, "iloc") else inside

    def _restored(self) -> None:
        self.classes_ = np.array(self.classes_)


class BayesRegressor(RegressorMixin, BayesEstimator):  # type: ignore[misc]
    """A Bayesian network as a regressor of scikit-learn, of one number or several.

    Networks that are made here learn standardised targets; predictions are in the targets' own units.

    Args:
        likelihood: "regression", "heteroscedastic", "student-t", "counts", "negative-binomial", or an object.

    The other arguments are those of `BayesClassifier`.

    Attributes:
        posterior_: What was learned; its outputs are of standardised targets where the network was made here.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 200)[:, None]
        >>> model = BayesRegressor(method="map", batch_size=200, epochs=20).fit(X, np.sin(3 * X[:, 0]))
        >>> mean, std = model.predict(X, return_std=True)
        >>> mean.shape, bool((std > 0).all()), model.predict_set(X, coverage=0.9).shape
        ((200,), True, (200, 2))
    """

    _fitted = (*BayesEstimator._fitted, "target_mean_", "target_scale_")

    def __init__(
        self,
        network: Network | None = None,
        method: Method | type[Method] | str | None = None,
        *,
        hidden: Sequence[int] = (64, 64),
        epochs: int | None = None,
        batch_size: int = 64,
        lr: float = 0.01,
        patience: int | None = 10,
        val_fraction: float = 0.2,
        num_draws: int | None = None,
        random_state: Any = 0,
        progress: bool = False,
        likelihood: str | Likelihood = "regression",
    ) -> None:
        super().__init__(
            network,
            method,
            hidden=hidden,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            patience=patience,
            val_fraction=val_fraction,
            num_draws=num_draws,
            random_state=random_state,
            progress=progress,
        )
        self.likelihood = likelihood

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _target_options(self) -> dict[str, Any]:
        return {"multi_output": True, "y_numeric": True}

    def _likelihood(self) -> Likelihood:
        found = copy.deepcopy(as_likelihood(self.likelihood))
        if found.to_dict()["kind"] in ("categorical", "bernoulli", "ordinal", "custom"):
            raise ValueError(f"likelihood={self.likelihood!r} is not one of numbers: take 'regression' or 'counts'.")
        return found

    def _learn_targets(self, y: Array) -> Array:
        likelihood = self._likelihood()
        y = y.astype(np.float64)
        units = Units.of(y, likelihood, wanted=not isinstance(self.network, nn.Module))
        self.target_mean_, self.target_scale_ = units.mean, units.scale
        self.outputs_ = (1 if y.ndim == 1 else y.shape[1]) * getattr(likelihood, "side_by_side", 1)
        return units.inside(y)

    @property
    def _units(self) -> Units:
        return Units(self.target_mean_, self.target_scale_)

    def _predicted(self, inputs: torch.Tensor) -> RegressionPrediction:
        return self._units.outside(cast(RegressionPrediction, super()._predicted(inputs)))

    def _set_scores(self, split: Split) -> Array:
        found = self._predicted(split.inputs)
        targets = split.targets.double().numpy() * self.target_scale_ + self.target_mean_
        scores: Array = np.abs(targets - found.mean.numpy()) / found.std.numpy()
        return scores if scores.ndim == 1 else scores.max(1)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each example, (N,) or (N, outputs), and with `return_std` its standard deviation."""
        found = cast(RegressionPrediction, self.predict_distribution(X))
        return (found.mean.numpy(), found.std.numpy()) if return_std else found.mean.numpy()

    def predict_set(self, X: Any, coverage: float = 0.9) -> Any:
        """Return intervals that hold the true number with a probability of at least `coverage`, by split conformal.

        mean -+ q std, q the conformal quantile of |y - mean| / std in the part that was held out for this; of several
        outputs the largest counts, and the box holds all of them together. The promise holds on average over new
        examples of the same kind.

        Returns:
            Lower and upper ends, (N, 2) or (N, outputs, 2); a table with columns `low` and `high` if X is one and there
            is one output.
        """
        found = cast(RegressionPrediction, self.predict_distribution(X))
        mean, std = found.mean.numpy(), found.std.numpy()
        half = conformal_quantile(self.scores_ or [math.inf], coverage) * std
        ends = np.stack([mean - half, mean + half], -1)
        if hasattr(X, "iloc") and ends.ndim == 2:
            return type(X)({"low": ends[:, 0], "high": ends[:, 1]}, index=X.index)
        return ends

    def _restored(self) -> None:
        self.target_mean_, self.target_scale_ = np.array(self.target_mean_), np.array(self.target_scale_)
