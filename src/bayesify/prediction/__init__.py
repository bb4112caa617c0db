"""How a prediction is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify._core.deprecation import moved_names, renamed
from bayesify._core.dividing import in_order
from bayesify._core.inputs import as_inputs, in_network_type
from bayesify._core.modes import evaluation_mode, first_parameter
from bayesify._core.processes import gather, is_sharded, rank
from bayesify._core.progress import bar
from bayesify._core.trees import batch_rows, inputs_of, slice_rows, to_device
from bayesify.laws import Posterior, require_posterior, warn_unless_learned
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction.features import check_output
from bayesify.prediction.layout import rows_per_pass
from bayesify.prediction.nan_warning import warn_of_nan
from bayesify.prediction.predictors import (
    PREDICTORS,
    How,
    Linearised,
    Mean,
    Predictor,
    Request,
    Sampling,
    Streamlined,
    as_predictor,
    capabilities,
)
from bayesify.prediction.sampling import add_draws, add_views
from bayesify.prediction.views import View, Views, as_views

if TYPE_CHECKING:
    from bayesify.prediction.streamlined import Moments, moment_rule
    from bayesify.prediction.variance_scale import fit_variance_scale

__all__ = [
    "PREDICTORS",
    "How",
    "Linearised",
    "Mean",
    "Moments",
    "Predictor",
    "Sampling",
    "Streamlined",
    "View",
    "Views",
    "add_draws",
    "add_views",
    "as_predictor",
    "as_views",
    "capabilities",
    "fit_variance_scale",
    "moment_rule",
    "posterior_device",
    "predict",
    "weight_norm",
]

# What only predictions without draws need is imported when it is asked for.
_LATER = {"fit_variance_scale": "variance_scale", "Moments": "streamlined", "moment_rule": "streamlined"}


_MOVED = ("ClassificationPrediction", "FeaturePrediction", "RegressionPrediction")
_old_name = moved_names(
    __name__,
    {
        "Law": "bayesify.laws.Component",
        "laws": "bayesify.laws",
        **{name: f"bayesify.likelihoods.{name}" for name in _MOVED},
    },
    stacklevel=4,
)


def __getattr__(name: str) -> Any:
    """Import a part on first use."""
    if name not in _LATER:
        return _old_name(name)
    return getattr(import_module(f"bayesify.prediction.{_LATER[name]}"), name)


@renamed(num_samples="num_draws")
def predict(
    posterior: Posterior,
    inputs: Any,
    *,
    how: str | Predictor = "sampling",
    views: Views | Sequence[Any] | str | None = None,
    num_draws: int | None = None,
    seed: int | None = 0,
    chunk_size: int | None = None,
    keep_samples: bool = False,
    output: str = "prediction",
    variance_scale: float | Mapping[str, float] = 1.0,
    input_variance: Tensor | None = None,
    progress: bool = False,
) -> Prediction:
    """Predict, with uncertainty.

    Sampling averages coherent draws: p(y|x) = (1/S) sum_s p(y | f_s(x)). The same seed gives the same functions, and
    so the same numbers for any chunk size and batch order. Costs S plain passes from the first random layer on, and
    one before it; memory does not grow with S unless the samples are kept. A first prediction for inputs of some kind
    has up to six passes more, on two or three copies of one row, which show how the network is built.

    Several processes (`torch.distributed`) divide a loader between them, and each gets the whole prediction, that of
    one process; a tensor is each process's own. A process that predicts a loader alone says so with `one_process`.

    Args:
        posterior: From `convert` or `load`.
        inputs: A tensor (B, ...), a tuple or a mapping of such, or a loader. Batches of a loader may be inputs
            alone (a tensor or a mapping) or (inputs, targets); targets are not looked at. Arrays are taken as tensors.
            Floating-point numbers are converted to the type of the network's parameters, where these have one type.
        how: "sampling"; "mean", one pass without noise; and, for posteriors with independent Gaussian weights, with
            Kronecker products, with noisy layers or with a random last layer (`Laplace()`), "streamlined", mean and
            variance in one pass, by the engine that suits the network (the prediction's `predictor` says which);
            "linearised", the exact variance of every output to first order in what is random, by one backward pass
            each. `capabilities(posterior)` says which of them a posterior has, and `Streamlined(engine=...,
            covariance=...)` chooses an engine.
        views: What of the inputs the network sees, as `Views("identity", "mirror")`: predictions for several views
            are averaged, and what they disagree about counts as epistemic (`view_epistemic`). The mean, members, and
            samples of a bank see every view, at the cost of a pass each; other draws take turns. None takes
            `posterior.views`, which `calibrate(views=...)` sets, and the inputs as they are where that is None.
        num_draws: How many draws; None takes the posterior's own number. Without sampling nothing is drawn but
            Gaussian outputs, which is cheap, and None integrates over them instead.
        seed: Of the draws; None takes one from torch's global generator.
        chunk_size: The largest number of examples in one pass; None chooses by the device.
        keep_samples: Whether to keep the draws' own predictions, (S, B, ...).
        output: "prediction"; or "features", the average over draws of what the network computes before its last
            linear layer, as a `FeaturePrediction`; or "features:<module>", of that module's input.
        variance_scale: What predictors without draws multiply the outputs' variances with; or what they multiply the
            variances of layers' weights with, by the layers' names. `fit_variance_scale` finds both.
        input_variance: The variance of the inputs' first tensor, which broadcasts against it, for
            how=Streamlined(engine="moments").
        progress: Whether to show a progress bar.

    Returns:
        The prediction, with all examples; in main memory if the inputs came from a loader.

    Example:
        >>> from torch import nn
        >>> from bayesify import MCDropout, convert
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> prediction = predict(convert(network, MCDropout()), torch.randn(5, 4), seed=0)
        >>> prediction.probs.shape, bool((prediction.epistemic > 0).all())
        (torch.Size([5, 3]), True)
    """
    require_posterior(posterior)
    inputs, direct = as_inputs(inputs)
    predictor = as_predictor(how, posterior)
    check_output(output)
    if seed is None:
        seed = int(torch.randint(2**31, ()))
        seed = seed if direct else gather(seed)[0]
    seen = as_views(views, posterior.views)
    request = Request(num_draws, seed, keep_samples, output, variance_scale, input_variance, seen)
    predictor.check(request)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, but it is {chunk_size}.")
    if predictor.random or predictor.variances:  # a mean never is random
        warn_unless_learned(posterior)
    device = posterior_device(posterior)

    def predicted(batch: Any) -> list[Prediction]:
        batch = in_network_type(to_device(batch if direct else inputs_of(batch), device), posterior.network)
        # The lock keeps other threads from seeing, and from ending, this evaluation mode.
        recorded = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        with recorded, torch.no_grad(), posterior.lock, evaluation_mode(posterior.network):
            found = _predict_batch(posterior, predictor, batch, request, chunk_size, progress and direct)
        return found if direct else [prediction.cpu() for prediction in found]

    if direct:
        parts = predicted(inputs)
    else:
        each = in_order(inputs, predicted, norm=lambda: weight_norm(posterior))
        shown = bar(each, "predict", shown=progress and rank() == 0, total=length_hint(inputs) or None)
        parts = [part for some in shown for part in some]
    if not parts:
        raise ValueError("There is nothing to predict: the inputs are empty. Check the loader or the tensor.")
    return Prediction.join(parts)


def _predict_batch(
    posterior: Posterior, predictor: Predictor, batch: Any, request: Request, chunk_size: int | None, progress: bool
) -> list[Prediction]:
    count = batch_rows(batch)
    if not count:
        return []
    trace = posterior.trace(batch)
    try:
        run = predictor.prepared(posterior, batch, request)
        rows = chunk_size or predictor.breadth * rows_per_pass(posterior, trace, count)
        spread, parts = request.input_variance, []
        each = spread is not None and spread.ndim > 0 and len(spread) == count
        for start in bar(range(0, count, rows), "predict", shown=progress):
            part = slice_rows(batch, start, min(start + rows, count)) if count > rows else batch
            made = run(part, spread[start : start + rows] if each and spread is not None else spread)
            parts.append(made.complete() if count > rows else made)  # what waits has all draws in memory
    except BaseException:
        posterior.runtime.forget(trace)
        raise
    trace.prove(stacklevel=5)
    warn_of_nan(posterior, batch, parts, stacklevel=6)
    return parts


def posterior_device(posterior: Posterior) -> torch.device:
    """Return the device of a posterior's parameters."""
    tensor = first_parameter(posterior)
    return torch.device("cpu") if tensor is None else tensor.device


def weight_norm(posterior: Posterior) -> float:
    """Return the sum of the norms of all weights that this process holds whole, which tells posteriors apart."""
    tensors = [t for t in (*posterior.parameters(), *posterior.buffers()) if not is_sharded(t) and t.numel()]
    norms = [torch.linalg.vector_norm(t.detach(), dtype=torch.float64) for t in tensors if t.is_floating_point()]
    return float(torch.stack(norms).sum()) if norms else 0.0
