"""Hamiltonian Monte Carlo for small networks: many chains at once, full gradients, an accept step.

The reference that approximations are judged by (`experiments.truth`). A state (w, v) moves by leapfrog steps of
H = U(w) + |v|^2 / 2, U = -ln p(y | x, w) - ln p(w), and is accepted with probability min(1, exp(-dH)): the stationary
distribution is the posterior, whatever the step size (Neal 2011).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["hmc"]


def hmc(
    potential: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    num_samples: int,
    burn_in: int,
    leapfrogs: int,
    step: float,
    generator: torch.Generator,
    acceptance: float = 0.8,
) -> tuple[Tensor, Tensor]:
    """Sample from exp(-U).

    Args:
        potential: U of one state (D,), differentiable by `torch.func`.
        start: The chains' first states, (M, D).
        num_samples: How many states of each chain are kept after the burn-in.
        burn_in: Steps before; the step size of each chain adapts in them.
        leapfrogs: The mean number of leapfrog steps; each proposal takes a random number from half of it to one and a
            half, so that no chain can return to where it was.
        step: The first step size.
        generator: Of all random numbers.
        acceptance: What the step sizes aim at.

    Returns:
        Samples (num_samples, M, D), and the share of accepted proposals of each chain after the burn-in, (M,).
    """
    energy = torch.func.vmap(potential)
    slope = torch.func.vmap(torch.func.grad(potential))
    w, steps = start.clone(), torch.full((len(start), 1), step, dtype=start.dtype)
    kept, accepted = [], torch.zeros(len(start), dtype=start.dtype)
    for index in range(burn_in + num_samples):
        v = torch.randn(w.shape, generator=generator, dtype=w.dtype)
        before = energy(w) + v.square().sum(1) / 2
        count = int(torch.randint(leapfrogs // 2, leapfrogs + leapfrogs // 2 + 1, (), generator=generator))
        moved, v = w, v - steps / 2 * slope(w)
        for inner in range(count):
            moved = moved + steps * v
            v = v - (steps if inner < count - 1 else steps / 2) * slope(moved)
        change = energy(moved) + v.square().sum(1) / 2 - before
        chance = torch.nan_to_num(-change, nan=-torch.inf).clamp(max=0).exp()
        accept = torch.rand(len(w), generator=generator, dtype=w.dtype) < chance
        w = torch.where(accept[:, None], moved, w)
        if index < burn_in:
            steps = steps * torch.exp(0.1 * (chance - acceptance))[:, None]
        else:
            kept.append(w)
            accepted += accept
    return torch.stack(kept), accepted / num_samples
