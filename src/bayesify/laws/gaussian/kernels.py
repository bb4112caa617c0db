"""How each type of layer runs with noise that differs between examples.

A kernel takes the layer, its input, and a `Visit`. It reads the layer's own tensors as means, so that whatever is in
their place for a pass is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.laws.gaussian.functions import exemplar, flipout, local_reparameterisation, normals
from bayesify.laws.gaussian.norms import batch_norm, instance_norm, own_norm
from bayesify.laws.gaussian.site import Visit
from bayesify.layers import Convolution, Family, LinearMap, Operation, layer_type, padded

__all__ = ["KERNELS", "choose", "has_kernel", "kernel_of"]

# Below so many positions per example a weight for each example costs more than a second product
# (python -m benchmarks.adapter --layers).
FEW_POSITIONS = 128
# Below so many, normal numbers for each example's weight cost more than the product, however small the weight is.
LEAST_POSITIONS = 64

Arranged = Literal["exemplar", "local", "flipout", "flipout, weights each"]


def choose(kind: str, positions: int, entries: int, *, local: bool) -> Arranged:
    """Choose how a product is made random, by the positions for which an example's weight is used and by its size.

    "auto" takes local reparameterisation where it is exact (`local`: one position, one call); a draw for each example
    where the weight has no more entries than it is used at positions, so that normal numbers cost little; and flipout
    elsewhere, which forms each example's weight from 128 positions on. "local" takes it where it is exact, and a draw
    for each example elsewhere.

    >>> choose("auto", 1, 99, local=True), choose("auto", 16, 99, local=False), choose("auto", 99, 16, local=False)
    ('local', 'flipout', 'exemplar')
    """
    if kind in ("auto", "local") and local:
        return "local"
    if kind in ("exemplar", "local") or (kind == "auto" and positions >= max(entries, LEAST_POSITIONS)):
        return "exemplar"
    return "flipout" if positions < FEW_POSITIONS else "flipout, weights each"


def _product(
    x: Tensor, weight: Tensor, visit: Visit, operation: Operation, positions: int, *, local: bool = False
) -> Tensor:
    """Return the product of an activation in the operation's arrangement and a random weight."""
    std = visit.std("weight")
    if std is None:
        return operation.shared(x, weight)
    how = choose(visit.kind, positions, weight.numel(), local=local)
    # Under autocast everything inside is in one type; gradients come back through the casts.
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, std = x.to(dtype), weight.to(dtype), std.to(dtype)
    std = std.to(weight.dtype)
    with torch.autocast(device, enabled=False):
        if how == "local":
            return local_reparameterisation(x, weight, std, visit.seed)
        if how == "exemplar":
            return exemplar(x, weight, std, operation, visit.seed)
        return flipout(x, weight, std, operation, visit.seed, weights_each=how != "flipout")


def linear(layer: nn.Linear, x: Tensor, visit: Visit) -> Tensor:
    """Run a linear layer on inputs with any leading dimensions."""
    whole = visit.batch.split(x)
    flat = whole.reshape(len(whole), -1, x.shape[-1])
    positions = flat.shape[1]
    y = _product(flat, layer.weight, visit, LinearMap(), positions, local=positions == 1 and visit.once)
    if layer.bias is not None:
        y = y + visit.each("bias", layer.bias)[:, None].to(y.dtype)
    return visit.batch.join(y.reshape(*whole.shape[:-1], y.shape[-1]))


def convolution(layer: Any, x: Tensor, visit: Visit, output_size: list[int] | None = None) -> Tensor:
    """Run a convolution or a transposed one, with every option that they have."""
    dims = layer.weight.ndim - 2
    if x.ndim == dims + 1:  # without a batch
        return convolution(layer, x[None], _without_batch(visit), output_size)[0]
    if visit.batch.dim not in (0, None):
        visit = _without_batch(visit)
    transposed = layer.transposed
    output_padding = layer.output_padding
    if transposed and output_size is not None:
        output_padding = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation
        )
    x, padding = padded(layer, x)
    operation = Convolution(layer.stride, padding, layer.dilation, transposed, tuple(output_padding), layer.groups)
    whole = visit.batch.split(x)
    y = _product(whole, layer.weight, visit, operation, _positions(layer, whole, operation))
    if layer.bias is not None:
        bias = visit.each("bias", layer.bias).to(y.dtype)
        y = y + bias.view(len(bias), 1, -1, *[1] * dims)
    return visit.batch.join(y)


def _positions(layer: Any, x: Tensor, operation: Convolution) -> int:
    """Return for how many positions an example's weight is used: of the outputs, or of a transposed one's inputs."""
    count = x.shape[1]
    for dim, size in enumerate(x.shape[3:]):
        if not operation.transposed:
            reach = operation.dilation[dim] * (layer.kernel_size[dim] - 1)
            size = (size + 2 * operation.padding[dim] - reach - 1) // operation.stride[dim] + 1
        count *= size
    return count


def _without_batch(visit: Visit) -> Visit:
    return replace(visit, batch=replace(visit.batch, rows=1, dim=None))


def embedding(layer: nn.Embedding, ids: Tensor, visit: Visit) -> Tensor:
    """Look tokens up in each example's own table; a token that stands twice in an example has one vector there.

    Numbers are drawn for the tokens that occur only: one vector for each pair of an example and a token, or with
    flipout one for each token, with signs for each example.
    """
    mean = functional.embedding(ids, layer.weight, layer.padding_idx)
    log_std = visit.log_std("weight")
    if log_std is None or not ids.numel():
        return mean
    whole = visit.batch.split(ids)
    rows, tokens, width = len(whole), len(layer.weight), layer.embedding_dim
    generator = torch.Generator(mean.device).manual_seed(visit.seed)
    examples = torch.arange(rows, device=ids.device).view(rows, *[1] * (whole.ndim - 1))
    if visit.kind == "flipout":
        examples = torch.zeros_like(examples)
    found, inverse = torch.unique(examples * tokens + whole, return_inverse=True)
    noise = normals([len(found), width], mean, generator)[inverse]
    if visit.kind == "flipout":
        flips = torch.randint(2, (rows, *[1] * (whole.ndim - 1), width), generator=generator, device=mean.device)
        noise = noise * (2 * flips - 1)
    std = functional.embedding(ids, log_std, layer.padding_idx).exp()
    return mean + std.to(mean.dtype) * visit.batch.join(noise)


Kernel = Callable[..., Tensor]

KERNELS: dict[Family, Kernel] = {
    "linear": linear,
    "convolution": convolution,
    "transposed convolution": convolution,
    "embedding": embedding,
    "batch norm": batch_norm,
    "instance norm": instance_norm,
    "group norm": own_norm,
    "layer norm": own_norm,
    "rms norm": own_norm,
}


def kernel_of(module: nn.Module) -> Kernel | None:
    """Return how a module runs with noise for each example, if its type is known."""
    family = layer_type(module).family
    return None if family is None else KERNELS[family]


def has_kernel(module: Any) -> bool:
    """Return whether a module, of exactly a registered type, can have noise for each example."""
    if layer_type(module).family == "embedding" and (module.sparse or module.max_norm or module.scale_grad_by_freq):
        return False
    return kernel_of(module) is not None
