"""Calibration after any method: temperatures, and how draws are averaged, fitted on validation data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed
from bayesify._core.dividing import in_order
from bayesify._core.inputs import as_loader, in_network_type
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import batch_rows, slice_rows, to_device
from bayesify.laws import Posterior, require_posterior, warn_unless_learned
from bayesify.likelihoods import Stream
from bayesify.likelihoods.pooling import Pooling, Temperatures, check_pooling
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction import Views, add_views, as_views, posterior_device, weight_norm
from bayesify.prediction.layout import rows_per_pass

__all__ = ["Outputs", "calibrate", "draws_of"]


@renamed(num_samples="num_draws")
@torch.inference_mode(False)
def calibrate(
    posterior: Posterior,
    val_loader: Iterable[Any],
    *,
    views: Views | Sequence[Any] | str | None = None,
    pooling: Pooling | float = "auto",
    temperatures: Temperatures = "auto",
    num_draws: int | None = None,
    seed: int = 0,
) -> Posterior:
    """Fit temperatures and pooling, or for regression the variance's scale, on validation data.

    Classification: draws p_s = softmax(logits_s / T) become p proportional to ((1/S) sum_s p_s^a)^(1/a), with the T and
    the a of least NLL; regression: the predictive variance times the c of least NLL. It acts on predictions, by draws
    and without, never on the loss, and is saved with the posterior. Total, aleatoric and epistemic uncertainty stay
    those of the average of the tempered probabilities.

    Args:
        posterior: Any posterior; it is changed in place.
        val_loader: Batches of (inputs, targets) that were not trained on.
        views: As in `predict`; they become the posterior's own, `posterior.views`.
        pooling: How draws are averaged: "probs", a = 1; "log-probs", a = 0, the normalised average of
            log-probabilities; "power", with an a between the two that is fitted; a number; or "auto", which of these
            is best in cross-validation, and "probs" unless another is better by more than a standard error.
        temperatures: "one"; "each", one for each member of an ensemble or component of a mixture, which need not be
            equally sharp; or "auto", chosen like the pooling.
        num_draws: How many draws; None takes the posterior's own number.
        seed: Of the draws.

    Returns:
        The same posterior. `posterior.likelihood.temperature` and `.exponent` (or `.variance_scale`) hold the numbers.

    Memory is that of the draws' outputs on the validation data, S x N x C numbers.

    Example:
        >>> from torch import nn
        >>> from bayesify import convert
        >>> posterior = convert(nn.Linear(2, 2, bias=False), "map")
        >>> x, coins = torch.randn(64, 2), torch.arange(64) % 2
        >>> _ = calibrate(posterior, [(20 * x, coins)])
        >>> bool(posterior.likelihood.temperature > 1)  # nothing can be known of coins, so it must be less sure
        True
    """
    require_posterior(posterior)
    warn_unless_learned(posterior)
    check_pooling(pooling, temperatures)
    seen = as_views(views, posterior.views)
    found = draws_of(posterior, val_loader, seen, num_draws=num_draws, seed=seed)
    there, wanted = len(set(found.parts)), posterior.law.num_parts
    if there < wanted and temperatures == "each":
        raise ValueError(
            f"temperatures='each' needs draws of all {wanted} parts, and {len(found.parts)} draws are of {there} of "
            f"them. Give num_draws={wanted} or more, or temperatures='one'."
        )
    temperatures = "one" if there < wanted else temperatures
    posterior.likelihood.calibrate(found.batches, parts=found.parts, pooling=pooling, temperatures=temperatures)
    if views is not None:
        posterior.views = seen
    return posterior


@dataclass
class Outputs:
    """Outputs of draws on all batches of a loader.

    Attributes:
        batches: Outputs (S, B, ...) and targets of each batch.
        parts: Which part of a mixture each draw is of, alike for all batches.
    """

    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)


class _Kept(Stream):
    """Keeps the outputs of draws on some rows, and what part of a mixture each is of."""

    keeps_parts = True

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.parts: list[int] = []

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        """Keep outputs of some draws."""
        del view
        self.outputs.append(outputs)
        self.parts += [part] * len(outputs)

    def result(self) -> Prediction:
        """Refuse."""
        raise TypeError("Kept outputs are not a prediction.")


def draws_of(
    posterior: Posterior, loader: Iterable[Any], views: Views, *, num_draws: int | None = None, seed: int = 0
) -> Outputs:
    """Return the outputs of draws on all batches of a loader, with the targets."""
    kept, device = Outputs(), posterior_device(posterior)
    with torch.no_grad(), posterior.lock, evaluation_mode(posterior):
        keys = posterior.keys(num_draws, seed)
        plan = views.plan(keys, finite=posterior.law.functions is not None)

        def drawn(batch: Any) -> tuple[Tensor, Tensor, list[int]]:
            inputs, target = posterior.split_batch(to_device(batch, device))
            inputs = in_network_type(inputs, posterior.network)
            count, found = batch_rows(inputs), []
            rows = rows_per_pass(posterior, posterior.trace(inputs), count)
            for start in range(0, max(1, count), rows):
                own = _Kept()
                part = slice_rows(inputs, start, min(start + rows, count)) if count > rows else inputs
                add_views(posterior, part, views, plan, own)
                found.append(torch.cat(own.outputs))
            outputs = torch.cat(found, 1)
            posterior.likelihood.check(outputs[0], target)
            return outputs, target, own.parts

        for outputs, target, parts in in_order(
            as_loader(loader, "calibrate"), drawn, norm=lambda: weight_norm(posterior)
        ):
            kept.batches.append((outputs.to(device), target.to(device)))
            kept.parts = parts
    if not kept.batches:
        raise ValueError("The validation loader gave no batch. Check its data set and sampler.")
    return kept
