"""Random products as autograd functions that do not keep a weight for each example.

The forward pass keeps the input and a seed; the backward pass draws the same noise again. Examples are taken in
chunks, so that no more than a chunk's weights exist at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bayesify.layers import Operation

__all__ = ["exemplar", "flipout", "local_reparameterisation", "normals", "signs"]

# The weights of a chunk of examples should stay in the cache, forward and backward: 2^19 numbers are two megabytes.
CHUNK = 2**19
# Of weights that differ in signs alone, which are made faster than numbers are drawn: few calls are worth more.
FLIPPED_CHUNK = 2**20
# Noise up to this share of the layer's own input is kept for the backward pass; drawing it again costs more time.
KEPT_SHARE = 0.5


def normals(shape: list[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw standard normals; those of half precision are rounded single ones."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(shape, dtype=dtype, device=like.device).normal_(generator=generator).to(like.dtype)


def signs(shape: list[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw -1 and 1 with equal probability."""
    drawn = torch.empty(shape, dtype=like.dtype, device=like.device)
    return drawn.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)


def exemplar(x: Tensor, mean: Tensor, std: Tensor, operation: Operation, seed: int) -> Tensor:
    """Multiply each example by its own weight, W_b = mean + std e_b, e_b ~ N(0, I) independent.

    Args:
        x: B examples in the operation's arrangement.
        mean: (*weight).
        std: (*weight).
        operation: The product.
        seed: Decides the noise.

    Returns:
        (B, ...). Costs one product with B times the groups, and B |W| normal numbers; twice as many where they are not
        kept, which is where they are more than half as many as the input's.
    """
    result: Tensor = _Exemplar.apply(x, mean, std, operation, seed)  # type: ignore[no-untyped-call]
    return result


def flipout(
    x: Tensor, mean: Tensor, std: Tensor, operation: Operation, seed: int, *, weights_each: bool = False
) -> Tensor:
    """Multiply each example by W_b = mean + (r_b s_b') (std e), with one e ~ N(0, I) and signs r_b, s_b for each.

    The law of each W_b is that of `exemplar`; those of two examples are uncorrelated, not independent (Wen et al. 2018,
    eq. 4). `weights_each` forms the weights and takes one product with B times the groups; without it there are two
    products, x mean' + r (x s) (std e)'. The numbers are the same.
    """
    result: Tensor = _Flipout.apply(x, mean, std, operation, seed, weights_each)  # type: ignore[no-untyped-call]
    return result


def local_reparameterisation(x: Tensor, mean: Tensor, std: Tensor, seed: int) -> Tensor:
    """Return x mean' + e sqrt(x^2 (std^2)'), which has the law of `exemplar` (Kingma et al. 2015, eq. 6).

    Args:
        x: (..., D), one row for each example.
        mean: (O, D).
        std: (O, D).
        seed: Decides the noise.

    Returns:
        (..., O). Costs two products, and one normal number for each output.
    """
    result: Tensor = _Local.apply(x, mean, std, seed)  # type: ignore[no-untyped-call]
    return result


