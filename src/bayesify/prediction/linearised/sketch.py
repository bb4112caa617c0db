"""Weighted squares of each example's weight gradient from a few mixtures of the layer's input channels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.random import Key, keyed_numbers
from bayesify.layers import Convolution, ConvolutionGradients, ExampleGradients, LinearGradients

__all__ = ["Sketch"]

LEAST = 3  # how many times as many channels, and positions, a layer must have as are mixed


@dataclass(frozen=True)
class Sketch:
    """What stands for all input channels of a layer while the squares of its weight's gradients are added up.

    A gradient G has rows i (outputs, and the entries of a kernel) and columns j (input channels), and the variances
    are r_i c_j. With Z = G diag(c)^(1/2), a unit vector q, and random signs e,

        sum_ij r_i c_j G_ij^2 = sum_i r_i ( (Z q)_i^2 + E[ (Z (I - q q') e)_i^2 ] )

    whatever q is. Here q is each example's own, the mean of its inputs, which is most of what positive activations are;
    the signs have to guess the rest alone. G times a
    vector v is the gradient in the weight of one channel, sum_j v_j x_j, so that 1 + R channels do for all.

    Signs are a function of the tensor's name, and q of the example, so that the numbers depend on no batch.

    Attributes:
        columns: The square roots of c, (groups, C).
        signs: e, (groups, R, C).
        variance: r, for each of the 1 + R channels, in the shape of a weight that has these alone.
    """

    columns: Tensor
    signs: Tensor
    variance: Tensor

    @classmethod
    def make(cls, variance: Tensor, operation: Convolution | None, number: int, site: str) -> Sketch:
        """Make the sketch of a weight.

        Variances that are no product of rows and columns are taken as the one with the same sums over both.

        Args:
            variance: Of the weight's entries.
            operation: The convolution; None is a linear layer.
            number: R, how many vectors of signs there are.
            site: What the signs are a function of.
        """
        groups = 1 if operation is None else operation.groups
        kernel = variance.shape[2:]
        if operation is not None and operation.transposed:  # (groups C, O, ...)
            table = variance.reshape(groups, variance.shape[0] // groups, -1).mT
        else:  # (groups O, C, ...)
            table = variance.reshape(groups, -1, variance.shape[1], kernel.numel()).mT.reshape(
                groups, -1, variance.shape[1]
            )
        rows, columns = table.sum(-1), table.sum(-2)
        columns = columns / columns.sum(-1, keepdim=True).clamp_min(torch.finfo(variance.dtype).tiny)
        signs = keyed_numbers(Key(0), f"sketch/{site}", (groups, number, columns.shape[-1]), variance, "uniform")
        signs = torch.where(signs < 0.5, -1, 1).to(variance.dtype)
        shares = torch.full((1 + number,), 1 / number, dtype=variance.dtype, device=variance.device)
        shares[0] = 1
        if operation is not None and operation.transposed:
            narrow = (shares[:, None] * rows[:, None]).reshape(groups * (1 + number), -1, *kernel)
        else:
            narrow = shares[:, None] * rows.reshape(-1, 1, kernel.numel())
            narrow = narrow.reshape(-1, 1 + number, *kernel)
        return cls(columns.sqrt(), signs, narrow)

    @staticmethod
    def pays(channels: int, positions: int, number: int) -> bool:
        """Return whether a sketch has much less to do than the sum itself."""
        return number > 0 and min(channels, positions) >= LEAST * (1 + number)

    def squares(self, found: ExampleGradients, kept: dict[str, Tensor]) -> Tensor:
        """Return the weighted squares of each example's gradient, (B,).

        Args:
            found: The gradients of a call.
            kept: What depends on the call's inputs alone: the same dictionary for all its gradients.
        """
        if isinstance(found, ConvolutionGradients):
            return self.narrow(found, kept).weighted_squares(self.variance)
        if "mixed" not in kept:
            kept["mixed"] = self._of_rows(found.x)
        return LinearGradients(kept["mixed"], found.grad).weighted_squares(self.variance)

    def narrow(self, found: ConvolutionGradients, kept: dict[str, Tensor]) -> ConvolutionGradients:
        """Return the gradients in the weight of the few channels that stand for all."""
        if "mixed" not in kept:
            kept["mixed"] = self._of_maps(found.x)
        return replace(found, x=kept["mixed"], kernel=self.variance)

    def _of_rows(self, x: Tensor) -> Tensor:
        """Mix the features of (B, T, D)."""
        return self.mixed(x.mT[:, None])[:, 0].mT

    def _of_maps(self, x: Tensor) -> Tensor:
        """Mix the channels of (B, r, C, ...)."""
        groups, channels = self.columns.shape
        rows = x.transpose(1, 2).reshape(x.shape[0], groups, channels, -1)
        maps = self.mixed(rows).reshape(x.shape[0], -1, x.shape[1], *x.shape[3:])
        return maps.transpose(1, 2)

    def mixed(self, x: Tensor) -> Tensor:
        """Return the inputs (B, groups, C, T) along q and along the signs beside it, (B, groups, 1 + R, T)."""
        largest = x.mean(-1) * self.columns
        first = functional.normalize(largest, dim=-1, eps=torch.finfo(x.dtype).tiny)[:, :, None]
        others = self.signs - (first @ self.signs.mT).mT * first
        mixture: Tensor = (torch.cat([first, others], 2) * self.columns[:, None]) @ x
        return mixture
