"""How good a posterior is before, during and after a run, measured without a trace in the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bayesify.fitting.backend import Engine
from bayesify.fitting.health import Measured, measure, validation_nll, warn_if_less_likely, warn_if_worse
from bayesify.fitting.history import History
from bayesify.fitting.network_probe import make_probe
from bayesify.fitting.random_state import generators, random_state, restore_random_state, seed_part
from bayesify.laws import Posterior
from bayesify.methods import Survey

__all__ = ["Measurements"]


@dataclass(kw_only=True)
class Measurements:
    """The measurements of one run, which are those of `fit`'s arguments.

    Attributes:
        original: What the original network did with the examples; None in a run that was resumed.
        first: The first batch that it was measured on.
    """

    posterior: Posterior
    loader: Iterable[Any]
    val_loader: Iterable[Any] | None
    epochs: int
    engine: Engine
    seed: int
    original: Measured | None = None
    first: Any = None

    def before(self, history: History) -> None:
        """Measure the original network."""
        with self._aside():
            self.original = measure(self.posterior, self._noting_first(), original=True, max_batches=self._most_batches)
        history.accuracy_before = None if self.original is None else self.original.accuracy

    def probe(self) -> dict[str, Any] | None:
        """Return what tells the network from another one of the same weights; None where no batch was seen."""
        with self._aside():
            return None if self.first is None else make_probe(self.posterior, self.first)

    def during(self) -> float | None:
        """Return the validation NLL; None without a validation loader."""
        if self.val_loader is None:
            return None
        with self._aside():
            num_draws = min(4, self.posterior.default_draws)
            return validation_nll(self.posterior, self.val_loader, self.engine, num_draws)

    def after(self, history: History, survey: Survey | None, tolerance: float) -> None:
        """Measure the posterior, and warn where it is worse than the original network."""
        if history.accuracy_before is None and (self.original is None or survey is None):
            return
        with self._aside():
            now = measure(self.posterior, self._sample, original=False, max_batches=self._most_batches)
        if now is None:
            return
        if self.epochs:
            now.draws.warn()
        advice = self.posterior.require_method().if_worse
        if now.accuracy is not None and history.accuracy_before is not None:
            history.accuracy_after = now.accuracy
            warn_if_worse(history.accuracy_before, now, self.original, tolerance, advice)
        if survey is not None and not self.epochs and self.original is not None:  # the mean is the original network
            held_out = self.val_loader is not None
            where, least = ("validation", 0.01) if held_out else ("training", survey.tolerated_rise())
            warn_if_less_likely(self.original, now, where, least=least, advice=advice)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Look at the posterior with the same order and noise each time and in every process, and put both back."""
        loaders = (self.loader, self.val_loader)
        before = random_state(*loaders)
        number = seed_part(self.seed, -1, -1, 0)
        for own in generators(*loaders):
            own.manual_seed(number)
        self.posterior.eval()
        try:
            yield
        finally:
            restore_random_state(before, *loaders)

    @property
    def _sample(self) -> Iterable[Any]:
        return self.loader if self.val_loader is None else self.val_loader

    @property
    def _most_batches(self) -> int | None:
        if self.val_loader is not None:
            return None
        return 20 if self.epochs else 4  # a single pass over the data should not be the smaller part of the work

    def _noting_first(self) -> Iterator[Any]:
        for batch in self._sample:
            if self.first is None:
                self.first = batch
            yield batch
