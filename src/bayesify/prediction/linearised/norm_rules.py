"""Rules of normalisation layers whose scale or shift is random, for a linearised pass; importing it registers them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from bayesify.prediction.linearised.tensor import affine, rule_for

__all__: list[str] = []


@rule_for(functional.batch_norm)
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    del momentum
    if training or running_mean is None or running_var is None:
        raise ValueError(
            "A random batch normalisation uses the batch's own statistics, so that examples depend on each other. Give "
            "it running statistics, or use how='sampling'."
        )
    return affine(input, weight, bias, (1,), running_mean, (running_var + eps).rsqrt())


@rule_for(functional.layer_norm)
def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    x = functional.layer_norm(input, normalized_shape, None, None, eps)
    return affine(x, weight, bias, tuple(range(-len(normalized_shape), 0)))


@rule_for(functional.rms_norm)
def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    x = functional.rms_norm(input, normalized_shape, None, eps)
    return affine(x, weight, None, tuple(range(-len(normalized_shape), 0)))


@rule_for(functional.group_norm)
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return affine(functional.group_norm(input, num_groups, None, None, eps), weight, bias, (1,))


@rule_for(functional.instance_norm)
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    x = functional.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return affine(x, weight, bias, (1,))
