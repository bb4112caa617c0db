"""New data for a posterior that is fitted already."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, cast

from torch.utils.data import ConcatDataset, DataLoader

from bayesify._core.inputs import as_loader
from bayesify._core.processes import num_processes
from bayesify._core.progress import bar
from bayesify.fitting import fit
from bayesify.fitting.recursive import Recursive
from bayesify.laws import GaussianLaw, Posterior, TensorTree, require_posterior
from bayesify.methods import APD, IVON, SGLD, BayesAdapter, Laplace

__all__ = ["update"]

_NEAREST = (
    "Fit on old and new data together, bayesify.fit(posterior, loader); or make a posterior that can be updated, "
    "bayesify.convert(network, bayesify.Laplace()) or bayesify.BayesAdapter(), of the trained network."
)
_REASONS = {
    "map": "MAP keeps the network's weights alone, and not how sure they are",
    "mc-dropout": "MCDropout keeps weights and a rate, and not how sure the old data made each weight",
    "deep-ensemble": "Members of an ensemble are single networks, none of which knows how sure its weights are",
    "swag": "SWAG's Gaussian is as wide as the path of SGD at its learning rate, and not a posterior to multiply with",
    "abnn": "ABNN's noise is set and not learned from data, so that it does not say what the old data left open",
    "ibnn": "IBNN's weights are points, and its factors of inputs are no distribution of what data leave open",
    "apd": "The generator of APD has forgotten the samples that it was made of",
}


def update(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    epochs: int | None = None,
    num_data: int | None = None,
    old: Iterable[Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Posterior:
    """Learn from new data, with the posterior of the old ones as the prior: p(w | D, D') is p(D' | w) p(w | D).

    For models in which all of this is Gaussian the result is that of a fit on all data. What is not random stays as it
    is: weights that are not converted, the likelihood's noise, statistics of batch normalisation.

    - `Laplace`: recursive. The precision of the weights grows by the new data's curvature, and their mean moves by
      Newton steps, see `Recursive`; prior precision and noise stay. Exact for a linear regression of known noise; for a
      network it takes the old loss to be quadratic. Costs a pass over the new data for each step, and one more.
    - `BayesAdapter`, `IVON`: the present Gaussian of every weight is the prior in the divergence, and the method's own
      training follows. Costs that training, of the new data.
    - `SGLD`: samples do not say what p(w | D) is elsewhere, so `old` data are needed again; the chains go on where
      they are, on both, and the samples are replaced. Costs the method's own training of all data, or `epochs`.

    Args:
        posterior: A fitted posterior, from `fit` or `load`; it is changed in place.
        loader: Batches of the new data alone.
        epochs: For Laplace the number of Newton steps, 1 unless said otherwise; for others epochs, as in `fit`.
        num_data: The number of new examples; None takes `len(loader.dataset)`, and for Laplace those that are seen.
        old: For SGLD a DataLoader of the old data.
        progress: Whether to show progress bars.
        options: For other methods than Laplace: of `fit`, as `seed`, `val_loader`, `checkpoint`.

    Returns:
        The same posterior. It can be updated again, and saved as ever. A calibration is that of before.

    Raises:
        ValueError: The posterior has not learned, or is of a method for which this has no meaning.

    Example:
        >>> import torch
        >>> from bayesify import Gaussian, Laplace, convert, fit
        >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
        >>> y = x.sum(1, keepdim=True)
        >>> network = torch.nn.Linear(2, 1)
        >>> posterior = convert(network, Laplace(prior_precision=1.0), likelihood=Gaussian(noise_std=0.1))
        >>> _ = fit(posterior, [(x[:50], y[:50])], num_data=50, progress=False)
        >>> before = posterior.law.covariance().trace()
        >>> _ = update(posterior, [(x[50:], y[50:])], progress=False)
        >>> bool(posterior.law.covariance().trace() < before), int(posterior.law.seen)
        (True, 100)
    """
    require_posterior(posterior)
    method, loader = posterior.require_method(), as_loader(loader, "update")
    if (reason := posterior.learned) is not True:
        raise ValueError(f"There is nothing to update: {reason}")
    if old is not None and (not isinstance(method, SGLD) or isinstance(method, APD)):
        raise ValueError(f"old= is for SGLD, whose chains need the old data; {type(method).__name__} does without.")
    if isinstance(method, Laplace):
        if options:
            raise TypeError(f"update of a Laplace posterior makes no training, and has no {sorted(options)}.")
        _recursive(posterior, loader, 1 if epochs is None else epochs, num_data, progress)
    elif isinstance(method, BayesAdapter | IVON):
        with _posterior_as_prior(posterior):
            fit(posterior, loader, epochs=epochs, num_data=num_data, progress=progress, **options)
    elif isinstance(method, SGLD) and not isinstance(method, APD):
        _go_on(posterior, loader, old, epochs=epochs, num_data=num_data, progress=progress, **options)
    else:
        raise ValueError(f"{_REASONS.get(method.name, f'{method.name} has no way to do this')}. {_NEAREST}")
    return posterior


def _recursive(posterior: Posterior, loader: Iterable[Any], steps: int, num_data: int | None, progress: bool) -> None:
    if iter(loader) is loader:
        raise TypeError("update reads the new data twice, and an iterator only once. Give a DataLoader, or a list.")
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"epochs is a number of Newton steps, at least 0, but it is {steps!r}.")
    if num_data is None and num_processes() > 1:  # which may see the same data, or a part each
        data = getattr(loader, "dataset", None)
        if not isinstance(data, Sized):
            raise ValueError("The number of new examples is unknown: pass num_data=..., or a loader with a data set.")
        num_data = len(data)
    shown: Callable[[Iterable[Any]], Iterable[Any]] = lambda batches: bar(batches, "update", shown=progress)  # noqa: E731
    Recursive(posterior, num_data).run(loader, steps, shown)


@contextmanager
def _posterior_as_prior(posterior: Posterior) -> Iterator[None]:
    """Let the present Gaussians be the prior, and nothing learn but them."""
    law = cast(GaussianLaw, posterior.law)
    log_stds = {name: log_std.detach().clone() for name, log_std in law.log_std.as_dict().items()}
    if not any(bool((log_std > -math.inf).any()) for log_std in log_stds.values()):
        raise ValueError(
            "All standard deviations are 0, and such a prior never moves. Convert with a start_std above 0."
        )
    means = {name: law.tensor(name).detach().clone() for name in log_stds}
    learned = {id(tensor) for name in log_stds for tensor in (law.tensor(name), law.log_std.as_dict()[name])}
    others = [p for p in posterior.parameters() if p.requires_grad and id(p) not in learned]
    before = law.prior_mean, law.prior_log_std, law.keep_statistics
    law.prior_mean, law.prior_log_std, law.keep_statistics = TensorTree(means), TensorTree(log_stds), True
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        law.prior_mean, law.prior_log_std, law.keep_statistics = before
        for parameter in others:
            parameter.requires_grad_(True)


def _go_on(posterior: Posterior, loader: Any, old: Any, *, num_data: int | None, **options: Any) -> None:
    if old is None:
        raise ValueError(
            "A bank has samples of the old posterior, and not its density, so that chains go on with the old data too: "
            "bayesify.update(posterior, loader, old=old_loader). Laplace and BayesAdapter need no old data."
        )
    if not isinstance(loader, DataLoader) or not isinstance(old, DataLoader) or num_data is not None:
        raise TypeError(
            "To put old and new data together both are DataLoaders over data sets that have a length, without "
            "num_data=. Or make one loader of all data, and call bayesify.fit(posterior, loader): the chains go on too."
        )
    data: ConcatDataset[Any] = ConcatDataset([old.dataset, loader.dataset])
    both = DataLoader(
        data, batch_size=loader.batch_size, shuffle=True, collate_fn=loader.collate_fn, num_workers=loader.num_workers
    )
    fit(posterior, both, **options)
