"""What is random: a law turns the name of a draw into what differs from the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn

from bayesify._core.random import Key, numbered_keys
from bayesify.laws.components import Component
from bayesify.laws.passes import Arranged, Kind, Pass, Patch, Refusal
from bayesify.laws.stacking import Stack, Stacking, find_stacking
from bayesify.laws.statistics import Statistics
from bayesify.laws.tensors import TensorTree, owners, statistics_names, tensor_of
from bayesify.laws.trace import Trace
from bayesify.likelihoods import Likelihood

__all__ = ["Law", "Rescaling", "check_count", "law_class", "register_law"]

Answer = Literal[True] | Refusal
Rescaling = Callable[[float], None]
_LAWS: dict[str, type[Law]] = {}
_AnyLaw = TypeVar("_AnyLaw", bound="type[Law]")


class Law(nn.Module):
    """A distribution over what a network computes.

    Its parameters and buffers are the distribution's own state. Its means may be the network's own parameters, which it
    refers to and does not hold; `own` has values that take their places where several laws share a network.

    Subclasses answer `patch`, and whatever else is true of them.

    Attributes:
        network: The network that it is about; a reference, no part of the law's state.
        own: Tensors in which the law's network differs from the shared one, by name.
        likelihood: What the network's outputs mean; a reference too.
        statistics: The posterior's batch-normalisation statistics of drawn weights, where it has such; a reference too.
        default_draws: How many draws a prediction takes if the caller does not say.
        first_order: Whether means and variances are carried as of a network that is linear in what is random.
        traced: The kinds of passes for which `patch` has to know where the batch is.
        functions: How many different functions there are; None for no end of them.
        stacks: Whether a draw is tensors and nothing else, so that layers may have those of several draws.
        made: Whether these are made for the draw, and not only looked up: a pass may then find those of the last draws
            in memory.
        mixes: Whether draws of different parts of a mixture may be rows of one pass.
        num_parts: How many parts a mixture has which can have temperatures of their own.
        statistics_rows: How many draws have batch-normalisation statistics of their own; 0 where all share the
            network's.
        keep_statistics: Whether normalisation uses its running statistics in training too, and leaves them alone; or
            the names of the layers that do.
    """

    network: nn.Module
    likelihood: Likelihood | None
    statistics: Statistics | None

    name: ClassVar[str] = ""
    old_settings: ClassVar[dict[str, str]] = {}  # names that older files have for some of `settings`
    settings: ClassVar[dict[str, Any]] = {}  # names and types of what `config` returns
    first_order: bool = False
    traced: frozenset[Kind] = frozenset()
    functions: int | None = None
    stacks: bool = False
    made: bool = True
    mixes: bool = True
    num_parts: int = 1
    statistics_rows: int = 0
    keep_statistics: bool | frozenset[str] = False

    def __init__(self, network: nn.Module, own: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        # References, which are no part of the law's state: nn.Module would register them.
        self.__dict__.update(network=network, likelihood=None, statistics=None)
        self.own = TensorTree(own or {})
        self.default_draws = 20

    # -- what is random -----------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the network's tensors that are random; those of noisy layers are not."""
        return ()

    def sites(self) -> set[nn.Module]:
        """Return the modules at which randomness enters; what ran before them is the same for every draw."""
        return owners(self.network, [*self.names, *self.own.as_dict()])

    @property
    def learned(self) -> Answer:
        """True, or why nothing is random yet, and what to call."""
        return True

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the law's network: its own, or the shared network's."""
        own = self.own.as_dict()
        return own[name] if name in own else tensor_of(self.network, name)

    # -- draws --------------------------------------------------------------------------------------------------

    def keys(self, num_draws: int | None, seed: int) -> list[Key]:
        """Name `num_draws` draws; None takes the law's own number."""
        return list(numbered_keys(check_count(num_draws, self.default_draws), seed))

    def together(self, trace: Trace | None) -> Arranged:
        """Return how several draws share a pass: not at all, as rows of a larger batch, or as stacked tensors."""
        return "one" if self.stacking(trace) is None else "stack"

    def stacking(self, trace: Trace | None) -> Stacking | None:
        """Return how layers have tensors of several draws; None where they cannot."""
        if not self.stacks:
            return None
        if trace is None:
            return find_stacking(self.network, self.varying(), None)
        found: Stacking | None = trace.conclude(
            ("stacking", id(self)), lambda: find_stacking(self.network, self.varying(), trace)
        )
        return found

    def varying(self) -> list[str]:
        """Return the names of the tensors that may differ between draws."""
        return [*self.names, *(statistics_names(self.network) if self.statistics_rows else ())]

    def independent_rows(self, trace: Trace | None) -> bool:
        """Return whether a fresh pass draws for each row: copies of a row then are several draws."""
        del trace
        return False

    @property
    def continues(self) -> Answer:
        """True, or why a draw that goes on from a key-value cache is not the function that it was: what to do instead.

        A cache holds what a draw made of earlier positions, so that its noise must not depend on where a pass begins.
        """
        return True

    def has_mean(self, part: Any = None) -> Answer:
        """True, or why there is no mean network; `part` is the part of a mixture that was chosen, if any."""
        del part
        return True

    def patch(self, p: Pass) -> Patch:
        """Return what a pass puts in the network's place."""
        raise NotImplementedError

    def check_part(self, part: int) -> None:
        """Raise unless there is such a part of a mixture, a component or a chain."""
        raise ValueError(f"{self.described()} has no members. It has one distribution for all.")

    def stacked(self, keys: Sequence[Key]) -> dict[str, Stack]:
        """Return the tensors of several draws by name, but for `own`; for laws that say "stack"."""
        drawn = [self.patch(Pass("draw", (key,), rows=1)).tensors for key in keys]
        return {name: tuple(one[name] for one in drawn) for name in self.names}

    # -- statistics of drawn weights ----------------------------------------------------------------------------

    def row_of(self, key: Key) -> int:
        """Return which of the re-estimated batch-normalisation statistics belong to a draw, counted from 0."""
        return key.index

    def statistics_row(self, p: Pass) -> int | None:
        """Return which row of the statistics a pass needs; 0 is the mean's, and None the network's own."""
        if p.kind == "mean":
            return 0
        return self.row_of(p.keys[0]) + 1 if p.keys else None

    def rows_to_refresh(self) -> list[int]:
        """Return the rows whose statistics belong to weights that there are; 0 is the mean's."""
        return list(range(1 + self.statistics_rows))

    def row_weights(self, row: int) -> dict[str, Tensor]:
        """Return the weights that a row of the statistics belongs to, by name."""
        raise NotImplementedError

    # -- as weights ---------------------------------------------------------------------------------------------

    def weights(self, key: Key) -> dict[str, Tensor] | Refusal:
        """Return a draw as tensors of the plain network, where it is one."""
        patch = self.patch(Pass("draw", (key,), rows=1))
        if patch.forwards:
            return Refusal("its randomness is in layers, and not in the network's weights alone")
        return dict(patch.tensors)

    def recomputed(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments of a layer that runs again in the backward pass; None where they cannot be known."""
        del module, args
        return None

    # -- without draws ------------------------------------------------------------------------------------------

    def components(self, trace: Trace | None = None) -> list[Component] | Refusal:
        """Return the law as a mixture of Gaussians, for predictors without draws."""
        del trace
        return Refusal(
            f"{self.described()} has no Gaussians that can be carried through a network, so its predictions need "
            "draws: use how='sampling'. Samples of weights have: sample_bank(posterior, 100) is a posterior of them."
        )

    # -- learning -----------------------------------------------------------------------------------------------

    def condition(self, likelihood: Likelihood) -> None:
        """Take notice of what the network's outputs mean; the likelihood is no part of the law's state."""
        self.__dict__["likelihood"] = likelihood

    def changed(self) -> None:
        """Say that weights have changed, so that batch-normalisation statistics are not theirs."""
        if self.statistics is not None:
            self.statistics.outdate()

    # -- the width ----------------------------------------------------------------------------------------------

    def rescaling(self) -> Rescaling | Refusal:
        """Return a function that makes the noise a factor times as wide as it is now, or why it cannot be.

        What is multiplied is the standard deviation of what is random; of Laplace's approximation it is the prior's.
        The function may be called again, with other factors: all are of the width that it was made at, and 1 brings
        that back bit for bit.
        """
        return Refusal(
            f"{self.described()} has no noise whose width is a number. The temperature of its predictions can be "
            "fitted: bayesify.calibrate(posterior, val_loader)."
        )

    def rescale(self, factor: float) -> None:
        """Multiply the standard deviation of the noise; `bayesify.widen` finds the factor.

        Raises:
            ValueError: The factor is not a positive number, or the law has no such noise; the message says what works.

        Example:
            >>> import torch
            >>> from bayesify import BayesAdapter, convert
            >>> law = convert(nn.Linear(2, 1, bias=False), BayesAdapter(start_std=(0.1, 0.1))).law
            >>> law.rescale(3)
            >>> law.log_std.weight.exp()
            tensor([[0.3000, 0.3000]], grad_fn=<ExpBackward0>)
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"The noise can be multiplied by a positive number, but the factor is {factor}.")
        rescale = self.rescaling()
        if isinstance(rescale, Refusal):
            raise ValueError(str(rescale))
        rescale(factor)

    # -- files --------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return what `build` needs to make a law of this kind again; only for laws that no method builds."""
        raise NotImplementedError

    @classmethod
    def build(cls, network: nn.Module, config: Mapping[str, Any]) -> Law:
        """Make a law from its configuration, with room for its tensors."""
        return cls(network, **config)

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors whose shape only learning decides the shape that they have in a state that will be loaded."""

    def described(self) -> str:
        """Return what the law is called in sentences."""
        return f"A {type(self).__name__} law"


def register_law(cls: _AnyLaw) -> _AnyLaw:
    """Make a law known to files by its name."""
    _LAWS[cls.name] = cls
    return cls


def law_class(name: str) -> type[Law] | None:
    """Return the law that files call by this name."""
    return _LAWS.get(name)


def check_count(num_draws: int | None, default: int) -> int:
    """Return how many draws are wanted, which must be at least one."""
    count = default if num_draws is None else num_draws
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"num_draws must be a whole number of at least 1, but it is {count!r}.")
    return count
