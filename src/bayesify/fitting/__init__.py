"""The training loop."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from numbers import Integral
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from bayesify._core.deprecation import renamed, warn_renamed
from bayesify._core.inputs import as_loader
from bayesify._core.modes import modes_kept
from bayesify._core.processes import others_expected
from bayesify.fitting.backend import Precision, make_engine
from bayesify.fitting.health import NonFiniteError
from bayesify.fitting.history import EpochRecord, History
from bayesify.fitting.identity import length
from bayesify.fitting.learner import Learner
from bayesify.fitting.objective import Objective
from bayesify.fitting.random_state import global_generators_kept
from bayesify.fitting.run import Run
from bayesify.laws import Posterior, require_posterior
from bayesify.likelihoods import Likelihood
from bayesify.methods import Method, OODRegularizer

__all__ = ["EpochRecord", "History", "Learner", "NonFiniteError", "Objective", "fit"]


@renamed(optimiser="optimizer", regulariser="regularizer")
def fit(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    likelihood: str | Likelihood | None = None,
    epochs: int | None = None,
    val_loader: Iterable[Any] | None = None,
    ood_loader: Iterable[Any] | None = None,
    regularizer: OODRegularizer | None = None,
    patience: int | None = None,
    num_data: int | None = None,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_steps: int | None = None,
    log_dir: str | Path | None = None,
    accuracy_tolerance: float = 0.01,
    seed: int = 0,
    progress: bool = True,
    **unknown: Any,
) -> History:
    """Learn a posterior: the loop around `posterior.loss`, with what such loops need.

    Started by `torchrun` or `accelerate launch` it runs in several processes. With `checkpoint`, a run that was
    killed goes on where it was and ends with the same numbers as one that was not.

    Args:
        posterior: From `convert`; it is changed in place.
        loader: Batches of (inputs, targets), or mappings with a target key.
        likelihood: An old way to say what the outputs mean; `convert` takes it.
        epochs: For each stage; None takes the method's.
        val_loader: Batches for the validation NLL after each epoch.
        ood_loader: Batches of OOD inputs (targets are not looked at), on which the posterior is to be uncertain;
            each step takes one, and the loader begins again when it ends.
        regularizer: How that is asked for; None takes `OODRegularizer()`.
        patience: Stop a stage after this many epochs without a better validation NLL, and take the best weights.
        num_data: The size of the training set; None takes `len(loader.dataset)`.
        optimizer: A function of parameter groups that returns an optimiser; None takes the method's.
        accumulate: How many batches make one step.
        clip_norm: The largest norm of the gradient.
        precision: Autocast to "bf16", or on a GPU "fp16"; None computes in the parameters' own type.
        checkpoint: A folder to keep the state of the run in. It belongs to the run: started with another network,
            method, data in memory or settings, `fit` raises and says what differs.
        checkpoint_steps: Write it every so many batches too, not only after epochs.
        log_dir: A folder for TensorBoard event files; needs `bayesify[logs]`.
        accuracy_tolerance: Warn if the accuracy falls by more than this against the original network, and by more than
            chance: see the sign test of `warn_if_worse`.
        seed: Of the order of the data and of the noise; torch's global generator is put back at the end.
        progress: Whether to show progress bars.
        unknown: Refused; settings of the method, as its learning rate, are given to it and not here.

    Returns:
        The history, with a record for each epoch.

    Example:
        >>> import torch
        >>> from bayesify import MAP, convert, fit
        >>> inputs = torch.randn(32, 4)
        >>> data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8)
        >>> history = fit(convert(torch.nn.Linear(4, 3), MAP(lr=0.1)), loader, epochs=2, progress=False)
        >>> len(history.epochs)
        2
    """
    require_posterior(posterior)
    method = posterior.require_method()
    _refuse(unknown, method)
    loader = as_loader(loader, "fit")
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer is a function of parameter groups, not an optimiser: "
            "optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3)."
        )
    if likelihood is not None:
        posterior.set_likelihood(likelihood)
        warn_renamed("likelihood= of fit", "convert(network, method, likelihood=...)", stacklevel=4)
    epochs = method.epochs if epochs is None else epochs
    _check_loader(loader)
    _check_numbers(epochs=(epochs, 0), accumulate=(accumulate, 1), patience=(patience, 1))
    _check_numbers(checkpoint_steps=(checkpoint_steps, 1), num_data=(num_data, 1))
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be greater than 0, but it is {clip_norm}.")
    if patience is not None and val_loader is None:
        raise ValueError("patience needs a val_loader: early stopping looks at the validation NLL.")
    if regularizer is not None and ood_loader is None:
        raise ValueError("The regulariser needs OOD inputs: pass an ood_loader.")
    if ood_loader is not None:
        _check_loader(ood_loader)
    size = _num_data(loader, num_data)
    run = Run(
        posterior=posterior,
        loader=loader,
        ood_loader=ood_loader,
        regularizer=regularizer,
        val_loader=val_loader,
        epochs=epochs,
        patience=patience,
        num_data=size,
        make_optimizer=optimizer or method.make_optimizer,
        accumulate=accumulate,
        clip_norm=clip_norm,
        engine=make_engine(Objective(posterior, num_data=size, regularizer=regularizer), precision),
        checkpoint_folder=checkpoint,
        checkpoint_steps=checkpoint_steps,
        log_dir=log_dir,
        seed=seed,
        shown=progress,
    )
    again = (
        "" if checkpoint is None else f" Start all of them again: the run goes on from its checkpoint, {checkpoint}."
    )
    with global_generators_kept(), modes_kept(posterior), others_expected(again):
        return run.all_stages(accuracy_tolerance)


def _refuse(unknown: Mapping[str, Any], method: Method) -> None:
    for name, value in unknown.items():
        if name in {field.name for field in dataclasses.fields(method)}:
            raise TypeError(
                f"fit has no {name!r}, which is a setting of the method: convert(network, "
                f"{type(method).__name__}({name}={value!r}, ...)). For one optimiser of your own give fit a function, "
                "optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3)."
            )
        known = [name for name in inspect.signature(fit).parameters if name != "unknown"]
        raise TypeError(f"fit has no argument {name!r}; it has {known}.")


def _num_data(loader: Iterable[Any], num_data: int | None) -> int:
    if num_data is not None:
        return num_data
    data = getattr(loader, "dataset", None)
    if isinstance(data, Sized):
        return len(data)
    raise ValueError("The number of training examples is unknown: pass num_data=..., or a loader with a data set.")


def _check_loader(loader: Iterable[Any]) -> None:
    if isinstance(loader, Iterator):
        raise TypeError(
            "The loader is an iterator, which ends after one epoch. Give the DataLoader itself, or a list of batches."
        )
    if length(loader) == 0:
        raise ValueError("The loader is empty. Check its data set, batch size and drop_last.")


def _check_numbers(**numbers: tuple[int | None, int]) -> None:
    for name, (value, least) in numbers.items():
        if value is not None and not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, but it is {value!r}.")
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, but it is {value}.")
