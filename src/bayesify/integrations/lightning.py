"""Lightning: a posterior as a `LightningModule`, and what comes after the training as a callback."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from bayesify._core.trees import inputs_of
from bayesify.evaluation.evaluation import evaluate
from bayesify.fitting import Learner, Objective
from bayesify.fitting.health import summed_nll
from bayesify.fitting.processes import add_up
from bayesify.laws import Posterior, require_posterior
from bayesify.methods import OODRegularizer
from bayesify.prediction import predict
from bayesify.prediction.calibration import calibrate
from bayesify.storage import save

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer

    from bayesify.likelihoods.prediction import Prediction
else:
    try:
        # The package `lightning` has classes of its own, which its trainer asks for.
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            raise ImportError
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        try:
            from pytorch_lightning import Callback, LightningModule, Trainer
        except ImportError as error:
            raise ImportError("This needs Lightning: pip install 'bayesify[lightning]'.") from error

__all__ = ["LightningPosterior", "PosteriorCallback"]


class LightningPosterior(LightningModule):
    """A posterior that a Lightning `Trainer` trains, validates and predicts with.

    The optimiser, its schedule and what is learned beside them are the method's; accumulation, clipping, precision,
    devices and checkpoints are the trainer's. Members of an ensemble train together. Each process draws noise of its
    own. `train_loss` and the terms of the loss are logged, and `val_nll` for validation data: -ln of the average
    density of some passes, in nats per example. After the last step the posterior is finished: see `Learner.finish`.

    Args:
        posterior: From `convert`; it is trained in place.
        num_data: The number of training examples; None takes the length of the training loader's data set.
        num_draws: Passes for each validation batch; None takes at most 4.
        regularizer: How OOD inputs are asked to be uncertain, for batches of `{"data": batch, "ood": inputs}`, as
            Lightning makes them of two loaders by these names; None takes the method's.

    Example:
        >>> from bayesify import SWAG, convert
        >>> module = LightningPosterior(convert(torch.nn.Linear(4, 3), SWAG()))
        >>> sorted(module.state_dict())[-2:]
        ['posterior.network.bias', 'posterior.network.weight']
    """

    def __init__(
        self,
        posterior: Posterior,
        *,
        num_data: int | None = None,
        num_draws: int | None = None,
        regularizer: OODRegularizer | None = None,
    ) -> None:
        super().__init__()
        require_posterior(posterior)
        posterior.require_method().learning(posterior)  # chains are parameters, which the strategy must find
        self.posterior = posterior
        self.num_data = num_data
        self.num_draws = num_draws or min(4, posterior.default_draws)
        self.regularizer = regularizer
        self._sums: list[Tensor] = []
        self._state: dict[str, Any] | None = None
        self._learner: Learner | None = None

    # -- training -----------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Optimizer:
        """Begin a run as long as the trainer's, and return the method's optimiser."""
        trainer = self.trainer
        total = trainer.estimated_stepping_batches  # this loads the data, if nothing has yet
        if not math.isfinite(total) or not math.isfinite(trainer.num_training_batches):
            raise ValueError("How long the run is must be known: Trainer(max_epochs=...), and a loader with a length.")
        data: Any = getattr(_first(trainer.train_dataloader), "dataset", None)
        if self.num_data is None and not hasattr(data, "__len__"):
            raise ValueError(
                "The number of training examples is unknown: LightningPosterior(posterior, num_data=...), or a loader "
                "with a data set that has a length."
            )
        size = self.num_data or len(data)
        objective = Objective(self.posterior, num_data=size, regularizer=self.regularizer)
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        self._learner = Learner(objective, epochs=total / steps, steps_per_epoch=steps)
        optimizer = self._learner.optimizer()
        if optimizer._optimizer_step_pre_hooks:
            raise ValueError(
                "Lightning computes gradients inside of the optimiser's step, so that nothing can be added to them "
                "before it. Use BayesAdapter(prior_gradient='autograd'), whose steps are the same."
            )
        return optimizer

    @property
    def learner(self) -> Learner:
        """What the method learns by beside its loss."""
        if self._learner is None:
            raise ValueError("There is no run yet: trainer.fit(module, loader) begins one.")
        return self._learner

    def on_fit_start(self) -> None:
        """Let layers train, as `fit` does: Lightning leaves them in the mode that they are in."""
        self.train()

    def on_train_start(self) -> None:
        """Go on where a checkpoint was, and give this process noise of its own."""
        if self._state is not None:
            self.learner.load_state_dict(self._state)
            self._state = None
        if self.global_rank:
            torch.manual_seed(torch.initial_seed() + self.global_rank)

    def training_step(self, batch: Any, *_: Any) -> Tensor:
        """Return the loss of a batch."""
        ood = None
        if isinstance(batch, dict) and batch.keys() == {"data", "ood"}:
            batch, ood = batch["data"], inputs_of(batch["ood"])
        objective = self.learner.objective
        loss: Tensor = objective(batch, ood)
        terms = {f"train_{name}": value for name, value in objective.terms.items()}
        self.log_dict({"train_loss": objective.terms.total, **terms}, batch_size=1)
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, and let the method act after it."""
        super().optimizer_step(*args, **kwargs)
        self.learner.after_step()

    def on_train_end(self) -> None:
        """Let the method act after the last step."""
        self.finish()

    def finish(self) -> None:
        """Let the method act after the last step, once, in whatever hook comes first."""
        if self.posterior.unfinished:
            trainer = self.trainer
            self.learner.finish(_first(trainer.train_dataloader), val_loader=_whole(trainer.val_dataloaders))

    # -- validation and prediction --------------------------------------------------------------------------------

    def validation_step(self, batch: Any, *_: Any) -> None:
        """Add up -ln of the average density of a batch's targets."""
        self._sums.append(torch.stack(summed_nll(self.posterior, batch, self.num_draws)))

    def on_validation_epoch_end(self) -> None:
        """Log the mean over all batches of all processes."""
        found = torch.stack(self._sums).sum(0)
        self._sums = []
        add_up([found])
        self.log("val_nll", found[0] / found[1], prog_bar=True, sync_dist=True)

    def predict_step(self, batch: Any, *_: Any) -> Prediction:
        """Return the prediction of a batch, whose targets are not looked at."""
        return predict(self.posterior, inputs_of(batch))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep where the run is."""
        if self._learner is not None:
            checkpoint["learner"] = self._learner.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over where the run was, when it goes on."""
        self._state = checkpoint.get("learner")


