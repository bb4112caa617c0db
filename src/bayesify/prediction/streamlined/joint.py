"""Mean and covariance of a vector for each example, for stacks of linear layers and activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.overrides import is_metadata, name_of, plain_call
from bayesify.prediction.streamlined.moments import Correlated, Moments, NoRuleError, centre, settings, variance_of

__all__ = ["Joint", "joint_linear"]

WIDEST = 4096  # entries of an activation: its covariance then takes 64 MB of each example
_KEEP = {"dropout", "dropout1d", "contiguous", "clone", "detach", "alpha_dropout", "feature_alpha_dropout"}


class Joint(Tensor):
    """Mean (B, D) and covariance (B, D, D), in the place of an activation.

    Linear layers and functions of single entries keep it; anything else is an error, since it would drop a part.
    """

    centre: Tensor
    covariance: Tensor

    @staticmethod
    def make(centre: Tensor, covariance: Tensor) -> Joint:
        """Return the pair."""
        pair = centre.detach().as_subclass(Joint)
        pair.centre, pair.covariance = centre, covariance
        return pair

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation by its rule."""
        options = dict(kwargs or {})
        if is_metadata(func):
            return plain_call(func, args, options)
        random = [value for value in (*args, *options.values()) if isinstance(value, Joint | Moments)]
        if func is functional.linear:
            return joint_linear(*args, **options)
        if name_of(func) in _KEEP and not any(value is True for value in (*args, *options.values())):
            return args[0]
        if len(random) == 1 and args and isinstance(args[0], Joint):
            return _entrywise(func, args[0], args[1:], options)
        raise NoRuleError(name_of(func))


def joint_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Joint:
    """Return the moments of W x + b: Cov = W C W' + diag(U (m^2 + diag C) + var b), exactly.

    W has independent entries with means W and variances U, and x has mean m and covariance C. With correlated entries,
    (W, b) = V_B E V_A': Cov = W C W' + V_B diag(s (V_A' (m, 1))^2 + s diag(V_A' C V_A)) V_B'.
    """
    mean = functional.linear(centre_of(input), centre(weight), centre(bias))
    if mean.shape[-1] > WIDEST:
        raise ValueError(
            f"Streamlined(covariance='full') would hold {mean.shape[-1]:,}^2 numbers for each example, of a layer with "
            f"{mean.shape[-1]:,} outputs; {WIDEST:,} are the most. Use how='streamlined', which holds variances alone."
        )
    if isinstance(input, Joint):
        covariance = centre(weight) @ input.covariance @ centre(weight).mT
        spread = input.covariance.diagonal(dim1=-2, dim2=-1)
    else:
        spread = variance_of(input)
        covariance = (centre(weight) * spread[:, None]) @ centre(weight).mT
    if isinstance(weight, Correlated):
        return Joint.make(mean, covariance + _rotated_covariance(input, weight, bias))
    own = torch.zeros_like(mean)
    if isinstance(weight, Moments):
        own = (centre_of(input).square() + spread) @ weight.variance.mT
    if isinstance(bias, Moments):
        own = own + bias.variance
    return Joint.make(mean, covariance + torch.diag_embed(own))


def _rotated_covariance(input: Tensor, weight: Correlated, bias: Tensor | None) -> Tensor:
    rotated = weight.with_bias(bias)
    kernel = rotated.kernel(weight.shape)
    second = functional.linear(centre_of(input), kernel, rotated.offset).square()
    if isinstance(input, Joint):
        second = second + ((kernel @ input.covariance) * kernel).sum(-1)
    elif isinstance(input, Moments):
        second = second + functional.linear(input.variance, rotated.kernel_square)
    left = rotated.left[0]
    return (left * rotated.inner(second)) @ left.mT


def centre_of(x: Tensor) -> Tensor:
    """Return the mean of either kind of pair."""
    return x.centre if isinstance(x, Joint) else centre(x)


def _entrywise(func: Callable[..., Any], x: Joint, args: tuple[Any, ...], options: dict[str, Any]) -> Joint:
    """Return the moments of g(x), entry by entry: Cov_ij = e_i e_j C_ij, with the matched variance where i = j.

    To first order e = g'(m); else e = E[g'] = Cov(g(x), x) / v by three nodes, (g(m + s) - g(m - s)) / 2s, s^2 = 3 v.
    Var g(x) >= e^2 v, so that the result is a covariance.
    """
    variance = x.covariance.diagonal(dim1=-2, dim2=-1)
    alone = func(Moments.make(x.centre, variance), *args, **options)
    if not isinstance(alone, Moments) or alone.centre.shape != x.centre.shape:
        raise NoRuleError(name_of(func))
    if settings().first_order:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.centre.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(func(leaf, *args, **options).sum(), leaf)
    else:
        step = (3 * variance.clamp_min(torch.finfo(variance.dtype).tiny)).sqrt()
        slope = (func(x.centre + step, *args, **options) - func(x.centre - step, *args, **options)) / (2 * step)
    covariance = slope[:, :, None] * x.covariance * slope[:, None]
    own = alone.variance - covariance.diagonal(dim1=-2, dim2=-1)
    return Joint.make(alone.centre, covariance + torch.diag_embed(own.clamp_min(0)))
