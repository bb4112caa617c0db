"""Langevin dynamics as an optimiser: a step of gradient descent, and noise of the right size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.posteriors import Key, generator_for

__all__ = ["Kind", "Langevin", "standard_normal"]

Kind = Literal["sgld", "sghmc", "psgld"]
FEW = 4096  # below it a call costs more than its numbers
BITS = 16


class Langevin(Optimizer):
    """Sample from exp(-n (loss + weight_decay/2 |w|^2) / T), of which loss is the mean over n examples.

    - sgld: w <- w - lr/2 g + N(0, T lr/n), with g = grad loss + weight_decay w (Welling and Teh 2011);
    - sghmc: v <- (1 - friction) v - lr/2 g + N(0, friction T lr/n), w <- w + v (Chen et al. 2014), which is sgld at
      friction 1;
    - psgld: w <- w - lr/2 G g + N(0, T lr G/n), with G = 1/(1e-5 + sqrt V), V <- .99 V + .01 (grad loss)^2 (Li et al.
      2016). V stands still after `adapt_steps` steps: from then on G is constant and the missing term of its gradient
      is zero.

    The noise is a function of (seed, step), so that a run goes on exactly, and alike in every process.

    Args:
        groups: Parameter groups; those with `sampled=False` are trained without noise: w <- w - lr/2 grad loss.
        num_data: The number n of examples, as a tensor that may be filled after the optimiser is made, before a step.
        kind: Which dynamics.
        lr: Step size.
        weight_decay: Precision of the prior, divided by n.
        prior_std: Standard deviation s of the prior, instead: weight_decay = 1/(n s^2).
        temperature: T; 1 samples the posterior.
        friction: Of sghmc.
        seed: Of the noise.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        num_data: Tensor,
        *,
        kind: Kind = "sgld",
        lr: float,
        weight_decay: float = 0.0,
        prior_std: float | None = None,
        temperature: float = 1.0,
        friction: float = 0.1,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "prior_std": prior_std,
            "temperature": temperature,
            "friction": friction,
            "kind": kind,
            "seed": seed,
            "sampled": True,
            "adapt_steps": None,
            "step": 0,
        }
        super().__init__(groups, defaults)
        self.num_data = num_data

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            for index, weights in enumerate(group["params"]):
                if weights.grad is None:
                    continue
                if group["sampled"]:
                    self._move(weights, weights.grad, group, f"weights {index}")
                else:
                    weights.add_(weights.grad, alpha=-group["lr"] / 2)
        return loss

    def _move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any], site: str) -> None:
        num_data, kind = int(self.num_data), group["kind"]
        if num_data < 1:
            raise ValueError("The number of data is unknown. Call posterior.loss(batch, num_data=n) before the step.")
        prior_std = group["prior_std"]
        decay = group["weight_decay"] if prior_std is None else 1 / (num_data * prior_std**2)
        half = group["lr"] / 2
        scale = math.sqrt(group["temperature"] * group["lr"] / num_data)
        noise = None
        if scale > 0:
            generator = generator_for(Key(group["seed"], group["step"]), site, weights.device)
            noise = standard_normal(weights, generator)
        if kind == "sgld":
            weights.mul_(1 - half * decay).add_(gradient, alpha=-half)
            if noise is not None:
                weights.add_(noise, alpha=scale)
            return
        state = self.state[weights]
        if not state:
            state["square" if kind == "psgld" else "velocity"] = torch.zeros_like(weights)
        if kind == "sghmc":
            velocity = state["velocity"]
            velocity.mul_(1 - group["friction"]).add_(gradient, alpha=-half).add_(weights, alpha=-half * decay)
            if noise is not None:
                velocity.add_(noise, alpha=scale * math.sqrt(group["friction"]))
            weights.add_(velocity)
            return
        square = state["square"]
        if group["adapt_steps"] is None or group["step"] <= group["adapt_steps"]:
            # From the first gradient on, not from zero, which would make the first steps enormous.
            keep = 0.99 if group["step"] > 1 else 0.0
            square.mul_(keep).addcmul_(gradient, gradient, value=1 - keep)
        precondition = square.sqrt().add_(1e-5).reciprocal_()
        drift = gradient.add(weights, alpha=decay).mul_(precondition)
        weights.add_(drift, alpha=-half)
        if noise is not None:
            weights.addcmul_(noise, precondition.sqrt_(), value=scale)


def standard_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers in a tensor's shape.

    Many numbers in single precision on a CPU are looked up in a table of 65,536 equally probable normal quantiles by 16
    random bits each, scaled to variance one: half the time of `normal_`, whose cost is its 32-bit uniform numbers. The
    largest is 4.2; a sum of a few, which every state of a chain is, cannot be told from a sum of normals.
    """
    if like.device.type != "cpu" or like.dtype != torch.float32 or like.numel() < FEW:
        return torch.empty_like(like).normal_(generator=generator)
    per_word = 64 // BITS
    words = torch.empty(-(-like.numel() // per_word), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    index = words.view(torch.int16)[: like.numel()].to(torch.int32).add_(2 ** (BITS - 1))
    return _quantiles().index_select(0, index).view(like.shape)


@functools.cache
def _quantiles() -> Tensor:
    levels = (torch.arange(2**BITS, dtype=torch.float64) + 0.5) / 2**BITS
    values: Tensor = torch.special.ndtri(levels)
    return (values / values.square().mean().sqrt()).float()
