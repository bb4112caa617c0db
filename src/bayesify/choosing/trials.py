"""What is tried, and how it is judged."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from bayesify._core.trees import batch_rows, first_tensor, to_device
from bayesify.choosing.candidates import IDENTITY, Candidate, Choice
from bayesify.choosing.judging import Found, crossed_nll, first_of, half_of, mean_and_error
from bayesify.choosing.looks import grown, names_of, some, wanted
from bayesify.conversion import convert, ensemble
from bayesify.fitting import fit
from bayesify.laws import Posterior, Refusal
from bayesify.likelihoods import Likelihood
from bayesify.methods import MAP, BayesAdapter, DeepEnsemble, Laplace, MCDropout, Method
from bayesify.prediction import Views, as_views, posterior_device
from bayesify.prediction.calibration import calibrate, draws_of
from bayesify.prediction.trials import Batches, halves, judge
from bayesify.prediction.widening import widen

__all__ = ["Trials"]

DRAWS = 20  # of what is random in the last layer alone, and costs next to nothing
WIDENED_ON = (256, 512)  # examples of both halves, an eighth of all but between these: a width is one number
SCREENED_ON = 256  # examples that say which of many views are worth a look at all
LEAST = 20  # examples to choose on
SURE = 2.0  # standard errors by which what costs more, or is random, must be better
PLAIN = "plain + temperature"
Looks = Sequence[Views]  # what was found on the first half of the examples, on the second, and on all


class Trials:
    """What was tried so far."""

    def __init__(
        self, network: nn.Module, batches: Iterable[Any], passes: int, likelihood: Likelihood, seed: int
    ) -> None:
        self.network, self.batches, self.passes, self.likelihood, self.seed = network, batches, passes, likelihood, seed
        self.candidates: list[Candidate] = []
        self.scores: dict[str, Tensor] = {}  # NLL of each validation example
        self.posteriors: dict[str, tuple[Posterior, int | None]] = {}  # with the number of draws
        self.looks_of: dict[str, Looks] = {}
        self.looks: Looks = [IDENTITY] * 3  # the best so far
        self.seen: dict[str, Found] = {}  # outputs of the plain network on sets of views
        self.few = WIDENED_ON[1]
        self.plain = self.converted(MAP())
        batch = next(iter(batches), None)
        if batch is None:
            raise ValueError("The validation loader gave no batch. Check its data set and sampler.")
        self.example = self.plain.split_batch(to_device(batch, posterior_device(self.plain)))[0]

    def converted(self, method: Method, include: list[str] | None = None) -> Posterior:
        """Return the network as a posterior of a method."""
        return convert(self.network, method, include=include, likelihood=copy.deepcopy(self.likelihood))

    # -- the network as it is -------------------------------------------------------------------------------------

    def look(self, given: Sequence[Any] | None) -> None:
        """Try the plain network, and what it says of views."""
        image = first_tensor(self.example)
        searched = given is None and self.passes > 1 and image is not None and _is_image(image)
        names = names_of(self.passes) if searched else ["identity"]
        try:
            names = self.screened(names)
            seen = draws_of(self.plain, self.batches, Views(*names)).batches
        except ValueError:  # a coarser map cannot be taken back from a shift by a pixel
            names = names[:3]
            seen = draws_of(self.plain, self.batches, Views(*names)).batches
        examples = sum(len(target) for _, target in seen)
        _require_enough(examples)
        self.few = max(WIDENED_ON[0], min(WIDENED_ON[1], examples // 8))
        self.judge(PLAIN, self.plain, 1, found=[_plain(some(seen, [0]))] * 2)
        _require_enough(len(self.scores[PLAIN]))
        for views in [given] if isinstance(given, Views | str) else given or ():
            views = as_views(views)
            name = f"plain, {views}"
            if len(views) <= self.passes:
                self.judge(name, self.plain, len(views), looks=[views] * 3)
            else:
                reason = f"{len(views)} views cost more than passes={self.passes}"
                self.candidates.append(Candidate(name, len(views), views=views, reason=reason))
        if searched:
            parts = [*(half for half, _ in halves(seen)), seen]
            paths = [grown(self.plain.likelihood, part, names, self.passes) for part in parts]
            for sets in zip(*paths, strict=True):
                found = [_plain(some(seen, [names.index(name) for name in chosen])) for chosen in sets[:2]]
                looks = [Views(*chosen) for chosen in sets]
                name = f"plain, {', '.join(sets[2])}"
                self.seen[name] = _plain(some(seen, [names.index(one) for one in sets[2]]))
                self.judge(name, self.plain, len(sets[2]), looks=looks, found=found)
        self.looks = self.looks_of[self.taken().name]

    def screened(self, names: list[str]) -> list[str]:
        """Return those of many views that the first examples ask for; all where there are few views, or examples."""
        if len(names) <= 3:
            return names
        few = list(first_of(self.batches, SCREENED_ON))
        if sum(map(batch_rows, few)) < SCREENED_ON:
            return names
        return wanted(self.plain.likelihood, draws_of(self.plain, few, Views(*names)).batches, names, self.passes)

    # -- noise ----------------------------------------------------------------------------------------------------

    def widen_all(self) -> None:
        """Try noise around the network, as wide as the validation data want it, on the best views."""
        views = len(self.looks[2])

        def dropout() -> Posterior:
            return self.converted(MCDropout(p=0.1, insert_before="linear"), self.last())

        self.widened("noise before the last layer, widened", dropout, DRAWS, views)
        if self.passes > 1:
            adapter = BayesAdapter(seed=self.seed)
            self.widened("Gaussian weights, widened", lambda: self.converted(adapter), self.passes, self.passes)

    def widened(self, name: str, made: Callable[[], Posterior], draws: int, passes: int) -> None:
        """Try noise: each half of the examples finds a width, and both together their geometric mean."""

        def trial() -> None:
            shared: dict[str, Any] = {"num_draws": draws, "seed": self.seed}
            options = [{**shared, "views": views} for views in self.looks[:2]]
            few = [list(half_of(self.batches, half, most=self.few)) for half in (0, 1)]
            both = [widen(made(), few[half], precise=False, **options[half]) for half in (0, 1)]
            if not self.helps(both, few, options):
                raise ValueError("no width of this noise is better than none on examples that had no part in it.")
            found = [self.outputs(one, views, draws) for one, views in zip(both, self.looks, strict=False)]
            logs = [math.log(one.widening.factor) for one in both if one.widening is not None]
            posterior = made()
            posterior.law.rescale(math.exp(sum(logs) / 2))
            self.judge(name, posterior, passes, draws, looks=self.looks, found=found)

        self.guard(name, trial)

    @staticmethod
    def helps(both: Sequence[Posterior], few: Sequence[Any], options: Sequence[dict[str, Any]]) -> bool:
        """Return whether the width that one half found has less NLL on the other than the least noise, taken together.

        Of a noise that does not, predictions of all examples would tell no more.
        """
        gain = 0.0
        for half, one in enumerate(both):
            other = both[1 - half].widening
            assert other is not None
            assert one.widening is not None
            how: dict[str, Any] = {"calibrated": True, "progress": False, "options": options[half]}
            gain += other.trials[0].nll - judge(one, few[1 - half], one.widening.factor, **how).nll
        return gain > 0

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
            self.judge(name, posterior, passes, draws, looks=[self.looks[2]] * 3, epochs=cost)

        last = "last-layer Laplace"
        self.guard(last, lambda: fitted(last, Laplace(), DRAWS, len(self.looks[2]), 1.0))
        if not epochs:
            return
        if self.passes > 1:
            trained = "the network and others trained on from it"
            self.guard(trained, lambda: self.train_on(trained, loader, epochs))
        adapted = "BayesAdapter"
        method = BayesAdapter(epochs=epochs, seed=self.seed)
        self.guard(adapted, lambda: fitted(adapted, method, max(self.passes, len(self.looks[2])), self.passes, epochs))

    def train_on(self, name: str, loader: Iterable[Any], epochs: int) -> None:
        """Try the network with others that were trained on from it, at a training rate."""
        best = self.looks[2]
        views = best if 2 * len(best) <= self.passes else IDENTITY
        if views is IDENTITY and len(best) > 1 and self.passes >= 4:
            views = Views(*list(best)[:2])
        others = min(self.passes // len(views) - 1, epochs)
        method = DeepEnsemble(members=others, start="network", epochs=epochs // others, seed=self.seed)
        posterior = self.converted(method)
        fit(posterior, loader, seed=self.seed, progress=False)
        made = ensemble([self.plain, *_members(posterior)])
        self.judge(name, made, (others + 1) * len(views), looks=[views] * 3, epochs=others * method.epochs)

    # -- judgement ------------------------------------------------------------------------------------------------

    def guard(self, name: str, trial: Callable[[], None]) -> None:
        """Let what a network or its data do not allow stop nothing else; the table says what warnings would."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                trial()
        except (ValueError, TypeError) as error:
            self.candidates.append(Candidate(name, 0, reason=str(error).splitlines()[0]))

    def outputs(self, posterior: Posterior, views: Views, draws: int | None) -> Found:
        """Return the outputs on all validation data."""
        seen = draws_of(posterior, self.batches, views, num_draws=draws, seed=self.seed)
        return Found(seen.batches, seen.parts)

    def judge(
        self,
        name: str,
        posterior: Posterior,
        passes: int,
        draws: int | None = None,
        *,
        looks: Looks = (IDENTITY,) * 3,
        found: Sequence[Found] = (),
        epochs: float = 0.0,
    ) -> None:
        """Note what a posterior is worth on validation data; without `found` nothing was looked for on them."""
        first, second = found or [self.outputs(posterior, looks[2], draws)] * 2
        scores = crossed_nll(posterior.likelihood, (first, second))
        if not bool(scores.isfinite().all()):
            if name == PLAIN:
                raise ValueError(
                    "The network's validation NLL is not finite: its outputs are not, or it rules out the class of a "
                    "label. Check the inputs, the labels and the network's weights."
                )
            self.candidates.append(Candidate(name, passes, epochs, views=looks[2], reason="its NLL is not finite"))
            return
        self.scores[name], self.posteriors[name], self.looks_of[name] = scores, (posterior, draws), looks
        gain = mean_and_error(self.scores[PLAIN] - scores)
        self.candidates.append(Candidate(name, passes, epochs, *mean_and_error(scores), *gain, looks[2]))

    def taken(self) -> Candidate:
        """Return the best of the cheapest that are as good as the best; the network as it is before what is random."""
        tried = [one for one in self.candidates if one.reason is None]
        least = min(tried, key=lambda one: one.nll)

        def as_good(one: Candidate) -> bool:
            worse, error = mean_and_error(self.scores[one.name] - self.scores[least.name])
            return worse <= SURE * error

        def order(one: Candidate) -> tuple[float, float, bool, float]:
            return one.passes, one.epochs, self.posteriors[one.name][0] is not self.plain, one.nll

        return min((one for one in tried if as_good(one)), key=order)

    def best(self) -> Posterior:
        """Return what was best, calibrated."""
        chosen = self.taken()
        posterior, draws = self.posteriors[chosen.name]
        if draws is not None:
            posterior.default_draws = draws
        there = self.seen.get(chosen.name)
        if there is None:
            calibrate(posterior, self.batches, views=chosen.views, num_draws=draws, seed=self.seed)
        else:
            posterior.likelihood.calibrate(there.batches, parts=there.parts, pooling="auto", temperatures="auto")
            posterior.views = chosen.views
        posterior.choice = Choice(tuple(self.candidates), chosen.name)
        return posterior


def _plain(batches: Batches) -> Found:
    return Found(batches, [0] * len(batches[0][0]))


def _is_image(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_floating_point()


def _require_enough(examples: int) -> None:
    if examples < LEAST:
        raise ValueError(f"{examples} validation examples are too few: give at least {LEAST}.")


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
