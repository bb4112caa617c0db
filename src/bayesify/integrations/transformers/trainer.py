"""A posterior in transformers' `Trainer`."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers.utils.generic import find_labels

from bayesify._core.trees import inputs_of
from bayesify.fitting import Learner, Objective
from bayesify.integrations.transformers.loading import columns_of, model_of
from bayesify.laws import Posterior, require_posterior
from bayesify.likelihoods import Bernoulli
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction
from bayesify.prediction import predict
from bayesify.prediction.calibration import calibrate as calibrate_posterior
from bayesify.storage import save

__all__ = ["Trainer"]

_METHODS = ("learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps")  # of the arguments, the method's own
_REACHES_IN = ("label_smoothing_factor", "activation_checkpointing", "gradient_checkpointing", "neftune_noise_alpha")


class Trainer(transformers.Trainer):
    """transformers' `Trainer` for a posterior: `model = bayesify.convert(model, method)`, and this class.

    The loss is the method's, in mean nats per example, whose likelihood is the network's own loss; the optimiser and
    its schedule are the method's too. The loop, accumulation, clipping, precision, devices, logging and checkpoints
    stay the trainer's, and a run that was killed goes on with `train(resume_from_checkpoint=True)`. After the last step
    the posterior is finished, see `Learner.finish`, and, if asked for, calibrated.

    `eval_loss` is -ln of the average density of draws; `compute_metrics` gets the logarithm of the average
    probabilities where it had logits, and means of numbers. While a method collects its samples, both are those of the
    network that is being trained. `save_model` writes what `bayesify.load` reads.

    Args:
        model: The posterior, from `convert`; it is trained in place.
        args: Of the training; how long it is, is read from them.
        calibrate: Whether to fit temperature and pooling on `eval_dataset` at the end.
        num_draws: In evaluation; None takes at most 4 while it trains, and the posterior's own number afterwards.
        num_data: The number of training examples; None takes the length of `train_dataset`.
        optimizer: A function of parameter groups that returns an optimiser, as in `fit`; None takes the method's.
        options: Of transformers' trainer: `train_dataset`, `eval_dataset`, `processing_class`, `data_collator`,
            `compute_metrics`, `callbacks` and so on.

    Attributes:
        posterior: The posterior.
        learner: What the method learns by beside its loss; None before the training.

    Example:
        >>> from tempfile import mkdtemp
        >>> from bayesify import SWAG, convert
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        >>> network = BertForSequenceClassification(BertConfig(vocab_size=9, **sizes))
        >>> rows = [{"input_ids": [1, 2], "labels": 0}, {"input_ids": [3, 4], "labels": 1}]
        >>> options = dict(report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no", use_cpu=True)
        >>> args = TrainingArguments(mkdtemp(), num_train_epochs=2, **options)
        >>> trainer = Trainer(convert(network, SWAG(rank=2)), args, train_dataset=rows, eval_dataset=rows)
        >>> trainer.train().global_step, trainer.posterior.learned  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        (2, True)
    """

    def __init__(
        self,
        model: Posterior,
        args: transformers.TrainingArguments | None = None,
        *,
        calibrate: bool = False,
        num_draws: int | None = None,
        num_data: int | None = None,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
        **options: Any,
    ) -> None:
        require_posterior(model)
        data = options.get("train_dataset")
        if data is not None and num_data is None and not hasattr(data, "__len__"):
            raise ValueError("The number of training examples is unknown: Trainer(..., num_data=...).")
        _refuse(args, options)
        if calibrate and not _is_one(options.get("eval_dataset")):
            raise ValueError("calibrate=True needs an eval_dataset, one, which the temperature is fitted on.")
        if args is not None and optimizer is None:
            _warn_of_settings(args, model)
        objective = Objective(model, num_data=num_data or (1 if data is None else len(data)))
        super().__init__(model=objective, args=args, **options)
        network = model_of(model.network)
        self.posterior = model
        self.learner: Learner | None = None
        self.num_draws = num_draws
        self.calibrate = calibrate
        self._make = optimizer
        self._loader: DataLoader[Any] | None = None
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch
        if self.args.label_names is None:
            self.label_names = find_labels(type(network))  # type: ignore[no-untyped-call]
        self._signature_columns: Any = [*columns_of(network), "label", "label_ids", *self.label_names]

    # -- training -----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training batches, and remember where they come from."""
        self._loader = super().get_train_dataloader()
        return self._loader

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Begin a run as long as the trainer's, and return the method's optimiser."""
        del model
        objective = self.accelerator.unwrap_model(self.model)
        loader: Any = self._loader
        total = max(self.state.max_steps, 0)
        batches = len(loader) if hasattr(loader, "__len__") else total * self.args.gradient_accumulation_steps
        steps = max(1, math.ceil(batches / self.args.gradient_accumulation_steps))
        self.learner = Learner(objective, epochs=total / steps, steps_per_epoch=steps)
        if total:
            self.optimizer = self.learner.optimizer(make=self._make)
        else:  # nothing to step with, where a pass over the data is all
            self.optimizer = torch.optim.SGD(objective.parameters(), lr=0.0)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Return the learner as what is called after each step and kept in checkpoints."""
        del num_training_steps, optimizer
        assert self.learner is not None
        self.lr_scheduler: Any = _Schedule(self.learner)
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the method's loss of a batch."""
        del num_items_in_batch
        loss = model(inputs)
        return (loss, {}) if return_outputs else loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, finish the posterior, and calibrate it where that was asked for; see `transformers.Trainer.train`."""
        output = super().train(*args, **kwargs)
        assert self.learner is not None
        assert self._loader is not None
        val_loader = self._val_loader()
        self.learner.finish(self._loader, val_loader=val_loader)
        if self.calibrate and val_loader is not None:
            calibrate_posterior(self.posterior, val_loader)
        return output

    def _val_loader(self) -> Iterable[Any] | None:
        """Return batches of all evaluation data, where there is one set of them."""
        if not _is_one(self.eval_dataset):
            return None
        loader = self.get_eval_dataloader()
        if self.args.world_size == 1:
            return loader
        return DataLoader(loader.dataset, batch_size=self.args.eval_batch_size, collate_fn=loader.collate_fn)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the terms of the last loss beside the loss."""
        if "loss" in logs:
            terms = self.accelerator.unwrap_model(self.model).terms
            logs |= {f"train_{name}": value.item() for name, value in terms.items()}
        super().log(logs, *args, **kwargs)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return -ln of the average density of a batch's targets, the average prediction, and the labels."""
        del model, ignore_keys
        inputs = self._prepare_inputs(inputs)
        labels = tuple(inputs.get(name) for name in self.label_names)
        given = [label for label in labels if label is not None]
        with torch.no_grad(), self.compute_loss_context_manager():
            prediction = self._predicted(inputs_of(inputs))
        loss = None
        if given:
            likelihood = self.posterior.likelihood
            _, targets = self.posterior.split_batch(inputs)
            total, count = likelihood.total_nll(prediction.log_prob(likelihood.marked(targets)), targets)
            loss = total / count.clamp_min(1)
        if prediction_loss_only:
            return loss, None, None
        return loss, self._scores(prediction), given[0] if len(given) == 1 else tuple(given) or None

    def _predicted(self, inputs: Any) -> Prediction:
        posterior = self.posterior
        number = self.num_draws
        if self.is_in_train and number is None:
            number = min(4, posterior.default_draws)
        if not posterior.unfinished:
            return predict(posterior, inputs, num_draws=number)
        method = posterior.require_method()  # which has no draws yet
        outputs = [method.outputs(posterior, inputs) for _ in range(number or min(4, posterior.default_draws))]
        return posterior.likelihood.from_samples(torch.stack(outputs))

    def _scores(self, prediction: Any) -> Any:
        """Return what stands in the place of the network's logits."""
        if not isinstance(prediction, ClassificationPrediction):
            return getattr(prediction, "mean", None)
        scores = prediction.log_probs
        if isinstance(self.posterior.likelihood, Bernoulli):
            return scores[..., 1] - scores[..., 0]
        return tuple(scores.unbind(1)) if "start_positions" in self.label_names else scores

    # -- files ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the posterior as `bayesify.save` does, and the tokenizer; checkpoints have the state of the run."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
        elif self.args.should_save:
            folder = str(output_dir or self.args.output_dir)
            save(self.posterior, folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the state, in which tied weights are written for each of their names."""
        state = self.accelerator.unwrap_model(self.model).state_dict() if state_dict is None else state_dict
        seen: set[int] = set()
        for name, tensor in state.items():
            address = tensor.untyped_storage().data_ptr()
            state[name] = tensor.clone() if address in seen else tensor.contiguous()
            seen.add(address)
        super()._save(output_dir, state_dict=state)


class _Schedule:
    """A learner where a trainer expects a schedule of learning rates."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def step(self) -> None:
        self.learner.after_step()

    def get_last_lr(self) -> list[Any]:
        return [0.0] if self.learner.schedule is None else self.learner.schedule.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)


def _is_one(dataset: Any) -> bool:
    """Return whether there is one evaluation set, and not several by name."""
    return dataset is not None and (not isinstance(dataset, dict) or hasattr(dataset, "column_names"))


def _refuse(args: transformers.TrainingArguments | None, options: dict[str, Any]) -> None:
    for name in ("optimizers", "optimizer_cls_and_kwargs", "compute_loss_func", "model_init"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name} is not for posteriors, whose loss and optimiser are the method's. Settings of the method, as "
                "SWAG(lr=...), or Trainer(..., optimizer=lambda groups: torch.optim.AdamW(groups, lr=...))."
            )
    for name in _REACHES_IN:
        if getattr(args, name, None):
            raise ValueError(
                f"TrainingArguments({name}=...) reaches into the model, which a posterior's network is not. Change the "
                "network before convert (as with model.gradient_checkpointing_enable()), or leave it out."
            )


def _warn_of_settings(args: transformers.TrainingArguments, posterior: Posterior) -> None:
    """Warn of arguments that somebody set and nobody reads."""
    defaults = {field.name: field.default for field in dataclasses.fields(type(args))}
    found = [name for name in _METHODS if name in defaults and getattr(args, name) != defaults[name]]
    if found:
        name = type(posterior.require_method()).__name__
        warnings.warn(
            f"TrainingArguments({', '.join(f'{one}=...' for one in found)}) are not used: the optimiser and its "
            f"schedule are the method's, {name}(lr=..., weight_decay=..., schedule=...). For another one: Trainer(..., "
            "optimizer=lambda groups: torch.optim.AdamW(groups, lr=2e-5)).",
            stacklevel=3,
        )
