"""The prior precision of least validation NLL."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from bayesify._core.maths import descend, minimise
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import batch_rows, slice_rows, to_device
from bayesify.laws.laplace.evidence import LEAST, MOST
from bayesify.laws.laplace.laplace import LaplaceLaw
from bayesify.laws.laplace.last_layer import LastLayerLaw, last_features
from bayesify.laws.posterior import Posterior

__all__ = ["choose_on_validation", "prior_without_effect"]

NEGLIGIBLE = 0.01  # the largest share of a variance that the data take away where they say nothing
EXAMPLES = 512  # that draws are judged on: a prior precision is one number
DRAWN = 4096  # passes of an example, at most, in a prediction by draws
STEP = math.log(100)  # of the search by draws: a factor of ten of the standard deviation


@torch.no_grad()
def choose_on_validation(
    posterior: Posterior, val_loader: Iterable[Any], *, num_draws: int | None = None, seed: int = 0
) -> None:
    """Set the prior precisions to those of least validation NLL, one after another; never worse than the present.

    Each is a search in log scale. A last layer is predicted in closed form, from features that are computed once; other
    posteriors by draws, the same for all candidates, in at most ten predictions of the first 512 examples, with eight
    draws of so many.

    Args:
        posterior: With a curvature; it is changed in place.
        val_loader: Batches of (inputs, targets) that were not trained on.
        num_draws: How many draws; None takes the posterior's own number, or fewer.
        seed: Of the draws.
    """
    law = cast(LaplaceLaw, posterior.law)
    law.require_complete()
    exact = law.layer is not None
    with evaluation_mode(posterior):
        if exact:
            loss = _closed_form_nll(posterior, cast(LastLayerLaw, law), val_loader)
        else:
            loss = _sampled_nll(posterior, val_loader, num_draws, seed)
        _search(law, loss, exact)


def prior_without_effect(law: LaplaceLaw) -> str | None:
    """Return a sentence where a prior precision that was chosen has left the range in which the data matter.

    That is where no variance differs from the prior's by more than a hundredth, delta > 100 times the largest
    eigenvalue of the curvature; or where the search ended at an end of its interval. With a precision for each layer it
    must be so in all of them: single layers may well be left to the prior.
    """
    chosen = law.prior_precision.double()
    largest = torch.tensor([float(s.values.max()) * law.scale for s in law.spectra()]).to(chosen)
    least, most = math.exp(LEAST), math.exp(MOST)
    width = (
        f"its weights have the prior's standard deviation, {float(chosen[0]) ** -0.5:.2g}. Set one that you believe "
        "in, posterior.law.set_prior_precision(...), or give fit more validation data."
    )
    if bool((chosen < least * 1.01).all() | (chosen > most / 1.01).all()):
        return (
            f"The search for the prior precision ended at an end of its interval, {float(chosen[0]):.3g} (of "
            f"{least:.3g} to {most:.3g}), so that there is no best one: where the data say nothing {width}"
        )
    if bool((chosen * NEGLIGIBLE > largest).all()):
        return (
            f"The prior precision was chosen as {float(chosen[0]):.3g}, and the largest eigenvalue of the curvature is "
            f"{float(largest[0]):.3g}: the data say nothing of how wide the posterior is, and {width}"
        )
    return None


def _search(law: LaplaceLaw, loss: Callable[[], float], exact: bool) -> None:
    precisions = law.prior_precision.tolist()
    for index in range(len(precisions)):

        def of(log_precision: float, index: int = index) -> float:
            tried = [*precisions]
            tried[index] = math.exp(log_precision)
            law.set_prior_precision(tried)
            return loss()

        start = math.log(precisions[index])
        if exact:
            best, _ = minimise(of, LEAST, MOST, start=start, points=25, tolerance=1e-3)
        else:
            best, _ = descend(of, LEAST, MOST, start=start, step=STEP)
        if best != start:
            precisions[index] = math.exp(best)
        law.set_prior_precision(precisions)


def _closed_form_nll(posterior: Posterior, law: LastLayerLaw, loader: Iterable[Any]) -> Callable[[], float]:
    device = law.prior_precision.device
    kept = []
    for batch in loader:
        inputs, targets = posterior.split_batch(to_device(batch, device))
        output, features = last_features(posterior, law.layer, inputs)
        posterior.likelihood.check(output, targets)
        kept.append((output, features, targets))
    _require(kept)

    def nll() -> float:
        found = [posterior.likelihood.gaussian_log_prob(t, o, law.output_variances(o, f)) for o, f, t in kept]
        return _mean(found, posterior, kept)

    return nll


def _sampled_nll(posterior: Posterior, loader: Iterable[Any], num_draws: int | None, seed: int) -> Callable[[], float]:
    device = next(posterior.parameters()).device
    batches, count = [], 0
    for batch in loader:
        some = slice_rows(batch, 0, EXAMPLES - count)
        batches.append(posterior.split_batch(to_device(some, device)))
        count += batch_rows(some)
        if count >= EXAMPLES:
            break
    _require(batches)
    keys = posterior.keys(num_draws, seed)
    keys = keys if num_draws is not None else keys[: max(1, DRAWN // max(count, 1))]

    def nll() -> float:
        found = []
        for inputs, targets in batches:
            outputs = [posterior.evaluate(inputs, [key])[0] for key in keys]
            found.append(posterior.likelihood.mixture_log_prob(outputs, targets))
        return _mean(found, posterior, batches)

    return nll


def _mean(log_probs: list[Tensor], posterior: Posterior, batches: list[Any]) -> float:
    """Return the mean NLL of what counts; infinite where it is not a number, so that it is never chosen."""
    pairs = zip(log_probs, batches, strict=True)
    sums = [posterior.likelihood.total_nll(log_prob, batch[-1]) for log_prob, batch in pairs]
    value = sum(nll.item() for nll, _ in sums) / max(sum(count.item() for _, count in sums), 1)
    return math.inf if math.isnan(value) else value


def _require(batches: list[Any]) -> None:
    if not batches:
        raise ValueError("The validation loader gave no batch. Check its data set and sampler.")
