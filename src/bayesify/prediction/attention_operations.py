"""Multi-head attention in operations that have rules of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["multi_head_attention"]


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Do what `torch.nn.functional.multi_head_attention_forward` does, with one linear map for each projection."""
    del embed_dim_to_check, is_causal  # the mask, which torch demands with it, says as much
    odd = (bias_k, bias_v, static_k, static_v)
    if any(x is not None for x in odd) or add_zero_attn or (dropout_p and training):
        return NotImplemented
    if single := query.ndim == 2:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    projected = (functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    q, k, v = (torch.unflatten(x, -1, (num_heads, -1)).permute(1, 2, 0, 3) for x in projected)  # (N, H, L, D)
    mask = _mask(attn_mask, key_padding_mask, num_heads, query)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out = functional.linear(out.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    attention = None
    if need_weights:
        logits = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        attention = (logits if mask is None else logits + mask).softmax(-1)
        attention = attention.mean(1) if average_attn_weights else attention
        attention = attention.squeeze(0) if single else attention
    return out.squeeze(1) if single else out, attention


def _mask(attn_mask: Tensor | None, padding: Tensor | None, heads: int, like: Tensor) -> Tensor | None:
    def additive(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(like.dtype)
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -torch.inf)

    found = None
    if attn_mask is not None:
        found = additive(attn_mask)
        found = torch.unflatten(found, 0, (-1, heads)) if found.ndim == 3 else found
    if padding is not None:
        of_keys = additive(padding)[:, None, None, :]
        found = of_keys if found is None else found + of_keys
    return found
