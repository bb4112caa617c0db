"""Members that learn: fits of one method from one network, put together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from bayesify.conversion import convert, ensemble
from bayesify.fitting import fit
from bayesify.laws import Posterior
from bayesify.likelihoods import Likelihood
from bayesify.methods import MAP, Method, as_method
from bayesify.selection import Patterns

__all__ = ["fit_members"]

DRAWS = 3  # of each member in a prediction, where they have noise


def fit_members(
    network: nn.Module,
    method: Method | type[Method] | str,
    loader: Iterable[Any],
    *,
    members: int = 3,
    keep_network: bool = True,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    likelihood: str | Likelihood = "classification",
    checkpoint: str | Path | None = None,
    seed: int = 0,
    **options: Any,
) -> Posterior:
    """Fit a method several times from one network, and put the fits together: q = (1/M) sum_m q_m.

    Costs as many fits, one after another. Members differ by their seed: what the method draws at its start, the order
    and the augmentation of the data. A member can have a temperature of its own, `calibrate(posterior, val_loader,
    temperatures="each")`, which networks that were trained for different lengths want.

    Args:
        network: The trained network, which is left untouched.
        method: `BayesAdapter.retrained()`, say; a method that ends far from the network, or starts at random.
        loader: Training batches.
        members: How many fits.
        keep_network: Whether the network is one more member, the first, as it is.
        include: As in `convert`.
        exclude: As in `convert`.
        likelihood: As in `convert`; each fit learns the parameters of its own, and the first one's counts.
        checkpoint: A folder, in which each fit has one of its own; a run that was interrupted goes on.
        seed: Of the first member; the others have the next ones.
        options: Of `fit`, for all members.

    Returns:
        One posterior, with three draws of each member in a prediction where they have noise.

    Example:
        >>> import torch
        >>> from bayesify import BayesAdapter, predict
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> batches = [(torch.randn(8, 2), torch.arange(8) % 3)]
        >>> method = BayesAdapter.retrained(epochs=1)
        >>> posterior = fit_members(nn.Linear(2, 3), method, batches, members=2, num_data=8, progress=False)
        >>> len(posterior.law.parts), predict(posterior, torch.ones(1, 2)).probs.shape
        (3, torch.Size([1, 3]))
    """
    if members < 1:
        raise ValueError(f"There must be at least one member, but members={members}.")
    resolved = as_method(method)
    if not resolved.learns:
        raise ValueError(
            f"{type(resolved).__name__} with epochs={resolved.epochs} learns nothing, so that members would be alike. "
            f"Say how long: {type(resolved).__name__}(epochs=10, ...)."
        )
    found = []
    for number in range(seed, seed + members):
        own = dataclasses.replace(resolved, seed=number) if hasattr(resolved, "seed") else resolved  # type: ignore[call-arg]
        posterior = convert(network, own, include=include, exclude=exclude, likelihood=copy.deepcopy(likelihood))
        folder = None if checkpoint is None else Path(checkpoint) / f"member-{number}"
        fit(posterior, loader, seed=number, checkpoint=folder, **options)
        found.append(posterior)
    if keep_network:
        found = [convert(network, MAP(), likelihood=found[0].likelihood), *found]
    made = ensemble(found).eval()
    if made.law.functions is None:
        made.default_draws = DRAWS * len(found)
    return made
