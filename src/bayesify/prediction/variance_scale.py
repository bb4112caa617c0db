"""Numbers that multiply the variances of a predictor without draws, fitted on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed
from bayesify._core.maths import minimise
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import to_device
from bayesify.laws import Posterior, require_posterior, warn_unless_learned
from bayesify.likelihoods import Likelihood
from bayesify.prediction.one_pass import OnePass, one_pass_of
from bayesify.prediction.outputs import OutputMoments, prediction_of
from bayesify.prediction.predictors import Predictor, as_predictor
from bayesify.prediction.views import Views, as_views

__all__ = ["fit_variance_scale"]

Found = list[tuple[list[OutputMoments], Tensor]]
SWEEPS = 20  # over the layers, at most: they end with one that gains less than GAIN nats
GAIN = 1e-5
LOWEST, HIGHEST = math.log(1e-4), math.log(1e4)


@overload
def fit_variance_scale(
    posterior: Posterior,
    val_loader: Iterable[Any],
    *,
    how: str | Predictor = "streamlined",
    per_layer: Literal[False] = False,
    num_draws: int | None = None,
    seed: int = 0,
) -> float: ...


@overload
def fit_variance_scale(
    posterior: Posterior,
    val_loader: Iterable[Any],
    *,
    how: str | Predictor = "streamlined",
    per_layer: Literal[True],
    num_draws: int | None = None,
    seed: int = 0,
) -> dict[str, float]: ...


@renamed(num_samples="num_draws")
def fit_variance_scale(
    posterior: Posterior,
    val_loader: Iterable[Any],
    *,
    how: str | Predictor = "streamlined",
    per_layer: bool = False,
    num_draws: int | None = None,
    seed: int = 0,
) -> float | dict[str, float]:
    """Find the scale of the outputs' variances with the least negative log-likelihood.

    The network runs once over the data, on the posterior's own views; a search in the logarithm of the scale follows,
    between 1e-4 and 1e4. The result is never worse on these data than a scale of 1.

    With `per_layer` each layer's weights have a scale of their own. To first order the outputs' variance is the sum of
    what the layers cause, V = sum_l s_l V_l, so that one run for each layer is enough, and the scales are searched for
    one after the other. As many numbers as layers want more data than one.

    Args:
        posterior: Any posterior that `predict(how=...)` takes.
        val_loader: Batches of (inputs, targets) that were not trained on; with `per_layer` all of them are kept.
        how: The predictor.
        per_layer: Whether each layer with Gaussian weights has a scale.
        num_draws: As in `predict`.
        seed: As in `predict`.

    Returns:
        The scale, for `predict(..., variance_scale=scale)`; or the scales, by the layers' names, for the same.

    Example:
        >>> from torch import nn
        >>> from bayesify import MCDropout, convert
        >>> posterior = convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), MCDropout())
        >>> loader = [(torch.randn(32, 4), torch.randint(3, (32,)))]
        >>> scale = fit_variance_scale(posterior, loader)
        >>> 0.99e-4 < scale < 1.01e4
        True
    """
    require_posterior(posterior)
    warn_unless_learned(posterior)
    predictor = as_predictor(how, posterior)
    if not predictor.variances:
        raise ValueError(
            f"how={how!r} has no variances of its own to scale. Use how='streamlined' or how='linearised'; for draws "
            "there is calibrate."
        )
    device = next((p.device for p in posterior.parameters()), torch.device("cpu"))
    with torch.inference_mode(False), torch.no_grad(), posterior.lock, evaluation_mode(posterior):
        batches = [posterior.split_batch(to_device(batch, device)) for batch in val_loader] if per_layer else []
        seen: Iterable[Any] = batches or (posterior.split_batch(to_device(batch, device)) for batch in val_loader)
        views = as_views(None, posterior.views)
        found: Found = []
        for inputs, targets in seen:
            moments = one_pass_of(posterior, predictor, inputs).moments(inputs, views=views)
            posterior.likelihood.check(moments[0].mean, targets)
            found.append((moments, targets))
        if not found:
            raise ValueError("The validation loader gave no batch. Check its data set and sampler.")

        def nll(moments: Found) -> float:
            return _nll(posterior.likelihood, moments, num_draws, seed)

        scale: float | dict[str, float]
        if per_layer:
            value = nll(found)
            scale = _per_layer(one_pass_of(posterior, predictor, batches[0][0]), batches, views, found, nll)
        else:
            best, value = minimise(lambda log: nll(_times(found, math.exp(log))), LOWEST, HIGHEST, start=0.0)
            scale = math.exp(best)
    if not math.isfinite(value):
        raise ValueError("The predictions or the targets are not finite, so there is no scale to fit.")
    return scale


def _per_layer(
    one_pass: OnePass,
    batches: Sequence[tuple[Any, Tensor]],
    views: Views,
    found: Found,
    nll: Callable[[Found], float],
) -> dict[str, float]:
    layers = one_pass.layers
    if not layers:
        raise ValueError("There is no layer with Gaussian weights, so that there are no scales per layer to fit.")

    def run(scales: dict[str, float]) -> Found:
        passes = one_pass.scaled(scales)
        return [(passes.moments(inputs, views=views), targets) for inputs, targets in batches]

    # What each layer causes alone, (L, B, ...), for each component of each batch; noise of layers is left as it is.
    silent = run(dict.fromkeys(layers, 0.0))
    alone = [run({other: float(other == layer) for other in layers}) for layer in layers]
    parts = [
        [
            torch.stack([_spread(each[batch][0][component]) - _spread(one) for each in alone])
            for component, one in enumerate(moments)
        ]
        for batch, (moments, _) in enumerate(silent)
    ]
    logs = dict.fromkeys(layers, 0.0)

    def together(logs: dict[str, float]) -> Found:
        made: Found = []
        for (moments, targets), (still, _), of_layers in zip(found, silent, parts, strict=True):
            sums = []
            for one, base, part in zip(moments, still, of_layers, strict=True):
                scales = torch.tensor([math.exp(value) for value in logs.values()]).to(part)
                spread = _spread(base) + torch.tensordot(scales, part, 1)
                field = {"variance": spread.clamp_min(0)} if one.covariance is None else {"covariance": spread}
                sums.append(replace(one, **field))
            made.append((sums, targets))
        return made

    def with_one(layer: str, value: float) -> float:
        return nll(together({**logs, layer: value}))

    value = math.inf
    for _ in range(SWEEPS):
        before = value
        for layer in layers:
            loss = partial(with_one, layer)
            logs[layer], value = minimise(loss, LOWEST, HIGHEST, start=logs[layer], points=9, tolerance=0.01)
        if not before - value > GAIN:
            break
    scales = {layer: math.exp(value) for layer, value in logs.items()}
    # Moments are not quite linear in the variances: what is returned was tried.
    return scales if nll(run(scales)) <= nll(found) else dict.fromkeys(layers, 1.0)


def _times(found: Found, scale: float) -> Found:
    return [([one.times(scale) for one in moments], targets) for moments, targets in found]


def _spread(one: OutputMoments) -> Tensor:
    found = one.variance if one.covariance is None else one.covariance
    assert found is not None
    return found


def _nll(likelihood: Likelihood, found: Found, num_draws: int | None, seed: int) -> float:
    total, count = 0.0, 0.0
    for moments, targets in found:
        prediction = prediction_of(likelihood, moments, num_draws=num_draws, seed=seed)
        part, number = likelihood.total_nll(prediction.log_prob(likelihood.marked(targets)), targets)
        total, count = total + part.item(), count + number.item()
    return total / max(count, 1.0)