class PosteriorCallback(Callback):
    """What comes after a training: calibration, the validation NLL of the average over draws, and a saved posterior.

    Args:
        folder: Where `bayesify.save` puts the posterior; None saves nothing.
        calibrate: Whether to fit the temperature, or the variance's scale, on the validation data.

    Attributes:
        nll: The validation NLL of the average over the posterior's draws, after calibration; None without such data.
            The trainer's loggers get it as `posterior_nll`.

    Example:
        >>> PosteriorCallback("my-posterior").nll is None
        True
    """

    def __init__(self, folder: str | Path | None = None, *, calibrate: bool = True) -> None:
        self.folder = folder
        self.calibrate = calibrate
        self.nll: float | None = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrate, measure and save; every process measures all of the data, and comes to the same."""
        if not isinstance(pl_module, LightningPosterior):
            raise TypeError(f"PosteriorCallback goes with a LightningPosterior, not a {type(pl_module).__name__}.")
        pl_module.finish()
        posterior, loader = pl_module.posterior, _whole(trainer.val_dataloaders)
        if loader is not None:
            if self.calibrate:
                calibrate(posterior, loader)
            self.nll = evaluate(posterior, loader).metrics["nll"]
            for logger in trainer.loggers:
                logger.log_metrics({"posterior_nll": self.nll}, step=trainer.global_step)
        if self.folder is not None and trainer.is_global_zero:
            save(posterior, self.folder)
        trainer.strategy.barrier()


def _first(loaders: Any) -> Any:
    """Return the loader of the data, of those that a trainer was given."""
    if isinstance(loaders, dict):
        return loaders.get("data", next(iter(loaders.values()), None))
    return next(iter(loaders), None) if isinstance(loaders, list | tuple) else loaders


def _whole(loaders: Any) -> Iterable[Any] | None:
    """Return the loader of all data, where Lightning gave this process a part of them."""
    loader: Iterable[Any] | None = _first(loaders)
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, DistributedSampler):
        return loader
    return DataLoader(loader.dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
