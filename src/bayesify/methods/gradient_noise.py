"""How much noise minibatches add to the noise that a sampler injects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

__all__ = ["EVERY", "RARELY", "TOLERATED", "Correction", "GradientNoise", "cancelled_share"]

Correction = Literal["shuffled", "independent"]
EVERY = 16  # steps between two looks of a correction, each of which costs about a step
RARELY = 64  # between two that only measure
TOLERATED = 0.1  # gradient noise, in variances of the injected noise, that nobody is warned of


class GradientNoise:
    """Measures the variance of a minibatch's gradient at the present state, by halves of the minibatch.

    With g_a and g_b the gradients of two halves of B rows, c = (g_a - g_b)/2 has mean zero, whatever the mean gradient
    is and wherever it drifts, and the variance s^2/B of the minibatch's gradient, s^2 that of an example's. Costs a
    second backward pass through the same graph in each look; no random number is drawn.

    Args:
        shares: Where the result is kept: for each chain, the mean variance of the gradients' noise as a multiple of
            the injected noise's, since the end of the burn-in; negative where nothing was measured.

    Attributes:
        due: Whether the next loss is to be looked at.
        rows: Of the minibatches that were looked at since the last step.
    """

    def __init__(self, shares: Tensor) -> None:
        self.shares = shares
        self.due = False
        self.rows = 0
        self._batches = 0
        self._contrasts: dict[Tensor, Tensor] = {}
        self._possible = True

    def look(self, loss: Callable[[slice], Tensor], rows: int, parameters: Iterable[Tensor]) -> None:
        """Look at a minibatch: `loss(some)` is the mean loss of some of its rows, in the graph that is trained."""
        half = rows // 2
        if not (self.due and self._possible and half and torch.is_grad_enabled()):
            return
        chosen = [parameter for parameter in parameters if parameter.requires_grad]
        # An odd row is left out: the halves' variance is that of the rows that they have.
        contrast = (loss(slice(0, half)) - loss(slice(half, 2 * half))) * (0.5 * (2 * half / rows) ** 0.5)
        try:
            found = torch.autograd.grad(contrast, chosen, retain_graph=True, allow_unused=True)
        except RuntimeError:  # compiled networks and reentrant checkpoints run backward once
            self._possible = False
            return
        for parameter, gradient in zip(chosen, found, strict=True):
            if gradient is not None:
                before = self._contrasts.get(parameter)
                self._contrasts[parameter] = gradient if before is None else before + gradient
        self.rows += rows
        self._batches += 1

    def squares(self, weights: list[Tensor]) -> list[Tensor] | None:
        """Return the estimated variance of the gradient of each weight, with replacement; None without a look."""
        if not self._batches or any(weight not in self._contrasts for weight in weights):
            return None
        return [(self._contrasts[weight] / self._batches).square_() for weight in weights]

    def clear(self) -> None:
        """Forget what was seen, after a step."""
        self._contrasts, self.rows, self._batches = {}, 0, 0

    def record(self, chain: int, share: Tensor, count: int) -> None:
        """Let a chain's share be the mean of `count`, of which this is the last."""
        share = share.to(self.shares)
        if count > 1:
            share = self.shares[chain] + (share - self.shares[chain]) / count
        self.shares[chain] = share


def cancelled_share(share: Tensor, finite: float, temperature: float) -> Tensor:
    """Return how much of the gradients' noise lasts where each epoch visits every example once.

    The noise of the minibatches of an epoch then has the sum zero, up to the state's own moves, so that what relaxes in
    more than an epoch feels little of it. With x = epoch / relaxation time, the stationary variance has

        1 - ((1 - e^-x)/x)^2 - (2/x) (1 - 2 (1 - e^-x)/x + (1 - e^-2x)/(2x))

    of what independent minibatches would give, about x/3 where x is small. x = 2 T share where the gradients' variance
    is the curvature divided by the rows, which it is for a likelihood that holds.

    Args:
        share: The variance of the gradients' noise with replacement, in variances of the injected noise.
        finite: 1 - B/n.
        temperature: T.

    >>> cancelled_share(torch.tensor([0.01, 1.0, 100.0]), 1.0, 1.0)
    tensor([6.6667e-05, 4.3233e-01, 9.9005e+01])
    """
    x = 2 * temperature * share
    safe = x.clamp_min(0.05)
    once, twice = -torch.expm1(-safe) / safe, -torch.expm1(-2 * safe) / (2 * safe)
    lasting = 1 - once**2 - 2 / safe * (1 - 2 * once + twice)
    return finite * share * torch.where(x < 0.05, x / 3, lasting)
