"""Which inputs drive the uncertainty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import map_tensors, to_device
from bayesify.laws import Posterior, require_posterior, warn_unless_learned
from bayesify.prediction import posterior_device

__all__ = ["Sensitivity", "input_sensitivity"]


@dataclass(frozen=True)
class Sensitivity:
    """What each entry of the inputs does to the variance of the outputs.

    Attributes:
        variance: V(x), the posterior's variance of the outputs (of centred logits), summed over them, (B,).
        gradient: dV / dx_i, as the inputs: where V rises with the entry, it is positive.
        contribution: v_i sum_c (d f_c / d x_i)^2, the variance that an uncertain entry would add to the outputs.
    """

    variance: Tensor
    gradient: Tensor
    contribution: Tensor


@renamed(num_samples="num_draws")
def input_sensitivity(
    posterior: Posterior,
    inputs: Any,
    *,
    input_variance: float | Tensor = 1.0,
    num_draws: int | None = None,
    seed: int = 0,
) -> Sensitivity:
    """Ask which inputs drive the uncertainty, in two ways.

    The derivative of the variance over draws f_s with mean f, V = (1/S) sum_s |f_s - f|^2, is
    dV/dx = (2/S) sum_s (f_s - f)' df_s/dx: two passes and a backward pass for each draw, and memory that does not grow
    with S. And the share of each entry in the outputs' variance if entry i of the input had a variance v_i of its own,
    to first order v_i sum_c (d f_c / d x_i)^2 of the draws' mean f: a backward pass for each draw and output c.

    Args:
        posterior: Any posterior.
        inputs: B examples; the first tensor of numbers among them is asked about.
        input_variance: v; broadcasts against the inputs.
        num_draws: S; None takes the posterior's own number.
        seed: Of the draws.

    Returns:
        Both, for each entry of the inputs.

    Example:
        >>> from torch import nn
        >>> from bayesify import MCDropout, convert
        >>> network = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1, bias=False))
        >>> _ = nn.init.ones_(network[1].weight)
        >>> posterior = convert(network, MCDropout(), likelihood="regression")
        >>> found = input_sensitivity(posterior, torch.tensor([[3.0, 0.0]]), num_draws=50)
        >>> bool(found.gradient[0, 0] > 0), found.contribution.shape
        (True, torch.Size([1, 2]))
    """
    require_posterior(posterior)
    warn_unless_learned(posterior)
    inputs = to_device(inputs, posterior_device(posterior))
    asked = _first_numbers(inputs)
    spread = torch.as_tensor(input_variance, dtype=asked.dtype, device=asked.device)
    if not bool((spread >= 0).all()):
        raise ValueError("input_variance must not be negative.")
    leaf = asked.detach().clone().requires_grad_()
    placed = map_tensors(lambda tensor: leaf if tensor is asked else tensor, inputs)
    keys = posterior.keys(num_draws, seed)
    with torch.inference_mode(False), posterior.lock, evaluation_mode(posterior):
        with torch.no_grad():
            mean = _values(posterior, placed, keys[0])
            for key in keys[1:]:
                mean = mean + _values(posterior, placed, key)
            mean = mean / len(keys)
        variance, gradient = torch.zeros_like(mean[:, 0]), torch.zeros_like(leaf)
        with torch.enable_grad():
            slopes = [torch.zeros_like(leaf) for _ in range(mean.shape[1])]
            for key in keys:
                values = _values(posterior, placed, key)
                moved = (values - mean).detach()
                variance += moved.square().sum(1) / len(keys)
                for index, slope in enumerate(slopes):
                    (one,) = torch.autograd.grad(values[:, index].sum(), leaf, retain_graph=True)
                    slope += one / len(keys)
                (one,) = torch.autograd.grad(values, leaf, moved * (2 / len(keys)))
                gradient += one
    squares = torch.stack(slopes).square().sum(0)
    try:
        contribution = squares * spread.expand_as(squares)
    except RuntimeError as error:
        raise ValueError(
            f"input_variance has the shape {tuple(spread.shape)}, which does not broadcast to the inputs' "
            f"{tuple(leaf.shape)}."
        ) from error
    return Sensitivity(variance, gradient, contribution)


def _values(posterior: Posterior, inputs: Any, key: Any) -> Tensor:
    """Return a draw's centred logits, or means, (B, K)."""
    outputs = posterior.likelihood.centre(posterior.evaluate(inputs, [key])[0])
    return outputs.reshape(outputs.shape[0], -1)


def _first_numbers(inputs: Any) -> Tensor:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) if tensor.is_floating_point() else None, inputs)
    if not found:
        raise ValueError("The inputs hold no tensor of numbers whose effect could be asked for; tokens have none.")
    return found[0]
