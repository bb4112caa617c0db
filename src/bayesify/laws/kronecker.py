"""Weights that are a rotation of independent numbers, as those with a Kronecker product are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Rotated"]


@dataclass(frozen=True)
class Rotated:
    """A layer's weight with its bias as one more column: (W, b) = mean + V_B E V_A', with E independent and centred.

    A curvature B (x) A with a prior delta I has the covariance (B (x) A + delta I)^-1, which is no Kronecker product,
    but in the eigenvectors V_B and V_A it is diagonal: Var E_jk = s_jk = 1 / (beta_j alpha_k + delta).

    Attributes:
        weight: The weight's name.
        bias: The bias's name, if that is random too.
        left: V_B, (G, O, O), for each group of a convolution; a linear layer has one.
        right: V_A, (G, D, D); with a bias the last row is the bias's.
        variance: s, (G, O, D).
    """

    weight: str
    bias: str | None
    left: Tensor
    right: Tensor
    variance: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of both tensors."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def scaled(self, scale: float) -> Rotated:
        """Return the same with all variances multiplied by a number."""
        return self if scale == 1 else replace(self, variance=self.variance * scale)

    def marginal(self, shape: torch.Size) -> dict[str, Tensor]:
        """Return the variances of single entries, V_B^2 s V_A^2', of a weight of some shape and its bias."""
        each = self.left.square() @ self.variance @ self.right.square().mT
        if self.bias is None:
            return {self.weight: each.reshape(shape)}
        return {self.weight: each[..., :-1].reshape(shape), self.bias: each[..., -1].reshape(-1)}

    def turned(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return V_B' (W, b) V_A of tensors (N, *shape) and (N, outputs), (N, G, O, D): gradients in E, say."""
        groups, rows = self.left.shape[:2]
        both = weight.reshape(-1, groups, rows, weight[0].numel() // (groups * rows))
        if self.bias is not None:
            assert bias is not None
            both = torch.cat([both, bias.reshape(-1, groups, rows, 1)], -1)
        return self.left.mT @ both @ self.right

    # -- a layer's input meets the rotation: V_A' (x, 1) = K x + k ----------------------------------------------------

    @cached_property
    def _kernel(self) -> Tensor:
        inputs = self.right if self.bias is None else self.right[:, :-1]
        return inputs.mT.flatten(0, 1).contiguous()

    def kernel(self, shape: torch.Size) -> Tensor:
        """Return K, as a weight with G D outputs where the layer's, of some shape, has G O."""
        return self._kernel.view(-1, *shape[1:])

    @cached_property
    def kernel_square(self) -> Tensor:
        """Return K^2, (G D, inputs)."""
        return self._kernel.square()

    @cached_property
    def offset(self) -> Tensor | None:
        """Return k, (G D,), or None without a bias."""
        return None if self.bias is None else self.right[:, -1].reshape(-1)

    @cached_property
    def left_square(self) -> Tensor:
        """Return V_B^2."""
        return self.left.square()

    @cached_property
    def columns(self) -> Tensor:
        """Return sum_j s_jk, (G D,): what all outputs together have from one rotated input."""
        return self.variance.sum(1).reshape(-1)

    def inner(self, second: Tensor) -> Tensor:
        """Return Var[E z]_j = sum_k s_jk E[z_k^2], (..., G, O), from the rotated input's squares, (..., G D)."""
        split = torch.unflatten(second, -1, (self.variance.shape[0], -1))
        return torch.einsum("...gk,gjk->...gj", split, self.variance)

    def spread(self, second: Tensor) -> Tensor:
        """Return Var[V_B E z]_i = sum_j V_B,ij^2 Var[E z]_j, (..., outputs)."""
        return torch.einsum("...gj,gij->...gi", self.inner(second), self.left_square).flatten(-2)