class _Local(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, std: Tensor, seed: int) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        root = (flat.square() @ std.square().T).sqrt_()
        noise = normals(list(root.shape), root, _generator(seed, x))
        ctx.save_for_backward(x, mean, std, root, noise)
        return _own(torch.addcmul(flat @ mean.T, root, noise).view(*x.shape[:-1], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, std, root, noise = ctx.saved_tensors
        flat, flow = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        # The root has no derivative at zero, where an input is zero or nothing is random: there is no noise.
        of_variance = (flow * noise).div_(root).masked_fill_(root == 0, 0)
        of_std = (of_variance.T @ flat.square()).mul_(std)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (flow @ mean).addcmul_(flat, of_variance @ std.square()).view(x.shape)
        return of_x, flow.T @ flat, of_std, None


class _Exemplar(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, std: Tensor, operation: Operation, seed: int) -> Tensor:
        keep = len(x) * mean.numel() <= KEPT_SHARE * x.numel()
        generator = _generator(seed, x)
        outputs, kept = [], []
        for rows in _chunks(x, mean, CHUNK):
            noise = normals([rows.stop - rows.start, *mean.shape], mean, generator)
            outputs.append(operation.each(x[rows], torch.addcmul(mean, noise, std)))
            if keep:
                kept.append(noise)
        ctx.save_for_backward(x, mean, std, *kept)
        ctx.operation, ctx.seed = operation, seed
        return _own(_joined(outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, std, *kept = ctx.saved_tensors
        generator = _generator(ctx.seed, x)
        of_mean, of_std = torch.zeros_like(mean), torch.zeros_like(std)
        of_x = []
        for index, rows in enumerate(_chunks(x, mean, CHUNK)):
            noise = kept[index] if kept else normals([rows.stop - rows.start, *mean.shape], mean, generator)
            weights = torch.addcmul(mean, noise, std)
            part, of_weights = ctx.operation.each_backward(grad[rows], x[rows], weights, need_x=ctx.needs_input_grad[0])
            of_x.append(part)
            of_mean += of_weights.sum(0)
            of_std += of_weights.mul_(noise).sum(0)
        return _joined(of_x) if ctx.needs_input_grad[0] else None, of_mean, of_std, None, None


class _Flipout(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, std: Tensor, operation: Operation, seed: int, weights_each: bool
    ) -> Tensor:
        generator = _generator(seed, x)
        noise = normals(list(mean.shape), mean, generator)
        of_inputs, of_outputs = (signs(shape, x, generator) for shape in operation.sign_shapes(x, mean))
        ctx.save_for_backward(x, mean, std, noise, of_inputs, of_outputs)
        ctx.operation, ctx.weights_each = operation, weights_each
        change = std * noise
        if not weights_each:
            arranged = operation.arranged(x)
            flipped = operation.shared(arranged * of_inputs, change).mul_(of_outputs)
            return _own(_ordered(operation.shared(arranged, mean).add_(flipped), x))
        first, rest = operation.weight_signs(of_inputs, of_outputs, mean)
        outputs = [
            operation.each(x[rows], _flipped(change[None], first[rows], rest[rows]).add_(mean))
            for rows in _chunks(x, mean, FLIPPED_CHUNK)
        ]
        return _own(_joined(outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, std, noise, of_inputs, of_outputs = ctx.saved_tensors
        need_x, operation, change = ctx.needs_input_grad[0], ctx.operation, std * noise
        if not ctx.weights_each:
            arranged, flow = operation.arranged(x), operation.arranged(grad)
            of_x, of_mean = operation.shared_backward(flow, arranged, mean, need_x=need_x)
            flipped, of_change = operation.shared_backward(
                flow * of_outputs, arranged * of_inputs, change, need_x=need_x
            )
            if need_x:
                of_x = _ordered(of_x.addcmul_(flipped, of_inputs), x)
            return of_x, of_mean, of_change * noise, None, None, None
        of_mean, of_change = torch.zeros_like(mean), torch.zeros_like(std)
        first, rest = operation.weight_signs(of_inputs, of_outputs, mean)
        parts = []
        for rows in _chunks(x, mean, FLIPPED_CHUNK):
            weights = _flipped(change[None], first[rows], rest[rows]).add_(mean)
            part, of_weights = operation.each_backward(grad[rows], x[rows], weights, need_x=need_x)
            parts.append(part)
            of_mean += of_weights.sum(0)
            of_change += _flipped(of_weights, first[rows], rest[rows]).sum(0)
        return _joined(parts) if need_x else None, of_mean, of_change * noise, None, None, None


def _flipped(weights: Tensor, first: Tensor, rest: Tensor) -> Tensor:
    """Return the signs of each example times one weight (1, *weight), or its own (B, *weight)."""
    # Signs that lie in memory as the weight's entries do: both products run over whole rows.
    split = weights.reshape(len(weights), first.shape[1], first.shape[2], rest.shape[3])
    return (split * rest).mul_(first).view(len(first), *weights.shape[1:])


def _generator(seed: int, like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(seed)


def _chunks(x: Tensor, weight: Tensor, most: int) -> Iterator[slice]:
    """Cut the examples, by their number and the weight's size alone: another call then has the same noise."""
    whole = len(x) * weight.numel()
    size = len(x) if whole <= 1.5 * most else max(1, most // weight.numel())
    for start in range(0, len(x), size):
        yield slice(start, min(start + size, len(x)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ordered(result: Tensor, x: Tensor) -> Tensor:
    """Return a result that lies in memory as a plain layer's would for the input, so that `view` works on it."""
    return result.contiguous() if x.is_contiguous() else result


def _own(result: Tensor) -> Tensor:
    """Return a function's result as no view: autograd refuses to change one in place, as activations may do after it.

    The memory is the same. What it was a view of was made inside the function, and nobody else holds it.
    """
    return result.detach()
