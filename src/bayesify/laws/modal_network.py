"""Modes and draws: which pass a call makes, and functions that are the same on every input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from bayesify._core.deprecation import old_attribute, renamed
from bayesify._core.random import Key
from bayesify.laws.passes import Pass, Refusal
from bayesify.laws.random_network import RandomNetwork, rows_of

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = ["Draw", "ModalNetwork"]


class ModalNetwork(RandomNetwork):
    """A random network whose calls make the pass that the caller's mode asks for: fresh, the mean, or given draws."""

    @property
    def lock(self) -> Any:
        """The lock that a pass holds."""
        return self.runtime.modes.lock

    @contextmanager
    def mean(self) -> Iterator[Self]:
        """Switch the noise off for the passes inside.

        The network then is the one at the posterior's mean; the mode before returns in any case. Like every mode, it is
        that of the thread or asyncio task which entered it, and of the tasks that this one starts inside; others are
        neither changed nor kept waiting. A generator that is suspended inside lends it to its caller meanwhile.
        """
        self.require_mean()
        with self.runtime.modes.enter(kind="mean", keys=()):
            yield self

    @contextmanager
    def drawn(self, *keys: Key) -> Iterator[Self]:
        """Fix the draws for the passes inside: each is the function named by the key.

        With several keys, a pass on B rows returns all draws together as (S B, ...) where
        `Law.together` says "rows".
        """
        with self.runtime.modes.enter(kind="draw", keys=keys):
            yield self

    @contextmanager
    def member(self, index: int) -> Iterator[Self]:
        """Fix the member, component or chain for the passes inside: losses and means are its own."""
        self.law.check_part(index)
        with self.runtime.modes.enter(part=index):
            yield self

    @property
    def present_part(self) -> Any:
        """The part of a mixture that was entered with `member`; None outside."""
        return self.runtime.modes.present("part", None)

    def draw(self, seed: int = 0) -> Draw:
        """Return one coherent function of the posterior.

        The same seed is the same function, on every input: a function draw costs no copy of the network.
        """
        return Draw(self, self.keys(1, seed)[0])

    @renamed(num_samples="num_draws")
    def keys(self, num_draws: int | None, seed: int) -> list[Key]:
        """Name `num_draws` draws of the posterior; None takes its own number.

        Laws with a finite number of functions, or with parts, balance them here.
        """
        if self.statistics is not None:
            self.statistics.require_fresh()
        return self.law.keys(num_draws, seed)

    default_samples = old_attribute("default_samples", "default_draws")

    @property
    def default_draws(self) -> int:
        """How many draws a prediction takes if the caller does not say."""
        return self.law.default_draws

    @default_draws.setter
    def default_draws(self, number: int) -> None:
        self.law.default_draws = number

    def require_mean(self) -> None:
        """Raise where the posterior has no mean network."""
        answer = self.has_mean()
        if answer is not True:
            raise ValueError(answer)

    def has_mean(self) -> Literal[True] | Refusal:
        """Return whether there is a mean network in the present mode, or why not."""
        answer = self.law.has_mean(self.present_part)
        if answer is True and self.statistics is not None and not bool(self.statistics.fresh[0]):
            return Refusal(
                "The mean network has no batch-normalisation statistics. Call "
                "posterior.refresh_statistics(train_loader) first, or use how='sampling'."
            )
        return answer


class Draw:
    """One coherent function of a posterior: the same weights for every input it is called on."""

    def __init__(self, posterior: ModalNetwork, key: Key) -> None:
        self.posterior = posterior
        self.key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the function; arguments and outputs are the network's own."""
        return self.posterior.run(Pass("draw", (self.key,), rows=rows_of(args, kwargs)), args, kwargs)

    def network(self) -> nn.Module:
        """Return the function as a plain network, which can be compiled, exported, and generate text.

        Random tensors are copies; the other parameters share their memory with the posterior's, so that a draw costs
        what is random in it. Who goes on to train either copies the network first: `copy.deepcopy(draw.network())`.

        Raises:
            ValueError: The randomness is in layers, and not in the network's weights alone.
        """
        tensors = self.posterior.weights(self.key)
        if isinstance(tensors, Refusal):
            raise ValueError(f"This draw is no plain network: {tensors}. Call the draw itself.")
        return self.posterior.plain_network(tensors)

    def __repr__(self) -> str:
        """Show the key."""
        return f"Draw({self.key})"
