"""No randomness at all."""

from __future__ import annotations

from collections.abc import Sequence

from bayesify._core.random import Key, numbered_keys
from bayesify.laws.components import Component
from bayesify.laws.law import Law, check_count
from bayesify.laws.passes import Pass, Patch, Refusal
from bayesify.laws.stacking import Stack
from bayesify.laws.trace import Trace

__all__ = ["PointLaw"]


class PointLaw(Law):
    """All mass on one network: every draw is the network itself, or the law's `own` tensors, and one is enough."""

    name = "point"
    functions = 1
    stacks = True
    made = False

    def keys(self, num_draws: int | None, seed: int) -> list[Key]:
        """Return the only draw, however many are asked for."""
        check_count(num_draws, 1)  # refuses nonsense
        return list(numbered_keys(1, seed))

    def patch(self, p: Pass) -> Patch:
        """Return the law's own tensors."""
        del p
        return Patch(self.own.as_dict())

    def stacked(self, keys: Sequence[Key]) -> dict[str, Stack]:
        """Return nothing: draws have no tensors beside `own`."""
        del keys
        return {}

    def rescaling(self) -> Refusal:
        """Refuse: there is no noise."""
        return Refusal(
            "A network without noise has none to widen. Convert it with a method that has: BayesAdapter(), IBNN(), "
            "ABNN(), or MCDropout(p=0.1, insert_before='linear')."
        )

    def components(self, trace: Trace | None = None) -> list[Component]:
        """Return one component without variance."""
        del trace
        return [Component(fixed=self.own.as_dict())]
