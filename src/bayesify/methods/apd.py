"""Adversarial posterior distillation: chains sample weights, and a generator learns to make such weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bayesify.conversion import Selection, require_something, select_parameters
from bayesify.laws import (
    DistilledPosterior,
    GeneratorPosterior,
    Key,
    LossTerms,
    Posterior,
    TensorTree,
    Workshop,
    generator_for,
)
from bayesify.methods.banks import DTYPES
from bayesify.methods.gan import Game, Kind, make_moments, make_players
from bayesify.methods.method import Stage, register
from bayesify.methods.pca import fold_generator, reduce_samples
from bayesify.methods.sgld import SGLD, sample_steps

__all__ = ["APD"]

SPACING = 20  # steps between samples that go to the generator online, as in the paper's code


@register
@dataclass(frozen=True, kw_only=True)
class APD(SGLD):
    """Adversarial posterior distillation (Wang et al. 2018): SGLD, distilled into a generator of weights.

    Offline (Algorithm 1) the chains run first, and the generator then learns from all their samples, in the
    coordinates of the samples' own span. Online (Algorithm 2) it learns while they run, in rounds, from the last
    `num_samples` of each chain: first in, first out. All chains move together. What is left after `fit` is the
    generator: (H + 1) D numbers, H the last of `hidden`, however many samples there were.

    `distill` does the same to a bank that exists, and can stop early.

    Attributes:
        online: Whether chains and generator learn in turns.
        round_samples: Online: how many samples of each chain are taken between two rounds of the generator's learning.
        restart: Online: whether each round ends with the chains beginning anew at draws of the generator.
        latent: The size of z.
        hidden: Sizes of the hidden layers of generator and critic.
        how: "wgan-gp", "wgan" (clipped) or "gan".
        steps: Generator steps, of all rounds together.
        batch: Samples in a minibatch.
        critic_steps: For each generator step.
        generator_lr: Learning rate of generator and critic; None takes that of `distill`.
        num_draws: For networks with batch normalisation: how many draws have their own statistics.
    """

    name = "apd"

    online: bool = False
    round_samples: int = 10
    restart: bool = False
    latent: int = 32
    hidden: tuple[int, ...] = (100, 100, 100)
    how: Kind = "wgan-gp"
    steps: int = 5000
    batch: int = 100
    critic_steps: int = 5
    generator_lr: float | None = None
    num_draws: int = 50
    together: bool = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for name in ("round_samples", "latent", "steps", "batch", "critic_steps", "num_draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        if not self.hidden or any(size < 1 for size in self.hidden):
            raise ValueError(f"hidden needs a layer, and layers of at least one unit, but it is {self.hidden}.")
        if self.how not in ("wgan-gp", "wgan", "gan"):
            raise ValueError(f"how must be 'wgan-gp', 'wgan' or 'gan', but it is {self.how!r}.")
        if not self.together:
            raise ValueError("APD's chains move together: leave together=True, or distil the bank of an SGLD run.")
        if self.restart and not self.online:
            raise ValueError("restart needs online=True: offline the generator learns after the chains' last step.")

    # -- building -----------------------------------------------------------------------------------------------

    def build(self, network: nn.Module, selection: Selection) -> DistilledPosterior:  # type: ignore[override]
        """Make a generator that returns the network's own weights, and chains for it to learn from."""
        names, table = select_parameters(network, selection, how=f"generated, {self.how}")
        require_something(table, network, "APD", "parameters that are not frozen")
        posterior = DistilledPosterior(
            network, self, names=names, latent=self.latent, hidden=self.hidden, num_draws=self.num_draws
        )
        posterior.workshop = self.make_workshop(posterior)
        posterior.conversion = table
        return posterior

    def make_workshop(self, posterior: GeneratorPosterior) -> Workshop:
        """Return chains at their starts, room for their samples, and a critic that has learned nothing."""
        codec = posterior.codec
        critic, moments = nn.Sequential(), TensorTree({})
        if self.online:  # offline both players begin and end with the distillation
            random = torch.Generator().manual_seed(self.seed)
            _, critic = make_players(sum(codec.sizes), self.latent, self.hidden, posterior.residual_std, random)
            moments = make_moments(posterior.generator, critic, self.how)
        return Workshop(
            codec,
            self.chain_starts(posterior.network, codec.names),
            room=self.chains * self.num_samples,
            dtype=DTYPES[self.storage] if self.storage else None,
            critic=critic,
            moments=moments,
        )

    # -- learning -----------------------------------------------------------------------------------------------

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the mean negative log-likelihood over the chains."""
        assert isinstance(posterior, DistilledPosterior)
        workshop = self._workshop(posterior)
        workshop.num_data.fill_(num_data)
        return self.joint_objective(posterior, posterior.chain_outputs(inputs), targets, workshop.chains)

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage, which moves all chains."""
        workshop = self._workshop(posterior)
        return self.joint_stage(posterior, workshop.chains, workshop.num_data)

    def make_schedule(self, optimiser: Optimizer, total_steps: int) -> LambdaLR:
        """Return the schedule of the step sizes, if there will be anything to learn from."""
        if self.chains * min(self.num_samples, max(1, len(_sample_numbers(self, total_steps)))) < 2:
            raise ValueError(
                f"{total_steps} steps of one chain with num_samples={self.num_samples} keep a single sample, and a "
                "generator needs at least two to learn from. Fit for more epochs, lower burn_in, or run several chains."
            )
        return super().make_schedule(optimiser, total_steps)

    def after_step(self, posterior: Posterior, step: int, total_steps: int, steps_per_epoch: int) -> None:
        """Keep samples where they are due; online, let the generator learn from them."""
        del steps_per_epoch
        assert isinstance(posterior, DistilledPosterior)
        workshop = self._workshop(posterior)
        if step == 1:
            self.check_steps(int(workshop.num_data), total_steps)
            posterior.noise_shares().fill_(-1)
        due = _sample_numbers(self, total_steps)
        if step not in due:
            return
        workshop.collect()
        taken, every = due[step], self.round_samples
        if self.online and (taken % every == 0 or taken == len(due)):
            number, rounds = -(-taken // every), -(-len(due) // every)
            self._round(posterior, self.steps * number // rounds - self.steps * (number - 1) // rounds)
            if self.restart and taken < len(due):
                self._restart(posterior)

    def finish(self, posterior: Posterior, loader: Iterable[Any], progress: Callable[..., Any]) -> None:
        """Let the generator learn, if it has not; leave chains and samples behind; re-estimate statistics."""
        assert isinstance(posterior, DistilledPosterior)
        workshop = self._workshop(posterior)
        if int(workshop.total) == 0:
            workshop.collect()
        if not self.online:
            self._learn_from_all(posterior, progress)
        elif int(workshop.rounds) == 0:
            self._round(posterior, self.steps)
        self.check_noise(posterior.noise_shares())
        posterior.meter = None
        posterior.close_workshop()
        posterior.refresh_statistics(loader, max_batches=self.statistics_batches, progress=progress)

    # -- the generator's part -----------------------------------------------------------------------------------

    def _workshop(self, posterior: Posterior) -> Workshop:
        assert isinstance(posterior, DistilledPosterior)
        if posterior.workshop is None:  # another fit begins anew
            posterior.workshop = self.make_workshop(posterior)
        return posterior.workshop

    def _learn_from_all(self, posterior: DistilledPosterior, progress: Callable[..., Any]) -> None:
        workshop = self._workshop(posterior)
        like = posterior.residual_std
        reduction = reduce_samples(workshop.samples[: len(workshop)].to(workshop.shift.dtype), self.hidden[-1])
        random = generator_for(Key(self.seed), "distillation", like.device)
        columns = reduction.coordinates.shape[1]
        generator, critic = make_players(columns, self.latent, self.hidden, like, random)
        game = self._game(generator, critic, random)
        for _ in progress(range(self.steps)):
            game.step(reduction.coordinates)
        fold_generator(generator, reduction, posterior.generator)

    def _round(self, posterior: DistilledPosterior, steps: int) -> None:
        """Let the generator take steps on the samples there are."""
        workshop = self._workshop(posterior)
        if len(workshop) < 2:  # a first round of one chain's one sample
            return
        random = generator_for(Key(self.seed, int(workshop.rounds)), "distillation", posterior.residual_std.device)
        if int(workshop.rounds) == 0:
            workshop.standardise()
            generator, critic = make_players(
                sum(posterior.codec.sizes), self.latent, self.hidden, posterior.residual_std, random
            )
            posterior.generator.load_state_dict(generator.state_dict())
            workshop.critic.load_state_dict(critic.state_dict())
        # Copies, since several processes watch the gradients of what the posterior holds.
        kept = (posterior.generator, workshop.critic)
        players = copy.deepcopy(kept)
        game = self._game(*players, random, workshop)
        rows = workshop.samples[: len(workshop)]
        with torch.enable_grad():
            for _ in range(steps):
                game.step(rows, workshop.prepare)
        for player, learned in zip(kept, players, strict=True):
            player.load_state_dict(learned.state_dict())
        workshop.rounds += 1
        posterior.outdate_statistics()

    def _game(
        self, generator: nn.Sequential, critic: nn.Sequential, random: torch.Generator, workshop: Workshop | None = None
    ) -> Game:
        return Game(
            generator, critic, kind=self.how, batch=self.batch, critic_steps=self.critic_steps, lr=self.generator_lr,
            random=random, moments=None if workshop is None else workshop.moments,
        )  # fmt: skip

    @torch.no_grad()
    def _restart(self, posterior: DistilledPosterior) -> None:
        """Put every chain at a draw of the generator."""
        workshop = self._workshop(posterior)
        for index in range(self.chains):
            drawn = posterior.sample(Key(self.seed, int(workshop.rounds) * self.chains + index))
            for name, tensor in posterior.codec.split(drawn).items():
                workshop.chain_tensors(index)[name].copy_(tensor)

    @classmethod
    def example(cls) -> APD:
        """Return a short run with a small generator."""
        return cls(**SGLD.example_settings(), chains=2, hidden=(20, 20), steps=500)


@functools.lru_cache(maxsize=8)
def _sample_numbers(method: APD, total_steps: int) -> dict[int, int]:
    """Return the steps after which samples are kept, each with how many steps were kept up to it."""
    steps: Iterable[int] = sample_steps(method, total_steps)
    if method.online:
        steps = range(total_steps, int(method.burn_in * total_steps), -(method.thin or SPACING))
    return {step: number for number, step in enumerate(sorted(steps), 1)}
