"""What the estimators for scikit-learn share: learning, predicting, files."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from bayesify._core.inputs import in_network_type
from bayesify._core.trees import to_device
from bayesify.conversion import convert
from bayesify.data import Split, hold_out
from bayesify.fitting import fit
from bayesify.integrations._tables import Array, Batches, as_tensor, mlp, packed, unpacked
from bayesify.laws import Posterior
from bayesify.likelihoods import Likelihood, Prediction
from bayesify.methods import MAP, DeepEnsemble, Laplace, Method, as_method, method_from_dict
from bayesify.prediction import posterior_device, predict
from bayesify.prediction.calibration import calibrate
from bayesify.storage import load, read_notes, save

if TYPE_CHECKING:
    from typing_extensions import Self

try:
    from sklearn.base import BaseEstimator
    from sklearn.utils import Bunch, check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("This needs scikit-learn 1.6 or newer: pip install 'bayesify[sklearn]'.") from error

__all__ = ["BayesEstimator", "Network"]

ENOUGH = 50  # examples that calibration needs
Network = nn.Module | Callable[[Any, int], nn.Module]


class BayesEstimator(BaseEstimator):  # type: ignore[misc]
    """A network that is trained, made Bayesian and calibrated by `fit`; classes and numbers say what targets are."""

    _fitted: ClassVar[tuple[str, ...]] = ("seed_", "shape_", "outputs_", "hidden_", "scores_", "n_features_in_")

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
    ) -> None:
        self.network = network
        self.method = method
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.patience = patience
        self.val_fraction = val_fraction
        self.num_draws = num_draws
        self.random_state = random_state
        self.progress = progress

    # -- learning -----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, **refused: Any) -> Self:
        """Train the network if it is to be trained, make it Bayesian, and calibrate it on what is held out.

        Args:
            X: (N, D), an array or a table; with a network of one's own also (N, ...).
            y: Labels of any kind, or numbers (N,) or (N, outputs).
            refused: Nothing else is taken; weights of examples would weigh in the fit alone, not in the calibration.
        """
        if refused:
            raise TypeError(
                f"fit takes X and y alone, and not {sorted(refused)}. There are no weights of examples here: repeat "
                "the rows that count more, or draw rows in proportion to their weights."
            )
        X, y = self._validated(X, y)
        self.seed_ = self._seed()
        targets = self._learn_targets(y)
        self.shape_, self.hidden_ = [int(size) for size in X.shape[1:]], [int(width) for width in self.hidden]
        train, val, rest = self._parts(Split(as_tensor(X), as_tensor(targets)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed_)
            network = self._make_network()
        if self.network is None:
            cast(Any, network[0]).learn(train.inputs)  # type: ignore[index]
        self.posterior_ = self._learned(network, train, val)
        if val is not None and self._tells(val):
            calibrate(self.posterior_, self._batches(val), num_draws=_plain(self.num_draws))
        self.scores_ = [] if rest is None else self._set_scores(rest).tolist()
        return self

    def _learned(self, network: nn.Module, train: Split, val: Split | None) -> Posterior:
        """Return a posterior that was trained as far as its network and its method need it."""
        likelihood = self._likelihood()
        loader, val_loader = self._batches(train, shuffled=True), None if val is None else self._batches(val)
        options: dict[str, Any] = {"val_loader": val_loader, "seed": self.seed_, "progress": self.progress}
        plain: dict[str, Any] = {"patience": None if val is None else _plain(self.patience), "clip_norm": 10.0}
        method, given = self._method(), isinstance(self.network, nn.Module)
        if self.method is None and not given:
            options |= plain  # members are trained as a plain network would be
        epochs = 0 if isinstance(method, DeepEnsemble) and method.start == "reset" else self._epochs()
        if epochs:
            trained = convert(network, MAP(lr=float(self.lr), optimizer="adam"), likelihood=likelihood)
            fit(trained, loader, epochs=epochs, accuracy_tolerance=1.0, **options, **plain)
            network, likelihood = trained.network, trained.likelihood
        elif given and any(p.requires_grad for p in likelihood.parameters()):
            likelihood = self._with_noise(network, likelihood, train if val is None else val)
        posterior = convert(network.eval(), method, likelihood=copy.deepcopy(likelihood))
        fit(posterior, loader, **options)
        return posterior.eval()

    def _with_noise(self, network: nn.Module, likelihood: Likelihood, part: Split) -> Likelihood:
        """Return the likelihood with the noise that a trained network leaves."""
        plain = convert(network, MAP(), likelihood=likelihood).eval()
        device = posterior_device(plain)
        with torch.no_grad():
            inputs = (in_network_type(to_device(x, device), network) for x, _ in self._batches(part))
            outputs = torch.cat([plain.outputs(one) for one in inputs])
        plain.likelihood.learn(outputs, part.targets.to(outputs))
        return plain.likelihood

    def _epochs(self) -> int:
        if self.epochs is None:
            return 0 if isinstance(self.network, nn.Module) else 100
        return int(self.epochs)

    def _method(self) -> Method:
        if self.method is not None:
            return as_method(self.method)
        if isinstance(self.network, nn.Module):
            return Laplace()
        return DeepEnsemble(
            epochs=self._epochs(), lr=float(self.lr), optimizer="adam", schedule="constant", seed=self.seed_
        )

    def _make_network(self) -> nn.Module:
        """Return the network before training: the MLP, the factory's, or a copy of the one given."""
        if self.network is None:
            return mlp(self.shape_[0], self.hidden_, self.outputs_)
        if isinstance(self.network, nn.Module):
            return copy.deepcopy(self.network)
        made = self.network(self.shape_[0] if len(self.shape_) == 1 else tuple(self.shape_), self.outputs_)
        if not isinstance(made, nn.Module):
            raise TypeError(
                "network is a torch.nn.Module, or a function of the number of features and of outputs that makes one, "
                f"but that returned a {type(made).__name__}."
            )
        return made

    def _parts(self, split: Split) -> tuple[Split, Split | None, Split | None]:
        """Return what is trained on, what chooses and calibrates, and what only counts for sets."""
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction is a share of the examples below 1, but it is {self.val_fraction}.")
        if round(self.val_fraction * len(split)) < 2:  # one for each of two
            return split, None, None
        train, held = hold_out(split, self.val_fraction, seed=self.seed_)
        val, rest = hold_out(held, 0.5, seed=self.seed_)
        return train, val, rest

    def _batches(self, split: Split, *, shuffled: bool = False) -> Batches:
        return Batches(split, int(self.batch_size), shuffled=shuffled)

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _validated(self, X: Any, *y: Any) -> Any:
        """Check what is given as scikit-learn does, targets too where there should be any; return arrays."""
        options: dict[str, Any] = {"allow_nd": self.network is not None}
        options["dtype"] = np.float32 if self.network is None else "numeric"
        if not y:
            return validate_data(self, X, reset=False, **options)
        if y[0] is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        X, targets = validate_data(self, X, y[0], **options, **self._target_options())
        if len(X) < 2:
            raise ValueError(f"One example is not enough to learn from: n_samples = {len(X)}.")
        return X, targets

    def _target_options(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _learn_targets(self, y: Array) -> Array:
        """Learn what targets there are, and return them as the network does."""

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """Return what the outputs mean."""

    def _tells(self, val: Split) -> bool:
        """Return whether there are enough examples to calibrate on."""
        return len(val) >= ENOUGH

    @abstractmethod
    def _set_scores(self, split: Split) -> Array:
        """Return how strange each target is, given its prediction: the scores of conformal prediction."""

    # -- predicting ---------------------------------------------------------------------------------------------------

    def predict_distribution(self, X: Any) -> Prediction:
        """Return the whole prediction, as `bayesify.predict` does; classes are in the order of `classes_`."""
        check_is_fitted(self)
        return self._predicted(as_tensor(self._validated(X)))

    def _predicted(self, inputs: torch.Tensor) -> Prediction:
        batches = Batches(Split(inputs, inputs), max(int(self.batch_size), 1024))
        return predict(self.posterior_, batches, num_draws=_plain(self.num_draws), seed=self.seed_).cpu()

    def predict_uncertainty(self, X: Any) -> Any:
        """Return `total`, `aleatoric` and `epistemic` uncertainty of each example: arrays by name, or a table.

        In nats for classes: entropy, expected entropy and mutual information. For numbers they are variances.
        """
        prediction = self.predict_distribution(X)
        found = {name: prediction.score(name).numpy() for name in ("total", "aleatoric", "epistemic")}
        if hasattr(X, "iloc") and found["total"].ndim == 1:
            return type(X)(found, index=X.index)
        return Bunch(**found)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Save the fitted estimator as a folder: JSON and safetensors, as `bayesify.save`, with all weights in it."""
        check_is_fitted(self)
        params = {name: value for name, value in self.get_params(deep=False).items() if name != "network"}
        params["method"] = None if self.method is None else as_method(self.method).to_dict()
        params["hidden"], params["random_state"] = list(self.hidden), self.seed_
        given = {name: _plain(value) for name, value in params.items() if not isinstance(value, Likelihood)}
        fitted = {name: getattr(self, name) for name in self._fitted if hasattr(self, name)}
        fitted = {name: _plain(value) for name, value in fitted.items()}
        if hasattr(self, "feature_names_in_"):
            fitted["feature_names_in_"] = list(self.feature_names_in_)
        notes = {"estimator": type(self).__name__, "own": self.network is not None, "params": given, "fitted": fitted}
        save(self.posterior_, path, whole=True, notes=notes)

    @classmethod
    def load(cls, path: str | Path, network: Network | None = None) -> Self:
        """Load what `save` saved; nothing in the folder is executed.

        Args:
            path: The folder.
            network: The network or the function that was given to the constructor; its weights do not matter.
        """
        notes = read_notes(path)
        if notes.get("estimator") != cls.__name__:
            raise ValueError(f"{path} holds a {notes.get('estimator', 'bare posterior')}, not a {cls.__name__}.")
        if notes["own"] != (network is not None):
            raise ValueError(
                f"{path} was saved with {'a network of your own' if notes['own'] else 'the network of hidden='}: "
                f"{cls.__name__}.load(path{', network' if notes['own'] else ''})."
            )
        params = dict(notes["params"])
        if params["method"] is not None:
            params["method"] = method_from_dict(params["method"])
        params["hidden"] = tuple(params["hidden"])
        made = cls(network, **params)
        for name, value in notes["fitted"].items():
            setattr(made, name, np.array(value, dtype=object) if name == "feature_names_in_" else value)
        made._restored()
        made.posterior_ = load(path, made._make_network())
        return made

    def _restored(self) -> None:
        """Make arrays of what was read as lists."""

    def __getstate__(self) -> dict[str, Any]:
        """Let pickles hold bytes of safetensors and JSON in the place of a posterior."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "posterior_" in state:
            state["posterior_"] = packed(state["posterior_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        files = self.__dict__.get("posterior_")
        if isinstance(files, dict):
            with TemporaryDirectory() as folder:
                unpacked(files, folder)
                self.posterior_ = load(folder, self._make_network())


def _plain(value: Any) -> Any:
    """Return what JSON has of an array, or of the numbers that searches set."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
