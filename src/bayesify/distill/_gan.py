"""Generators against critics: WGAN-GP, clipped WGAN, and the original GAN."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.posteriors import make_generator

__all__ = ["Game", "Kind", "gradient_penalty"]

Kind = Literal["wgan-gp", "wgan", "gan"]
CLIP = 0.01


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

    Args:
        size: Columns of the samples.
        latent: The size of z.
        hidden: Sizes of the hidden layers, of both.
        kind: "wgan-gp" (penalty 10, Adam 1e-4 (.5, .9)), "wgan" (weights clipped at .01, RMSProp 5e-5) or "gan"
            (non-saturating, Adam 2e-4 (.5, .999), one critic step).
        batch: Rows of a minibatch.
        critic_steps: For each generator step.
        lr: None takes the kind's own.
        generator: Of the random numbers.
    """

    def __init__(
        self,
        size: int,
        *,
        latent: int,
        hidden: tuple[int, ...],
        kind: Kind,
        batch: int,
        critic_steps: int,
        lr: float | None,
        like: Tensor,
        generator: torch.Generator,
    ) -> None:
        self.kind, self.latent, self.batch = kind, latent, batch
        self.critic_steps = 1 if kind == "gan" else critic_steps
        self.random = generator
        self.like = like
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator, device=generator.device)))
            self.generator = make_generator(latent, hidden, size).to(like)
            self.critic = make_generator(size, hidden, 1).to(like)
        if kind == "wgan":
            self.optimisers: list[torch.optim.Optimizer] = [
                torch.optim.RMSprop(net.parameters(), lr=lr or 5e-5) for net in (self.generator, self.critic)
            ]
        else:
            rate, betas = (lr or 1e-4, (0.5, 0.9)) if kind == "wgan-gp" else (lr or 2e-4, (0.5, 0.999))
            self.optimisers = [
                torch.optim.Adam(net.parameters(), lr=rate, betas=betas) for net in (self.generator, self.critic)
            ]

    def fake(self) -> Tensor:
        """Return a minibatch of generated samples."""
        z = self.like.new_empty(self.batch, self.latent).normal_(generator=self.random)
        made: Tensor = self.generator(z)
        return made

    def real(self, samples: Tensor) -> Tensor:
        """Return a minibatch of samples."""
        index = torch.randint(len(samples), (self.batch,), generator=self.random, device=samples.device)
        return samples[index]

    def step(self, samples: Tensor) -> float:
        """Take the critic's steps, each with new samples, and one of the generator; return the critic's last loss."""
        loss = 0.0
        for _ in range(self.critic_steps):
            loss = self._critic_step(self.real(samples))
        generator, _ = self.optimisers
        generator.zero_grad(set_to_none=True)
        for parameter in self.critic.parameters():
            parameter.requires_grad_(False)
        scores = self.critic(self.fake())
        torch.autograd.backward(self.generator_loss(scores))
        generator.step()
        for parameter in self.critic.parameters():
            parameter.requires_grad_(True)
        return loss

    def generator_loss(self, scores: Tensor) -> Tensor:
        """Return what the generator minimises."""
        return functional.softplus(-scores).mean() if self.kind == "gan" else -scores.mean()

    def _critic_step(self, real: Tensor) -> float:
        _, critic = self.optimisers
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
