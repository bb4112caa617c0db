"""Adversarial posterior distillation: chains sample weights, and a generator learns to make such weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bayesify.laws import STORAGE, Codec, GeneratorLaw, Key, Posterior, TensorTree, generator_for
from bayesify.methods.chains import Chains
from bayesify.methods.gan import Game, Kind, make_moments, make_players
from bayesify.methods.method import register
from bayesify.methods.pca import fold_generator, reduce_samples
from bayesify.methods.sgld import SGLD, sample_steps
from bayesify.selection import Conversion, Selection, require_something, select_parameters

__all__ = ["APD"]

SPACING = 20  # steps between samples that go to the generator online, as in the paper's code


@register
@dataclass(frozen=True, kw_only=True)
class APD(SGLD):
    """Adversarial posterior distillation (Wang et al. 2018): SGLD, distilled into a generator of weights.

    Offline (Algorithm 1) the chains run first, and the generator then learns from all their samples, in the
    coordinates of the samples' own span. Online (Algorithm 2) it learns while they run, in rounds, from the last
    `samples_per_chain` of each chain: first in, first out. All chains move together. What is left after `fit` is the
    generator: (H + 1) D numbers, H the last of `hidden`, however many samples there were.

    `distill` does the same to a bank that exists, and can stop early.

    Attributes:
        online: Whether chains and generator learn in turns.
        round_samples: Online: how many samples of each chain are taken between two rounds of the generator's learning.
        restart: Online: whether each round ends with the chains beginning anew at draws of the generator.
        latent: The size of z.
        hidden: Sizes of the hidden layers of generator and critic.
        algorithm: "wgan-gp", "wgan" (clipped) or "gan".
        steps: Generator steps, of all rounds together.
        batch: Samples in a minibatch.
        critic_steps: For each generator step.
        generator_lr: Learning rate of generator and critic; None takes that of `distill`.
        num_bn_draws: For networks with batch normalisation: how many draws have their own statistics.
    """

    name = "apd"
    renamed: ClassVar[dict[str, str]] = {**SGLD.renamed, "how": "algorithm", "num_draws": "num_bn_draws"}

    online: bool = False
    round_samples: int = 10
    restart: bool = False
    latent: int = 32
    hidden: tuple[int, ...] = (100, 100, 100)
    algorithm: Kind = "wgan-gp"
    steps: int = 5000
    batch: int = 100
    critic_steps: int = 5
    generator_lr: float | None = None
    num_bn_draws: int = 50
    together: bool = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for name in ("round_samples", "latent", "steps", "batch", "critic_steps", "num_bn_draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        if not self.hidden or any(size < 1 for size in self.hidden):
            raise ValueError(f"hidden needs a layer, and layers of at least one unit, but it is {self.hidden}.")
        if self.algorithm not in ("wgan-gp", "wgan", "gan"):
            raise ValueError(f"algorithm must be 'wgan-gp', 'wgan' or 'gan', but it is {self.algorithm!r}.")
        if not self.together:
            raise ValueError("APD's chains move together: leave together=True, or distil the bank of an SGLD run.")
        if self.restart and not self.online:
            raise ValueError("restart needs online=True: offline the generator learns after the chains' last step.")

    # -- building -----------------------------------------------------------------------------------------------

    def build(self, network: nn.Module, selection: Selection) -> tuple[GeneratorLaw, Conversion]:  # type: ignore[override]
        """Make a generator that returns the network's own weights."""
        names, table = select_parameters(network, selection, how=f"generated, {self.algorithm}")
        require_something(table, network, "APD", "parameters that are not frozen")
        law = GeneratorLaw(
            network,
            names=names,
            latent=self.latent,
            hidden=self.hidden,
            num_bn_draws=self.num_bn_draws,
            algorithm=self.algorithm,
            source=self.name,
        )
        return law, table

    def state(self, posterior: Posterior) -> APDState:
        """Return chains at their starts, room for their samples, and two players that have learned nothing."""
        law = cast(GeneratorLaw, posterior.law)
        return APDState(
            law.codec,
            self.chain_starts(posterior.network, list(law.names)),
            room=self.chains * self.samples_per_chain,
            dtype=STORAGE[self.storage] if self.storage else None,
            players=self._players(law) if self.online else None,  # offline both begin and end with the distillation
            kind=self.algorithm,
        )

    # -- learning -----------------------------------------------------------------------------------------------

    def data_count(self, posterior: Posterior) -> Tensor:
        """Return where the number of data is kept, which the sampler reads."""
        return cast(APDState, self.learning(posterior)).num_data

    def noise_shares(self, posterior: Posterior, chain: int | None = None) -> Tensor:
        """Return where the share of gradient noise of each chain is kept, or of one, while they run."""
        shares = cast(APDState, self.learning(posterior)).shares
        return shares if chain is None else shares[chain : chain + 1]

    def make_schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Return the schedule of the step sizes, if there will be anything to learn from."""
        if self.chains * min(self.samples_per_chain, max(1, len(_sample_numbers(self, total_steps)))) < 2:
            raise ValueError(
                f"{total_steps} steps of one chain with samples_per_chain={self.samples_per_chain} keep a single "
                "sample, and a generator needs at least two to learn from. Fit for more epochs, lower burn_in, or run "
                "several chains."
            )
        return super().make_schedule(optimizer, total_steps)

    def after_step(self, posterior: Posterior, step: int, total_steps: int, steps_per_epoch: int) -> None:
        """Keep samples where they are due; online, let the generator learn from them."""
        del steps_per_epoch
        state: APDState = self.learning(posterior)
        if step == 1:
            self.check_steps(int(state.num_data), total_steps)
            state.shares.fill_(-1)
        due = _sample_numbers(self, total_steps)
        if step not in due:
            return
        state.collect()
        taken, every = due[step], self.round_samples
        if self.online and (taken % every == 0 or taken == len(due)):
            number, rounds = -(-taken // every), -(-len(due) // every)
            self._round(posterior, self.steps * number // rounds - self.steps * (number - 1) // rounds)
            if self.restart and taken < len(due):
                self._restart(posterior)

    def finish(self, posterior: Posterior, loader: Iterable[Any], progress: Callable[..., Any]) -> None:
        """Let the generator learn, if it has not; leave chains and samples behind; re-estimate statistics."""
        state: APDState = self.learning(posterior)
        if int(state.total) == 0:
            state.collect()
        if not self.online:
            self._learn_from_all(posterior, progress)
        elif int(state.rounds) == 0:
            self._round(posterior, self.steps)
        self.check_noise(state.shares)
        posterior.learning = None
        posterior.refresh_statistics(loader, max_batches=self.statistics_batches, progress=progress)

    # -- the generator's part -----------------------------------------------------------------------------------

    def _players(self, law: GeneratorLaw, random: torch.Generator | None = None) -> tuple[nn.Sequential, nn.Sequential]:
        random = torch.Generator().manual_seed(self.seed) if random is None else random
        return make_players(sum(law.codec.sizes), self.latent, self.hidden, law.residual_std, random)

    def _learn_from_all(self, posterior: Posterior, progress: Callable[..., Any]) -> None:
        state, law = self.learning(posterior), cast(GeneratorLaw, posterior.law)
        like = law.residual_std
        reduction = reduce_samples(state.samples[: len(state)].to(state.shift.dtype), self.hidden[-1])
        random = generator_for(Key(self.seed), "distillation", like.device)
        columns = reduction.coordinates.shape[1]
        generator, critic = make_players(columns, self.latent, self.hidden, like, random)
        game = self._game(generator, critic, random)
        for _ in progress(range(self.steps)):
            game.step(reduction.coordinates)
        fold_generator(generator, reduction, law.generator)
        law.changed()

    def _round(self, posterior: Posterior, steps: int) -> None:
        """Let the generator take steps on the samples there are."""
        state, law = self.learning(posterior), cast(GeneratorLaw, posterior.law)
        if len(state) < 2:  # a first round of one chain's one sample
            return
        random = generator_for(Key(self.seed, int(state.rounds)), "distillation", law.residual_std.device)
        if int(state.rounds) == 0:
            state.standardise()
            for kept, made in zip(state.players, self._players(law, random), strict=True):
                kept.load_state_dict(made.state_dict())
        # Copies, since several processes watch the gradients of what the posterior holds.
        players = copy.deepcopy((state.generator, state.critic))
        game = self._game(*players, random, state)
        rows = state.samples[: len(state)]
        with torch.enable_grad():
            for _ in range(steps):
                game.step(rows, state.prepare)
        for player, learned in zip(state.players, players, strict=True):
            player.load_state_dict(learned.state_dict())
        state.rounds += 1
        state.fold(law.generator)
        law.changed()

    def _game(
        self, generator: nn.Sequential, critic: nn.Sequential, random: torch.Generator, state: APDState | None = None
    ) -> Game:
        return Game(
            generator, critic, kind=self.algorithm, batch=self.batch, critic_steps=self.critic_steps,
            lr=self.generator_lr, random=random, moments=None if state is None else state.moments,
        )  # fmt: skip

    @torch.no_grad()
    def _restart(self, posterior: Posterior) -> None:
        """Put every chain at a draw of the generator."""
        state, law = self.learning(posterior), cast(GeneratorLaw, posterior.law)
        for index in range(self.chains):
            drawn = law.sample(Key(self.seed, int(state.rounds) * self.chains + index))
            for name, tensor in law.codec.split(drawn).items():
                state.tensors(index)[name].copy_(tensor)

    @classmethod
    def example(cls) -> APD:
        """Return a short run with a small generator."""
        return cls(**SGLD.example_settings(), chains=2, hidden=(20, 20), steps=500)


class APDState(Chains):
    """What a generator is learned with, and is not needed afterwards: chains, their last samples, and two players.

    Samples are first in, first out: when there is no more room, the newest takes the place of the oldest. The players
    see samples as multiples of their root mean variance, around their mean: w = shift + scale G(z).

    Args:
        codec: Of the network's random parameters.
        starts: For each chain, the parameters by name that it begins with.
        room: How many samples are kept.
        dtype: Of the samples; None takes the parameters' own.
        players: A generator and a critic; None where they are not kept between rounds.
        kind: Of their game.

    Attributes:
        total: How many samples there were.
        rounds: How often the generator has learned from them.
        shift: What is added to the generator's outputs, (D,).
        scale: What they are multiplied by before.
        shares: The share of gradient noise of each chain.
    """

    samples: Tensor
    total: Tensor
    rounds: Tensor
    num_data: Tensor
    shift: Tensor
    scale: Tensor
    shares: Tensor

    def __init__(
        self,
        codec: Codec,
        starts: Sequence[Mapping[str, Tensor]],
        *,
        room: int,
        dtype: torch.dtype | None,
        players: tuple[nn.Sequential, nn.Sequential] | None,
        kind: Kind,
    ) -> None:
        super().__init__(starts, codec.names)
        self.codec = codec
        like = next(self.chains.parameters())
        columns = sum(codec.sizes)
        self.generator, self.critic = players or (nn.Sequential(), nn.Sequential())
        self.moments = make_moments(self.generator, self.critic, kind) if players else TensorTree({})
        rows = torch.zeros(room, columns, dtype=dtype or codec.dtype, device=like.device)
        self.register_buffer("samples", rows)
        for name in ("total", "rounds", "num_data"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long, device=like.device))
        self.register_buffer("shift", rows.new_zeros(columns, dtype=codec.dtype))
        self.register_buffer("scale", rows.new_ones((), dtype=codec.dtype))
        self.register_buffer("shares", rows.new_full((len(starts),), -1.0, dtype=codec.dtype))

    def __len__(self) -> int:
        """Return the number of samples that are kept now."""
        return min(int(self.total), len(self.samples))

    def __bool__(self) -> bool:
        """Return True: without samples it is what it is."""
        return True

    @property
    def players(self) -> tuple[nn.Sequential, nn.Sequential]:
        """The generator and the critic."""
        return self.generator, self.critic

    @torch.no_grad()
    def collect(self) -> None:
        """Keep the present state of every chain."""
        for index in range(len(self.chains)):
            row = self.samples[int(self.total) % len(self.samples)]
            row.copy_(self.codec.join(self.tensors(index)))
            self.total += 1

    @torch.no_grad()
    def standardise(self) -> None:
        """Let the generator's outputs be multiples of the samples' root mean variance, around their mean."""
        rows = self.samples[: len(self)].to(self.shift.dtype)
        variance, mean = torch.var_mean(rows, 0, correction=0)
        self.shift.copy_(mean)
        self.scale.copy_(variance.mean().sqrt().clamp_min(torch.finfo(mean.dtype).tiny))

    def prepare(self, rows: Tensor) -> Tensor:
        """Return samples as the critic sees them."""
        return (rows.to(self.shift.dtype) - self.shift) / self.scale

    @torch.no_grad()
    def fold(self, into: nn.Sequential) -> None:
        """Write the generator into one of weights: shift and scale go into its last layer."""
        into.load_state_dict(self.generator.state_dict())
        last = into[-1]
        assert isinstance(last, nn.Linear)
        last.weight.mul_(self.scale)
        last.bias.mul_(self.scale).add_(self.shift)


@functools.lru_cache(maxsize=8)
def _sample_numbers(method: APD, total_steps: int) -> dict[int, int]:
    """Return the steps after which samples are kept, each with how many steps were kept up to it."""
    steps: Iterable[int] = sample_steps(method, total_steps)
    if method.online:
        steps = range(total_steps, int(method.burn_in * total_steps), -(method.thin or SPACING))
    return {step: number for number, step in enumerate(sorted(steps), 1)}
