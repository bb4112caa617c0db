"""A random tensor of a network, as its operations meet it in a linearised pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify._core.trees import map_tensors
from bayesify.laws import BatchDim
from bayesify.laws.kronecker import Rotated
from bayesify.layers import Convolution
from bayesify.prediction.attention_operations import multi_head_attention
from bayesify.prediction.linearised.accumulator import Batch, Ledger
from bayesify.prediction.linearised.convolutions import ConvolutionCall
from bayesify.prediction.linearised.rules import (
    AffineCall,
    EmbeddingCall,
    ExpandCall,
    LinearCall,
    Random,
    run,
)
from bayesify.prediction.overrides import is_metadata, plain_call

__all__ = ["RandomWeight", "RotatedWeight", "affine", "rule_for"]

WeightT = TypeVar("WeightT", bound="RandomWeight")
_RULES: dict[Any, Callable[..., Any]] = {}
_MAPS = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)


class RandomWeight(Tensor):
    """A tensor with variances, whose operations account for them in the backward pass.

    Operations that are linear in it have a formula. One that has none lets its tensor be looped over, example by
    example, which is slow and as exact.
    """

    value: Tensor
    variance: Tensor
    ledger: Ledger
    label: str

    @classmethod
    def make(cls: type[WeightT], value: Tensor, variance: Tensor, ledger: Ledger, name: str) -> WeightT:
        """Return a random tensor with a mean and variances."""
        weight = value.as_subclass(cls) if type(value) in (Tensor, nn.Parameter) else _untraced(value)
        weight.value, weight.variance, weight.ledger, weight.label = value, variance, ledger, name
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation by its formula."""
        if is_metadata(func):
            return plain_call(func, args, kwargs)
        rule = _RULES.get(func) if RotatedWeight not in types or func in _MAPS else None
        result = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        map_tensors(_loop, (args, kwargs or {}))
        plain_args, plain_kwargs = map_tensors(_plain, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


class _TracedWeight(RandomWeight):
    """A random tensor without data: a part of a weight while a pass is traced for an export."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what did not go through a rule."""
        raise NotImplementedError(str(func))


def _untraced(value: Tensor) -> Any:
    sizes = (value.shape, value.stride(), value.storage_offset())
    return Tensor._make_wrapper_subclass(_TracedWeight, *sizes, dtype=value.dtype, device=value.device)


class RotatedWeight(RandomWeight):
    """A weight, or its bias, with correlated entries: linear maps have a formula for both together."""

    rotated: Rotated

    @staticmethod
    def turn(value: Tensor, variance: Tensor, ledger: Ledger, name: str, rotated: Rotated) -> RotatedWeight:
        """Return one of the two tensors."""
        weight = RotatedWeight.make(value, variance, ledger, name)
        weight.rotated = rotated
        return weight


def _loop(tensor: Tensor) -> None:
    if isinstance(tensor, RandomWeight):
        tensor.ledger.looped.add(tensor.label)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.value if isinstance(tensor, RandomWeight) else tensor


def rule_for(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as what these become where they meet a random tensor."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            _RULES[function] = rule
        return rule

    return register


class _Visit:
    """One call: its ledger, and its random tensors."""

    def __init__(self, x: Tensor, *weights: Tensor | None) -> None:
        random = [weight for weight in weights if isinstance(weight, RandomWeight)]
        self.ledger = random[0].ledger
        batch = self.ledger.visit(x, [weight.label for weight in random])
        self.x = x
        if batch.expand:
            self.x, batch = x.expand(self.ledger.rows, *x.shape[1:]), Batch(BatchDim(0))
        self.rows = self.ledger.arrange(self.x, batch)

    def random(self, weight: Tensor | None) -> Random | None:
        """Return the random part of a tensor."""
        if not isinstance(weight, RandomWeight):
            return None
        return Random(weight.variance, self.ledger.use(weight.label, weight.variance))

    def random_matrix(self, weight: Tensor) -> Random | None:
        """Return the same of a matrix, with what its variances are a product of."""
        random = self.random(weight)
        return None if random is None else replace(random, factors=self.ledger.factors_of(random.part, random.variance))

    def random_map(self, weight: Tensor, bias: Tensor | None) -> tuple[Random | None, Random | None]:
        """Return the random parts of a linear map, in one where they are correlated."""
        if isinstance(weight, RotatedWeight):
            rotated = weight.rotated
            variance = rotated.variance[0] if weight.ndim == 2 else rotated.variance
            return Random(variance, self.ledger.use(weight.label, variance), rotated=rotated), None
        return (self.random_matrix(weight) if weight.ndim == 2 else self.random(weight)), self.random(bias)


def _torn(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a weight meets another bias than the one that it is correlated with."""
    if not isinstance(weight, RotatedWeight):
        return isinstance(bias, RotatedWeight)
    return (bias.label if isinstance(bias, RandomWeight) else None) != weight.rotated.bias


def _value(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else _plain(weight)


# -- products -----------------------------------------------------------------------------------------------------


@rule_for(functional.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if isinstance(input, RandomWeight) or weight.ndim != 2 or _torn(weight, bias):
        return NotImplemented
    visit = _Visit(input, weight, bias)
    random = visit.random_map(weight, bias)
    return run(LinearCall(visit.ledger, visit.rows, _plain(weight), _value(bias), *random), visit.x)


@rule_for(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def _matmul(input: Tensor, other: Tensor) -> Any:
    if isinstance(input, RandomWeight) or other.ndim != 2:
        return NotImplemented
    return _linear(input, other.t())


@rule_for(torch.addmm, Tensor.addmm)
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1 or input.ndim != 1 or isinstance(mat1, RandomWeight):
        return NotImplemented
    return _linear(mat1, mat2.t(), input)


def _convolution(dims: int, transposed: bool) -> Callable[..., Any]:
    def rule(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **options: Any,
    ) -> Any:
        # After the padding a convolution takes dilation and groups; a transposed one output_padding, groups, dilation.
        names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        options = {"output_padding": 0, "dilation": 1, "groups": 1, **dict(zip(names, rest, strict=False)), **options}
        if isinstance(input, RandomWeight) or input.ndim != dims + 2 or _torn(weight, bias):
            return NotImplemented
        steps, dilation = _each(stride, dims), _each(options["dilation"], dims)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            input = functional.pad(input, [p for t in reversed(total) for p in (t // 2, t - t // 2)])
        sides = _each(0 if isinstance(padding, str) else padding, dims)
        visit = _Visit(input, weight, bias)
        operation = Convolution(
            steps, sides, dilation, transposed, _each(options["output_padding"], dims), options["groups"]
        )
        random = visit.random_map(weight, bias)
        call = ConvolutionCall(visit.ledger, visit.rows, operation, _plain(weight), _value(bias), *random)
        return run(call, visit.x)

    return rule


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


for _dims, (_plain_one, _transposed_one) in enumerate(
    [
        (functional.conv1d, functional.conv_transpose1d),
        (functional.conv2d, functional.conv_transpose2d),
        (functional.conv3d, functional.conv_transpose3d),
    ],
    start=1,
):
    _RULES[_plain_one] = _convolution(_dims, False)
    _RULES[_transposed_one] = _convolution(_dims, True)


@rule_for(functional.embedding)
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    del padding_idx, norm_type, scale_grad_by_freq, sparse  # these change gradients, not the output
    if max_norm is not None:
        return NotImplemented
    visit = _Visit(input, weight)
    random = visit.random(weight)
    assert random is not None
    return run(EmbeddingCall(visit.ledger, visit.rows, _plain(weight), random), visit.x)


_RULES[functional.multi_head_attention_forward] = multi_head_attention


def affine(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dims: tuple[int, ...],
    centre: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Return factor (x - centre) weight + bias along some dimensions, as a call whose randomness is kept."""
    visit = _Visit(x, weight, bias)
    random = visit.random(weight), visit.random(bias)
    call = AffineCall(visit.ledger, visit.rows, dims, _value(weight), _value(bias), centre, factor, *random)
    return run(call, visit.x)


# -- a tensor that meets activations entry by entry -----------------------------------------------------------------


def _meets(operation: Any) -> Callable[..., Any]:
    def rule(one: Any, other: Any, **options: Any) -> Any:
        random = [value for value in (one, other) if isinstance(value, RandomWeight)]
        x = other if isinstance(one, RandomWeight) else one
        if len(random) != 1 or not isinstance(x, Tensor):
            return NotImplemented
        weight = random[0]
        if operation is torch.mul and (dims := _scaled_dims(x, weight)) is not None:
            return affine(x, weight.view(-1), None, dims)
        if x.ndim < 1 or not (weight.ndim < x.ndim or (weight.ndim == x.ndim and weight.shape[0] == 1)):
            return NotImplemented
        batch = weight.ledger.visit(x, [weight.label])
        if batch.expand or batch.dim is None or batch.dim.dim != 0 or batch.dim.times != 1:
            return NotImplemented
        return operation(
            *(_copies(value, x.ndim) if isinstance(value, RandomWeight) else value for value in (one, other)), **options
        )

    return rule


def _scaled_dims(x: Tensor, weight: RandomWeight) -> tuple[int, ...] | None:
    """Return the dimension along which a tensor multiplies an activation: features (D,) or channels (C, 1, ...)."""
    if x.ndim < 2 or weight.ndim < 1:
        return None
    if weight.ndim == 1 and weight.shape[0] == x.shape[-1]:
        return (-1,)
    channels = weight.ndim == x.ndim - 1 and weight.numel() == weight.shape[0] == x.shape[1]
    return (1,) if channels else None


def _copies(weight: RandomWeight, ndim: int) -> Tensor:
    """Return a copy of a tensor for each example, with as many dimensions as what it meets."""
    random = Random(weight.variance, weight.ledger.use(weight.label, weight.variance))
    copies = run(ExpandCall(weight.ledger, weight.value, random), weight.ledger.anchor.detach())
    shape = weight.shape[1:] if weight.ndim == ndim else weight.shape
    return copies.reshape(copies.shape[0], *(1,) * (ndim - 1 - len(shape)), *shape)


for _operation, _functions in {
    torch.add: (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
    torch.mul: (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
    torch.sub: (torch.sub, Tensor.sub, Tensor.__sub__),
}.items():
    for _function in _functions:
        _RULES[_function] = _meets(_operation)


@rule_for(Tensor.expand)
def _expand(weight: Tensor, *sizes: Any) -> Any:
    shape = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple | torch.Size) else sizes
    if not isinstance(weight, RandomWeight) or weight.ndim != len(shape) or weight.ndim < 2 or weight.shape[0] != 1:
        return NotImplemented
    if any(size not in (-1, own) for size, own in zip(shape[1:], weight.shape[1:], strict=True)):
        return NotImplemented
    like = weight.value.new_empty(()).expand(shape[0] if shape[0] != -1 else 1, *weight.shape[1:])
    batch = weight.ledger.visit(like, [weight.label])
    if batch.expand or batch.dim is None or batch.dim.dim != 0 or batch.dim.times != 1:
        return NotImplemented
    return _copies(weight, weight.ndim)


# -- views ----------------------------------------------------------------------------------------------------------


def _view(operation: Callable[..., Any]) -> Callable[..., Any]:
    def rule(weight: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(weight, RandomWeight):
            return NotImplemented
        values, variances = (operation(tensor, *args, **kwargs) for tensor in (weight.value, weight.variance))
        if isinstance(values, Tensor):
            return RandomWeight.make(values, variances, weight.ledger, weight.label)
        pairs = zip(values, variances, strict=True)
        return type(values)(RandomWeight.make(a, b, weight.ledger, weight.label) for a, b in pairs)

    return rule


for _operation in (
    *(Tensor.t, Tensor.transpose, Tensor.permute, Tensor.view, Tensor.chunk, Tensor.split, Tensor.unbind),
    *(Tensor.squeeze, Tensor.unsqueeze, Tensor.narrow, Tensor.detach, Tensor.unflatten, Tensor.swapaxes),
    *(torch.t, torch.transpose, torch.permute, torch.chunk, torch.split, torch.unbind, torch.squeeze, torch.unsqueeze),
    *(torch.narrow, torch.detach, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
):
    _RULES[_operation] = _view(_operation)
