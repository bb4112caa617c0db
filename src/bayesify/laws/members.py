"""Mixtures of laws: members that were trained apart, of whatever kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, groupby
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from bayesify._core.random import Key, numbered_keys, spread_keys
from bayesify.laws.components import Component
from bayesify.laws.law import Law, Rescaling, check_count, register_law
from bayesify.laws.passes import Arranged, Kind, Pass, Patch, Refusal
from bayesify.laws.stacking import Stack, Stacking, whole_stack
from bayesify.laws.tensors import TensorTree, batch_norms, tensor_of
from bayesify.laws.trace import Trace
from bayesify.likelihoods import Likelihood

__all__ = ["MemberLaw", "rebase"]


@register_law
class MemberLaw(Law):
    """A mixture of laws of one network, q = (1/M) sum_m q_m.

    The members share one network in memory and differ in the tensors of their own; a pass puts a member's tensors in
    place of the network's, without a copy. Draws are spread evenly over the members.

    Args:
        network: The network that all of them are about.
        parts: A law for each member.
        sources: What each can be built from again, for files of mixtures that no method builds.
    """

    name = "members"
    mixes = False
    settings: ClassVar[dict[str, Any]] = {"parts": list}
    NO_STATISTICS = (
        "Members without end of draws, each with batch-normalisation statistics of its own (SWAG, APD), cannot share a "
        "network with others. Take some of their draws: ensemble([..., sample_bank(one, n)])."
    )

    def __init__(self, network: nn.Module, parts: Sequence[Law], sources: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(network)
        self.sources = list(sources)
        self.parts = nn.ModuleList(parts)
        self.num_parts = len(parts)
        self.default_draws = self.functions or 3 * len(parts)
        self.first_order = all(part.first_order for part in parts)
        kinds: frozenset[Kind] = frozenset()
        self.traced = kinds.union(*(part.traced for part in parts))
        self.keep_statistics = any(part.keep_statistics for part in parts)
        self.stacks, self.made = all(part.stacks for part in parts), any(part.made for part in parts)
        if any(part.statistics_rows and batch_norms(network) for part in parts):
            raise ValueError(self.NO_STATISTICS)

    @property
    def functions(self) -> int | None:  # type: ignore[override]
        """How many different functions the members have together; None for no end of them."""
        finite = [part.functions for part in self.laws]
        return None if None in finite else sum(filter(None, finite))

    def part(self, index: int) -> Law:
        """Return the law of a member."""
        found = self.parts[index]
        assert isinstance(found, Law)
        return found

    def member_tensors(self, index: int) -> dict[str, Tensor]:
        """Return a member's own tensors by their name in the network."""
        return self.part(index).own.as_dict()

    @property
    def laws(self) -> list[Law]:
        """The members' laws."""
        return cast("list[Law]", list(self.parts))

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the tensors that are random in any member."""
        return list(dict.fromkeys(name for part in self.laws for name in part.names))

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a tensor of a member, and those where a member is random itself."""
        return set().union(*(part.sites() for part in self.laws))

    @property
    def learned(self) -> Any:
        """Whether all members have learned."""
        return next((part.learned for part in self.laws if part.learned is not True), True)

    def check_part(self, part: int) -> None:
        """Raise unless there is such a member."""
        if not 0 <= part < len(self.parts):
            raise IndexError(f"There is no member {part}: there are {len(self.parts)}, from 0 on.")

    # -- draws --------------------------------------------------------------------------------------------------

    def keys(self, num_draws: int | None, seed: int) -> list[Key]:
        """Spread the draws evenly over the members; which of them get one more, the seed decides.

        Members without noise of their own are taken once each at most: another round would add nothing. Beside members
        with noise they are taken as often as these, so that all have an equal share.
        """
        number = len(self.parts)
        count, functions, laws = check_count(num_draws, self.default_draws), self.functions, self.laws
        if functions is not None:
            count = min(count, functions)
        found: list[Key] = []
        for member, group in groupby(spread_keys(count, seed, number), key=lambda key: key.path[0]):
            found += _own_keys(laws[member], list(group))
        return found

    def together(self, trace: Trace | None) -> Arranged:
        """Return how draws share a pass: of all members where they are tensors, else of one where all agree on that."""
        if self.stacking(trace) is not None:
            return "stack"
        return "rows" if all(part.together(trace) == "rows" for part in self.laws) else "one"

    def stacking(self, trace: Trace | None) -> Stacking | None:
        """Return how layers have tensors of draws of several members, where a member's own draws can share a pass."""

        def able() -> bool:
            return all(part.stacks and (not part.varying() or part.stacking(trace)) for part in self.laws)

        known = able() if trace is None else trace.conclude(("members", id(self)), able)
        return super().stacking(trace) if known else None

    def varying(self) -> list[str]:
        """Return the names of the tensors in which members differ, or draws of one."""
        return list(dict.fromkeys(n for part in self.laws for n in (*part.varying(), *part.own.as_dict())))

    def stacked(self, keys: Sequence[Key]) -> dict[str, Stack]:
        """Return the tensors of draws of any members; those that a member has not are the network's own."""
        groups: list[tuple[dict[str, Tensor], dict[str, Stack], int]] = []
        laws, names = self.laws, dict[str, Any]()
        for member, group in groupby(keys, key=lambda key: key.path[0] if key.path else 0):
            part, inner = laws[member], [key.inner() for key in group]
            groups.append((part.own.as_dict(), part.stacked(inner), len(inner)))
            names.update(groups[-1][0])
            names.update(groups[-1][1])
        if len(groups) == len(keys):  # each has one of them, which needs no copy
            single = [{**own, **{name: stack[0] for name, stack in drawn.items()}} for own, drawn, _ in groups]
            return {
                name: tuple([one[name] if name in one else tensor_of(self.network, name) for one in single])
                for name in names
            }
        return {name: self._joined(name, groups) for name in names}

    def _joined(self, name: str, groups: Sequence[tuple[dict[str, Tensor], dict[str, Stack], int]]) -> Stack:
        """Return a tensor of all draws."""

        def own(tensors: dict[str, Tensor]) -> Tensor:
            return tensors[name] if name in tensors else tensor_of(self.network, name)

        return torch.cat([
            whole_stack(drawn[name]) if name in drawn else own(tensors).expand(number, *own(tensors).shape)
            for tensors, drawn, number in groups
        ])  # fmt: skip

    @property
    def continues(self) -> Any:
        """Whether draws of all members go on from a key-value cache."""
        return next((part.continues for part in self.laws if part.continues is not True), True)

    def has_mean(self, part: Any = None) -> Any:
        """Return whether the chosen member has a mean; all together have none."""
        if isinstance(part, int):
            return self.part(part).has_mean()
        return Refusal(
            "Members that were trained apart have no mean network: the average of their weights is not one of "
            "them. Use how='sampling', or one member: `with posterior.member(0), posterior.mean():`."
        )

    def patch(self, p: Pass) -> Patch:
        """Return what the member puts in the network's place; a fresh pass takes one at random."""
        if isinstance(p.part, int):
            member = p.part
        elif p.keys:
            member = p.keys[0].path[0] if p.keys[0].path else 0
        else:
            member = int(torch.randint(len(self.parts), ()))
        return self.part(member).patch(p.inner())

    def weights(self, key: Key) -> dict[str, Tensor] | Refusal:
        """Return a member's draw as weights, with all tensors in which any member differs from the network."""
        part = self.part(key.path[0] if key.path else 0)
        found = part.weights(key.inner())
        if isinstance(found, Refusal):
            return found
        others = {*self.names, *(name for one in self.laws for name in one.own.as_dict())}
        return {**{name: part.tensor(name) for name in others - found.keys()}, **found}

    # -- without draws ------------------------------------------------------------------------------------------

    def components(self, trace: Trace | None = None) -> list[Component] | Refusal:
        """Return the members' components, each member with an equal share."""
        found: list[Component] = []
        for index, part in enumerate(self.laws):
            own = part.components(trace)
            if isinstance(own, Refusal):
                return own
            total = sum(one.weight for one in own)
            found += [replace(one, weight=one.weight / total, part=index) for one in own]
        return found

    def condition(self, likelihood: Likelihood) -> None:
        """Take notice of what the network's outputs mean."""
        super().condition(likelihood)
        for part in self.laws:
            part.condition(likelihood)

    def rescaling(self) -> Rescaling | Refusal:
        """Return what rescales every member that has noise; refuse as the first does where none has."""
        found = [part.rescaling() for part in self.laws]
        able = [one for one in found if not isinstance(one, Refusal)]
        if not able:
            return found[0]

        def rescale(factor: float) -> None:
            for one in able:
                one(factor)

        return rescale

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Make room in every member."""
        for index, part in enumerate(self.laws):
            prefix = f"parts.{index}."
            part.make_room({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})

    def config(self) -> dict[str, Any]:
        """Return what the members can be built from again."""
        return {"parts": self.sources}

    def described(self) -> str:
        """Return what the law is called in sentences."""
        return f"A mixture of {len(self.parts)} members"


def _own_keys(law: Law, keys: list[Key]) -> list[Key]:
    """Return the keys of a member's draws, in turn where it has fewer; those that it numbers are numbered as given."""
    seed, count, path = keys[0].seed, len(keys), keys[0].path
    own = law.keys(count, seed)
    if own == list(numbered_keys(count, seed)):
        return keys
    numbered = [key.index for key in own] == list(range(count))
    return [
        Key(key.seed, given.index if numbered else key.index, (*path, *key.path))
        for given, key in zip(keys, cycle(own), strict=False)
    ]


def rebase(law: Law, own: Mapping[str, Tensor]) -> None:
    """Give a law tensors that take the places of its network's own, beneath those that it has already."""
    if isinstance(law, MemberLaw):
        for part in law.laws:
            rebase(part, own)
    else:
        law.own = TensorTree({**own, **law.own.as_dict()})
