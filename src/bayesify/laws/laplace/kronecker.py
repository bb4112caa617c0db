"""Laplace's approximation with a Kronecker product for each linear layer and convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.random import Key, keyed_numbers
from bayesify.laws.components import Component
from bayesify.laws.kronecker import Rotated
from bayesify.laws.laplace.diagonal import constant_rows
from bayesify.laws.laplace.evidence import Spectrum
from bayesify.laws.laplace.laplace import LaplaceLaw
from bayesify.laws.patching import forbid_fused_layers
from bayesify.laws.tensors import TensorTree, tensor_of
from bayesify.laws.trace import Trace

__all__ = ["Block", "KroneckerLaw"]


@dataclass(frozen=True)
class Block:
    """A layer whose weight, with the bias as one more column, has a Kronecker product as its curvature.

    Attributes:
        layer: The layer's name.
        weight: Its weight's name.
        bias: Its bias's name, if that is random too.
        groups: Of a convolution: each group has a product of its own.
        rows: Outputs of a group.
        columns: Inputs of a group, times the kernel's size, and one for the bias.
    """

    layer: str
    weight: str
    bias: str | None
    groups: int
    rows: int
    columns: int

    @classmethod
    def of(cls, network: nn.Module, layer: str, weight: str, bias: str | None) -> Block:
        """Describe a linear layer or a convolution."""
        module: Any = network.get_submodule(layer)
        groups = getattr(module, "groups", 1)
        shape = module.weight.shape
        return cls(layer, weight, bias, groups, shape[0] // groups, math.prod(shape[1:]) + (bias is not None))


class KroneckerLaw(LaplaceLaw):
    """N(w, (H / noise variance + delta I)^-1) with H = B (x) A / T for each layer (Martens and Grosse 2015).

    A is the sum of a a' over examples and positions, a the layer's input with a one for the bias; B that of g g', g the
    gradients of the output in the directions of the curvature; T the number of positions of all examples, each taken as
    an example of its own (Grosse and Martens 2016; "expand" of Eschenhagen et al. 2023). With eigenvalues alpha and
    beta the covariance has the eigenvalues 1 / (alpha_i beta_j / T + delta), exactly, in the product of the two bases.
    Parameters of other layers have a diagonal curvature.

    `left` and `right` hold B and A while the data are seen, and afterwards their eigenvectors.

    Args:
        network: The network.
        blocks: The layers with a product.
        others: Names of the parameters with a diagonal.
        groups: Which parameters share a prior precision.
        precision: The prior precision at the start.
        power: See `Residuals`.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        blocks: list[Block],
        others: list[str],
        groups: Mapping[str, list[str]],
        precision: float,
        power: int,
    ) -> None:
        super().__init__(network)
        self.blocks = {block.weight: block for block in blocks}
        parameters = {name: network.get_parameter(name).detach() for name in [*self.blocks, *others]}

        def zeros(name: str, *shape: int) -> Tensor:
            dtype = torch.promote_types(parameters[name].dtype, torch.float32)
            return parameters[name].new_zeros(shape, dtype=dtype)

        sides = {name: (b.groups, b.rows, b.columns) for name, b in self.blocks.items()}
        self.left = TensorTree({name: zeros(name, g, rows, rows) for name, (g, rows, _) in sides.items()})
        self.right = TensorTree({name: zeros(name, g, cols, cols) for name, (g, _, cols) in sides.items()})
        self.left_values = TensorTree({name: zeros(name, g, rows) for name, (g, rows, _) in sides.items()})
        self.right_values = TensorTree({name: zeros(name, g, cols) for name, (g, _, cols) in sides.items()})
        self.positions = TensorTree({name: zeros(name) for name in sides})
        self.curvature = TensorTree({name: zeros(name, *parameters[name].shape) for name in others})
        self.constant = {name: row for name, row in constant_rows(network).items() if name in others}
        self._start(dict(groups), precision=precision, power=power)
        forbid_fused_layers(network, self.sites())

    @property
    def names(self) -> list[str]:
        """Return the names of the random parameters."""
        biases = [block.bias for block in self.blocks.values() if block.bias is not None]
        return [*self.blocks, *biases, *self.curvature.as_dict()]

    # -- the curvature ----------------------------------------------------------------------------------------------

    def curvature_tensors(self) -> list[Tensor]:
        """Return the factors and the diagonals."""
        trees = (self.left, self.right, self.left_values, self.right_values, self.positions, self.curvature)
        return [tensor for tree in trees for tensor in tree.as_dict().values()]

    @torch.no_grad()
    def add_inputs(self, weight: str, inputs: Tensor) -> None:
        """Add sum a a' of a layer's inputs (N, G, D) at N positions."""
        if self.blocks[weight].bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)
        flat = inputs.transpose(0, 1)
        tensor_of(self.right, weight).add_(flat.mT @ flat)
        tensor_of(self.positions, weight).add_(len(inputs))

    @torch.no_grad()
    def add_gradients(self, weight: str, gradients: Tensor) -> None:
        """Add sum g g' of gradients (N, G, O) of a layer's outputs."""
        flat = gradients.transpose(0, 1)
        tensor_of(self.left, weight).add_(flat.mT @ flat)

    def complete_curvature(self, factor: float) -> None:
        """Replace the factors by their eigenvectors and eigenvalues."""
        for weight in self.blocks:
            positions = tensor_of(self.positions, weight).item()
            # B grows with the data, and A / T is a mean.
            for factors, values, scale in (
                (self.left, self.left_values, factor),
                (self.right, self.right_values, 1 / max(positions, 1.0)),
            ):
                matrix = tensor_of(factors, weight)
                found, vectors = torch.linalg.eigh(matrix.double() * scale)
                matrix.copy_(vectors)
                tensor_of(values, weight).copy_(found.clamp_min_(0))
        for tensor in self.curvature.as_dict().values():
            tensor.mul_(factor)

    def reopen_curvature(self) -> None:
        """Put the sums in the place of their eigenvectors, A of as many positions as were seen."""
        for weight in self.blocks:
            positions = tensor_of(self.positions, weight).item()
            sides = ((self.left, self.left_values, 1.0), (self.right, self.right_values, max(positions, 1.0)))
            for factors, values, scale in sides:
                vectors, found = tensor_of(factors, weight), tensor_of(values, weight)
                vectors.copy_((vectors.double() * found.double()[..., None, :]) @ vectors.double().mT * scale)
                found.zero_()

    def times_precision(self, tensors: Mapping[str, Tensor], power: float = 1.0) -> dict[str, Tensor]:
        """Multiply by powers of 1 / variance in the products' bases, and constants by 0."""
        found: dict[str, Tensor] = {}
        for weight, block in self.blocks.items():
            left, right = tensor_of(self.left, weight), tensor_of(self.right, weight)
            given = tensors[weight].reshape(block.groups, block.rows, -1).to(left.dtype)
            if block.bias is not None:
                given = torch.cat([given, tensors[block.bias].reshape(block.groups, block.rows, 1).to(left.dtype)], -1)
            changed = left @ ((left.mT @ given @ right) * self.variance(weight) ** -power) @ right.mT
            if block.bias is not None:
                found[block.bias] = changed[..., -1].reshape(-1)
                changed = changed[..., :-1]
            found[weight] = changed.reshape(tensors[weight].shape)
        for name in self.curvature.as_dict():
            factor = (tensor_of(self.curvature, name) * self.scale + self._precision_of(name)) ** power
            if name in self.constant:
                factor[self.constant[name]] = 0
            found[name] = factor * tensors[name]
        return found

    def eigenvalues(self, weight: str) -> Tensor:
        """Return the eigenvalues of a layer's curvature, (G, O, D)."""
        return tensor_of(self.left_values, weight)[..., :, None] * tensor_of(self.right_values, weight)[..., None, :]

    def variance(self, name: str) -> Tensor:
        """Return 1 / (h / noise variance + delta), h a layer's eigenvalues (G, O, D) or a parameter's curvature."""
        curvature = self.eigenvalues(name) if name in self.blocks else tensor_of(self.curvature, name)
        found = 1 / (curvature * self.scale + self._precision_of(name))
        if name in self.constant:
            found[self.constant[name]] = 0
        return found

    def spectra(self) -> list[Spectrum]:
        """Return the eigenvalues of the products, and the diagonals, for each group."""
        diagonal = self.curvature.as_dict()
        found = []
        for names in self.groups.values():
            parts = [self.eigenvalues(name).double().flatten() for name in names if name in self.blocks]
            for name in names:
                if name in diagonal:
                    values = diagonal[name].double()
                    if name in self.constant:
                        values = values[torch.arange(len(values), device=values.device) != self.constant[name]]
                    parts.append(values.flatten())
            found.append(Spectrum(torch.cat(parts), self._square_norm(names)))
        return found

    # -- draws ------------------------------------------------------------------------------------------------------

    def drawn(self, key: Key | None) -> dict[str, Tensor]:
        """Return the weights of a draw by name: (W, b) + V_B (Z / sqrt(beta alpha' / T + delta)) V_A'."""
        means = {name: self.tensor(name) for name in self.names}
        if not bool(self.complete):
            return means
        found: dict[str, Tensor] = {}
        for weight, block in self.blocks.items():
            variance = self.variance(weight)
            noise = self._normals(weight, variance, key) * variance.sqrt()
            change = tensor_of(self.left, weight) @ noise @ tensor_of(self.right, weight).mT
            mean = means[weight]
            if block.bias is not None:
                found[block.bias] = means[block.bias] + change[..., -1].reshape(-1).to(mean.dtype)
                change = change[..., :-1]
            found[weight] = mean + change.reshape(mean.shape).to(mean.dtype)
        for name in self.curvature.as_dict():
            std = self.variance(name).sqrt()
            found[name] = means[name] + (std * self._normals(name, std, key)).to(means[name].dtype)
        return found

    def _normals(self, name: str, like: Tensor, key: Key | None) -> Tensor:
        return torch.randn_like(like) if key is None else keyed_numbers(key, name, like.shape, like).to(like.dtype)

    def components(self, trace: Trace | None = None) -> list[Component]:
        """Return one component, whose tensors are rotations of independent ones."""
        del trace
        fixed = self.own.as_dict()
        if not bool(self.complete):
            return [Component(fixed=fixed)]  # nothing is random before the data were seen
        wanted = set(self.names)
        means = {name: self.tensor(name).detach() for name, _ in self.network.named_parameters() if name in wanted}
        variances = {name: self.variance(name).to(means[name].dtype) for name in self.curvature.as_dict()}
        rotated = []
        for weight, block in self.blocks.items():
            parts = (tensor_of(self.left, weight), tensor_of(self.right, weight), self.variance(weight))
            left, right, variance = (part.to(means[weight].dtype) for part in parts)
            rotated.append(Rotated(weight, block.bias, left, right, variance))
            variances |= rotated[-1].marginal(means[weight].shape)
        fixed = {name: tensor for name, tensor in fixed.items() if name not in means}
        return [Component(means, {name: variances[name] for name in means}, fixed, rotated=tuple(rotated))]
