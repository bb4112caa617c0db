"""Generators against critics: WGAN-GP, clipped WGAN, and the original GAN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.laws import TensorTree, make_generator

__all__ = ["Game", "Kind", "gradient_penalty", "make_moments", "make_players"]

Kind = Literal["wgan-gp", "wgan", "gan"]
CLIP = 0.01
PLAYERS = ("generator", "critic")


def gradient_penalty(critic: nn.Sequential, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """Return mean (|grad_x critic(x)| - 1)^2 at x = real + mix (fake - real) (Gulrajani et al. 2017, eq. 3).

    Neither x nor its gradient is ever made: the first layer is linear, so its outputs at x are the same mixture of its
    outputs at both ends, and |grad_x|^2 = g' W W' g with g the gradient there and W its weight. Exact; only W W' costs
    as many products as there are columns.

    Args:
        critic: Starts with a linear layer.
        real: First layer's outputs at real samples, (B, H).
        fake: The same at generated samples, (B, H).
        mix: Uniform numbers, (B, 1).
    """
    first = critic[0]
    assert isinstance(first, nn.Linear)
    hidden = torch.lerp(real, fake, mix)
    if not hidden.requires_grad:
        hidden = hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(critic[1:](hidden).sum(), hidden, create_graph=True)
    square = ((gradient @ (first.weight @ first.weight.T)) * gradient).sum(1)
    # A root has no gradient at zero, where rounding may even put the square below it.
    return (square.clamp_min(1e-12).sqrt() - 1).square().mean()


class Game:
    """A generator and a critic, and a step of their training.

    The optimisers' moments can live in a module, to be saved and loaded with it: a game that is made anew from the same
    modules goes on where the last one was.

    Args:
        generator: Maps z to samples.
        critic: Maps samples to scores; begins with a linear layer.
        kind: "wgan-gp" (penalty 10, Adam 1e-4 (.5, .9)), "wgan" (weights clipped at .01, RMSProp 5e-5) or "gan"
            (non-saturating, Adam 2e-4 (.5, .999), one critic step).
        batch: Rows of a minibatch.
        critic_steps: For each generator step.
        lr: None takes the kind's own.
        random: Where random numbers come from.
        moments: From `make_moments`; None keeps them in the optimisers.
    """

    def __init__(
        self,
        generator: nn.Sequential,
        critic: nn.Sequential,
        *,
        kind: Kind = "wgan-gp",
        batch: int = 100,
        critic_steps: int = 5,
        lr: float | None = None,
        random: torch.Generator,
        moments: TensorTree | None = None,
    ) -> None:
        self.generator, self.critic = generator, critic
        self.kind, self.batch, self.random = kind, batch, random
        self.critic_steps = 1 if kind == "gan" else critic_steps
        players = (generator, critic)
        if kind == "wgan":
            self.optimizers: list[torch.optim.Optimizer] = [
                torch.optim.RMSprop(player.parameters(), lr=lr or 5e-5) for player in players
            ]
        else:
            rate, betas = (lr or 5e-4, (0.5, 0.9)) if kind == "wgan-gp" else (lr or 2e-4, (0.5, 0.999))
            # One kernel for a player: the ten small ones of each tensor are a sixth of a step.
            self.optimizers = [
                torch.optim.Adam(player.parameters(), lr=rate, betas=betas, fused=True) for player in players
            ]
        if moments is not None:
            kept = moments.as_dict()
            for optimizer, name, player in zip(self.optimizers, PLAYERS, players, strict=True):
                for path, parameter in player.named_parameters():
                    optimizer.state[parameter] = {key: kept[f"{name}.{path}.{key}"] for key in _keys(kind)}

    def fake(self) -> Tensor:
        """Return a minibatch of generated samples."""
        first = self.generator[0]
        assert isinstance(first, nn.Linear)
        z = first.weight.new_empty(self.batch, first.in_features).normal_(generator=self.random)
        made: Tensor = self.generator(z)
        return made

    def real(self, samples: Tensor) -> Tensor:
        """Return a minibatch of samples."""
        index = torch.randint(len(samples), (self.batch,), generator=self.random, device=samples.device)
        return samples[index]

    def step(self, samples: Tensor, prepare: Callable[[Tensor], Tensor] | None = None) -> float:
        """Take the critic's steps, each with new samples, and one of the generator; return the critic's last loss.

        Args:
            samples: (M, D).
            prepare: What a minibatch of them goes through first.
        """
        loss = 0.0
        for _ in range(self.critic_steps):
            real = self.real(samples)
            loss = self._critic_step(real if prepare is None else prepare(real))
        generator, _ = self.optimizers
        generator.zero_grad(set_to_none=True)
        for parameter in self.critic.parameters():
            parameter.requires_grad_(False)
        scores = self.critic(self.fake())
        torch.autograd.backward(self.generator_loss(scores))
        generator.step()
        for parameter in self.critic.parameters():
            parameter.requires_grad_(True)
        if not math.isfinite(loss):
            raise ArithmeticError("The critic's loss is not finite. Lower its learning rate, or use 'wgan-gp'.")
        return loss

    def generator_loss(self, scores: Tensor) -> Tensor:
        """Return what the generator minimises."""
        return functional.softplus(-scores).mean() if self.kind == "gan" else -scores.mean()

    def _critic_step(self, real: Tensor) -> float:
        _, critic = self.optimizers
        critic.zero_grad(set_to_none=True)
        with torch.no_grad():
            fake = self.fake()
        first, rest = self.critic[0], self.critic[1:]
        hidden = first(torch.cat([real, fake]))
        scores = rest(hidden)
        on_real, on_fake = scores[: self.batch], scores[self.batch :]
        if self.kind == "gan":
            loss = functional.softplus(-on_real).mean() + functional.softplus(on_fake).mean()
        else:
            loss = on_fake.mean() - on_real.mean()
        if self.kind == "wgan-gp":
            mix = torch.rand(self.batch, 1, generator=self.random, device=real.device, dtype=real.dtype)
            loss = loss + 10 * gradient_penalty(self.critic, hidden[: self.batch], hidden[self.batch :], mix)
        torch.autograd.backward(loss)
        critic.step()
        if self.kind == "wgan":
            with torch.no_grad():
                for parameter in self.critic.parameters():
                    parameter.clamp_(-CLIP, CLIP)
        return float(loss.detach())


def make_players(
    columns: int, latent: int, hidden: tuple[int, ...], like: Tensor, random: torch.Generator
) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a generator of samples with so many columns and a critic of them, at their first weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=random, device=random.device)))
        return make_generator(latent, hidden, columns).to(like), make_generator(columns, hidden, 1).to(like)


def make_moments(generator: nn.Sequential, critic: nn.Sequential, kind: Kind) -> TensorTree:
    """Return the optimisers' moments before the first step, as the state of a module."""
    players = zip(PLAYERS, (generator, critic), strict=True)
    return TensorTree(
        {
            f"{name}.{path}.{key}": torch.zeros(()) if key == "step" else torch.zeros_like(parameter.detach())
            for name, player in players
            for path, parameter in player.named_parameters()
            for key in _keys(kind)
        }
    )


def _keys(kind: Kind) -> tuple[str, ...]:
    return ("step", "square_avg") if kind == "wgan" else ("step", "exp_avg", "exp_avg_sq")
