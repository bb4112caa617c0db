"""How a prediction is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify._core.inputs import as_inputs, in_network_type
from bayesify._core.modes import evaluation_mode
from bayesify._core.progress import bar
from bayesify._core.trees import batch_rows, inputs_of, slice_rows, to_device
from bayesify.laws import Key, Posterior, require_posterior, warn_unless_learned
from bayesify.likelihoods import Stream
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction.features import FeatureStream, check_output, features_read
from bayesify.prediction.layout import layout_of
from bayesify.prediction.names import ONE_PASS, PREDICTORS, How, require_name
from bayesify.prediction.sampling import add_draws

if TYPE_CHECKING:
    from bayesify.prediction.components import Component, gaussian_components
    from bayesify.prediction.streamlined import Moments, moment_rule
    from bayesify.prediction.variance_scale import fit_variance_scale

__all__ = [
    "ONE_PASS",
    "PREDICTORS",
    "Component",
    "How",
    "Moments",
    "add_draws",
    "fit_variance_scale",
    "gaussian_components",
    "moment_rule",
    "posterior_device",
    "predict",
    "require_name",
]

# What only predictions without draws need is imported when it is asked for.
_LATER = {
    "Component": "components",
    "gaussian_components": "components",
    "fit_variance_scale": "variance_scale",
    "Moments": "streamlined",
    "moment_rule": "streamlined",
}


def __getattr__(name: str) -> Any:
    """Import a part on first use."""
    if name not in _LATER:
        raise AttributeError(f"module 'bayesify.prediction' has no attribute {name!r}")
    return getattr(import_module(f"bayesify.prediction.{_LATER[name]}"), name)


def predict(
    posterior: Posterior,
    inputs: Any,
    *,
    how: How = "sampling",
    num_samples: int | None = None,
    seed: int | None = None,
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
    one before it; memory does not grow with S unless the samples are kept.

    Args:
        posterior: From `convert` or `load`.
        inputs: A tensor (B, ...), a tuple or a mapping of such, or a loader. Batches of a loader may be inputs
            alone (a tensor or a mapping) or (inputs, targets); targets are not looked at. Arrays are taken as tensors.
            Floating-point numbers are converted to the type of the network's parameters, where these have one type.
        how: "sampling"; "mean", one pass without noise; and, for posteriors with independent Gaussian weights, with
            Kronecker products, with noisy layers or with a random last layer (`Laplace()`), "streamlined", mean and
            variance in one pass, by the engine that suits the network (the prediction's `predictor` says which);
            "linearised", the exact variance of every output to first order in what is random, by one backward pass
            each. "moments", "margin" and "principal" are the engines of "streamlined", and "closed-form" is its name
            where only the last layer is random. "covariance" carries covariances through stacks of linear layers and
            activations. "per-head" is "moments" with the covariances within each head of attention.
        num_samples: How many draws; None takes the posterior's own number. Without sampling nothing is drawn but
            Gaussian outputs, which is cheap, and None integrates over them instead.
        seed: None takes one from torch's global generator.
        chunk_size: The largest number of examples in one pass; None chooses by the device.
        keep_samples: Whether to keep the draws' own predictions, (S, B, ...).
        output: "prediction"; or "features", the average over draws of what the network computes before its last
            linear layer, as a `FeaturePrediction`; or "features:<module>", of that module's input.
        variance_scale: What predictors without draws multiply the outputs' variances with; or what they multiply the
            variances of layers' weights with, by the layers' names. `fit_variance_scale` finds both.
        input_variance: The variance of the inputs' first tensor, which broadcasts against it, for how="moments".
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
    require_name(how)
    check_output(output)
    if how == "closed-form" and (output != "prediction" or keep_samples):
        raise ValueError("A prediction in closed form has neither features nor samples: use how='sampling'.")
    if how in ONE_PASS:
        _check_one_pass(how, output, keep_samples, num_samples, variance_scale)
    elif input_variance is not None:
        raise ValueError(f"how={how!r} takes inputs as they are. Use how='moments' for an input_variance.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, but it is {chunk_size}.")
    if how not in ("mean", "closed-form"):  # the first never is random, the second refuses
        warn_unless_learned(posterior)
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    device = posterior_device(posterior)
    keys = posterior.keys(None if how in ONE_PASS else num_samples, seed)
    batches = [inputs] if direct else bar(inputs, "predict", shown=progress)
    parts = []
    for batch in batches:
        batch = to_device(batch if direct else inputs_of(batch), device)
        batch = in_network_type(batch, posterior.network)
        count = batch_rows(batch)
        # The lock keeps other threads from seeing, and from ending, this evaluation mode.
        with torch.inference_mode(False), torch.no_grad(), posterior.noise.lock, evaluation_mode(posterior):
            rows = chunk_size or (layout_of(posterior, batch, keys).rows if count else 1)
            one_pass = _without_draws(posterior, how, batch) if how in ONE_PASS and count else None
            for start in bar(range(0, count, rows), "predict", shown=progress and direct):
                part = slice_rows(batch, start, min(start + rows, count)) if count > rows else batch
                if one_pass is None:
                    prediction = _predict_chunk(posterior, part, keys, how, keep_samples, output)
                else:
                    spread = input_variance
                    if spread is not None and spread.ndim and len(spread) == count:
                        spread = spread[start : start + rows]
                    prediction = one_pass.predict(
                        part, num_samples=num_samples, seed=seed, scale=variance_scale, input_variance=spread
                    )
                parts.append(prediction if direct else prediction.cpu())
    if not parts:
        raise ValueError("There is nothing to predict: the inputs are empty. Check the loader or the tensor.")
    return Prediction.join(parts)


def _without_draws(posterior: Posterior, how: str, batch: Any) -> Any:
    from bayesify.prediction.one_pass import one_pass_of

    return one_pass_of(posterior, how, batch)


def _check_one_pass(how: str, output: str, keep_samples: bool, num_samples: int | None, variance_scale: Any) -> None:
    if output != "prediction":
        raise ValueError(f"how={how!r} predicts outputs, not features. Use how='sampling' for output={output!r}.")
    if keep_samples:
        raise ValueError(f"how={how!r} has no draws to keep. Use how='sampling' with keep_samples=True.")
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples must be a whole number of at least 1, but it is {num_samples!r}.")
    if not isinstance(variance_scale, Mapping) and not 0 <= variance_scale < math.inf:
        raise ValueError(f"variance_scale must be at least 0 and finite, but it is {variance_scale}.")


def _predict_chunk(
    posterior: Posterior, inputs: Any, keys: Sequence[Key], how: str, keep_samples: bool, output: str
) -> Prediction:
    with ExitStack() as stack:
        stream: Stream
        if output == "prediction":
            stream = posterior.likelihood.stream(keep_samples=keep_samples)
        else:
            features = stack.enter_context(features_read(posterior, output, inputs, keys[0]))
            stream = FeatureStream(features, keep_samples)
        if how == "mean":
            with posterior.mean():
                stream.add(posterior.outputs(inputs)[None])
        else:
            add_draws(posterior, inputs, keys, stream)
        return stream.result()


def posterior_device(posterior: Posterior) -> torch.device:
    """Return the device of a posterior's parameters."""
    tensor = next(posterior.parameters(), None)
    return torch.device("cpu") if tensor is None else tensor.device
