"""One call that tries what a budget allows, and returns the best posterior, ready."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.inputs import as_loader
from bayesify._core.trees import batch_rows, first_tensor, to_device
from bayesify.conversion import convert, ensemble
from bayesify.fitting import fit
from bayesify.laws import Posterior, Refusal
from bayesify.likelihoods import Likelihood, as_likelihood
from bayesify.likelihoods.pooling import Pooling
from bayesify.methods import MAP, BayesAdapter, DeepEnsemble, Laplace, MCDropout, Method
from bayesify.prediction import Views, as_views, posterior_device
from bayesify.prediction.calibration import Outputs, calibrate, draws_of
from bayesify.prediction.widening import widen

__all__ = ["Candidate", "Choice", "choose"]

DRAWS = 20  # of what is random in the last layer alone, and costs next to nothing
WIDENED_ON = 512  # examples: the width of noise is one number
LEAST = 20  # examples to choose on
_SHIFTS = [(1, 0), (-1, 0), (2, 0), (-2, 0), (0, 1), (0, -1), (0, 2), (0, -2)]
_POOLS: dict[str, Pooling] = {"categorical": "log-probs", "bernoulli": "log-probs"}
PLAIN = "plain + temperature"
IDENTITY = Views("identity")


@dataclass(frozen=True)
class Candidate:
    """What was tried.

    Attributes:
        name: What it is.
        passes: What a prediction costs, in plain passes.
        epochs: What fitting costs, in plain epochs.
        nll: Mean NLL of validation examples, each judged by a calibration that was fitted on others.
        nll_error: Its standard error.
        gain: How much less that is than the plain network's with a temperature.
        gain_error: The standard error of this difference, of the same examples.
        views: What the network sees.
        reason: Why it could not be tried; None where it was.
    """

    name: str
    passes: int
    epochs: float = 0.0
    nll: float = math.nan
    nll_error: float = math.nan
    gain: float = math.nan
    gain_error: float = math.nan
    views: Views = IDENTITY
    reason: str | None = None


@dataclass(frozen=True)
class Choice:
    """All that `choose` tried, and what it took.

    Attributes:
        candidates: In the order in which they were tried.
        chosen: The name of the one that was taken.
    """

    candidates: tuple[Candidate, ...]
    chosen: str

    def __str__(self) -> str:
        """Return a table: NLL with its 95 % interval, and the paired gain over the plain network with its own."""
        width = max(len(one.name) for one in self.candidates)
        lines = [f"{'':{width}}  passes  epochs  validation NLL    gain over plain + temperature"]
        for one in self.candidates:
            if one.reason is not None:
                lines.append(f"{one.name:{width}}  not tried: {one.reason}")
                continue
            nll = f"{one.nll:.4f} +- {1.96 * one.nll_error:.4f}"
            gain = f"{one.gain:+.4f} +- {1.96 * one.gain_error:.4f}" if one.gain_error else ""
            mark = "  <- chosen" if one.name == self.chosen else ""
            lines.append(f"{one.name:{width}}  {one.passes:6}  {one.epochs:6.1f}  {nll}  {gain}{mark}".rstrip())
        return "\n".join(lines)


@torch.inference_mode(False)
def choose(
    network: nn.Module,
    val_loader: Iterable[Any],
    *,
    passes: int = 2,
    loader: Iterable[Any] | None = None,
    epochs: int = 0,
    likelihood: str | Likelihood = "classification",
    views: Sequence[Views | Sequence[Any] | str] | None = None,
    seed: int = 0,
    verbose: bool = True,
) -> Posterior:
    """Try what a budget allows, and return the best posterior, calibrated and ready to predict.

    Tried are the plain network with a temperature; views of images, found by going from one pair of views to the next
    best, and both ways of pooling them; noise around the weights and in front of the last layer, as wide as the
    validation data want it; with training data a Laplace approximation of the last layer; with epochs members trained
    on from the network, and BayesAdapter. Each is judged by its NLL on validation examples, calibrated on others in
    five folds. Taken is the best of the cheapest that are not worse than the best of all by more than a standard
    error; at equal cost the plain network on views before anything random.

    Args:
        network: A trained network, which is left untouched.
        val_loader: Batches of (inputs, targets) that were not trained on, the same in every round.
        passes: How many plain passes a prediction may cost.
        loader: Training data, for what needs a look at them, or learns.
        epochs: How many plain epochs fitting may cost; 0 trains nothing.
        likelihood: What the outputs mean, as in `convert`.
        views: Sets of views to try, each as in `predict`; None takes reflections and shifts for images (B, C, H, W),
            and none for others.
        seed: Of all that is random.
        verbose: Whether to print the table.

    Returns:
        The posterior: `predict(posterior, inputs)` takes its views, its number of draws, temperatures and pooling.
        `posterior.choice` holds the table.

    Costs about 20 plain passes over the validation data for images and four passes or more, and about ten predictions
    of 512 validation examples for each kind of noise.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 2)
        >>> network = nn.Linear(2, 2)
        >>> posterior = choose(network, [(x, x.argmax(1))], passes=1, verbose=False)
        >>> [candidate.name for candidate in posterior.choice.candidates]
        ['plain + temperature', 'noise before the last layer, widened']
    """
    if passes < 1 or epochs < 0:
        raise ValueError(f"passes must be at least 1 and epochs at least 0, but they are {passes} and {epochs}.")
    if epochs and loader is None:
        raise ValueError(f"epochs={epochs} needs training data: choose(..., loader=train_loader).")
    batches = as_loader(val_loader, "choose")
    if iter(batches) is batches:
        raise TypeError("choose reads the validation data several times. Give a DataLoader, or a list of batches.")
    trials = _Trials(network, batches, passes, as_likelihood(likelihood), seed)
    trials.look(views)
    trials.widen_all()
    if loader is not None:
        trials.learn_all(loader, epochs)
    posterior = trials.best()
    if verbose:
        print(posterior.choice)
    return posterior


class _Trials:
    """What was tried so far."""

    def __init__(
        self, network: nn.Module, batches: Iterable[Any], passes: int, likelihood: Likelihood, seed: int
    ) -> None:
        self.network, self.batches, self.passes, self.likelihood, self.seed = network, batches, passes, likelihood, seed
        self.candidates: list[Candidate] = []
        self.scores: dict[str, Tensor] = {}  # NLL of each validation example
        self.posteriors: dict[str, tuple[Posterior, int | None]] = {}  # with the number of draws
        self.views = IDENTITY  # the best so far
        self.plain = self.converted(MAP())
        batch = next(iter(batches), None)
        if batch is None:
            raise ValueError("The validation loader gave no batch. Check its data set and sampler.")
        self.example = self.plain.split_batch(to_device(batch, posterior_device(self.plain)))[0]

    def converted(self, method: Method, include: list[str] | None = None) -> Posterior:
        return convert(self.network, method, include=include, likelihood=copy.deepcopy(self.likelihood))

    # -- the network as it is -------------------------------------------------------------------------------------

    def look(self, given: Sequence[Any] | None) -> None:
        """Try the plain network, and what it says of views."""
        image = first_tensor(self.example)
        searched = given is None and self.passes > 1 and image is not None and _is_image(image)
        names = _names(self.passes) if searched else ["identity"]
        try:
            seen = draws_of(self.plain, self.batches, Views(*names))
        except ValueError:  # a coarser map cannot be taken back from a shift by a pixel
            names = names[:3]
            seen = draws_of(self.plain, self.batches, Views(*names))
        _require_enough(sum(len(target) for _, target in seen.batches))
        self.judge(PLAIN, self.plain, IDENTITY, 1, seen=_some(seen, [0]))
        _require_enough(len(self.scores[PLAIN]))
        for views in [given] if isinstance(given, Views | str) else given or ():
            views = as_views(views)
            name = f"plain, {views}"
            if len(views) <= self.passes:
                self.judge(name, self.plain, views, len(views))
            else:
                reason = f"{len(views)} views cost more than passes={self.passes}"
                self.candidates.append(Candidate(name, len(views), views=views, reason=reason))
        for chosen in _grown(self.plain.likelihood, seen, names, self.passes) if searched else ():
            own = _some(seen, [names.index(name) for name in chosen])
            self.judge(f"plain, {', '.join(chosen)}", self.plain, Views(*chosen), len(chosen), seen=own)
        self.views = min(self.candidates, key=lambda one: one.nll).views

    # -- noise ----------------------------------------------------------------------------------------------------

    def widen_all(self) -> None:
        """Try noise around the network, as wide as the validation data want it, on the best views."""
        few = list(_first(self.batches, WIDENED_ON))

        def widened(name: str, posterior: Posterior, draws: int, passes: int) -> None:
            widen(posterior, few, num_draws=draws, views=self.views, seed=self.seed)
            self.judge(name, posterior, self.views, passes, draws)

        dropout = MCDropout(p=0.1, insert_before="linear")
        name = "noise before the last layer, widened"
        self.guard(name, lambda: widened(name, self.converted(dropout, self.last()), DRAWS, len(self.views)))
        if self.passes > 1:
            other = "Gaussian weights, widened"
            adapter = BayesAdapter(seed=self.seed)
            self.guard(other, lambda: widened(other, self.converted(adapter), self.passes, self.passes))

    def last(self) -> list[str] | None:
        """Return the last linear layer; None where it is the network itself."""
        found = self.plain.trace(self.example).last_linear
        if found is None:
            raise ValueError("The network calls no linear layer.")
        return [found] if found else None

    # -- training data --------------------------------------------------------------------------------------------

    def learn_all(self, loader: Iterable[Any], epochs: int) -> None:
        """Try what needs the training data."""

        def fitted(name: str, method: Method, draws: int, passes: int, cost: float) -> None:
            posterior = self.converted(method)
            fit(posterior, loader, seed=self.seed, progress=False)
            self.judge(name, posterior, self.views, passes, draws, epochs=cost)

        last = "last-layer Laplace"
        self.guard(last, lambda: fitted(last, Laplace(), DRAWS, len(self.views), 1.0))
        if not epochs:
            return
        if self.passes > 1:
            trained = "the network and others trained on from it"
            self.guard(trained, lambda: self.train_on(trained, loader, epochs))
        adapted = "BayesAdapter"
        method = BayesAdapter(epochs=epochs, seed=self.seed)
        self.guard(adapted, lambda: fitted(adapted, method, max(self.passes, len(self.views)), self.passes, epochs))

    def train_on(self, name: str, loader: Iterable[Any], epochs: int) -> None:
        """Try the network with others that were trained on from it, at a training rate."""
        views = self.views if 2 * len(self.views) <= self.passes else IDENTITY
        if views is IDENTITY and len(self.views) > 1 and self.passes >= 4:
            views = Views(*list(self.views)[:2])
        others = min(self.passes // len(views) - 1, epochs)
        method = DeepEnsemble(members=others, start="network", epochs=epochs // others, seed=self.seed)
        posterior = self.converted(method)
        fit(posterior, loader, seed=self.seed, progress=False)
        made = ensemble([self.plain, *_members(posterior)])
        self.judge(name, made, views, (others + 1) * len(views), epochs=others * method.epochs)

    # -- judgement ------------------------------------------------------------------------------------------------

    def guard(self, name: str, trial: Callable[[], None]) -> None:
        """Let what a network or its data do not allow stop nothing else; the table says what warnings would."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                trial()
        except (ValueError, TypeError) as error:
            self.candidates.append(Candidate(name, 0, reason=str(error).splitlines()[0]))

    def judge(
        self,
        name: str,
        posterior: Posterior,
        views: Views,
        passes: int,
        draws: int | None = None,
        *,
        epochs: float = 0.0,
        seen: Outputs | None = None,
    ) -> None:
        """Note what a posterior is worth on validation data."""
        if seen is None:
            seen = draws_of(posterior, self.batches, views, num_draws=draws, seed=self.seed)
        scores = posterior.likelihood.held_out_nll(seen.batches, parts=seen.parts).cpu()
        if not bool(scores.isfinite().all()):
            if name == PLAIN:
                raise ValueError(
                    "The network's validation NLL is not finite: its outputs are not, or it rules out the class of a "
                    "label. Check the inputs, the labels and the network's weights."
                )
            self.candidates.append(Candidate(name, passes, epochs, views=views, reason="its NLL is not finite"))
            return
        self.scores[name], self.posteriors[name] = scores, (posterior, draws)
        gain = _mean_and_error(self.scores[PLAIN] - scores)
        self.candidates.append(Candidate(name, passes, epochs, *_mean_and_error(scores), *gain, views))

    def best(self) -> Posterior:
        """Return what was best, calibrated."""
        tried = [one for one in self.candidates if one.reason is None]
        least = min(tried, key=lambda one: one.nll)

        def as_good(one: Candidate) -> bool:
            worse, error = _mean_and_error(self.scores[one.name] - self.scores[least.name])
            return worse <= error

        good = [one for one in tried if as_good(one)]
        cheapest = min((one.passes, one.epochs) for one in good)
        alike = [one for one in good if (one.passes, one.epochs) == cheapest]
        # The network as it is needs nothing to be believed but its views.
        chosen = min(alike, key=lambda one: (self.posteriors[one.name][0] is not self.plain, one.nll))
        posterior, draws = self.posteriors[chosen.name]
        if draws is not None:
            posterior.default_draws = draws
        calibrate(posterior, self.batches, views=chosen.views, num_draws=draws, seed=self.seed)
        posterior.choice = Choice(tuple(self.candidates), chosen.name)
        return posterior


