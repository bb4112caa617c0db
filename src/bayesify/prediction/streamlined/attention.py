"""Attention: queries and keys at their means, and tokens mixed before the value weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.attention_operations import multi_head_attention
from bayesify.prediction.streamlined.heads import Heads
from bayesify.prediction.streamlined.moments import (
    Correlated,
    Moments,
    Source,
    centre,
    moment_rule,
    same_size,
    settings,
)

__all__: list[str] = []

# Mixing the inputs of the value weights takes a product for each head; up to this many times the value weights' own
# size it is worth its exactness.
MOST_MIXING = 2.0


@moment_rule(functional.multi_head_attention_forward, kind="first order")
def _heads(*args: Any, **options: Any) -> Any:
    return multi_head_attention(*args, **options)


@moment_rule(functional.scaled_dot_product_attention, kind="first order")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return A V with A = softmax(Q K' / sqrt d) at the means of Q and K.

    With V = x W', x of mean m and variance v: A V = (A x) W', so c = A m and S = A^2 v go through the weights as any
    input does, Var = U c^2 + (W^2 + U) S, which is exact for weights that all tokens share. Tokens with a common part r
    of their variance have S = (1 - r) A^2 v + r (A sqrt v)^2. Covariances within heads, see `Heads`, are left to the
    next linear map if they are asked for.
    """
    if dropout_p:
        return NotImplemented
    q, k = centre(query), centre(key)
    v, mask = centre(value), centre(attn_mask)
    mean = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if not isinstance(value, Moments):
        return mean
    times = q.shape[-3] // k.shape[-3] if enable_gqa else 1  # heads that share a head of keys and values
    weights = _weights(q, k.repeat_interleave(times, -3) if times > 1 else k, mask, is_causal, scale)
    heads = _through_weights(weights, value, times)
    if times > 1:
        value = value.repeat_interleave(times, -3)
        assert isinstance(value, Moments)
    settings().attentions += 1
    if heads is None:
        return value.like(mean, _mixed(weights, value.variance, value.shared))
    return Moments.make(mean, heads.variance(), value.shared, heads if settings().per_head else None)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    logits = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits[..., :, :], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1)


def _mixed(weights: Tensor, variance: Tensor, shared: Tensor | None) -> Tensor:
    """Return (1 - r) A^2 v + r (A sqrt v)^2."""
    apart = weights.square() @ variance
    if shared is None:
        return apart
    together = (weights @ variance.sqrt()).square()
    share = shared.view(-1, *(1,) * (apart.ndim - 1))
    return apart + share * (together - apart)


def _through_weights(weights: Tensor, value: Moments, times: int = 1) -> Heads | None:
    """Mix the inputs of the value weights instead of the values, where their origin is known and it is worth it."""
    source = value.source
    if not isinstance(source, Source) or value.centre.ndim != 4:
        return None
    found = _rows_of(source, value)
    if found is None:
        return None
    x, rows = found
    rows = rows.repeat_interleave(times, 0)
    heads, tokens = weights.shape[1], weights.shape[-1]
    if heads * tokens > MOST_MIXING * x.shape[-1] and not settings().per_head:
        return None
    loadings, spread = [], []
    own: Tensor | None = None
    if isinstance(x, Moments):
        shared = None if x.shared is None or not same_size(x.shared.shape[0], x.centre.shape[0]) else x.shared
        loadings.append(centre(source.weight)[rows])
        spread.append(_mixed(weights, x.variance[:, None], shared))  # (B, H, T, D)
    if isinstance(source.weight, Moments):
        mixed = weights @ centre(x)[:, None]
        if isinstance(source.weight, Correlated):
            loadings.append(source.weight.rotated.left[0][rows])
            spread.append(_inner(source.weight, source.bias, mixed, spread))
        else:
            second = sum(spread, mixed.square())
            own = second @ source.weight.variance[rows].mT
    if isinstance(source.bias, Moments) and not isinstance(source.bias, Correlated):
        of_bias = source.bias.variance[rows][:, None]  # the weights of attention sum to one
        own = of_bias.expand(*weights.shape[:3], -1).clone() if own is None else own + of_bias
    return _made(weights, value, loadings, spread, own)


def _inner(weight: Correlated, bias: Tensor | None, mixed: Tensor, spread: list[Tensor]) -> Tensor:
    """Return Var[E z] of correlated weights (W, b) = V_B E V_A', see `_rotated`, with z = V_A' (A x, 1)."""
    rotated = weight.with_bias(bias)
    second = functional.linear(mixed, rotated.kernel(weight.shape), rotated.offset).square()
    for one in spread:
        second = second + functional.linear(one, rotated.kernel_square)
    return rotated.inner(second)[..., 0, :]


def _made(weights: Tensor, value: Moments, loadings: list[Tensor], spread: list[Tensor], own: Tensor | None) -> Heads:
    """Return what is known of the heads, as a tensor (B, T, H, d) that is looked at as (B, H, T, d)."""
    rows, heads, tokens = weights.shape[:3]
    size = value.centre.shape[-1]
    index = torch.empty((rows, tokens, heads, size), device="meta").transpose(1, 2)
    if not spread:
        loadings, spread = [value.centre.new_zeros(heads, size, 0)], [weights.new_zeros(*weights.shape[:3], 0)]
    return Heads(index, torch.cat(loadings, -1), torch.cat(spread, -1), own)


def _rows_of(source: Source, value: Moments) -> tuple[Tensor, Tensor] | None:
    """Return the linear map's input, (B, S, D), and which rows of its weight made each entry of a head, (H, d).

    The index' strides tell: its output was (B, S, O) or (S, B, O), and the present tensor is (B, H, S, d).
    """
    first, second, width = source.x.shape[0], source.x.shape[1], source.weight.shape[0]
    batch, heads, tokens, size = value.centre.shape
    steps, offset = source.index.stride(), int(source.index.storage_offset())
    if source.index.shape != value.centre.shape or offset >= width:
        return None
    present = (steps[2], steps[0], batch, tokens)
    if all(map(same_size, present, (width, second * width, first, second))):
        x = source.x
    elif all(map(same_size, present, (second * width, width, second, first))):
        x = source.x.transpose(0, 1)
    else:
        return None
    if offset + steps[1] * (heads - 1) + steps[3] * (size - 1) >= width:
        return None
    device = value.centre.device
    rows = (
        offset + steps[1] * torch.arange(heads, device=device)[:, None] + steps[3] * torch.arange(size, device=device)
    )
    return x, rows
