"""Langevin dynamics as an optimiser: a step of gradient descent, and noise of the right size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.laws import Key, generator_for
from bayesify.methods.gradient_noise import EVERY, RARELY, Correction, GradientNoise, cancelled_share

__all__ = ["Kind", "Langevin"]

Kind = Literal["sgld", "sghmc", "psgld"]
FORGET = 0.02  # how much a look at the gradients' noise counts, at least, in its average
_COUNTS = {"measure_after": RARELY, "measured": 0, "looks": 0}


class Langevin(Optimizer):
    """Sample from exp(-n (loss + weight_decay/2 |w|^2) / T), of which loss is the mean over n examples.

    - sgld: w <- w - lr/2 g + N(0, T lr/n), with g = grad loss + weight_decay w (Welling and Teh 2011);
    - sghmc: v <- (1 - friction) v - lr/2 g + N(0, friction T lr/n), w <- w + v (Chen et al. 2014), which is sgld at
      friction 1;
    - psgld: w <- w - lr/2 G g + N(0, T lr G/n), with G = 1/(1e-5 + sqrt V), V <- .99 V + .01 (grad loss)^2 (Li et al.
      2016). V stands still after `adapt_steps` steps: from then on G is constant and the missing term of its gradient
      is zero.

    The noise is a function of (seed, step), so that a run goes on exactly, and alike in every process.

    Minibatches add noise of variance (lr/2)^2 Var g, in psgld G^2 times that. A `meter` measures it as a multiple of
    the injected variance: lr n Var g / (4 T) in sgld, G times that in psgld, 1/friction times that in sghmc. A
    `correction` takes it off the injected noise, weight by weight, as far as there is any.

    Args:
        groups: Parameter groups; those with `sampled=False` are trained without noise: w <- w - lr/2 grad loss. A group
            with `chains=C` holds C chains, of whose losses the mean was taken: gradients are multiplied by C.
        num_data: The number n of examples, as a tensor that may be filled after the optimiser is made, before a step.
        kind: Which dynamics.
        lr: Step size.
        weight_decay: Precision of the prior, divided by n.
        prior_std: Standard deviation s of the prior, instead: weight_decay = 1/(n s^2).
        temperature: T; 1 samples the posterior.
        friction: Of sghmc.
        seed: Of the noise.
        correction: Of the injected noise, for minibatches that are the parts of a shuffled epoch, or independent.
    """

    meter: GradientNoise | None = None

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
        correction: Correction | None = None,
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
            "chains": 1,
            "adapt_steps": None,
            "step": 0,
            "correction": correction,
            **_COUNTS,
        }
        super().__init__(groups, defaults)
        self.num_data = num_data
        self._room: tuple[Any, Tensor, list[Tensor]] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            weights = [weight for weight in group["params"] if weight.grad is not None]
            gradients = [weight.grad for weight in weights]
            if group["chains"] > 1 and weights:
                torch._foreach_mul_(gradients, group["chains"])
            if weights and group["sampled"]:
                self._move(weights, gradients, group)
                self._measure(weights, group)
            elif weights:
                torch._foreach_add_(weights, gradients, alpha=-group["lr"] / 2)
        self.plan_look()
        return loss

    def plan_look(self) -> None:
        """Say whether the gradients of the next step are to be looked at."""
        group = self.param_groups[0]
        if self.meter is not None:
            self.meter.clear()
            since = group["step"] - group["measure_after"]
            due = since >= 0 and since % RARELY == 0 if group["correction"] is None else group["step"] % EVERY == 0
            self.meter.due = due and group["temperature"] > 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, of an older version too."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in {"correction": None, **_COUNTS}.items():
                group.setdefault(name, value)
        self.plan_look()

    def _measure(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Compare the gradients' noise with the injected one, and know the correction of the steps to come."""
        variances = None if self.meter is None else self.meter.squares(weights)
        if self.meter is None or variances is None:
            return
        num_data, temperature, chains = int(self.num_data), group["temperature"], group["chains"]
        finite = max(0.0, 1 - self.meter.rows / num_data)
        factor = group["lr"] * num_data * chains**2 / (4 * temperature)
        if group["kind"] == "sghmc":
            factor /= group["friction"]
        ratios = torch._foreach_mul(variances, factor)
        if group["kind"] == "psgld":
            torch._foreach_div_(ratios, [square.sqrt().add_(1e-5) for square in self._states(weights, "square")])
        if group["step"] > group["measure_after"]:
            group["measured"] += 1
            for chain in range(chains):
                of_chain = ratios[chain * len(ratios) // chains : (chain + 1) * len(ratios) // chains]
                total = torch.stack([ratio.sum(dtype=torch.float64) for ratio in of_chain]).sum()
                share = finite * total / sum(ratio.numel() for ratio in of_chain)
                self.meter.record(chain, share, group["measured"])
        if group["correction"] is not None:
            group["looks"] += 1
            averages = self._states(weights, "ratio")
            torch._foreach_lerp_(averages, ratios, max(1 / group["looks"], FORGET))
            for weight, ratio in zip(weights, averages, strict=True):
                taken = ratio if group["correction"] == "independent" else cancelled_share(ratio, finite, temperature)
                self.state[weight]["kept"] = (1 - taken).clamp_min_(0).sqrt_()

    def _move(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        num_data, kind, friction = int(self.num_data), group["kind"], group["friction"]
        if num_data < 1:
            raise ValueError("The number of data is unknown. Call posterior.loss(batch, num_data=n) before the step.")
        prior_std = group["prior_std"]
        decay = group["weight_decay"] if prior_std is None else 1 / (num_data * prior_std**2)
        half = group["lr"] / 2
        scale = math.sqrt(group["temperature"] * group["lr"] / num_data)
        noise = self._noise(weights, group) if scale > 0 else None
        if noise is not None and group["looks"]:
            torch._foreach_mul_(noise, [self.state[weight].get("kept", 1.0) for weight in weights])
        if kind == "sgld":
            if decay:
                torch._foreach_mul_(weights, 1 - half * decay)
            torch._foreach_add_(weights, gradients, alpha=-half)
            if noise is not None:
                torch._foreach_add_(weights, noise, alpha=scale)
        elif kind == "sghmc":
            velocities = self._states(weights, "velocity")
            torch._foreach_mul_(velocities, 1 - friction)
            torch._foreach_add_(velocities, gradients, alpha=-half)
            torch._foreach_add_(velocities, weights, alpha=-half * decay)
            if noise is not None:
                torch._foreach_add_(velocities, noise, alpha=scale * math.sqrt(friction))
            torch._foreach_add_(weights, velocities)
        else:
            squares = self._states(weights, "square")
            if group["adapt_steps"] is None or group["step"] <= group["adapt_steps"]:
                # From the first gradient on, not from zero, which would make the first steps enormous.
                keep = 0.99 if group["step"] > 1 else 0.0
                torch._foreach_mul_(squares, keep)
                torch._foreach_addcmul_(squares, gradients, gradients, value=1 - keep)
            for index, weight in enumerate(weights):
                precondition = squares[index].sqrt().add_(1e-5).reciprocal_()
                weight.addcmul_(gradients[index].add(weight, alpha=decay), precondition, value=-half)
                if noise is not None:
                    weight.addcmul_(noise[index], precondition.sqrt_(), value=scale)

    def _noise(self, weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return standard normals for all weights, drawn together."""
        generator = generator_for(Key(group["seed"], group["step"]), "weights", weights[0].device)
        wanted = (generator.device, [(weight.shape, weight.dtype) for weight in weights])
        if self._room is None or self._room[0] != wanted:
            # Memory of this size that is new in each step costs as much as the numbers.
            dtype = functools.reduce(torch.promote_types, [weight.dtype for weight in weights])
            sizes = [weight.numel() for weight in weights]
            room = torch.empty(sum(sizes), dtype=dtype, device=generator.device)
            pieces = zip(torch.split(room, sizes), weights, strict=True)
            self._room = (wanted, room, [piece.view(weight.shape) for piece, weight in pieces])
        _, room, made = self._room
        room.normal_(generator=generator)
        return [piece.to(weight.dtype) for piece, weight in zip(made, weights, strict=True)]

    def _states(self, weights: list[Tensor], name: str) -> list[Tensor]:
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight)
        return [self.state[weight][name] for weight in weights]