def _is_image(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_floating_point()


def _require_enough(examples: int) -> None:
    if examples < LEAST:
        raise ValueError(f"{examples} validation examples are too few: give at least {LEAST}.")


def _names(passes: int) -> list[str]:
    """Return the views of images that sets are made of."""
    names = ["identity", "mirror", "flip"]
    return names if passes < 4 else [*names, *(name for pair in _pairs() for name in pair if name not in names)]


def _pairs() -> list[tuple[str, str]]:
    shifts = [(f"shift({down},{right})", f"mirror+shift({-down},{right})") for down, right in _SHIFTS]
    return [("flip", "mirror+flip"), *shifts]


def _grown(likelihood: Likelihood, seen: Outputs, names: Sequence[str], passes: int) -> Iterator[list[str]]:
    """Give sets of views: the image with each reflection of it, then the better of these with the next best pair."""

    def nll(chosen: Sequence[str]) -> float:
        own = _some(seen, [names.index(name) for name in chosen])
        return copy.deepcopy(likelihood).calibrate(own.batches, pooling=_POOLS.get(likelihood.kind, "probs"))[1]

    first = [["identity", "mirror"], ["identity", "flip"]]
    yield from first
    best = min(first, key=nll)
    rest = [pair for pair in _pairs() if set(pair) <= set(names)]
    while len(best) + 2 <= passes and rest:
        sets = [[*best, *(name for name in pair if name not in best)] for pair in rest]
        index = min(range(len(sets)), key=lambda index: nll(sets[index]))
        best = sets[index]
        del rest[index]
        yield best


def _some(seen: Outputs, draws: list[int]) -> Outputs:
    """Return some of the draws."""
    found = Outputs()
    found.batches = [(outputs[draws], target) for outputs, target in seen.batches]
    found.parts = [seen.parts[index] for index in draws]
    return found


def _members(posterior: Posterior) -> list[Posterior]:
    """Return the members of an ensemble, each as a plain posterior."""
    found = []
    for key in posterior.keys(None, 0):
        weights = posterior.weights(key)
        assert not isinstance(weights, Refusal)
        network = posterior.plain_network()
        network.load_state_dict({**network.state_dict(), **weights})
        found.append(convert(network, MAP(), likelihood=copy.deepcopy(posterior.likelihood)))
    return found


def _first(batches: Iterable[Any], examples: int) -> Iterator[Any]:
    """Give the first batches, until there are enough examples."""
    count = 0
    for batch in batches:
        yield batch
        count += batch_rows(batch)
        if count >= examples:
            return


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean of values, and its standard error."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))
