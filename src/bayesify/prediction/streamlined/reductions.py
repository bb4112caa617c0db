"""Running sums, soft and hard maxima, norms and sample variances along dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.elementwise import elementwise
from bayesify.prediction.streamlined.moments import Moments, centre, moment_rule, settings
from bayesify.prediction.streamlined.normalisation import normalise
from bayesify.prediction.streamlined.pooling import over_positions, reduced, summed_variance

__all__: list[str] = []


@moment_rule(torch.cumsum, Tensor.cumsum, kind="exact")
def _cumsum(input: Moments, dim: int, *, dtype: torch.dtype | None = None) -> Moments:
    """Return running sums: sums of variances, with what positions have in common."""

    def total(x: Tensor) -> Tensor:
        return x.cumsum(dim, dtype=dtype)

    variance = summed_variance(input, total, positions=over_positions(input.centre.ndim, dim))
    return input.like(total(input.centre), variance)


@moment_rule(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp, kind="first order")
def _logsumexp(input: Moments, dim: Any, keepdim: bool = False) -> Moments:
    """Return the soft maximum to first order: its gradient is p = softmax, so var = sum p^2 v."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    peak = torch.logsumexp(input.centre, dims, keepdim=True)
    weighted = input.like(input.centre, (input.centre - peak).exp().square() * input.variance)
    positions = over_positions(input.centre.ndim, dims)
    variance = summed_variance(weighted, lambda x: x.sum(dims, keepdim=keepdim), positions=positions)
    return reduced(input, torch.logsumexp(input.centre, dims, keepdim=keepdim), variance)


def _extreme(name: str) -> Any:
    """Return the rule of max or min: of all entries, along one dimension with its places, or of two tensors."""
    whole, pair = getattr(torch, f"a{name}"), getattr(torch, f"{name}imum")

    def rule(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        second = dim if isinstance(dim, Tensor) else other
        if second is not None:
            return pair(input, second)
        if dim is None:
            return whole(input)
        places = getattr(input.centre, name)(dim, keepdim=keepdim).indices
        return getattr(torch.return_types, name)((whole(input, dim, keepdim=keepdim), places))

    return rule


for _name in ("max", "min"):
    moment_rule(getattr(torch, _name), getattr(Tensor, _name), kind="matched")(_extreme(_name))


@moment_rule(torch.topk, Tensor.topk, kind="first order")
def _topk(input: Moments, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the entries whose means are the largest."""
    values, indices = torch.topk(input.centre, k, dim, largest, sorted)
    return torch.return_types.topk((input.like(values, input.variance.gather(dim, indices)), indices))


@moment_rule(torch.sort, Tensor.sort, kind="first order")
def _sort(input: Moments, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    """Return entries in the order of their means."""
    values, indices = torch.sort(input.centre, dim=dim, descending=descending, stable=stable)
    return torch.return_types.sort((input.like(values, input.variance.gather(dim, indices)), indices))


# -- norms and spreads ------------------------------------------------------------------------------------------------


@moment_rule(functional.normalize, kind="first order")
def _normalize(input: Moments, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Return y = x / |x|: with J = (I - y y') / |x|, var_i = (v_i (1 - 2 y_i^2) + y_i^2 sum_j y_j^2 v_j) / |x|^2.

    Matching moments, |x|^2 is its own mean, as in `normalise`. Vectors shorter than eps are divided by it.
    """
    if p != 2 or not isinstance(dim, int) or out is not None:
        return NotImplemented
    mean, v = input.centre.movedim(dim, -1), input.variance.movedim(dim, -1)
    square = mean.square().sum(-1, keepdim=True)
    if not settings().first_order:
        square = square + v.sum(-1, keepdim=True)
    short = square <= eps**2
    size = mean.shape[-1]
    x, variance = normalise(torch.where(short, 1.0, mean), v, 0.0, centred=False)
    x = torch.where(short, mean / eps, x / math.sqrt(size))
    variance = torch.where(short, v / eps**2, variance / size)
    return input.like(x.movedim(-1, dim), variance.movedim(-1, dim))


@moment_rule(torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, kind="first order")
def _norm(input: Moments, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """Return the length |x| to first order: var = sum x^2 v / |x|^2; the sum and the largest of |x| by their rules."""
    order = options.pop("p", ord)
    order = 2 if order in (None, "fro") else order
    if any(value is not None for value in options.values()) or (dim is None and input.centre.ndim > 1):
        return NotImplemented
    if order == 2 and not (isinstance(dim, list | tuple) and len(dim) > 1):
        dims = [-1] if dim is None else [dim] if isinstance(dim, int) else list(dim)
        length = input.centre.square().sum(dims, keepdim=True).sqrt()
        unit = input.centre / length.clamp_min(torch.finfo(length.dtype).tiny)
        variance = (unit.square() * input.variance).sum(dims, keepdim=keepdim)
        return reduced(input, length if keepdim else length.squeeze(dims[0]), variance)
    dim = -1 if dim is None else dim
    if order == 1:
        return torch.abs(input).sum(dim, keepdim=keepdim)
    return torch.abs(input).amax(dim, keepdim=keepdim) if order == math.inf else NotImplemented


@moment_rule(torch.var, Tensor.var, kind="exact")
def _var(
    input: Moments, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Any:
    """Return the sample variance s^2 = x' A x / n, A = I - 1 1' / D, n = D - 1 or D.

    E = (sum (m - mean m)^2 + (1 - 1/D) sum v) / n, and of Gaussian entries
    Var = (4 sum w^2 v + 2 (1 - 2/D) sum v^2 + 2 (sum v)^2 / D^2) / n^2 with w = m - mean m.
    """
    if isinstance(dim, bool):
        return NotImplemented
    dims = list(range(input.centre.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    size = math.prod(input.centre.shape[one] for one in dims)
    left = size - (int(unbiased) if correction is None else correction)
    mean, v = input.centre, input.variance

    def total(x: Tensor) -> Tensor:
        return x.sum(dims, keepdim=keepdim)

    moved = mean - mean.mean(dims, keepdim=True)
    square, variance = total(moved.square()), 4 * total(moved.square() * v)
    if not settings().first_order:
        square = square + (1 - 1 / size) * total(v)
        variance = variance + 2 * (1 - 2 / size) * total(v.square()) + 2 * total(v).square() / size**2
    return reduced(input, square / left, variance / left**2)


@moment_rule(torch.std, Tensor.std, kind="matched")
def _std(input: Moments, *args: Any, **options: Any) -> Any:
    found = _var(input, *args, **options)
    return found if found is NotImplemented else elementwise(torch.sqrt, found, careful=True)


@moment_rule(torch.var_mean, kind="exact")
def _var_mean(
    input: Moments, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Any:
    found = _var(input, dim, unbiased, keepdim, correction=correction)
    if found is NotImplemented:
        return found
    return found, input.mean(list(range(input.centre.ndim)) if dim is None else dim, keepdim=keepdim)


@moment_rule(torch.bilinear, kind="exact")
def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return x' W_o y + b_o: exact for random weights and either random input."""
    if centre(input1).ndim != 2:
        return NotImplemented
    one = torch.einsum("bi,oij->boj", input1, weight)
    made = torch.einsum("boj,bj->bo", one, input2)
    return made if bias is None else made + bias
