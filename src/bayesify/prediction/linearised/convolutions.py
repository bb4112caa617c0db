"""Convolutions with random weights, for one function of the outputs or for several at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesify.laws.gaussian.site import Arrangement
from bayesify.layers import Convolution, ConvolutionGradients, ExampleGradients, Factors, is_traced
from bayesify.prediction.linearised.accumulator import Ledger
from bayesify.prediction.linearised.rules import LayerCall, Random
from bayesify.prediction.linearised.sketch import Sketch

__all__ = ["ConvolutionCall"]


@dataclass
class ConvolutionCall(LayerCall):
    """A convolution."""

    ledger: Ledger
    rows: Arrangement
    operation: Convolution
    weight: Tensor
    bias: Tensor | None
    random_weight: Random | None
    random_bias: Random | None
    kept: dict[str, Tensor] = field(default_factory=dict)

    def output(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        o = self.operation
        return torch.convolution(
            x, self.weight, self.bias, o.stride, o.padding, o.dilation, o.transposed, o.output_padding, o.groups
        )

    def of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the input."""
        return self.operation.input_gradient(grad, x, self.weight)

    def of_inputs(self, grads: Tensor, x: Tensor) -> Tensor:
        """Return the gradients of the input, of which only the size matters to them.

        In memory those of an example are side by side, as `all_weighted_squares` has them.
        """
        rows = grads.transpose(0, 1)
        like = x.new_empty(rows.shape[:2].numel(), *x.shape[1:])
        return self.of_input(rows.flatten(0, 1), like).view(*rows.shape[:2], *x.shape[1:]).transpose(0, 1)

    def gradients(self, x: Tensor, grad: Tensor) -> ConvolutionGradients:
        """Return each example's own convolution of its input with its gradient."""
        rotated = None if self.random_weight is None else self.random_weight.rotated
        turn = None if rotated is None else rotated.turned
        return ConvolutionGradients(x, grad, self.operation, self.weight, turn)

    def account_all(self, grads: Tensor, x: Tensor) -> None:
        """Add what weight and bias cause in each function; the weight's copies of the input serve all of them."""
        random, bias = self.random_weight, self.random_bias
        found = self.gradients(self.rows.split(x), self.rows.split(grads[0]))
        alone = random is not None and self.ledger.once(random.part) and self.ledger.columns_of(random.part) is None
        if random is None or not alone or not self._copied(found):
            super().account_all(grads, x)
            return
        if bias is not None:
            self.ledger.add_gradients(bias.part, grads.flatten(3).sum(3), bias.variance)
        self.ledger.add_all(self._all_squares(found, grads[:, :, None], random))

    def squares(self, found: ExampleGradients, random: Random) -> Tensor:
        """Return the weighted squares, from a few mixtures of channels where that is asked for."""
        assert isinstance(found, ConvolutionGradients)
        if (factors := self._factors(found, random)) is not None:
            return self._by_positions(found, found.grad[None], *factors)[0]
        sketch = self._sketch(found, random)
        return super().squares(found, random) if sketch is None else sketch.squares(found, self.kept)

    def _all_squares(self, found: ConvolutionGradients, grads: Tensor, random: Random) -> Tensor:
        """Return the same for several gradients of the output, (N, B)."""
        if (factors := self._factors(found, random)) is not None:
            return self._by_positions(found, grads, *factors)
        sketch = self._sketch(found, random)
        if sketch is None:
            return found.all_weighted_squares(grads, random.variance)
        return sketch.narrow(found, self.kept).all_weighted_squares(grads, sketch.variance)

    def _sketch(self, found: ConvolutionGradients, random: Random) -> Sketch | None:
        channels, positions = found.x.shape[2] // self.operation.groups, found.x.shape[3:].numel()
        if random.rotated is not None or not Sketch.pays(channels, positions, self.ledger.signs):
            return None
        return self.ledger.sketch_of(random.part, random.variance, self.operation)

    def _copied(self, found: ConvolutionGradients) -> bool:
        """Return whether several gradients of the output can share copies of what the kernel meets."""
        plain = found.turn is None and not self.operation.transposed and not is_traced(found.x)
        return plain and found.x.shape[1] == 1

    def _factors(self, found: ConvolutionGradients, random: Random) -> Factors:
        """Return r and c of variances r c', where pairs of positions are few and several backward passes share them."""
        if not self.ledger.several or self.operation.groups > 1 or not self._copied(found):
            return None
        if 4 * found.grad.shape[3:].numel() > random.variance[0].numel():
            return None
        return self.ledger.factors_of(random.part, random.variance.flatten(1))

    def _by_positions(self, found: ConvolutionGradients, grads: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Return sum_ij r_i c_j (sum_t g_ti x_tj)^2 as sum_tt' (g_t . r g_t') (x_t . c x_t'), (N, B).

        x_t is what the kernel meets at position t, so that the second factor is the same for all backward passes.
        """
        if "met" not in self.kept:
            patches = self.operation.copies(found.x, self.weight.shape, grads.shape[4:])[:, 0]
            self.kept["met"] = (patches * column[:, None]).mT @ patches
        rows = grads[:, :, 0].transpose(0, 1).flatten(3)
        return ((rows * row[:, None]).mT @ rows).mul_(self.kept["met"][:, None]).sum((2, 3)).mT
