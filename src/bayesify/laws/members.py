"""Several members of one posterior, each with its own values of what is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.trees import call
from bayesify.laws.dropout import draws_fold, noisy_layers
from bayesify.laws.noise import Key, shuffled
from bayesify.laws.posterior import Posterior
from bayesify.laws.tensors import TensorTree, owners

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["MembersPosterior"]


class MembersPosterior(Posterior):
    """A mixture of M members: q = (1/M) sum_m q_m.

    The members share one network in memory and differ in the tensors given for them; a pass puts a member's tensors
    in place of the network's, without a copy. Draws are spread evenly over the members.

    Args:
        network: What each member is: a plain network, one with noisy layers, or a posterior.
        members: For each member, its own tensors by their name in `network`.
        method: How the members are learned.
    """

    def __init__(self, network: nn.Module, members: Sequence[Mapping[str, Tensor]], method: Method) -> None:
        super().__init__(network, method)
        self.members = nn.ModuleList(TensorTree(tensors) for tensors in members)
        if isinstance(network, Posterior):
            self.noise = network.noise
        self.default_samples = len(members) * (3 if self._random_members else 1)

    @property
    def _random_members(self) -> bool:
        return bool(self._noisy_sites())

    def _noisy_sites(self) -> set[nn.Module]:
        return self.network.sites() if isinstance(self.network, Posterior) else noisy_layers(self.network)

    def tensors(self) -> dict[str, Tensor]:
        """Return the present member's tensors; a fresh pass takes a member at random."""
        if self.noise.member is not None:
            return self.member_tensors(self.noise.member)
        if self.noise.keys:
            return self.member_tensors(self.noise.keys[0].member or 0)
        return self.member_tensors(int(torch.randint(len(self.members), ())))

    def member_tensors(self, member: int) -> dict[str, Tensor]:
        """Return a member's own tensors by their name in the network."""
        tree = self.members[member]
        assert isinstance(tree, TensorTree)
        return tree.as_dict()

    @contextmanager
    def member(self, index: int) -> Iterator[MembersPosterior]:
        """Fix the member for a while: passes, losses and means are its own."""
        if not 0 <= index < len(self.members):
            raise IndexError(f"There is no member {index}: there are {len(self.members)}, from 0 on.")
        with self.noise.of_member(index):
            yield self

    def keys(self, num_samples: int | None, seed: int) -> list[Key]:
        """Spread the draws evenly over the members; which of them get one more, the seed decides.

        Members without noise of their own are taken once each at most: another round would add nothing.
        """
        number = len(self.members)
        count = self._count(num_samples)
        if not self._random_members:
            count = min(count, number)
        order = shuffled(number, seed)
        members = sorted(order[index % number] for index in range(count))
        return [Key(seed, index, member) for index, member in enumerate(members)]

    def _check_mean(self) -> None:
        if self.noise.member is None:
            raise ValueError(
                "Members that were trained apart have no mean network: the average of their weights is not one of "
                "them. Use how='sampling', or one member: `with posterior.member(0), posterior.mean():`."
            )

    def reference(self, inputs: Any) -> Tensor:
        """Return what the shared network returns, which is no member's training's result."""
        with self.noise.lock, self.noise.mode(silent=True):
            return self.read(call(self.network, inputs))

    @property
    def learned(self) -> Literal[True] | str:
        """Whether the members, where they are posteriors themselves, have learned."""
        return self.network.learned if isinstance(self.network, Posterior) else True

    @property
    def folds(self) -> bool:
        """Whether the draws of one member can share a batch."""
        if isinstance(self.network, Posterior):
            return self.network.folds
        return self._random_members and draws_fold(self.network, self.noise)

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a tensor of a member, and those where a member is random itself."""
        return owners(self.network, self.member_tensors(0)) | self._noisy_sites()
