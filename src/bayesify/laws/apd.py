"""A generator of weights together with the chains that it learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from bayesify._core.trees import call
from bayesify.laws.noise import Key
from bayesify.laws.tensors import Codec, TensorTree
from bayesify.laws.vectorised import chain_states, vectorised_outputs
from bayesify.laws.vectors import GeneratorPosterior

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["DistilledPosterior", "Workshop"]


class Workshop(nn.Module):
    """What a generator is learned with, and is not needed afterwards: chains, their last samples, and a critic.

    Samples are first in, first out: when there is no more room, the newest takes the place of the oldest.

    Args:
        codec: Of the network's random parameters.
        starts: For each chain, the parameters by name that it begins with.
        room: How many samples are kept.
        dtype: Of the samples; None takes the parameters' own.
        critic: Scores samples.
        moments: State of the optimisers of generator and critic.

    Attributes:
        total: How many samples there were.
        rounds: How often the generator has learned from them.
        shift: What is added to the generator's outputs, (D,).
        scale: What they are multiplied by before.
    """

    samples: Tensor
    total: Tensor
    rounds: Tensor
    num_data: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(
        self,
        codec: Codec,
        starts: Sequence[Mapping[str, Tensor]],
        *,
        room: int,
        dtype: torch.dtype | None,
        critic: nn.Sequential,
        moments: TensorTree,
    ) -> None:
        super().__init__()
        self.codec = codec
        self.chains = chain_states(starts, codec.names)
        like = next(self.chains.parameters())
        columns = sum(codec.sizes)
        self.critic = critic
        self.moments = moments
        rows = torch.zeros(room, columns, dtype=dtype or codec.dtype, device=like.device)
        self.register_buffer("samples", rows)
        for name in ("total", "rounds", "num_data"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long, device=like.device))
        self.register_buffer("shift", rows.new_zeros(columns, dtype=codec.dtype))
        self.register_buffer("scale", rows.new_ones((), dtype=codec.dtype))

    def __len__(self) -> int:
        """Return the number of samples that are kept now."""
        return min(int(self.total), len(self.samples))

    def chain_tensors(self, index: int) -> dict[str, Tensor]:
        """Return the present state of a chain, by name."""
        tree = self.chains[index]
        assert isinstance(tree, TensorTree)
        return tree.as_dict()

    @torch.no_grad()
    def collect(self) -> None:
        """Keep the present state of every chain."""
        for index in range(len(self.chains)):
            row = self.samples[int(self.total) % len(self.samples)]
            row.copy_(self.codec.join(self.chain_tensors(index)))
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


class DistilledPosterior(GeneratorPosterior):
    """A `GeneratorPosterior` that is learned by `fit`: w = shift + scale G(z) while it learns.

    Args:
        network: A copy of the user's network.
        method: How it is learned; `method.make_workshop(posterior)` begins anew.
        names: The random parameters.
        latent: The size of z.
        hidden: Sizes of the hidden layers.
        num_draws: The number of draws that get batch-normalisation statistics.

    Attributes:
        workshop: Chains, samples and critic; None when all is learned.
    """

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        *,
        names: list[str],
        latent: int,
        hidden: tuple[int, ...],
        num_draws: int,
    ) -> None:
        super().__init__(network, method, names=names, latent=latent, hidden=hidden, num_draws=num_draws)
        self.workshop: Workshop | None = None
        self.meter: Any = None  # of a sampler's gradients, while it runs
        self._shares: Tensor | None = None

    # -- learning -----------------------------------------------------------------------------------------------

    def chain_outputs(self, inputs: Any) -> Tensor:
        """Return the outputs of all chains' present states, (C, B, ...): in one vectorised pass where they allow it."""
        assert self.workshop is not None
        self.noise.guard.watch((id(self), "tensors"), self.sites)
        together = vectorised_outputs(self.network, self.workshop.chains, self.read, inputs)
        if together is not None:
            return together
        outputs = []
        for index in range(len(self.workshop.chains)):
            with self.noise.of_member(index):
                outputs.append(self.outputs(inputs))
        return torch.stack(outputs)

    def noise_shares(self, chain: int | None = None) -> Tensor:
        """Return where the share of gradient noise of each chain is kept, or of one, while they run."""
        assert self.workshop is not None
        if self._shares is None or len(self._shares) != len(self.workshop.chains):
            self._shares = self.residual_std.new_full((len(self.workshop.chains),), -1.0)
        return self._shares if chain is None else self._shares[chain : chain + 1]

    @torch.no_grad()
    def close_workshop(self) -> None:
        """Write shift and scale into the generator's last layer, and leave the rest behind."""
        if self.workshop is not None:
            last = self.generator[-1]
            assert isinstance(last, nn.Linear)
            last.weight.mul_(self.workshop.scale)
            last.bias.mul_(self.workshop.scale).add_(self.workshop.shift)
            self.workshop = None
            self.outdate_statistics()

    # -- passes -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights, and their statistics, for the present mode; a chain's where one is chosen."""
        noise = self.noise
        if self.workshop is not None and noise.member is not None and not noise.keys and not noise.silent:
            return self.workshop.chain_tensors(noise.member)
        return super().tensors()

    def sample(self, key: Key) -> Tensor:
        """Return the weights of a draw, (D,)."""
        return self._placed(super().sample(key))

    def centre(self) -> Tensor:
        """Return the mean of the weights, (D,)."""
        return self._placed(super().centre())

    def _placed(self, weights: Tensor) -> Tensor:
        return weights if self.workshop is None else weights * self.workshop.scale + self.workshop.shift

    def reference(self, inputs: Any) -> Tensor:
        """Return what the network that the chains began from returns."""
        with self.noise.lock, self.noise.mode(silent=True):
            return self.read(call(self.network, inputs))

    # -- state --------------------------------------------------------------------------------------------------

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Have a workshop where the state that will be loaded has one."""
        if not any(name.startswith("workshop.") for name in tensors):
            self.workshop = None
        elif self.workshop is None:
            self.workshop = self._maker().make_workshop(self)

    def _maker(self) -> _MakesWorkshops:
        assert hasattr(self.method, "make_workshop")
        return self.method

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.make_room({name.removeprefix(prefix): value for name, value in state_dict.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


class _MakesWorkshops(Protocol):
    def make_workshop(self, posterior: GeneratorPosterior) -> Workshop: ...
