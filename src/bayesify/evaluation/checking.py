"""Whether a predictor without draws can be trusted on a network and its data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import inputs_of, to_device
from bayesify.laws import Posterior, require_posterior
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction import (
    Linearised,
    Predictor,
    Streamlined,
    Views,
    as_predictor,
    posterior_device,
    predict,
)

__all__ = ["Check", "check"]

LOW, HIGH = 0.8, 1.25  # of a ratio that counts as right
LOST = 0.05  # of accuracy, from which on weights move too far
SINGLE = 8  # draws of which each is scored alone
REPLICATES, FEWEST = 400, 40  # of a bootstrap
MOST = 2**24  # numbers that are drawn for it, unless the fewest take more


@dataclass(frozen=True)
class Check:
    """What a predictor without draws says, against Monte Carlo.

    Attributes:
        how: The predictor.
        predictor: The engine behind it, in words.
        examples: How many examples were compared.
        draws: How many draws Monte Carlo had.
        variance_ratio: Sum of its variances of the (centred) outputs over Monte Carlo's.
        rank_correlation: Spearman's correlation of the examples' variances.
        noise_ceiling: That of two halves of Monte Carlo's draws: a perfect predictor cannot be told from one here.
        epistemic_ratio: Mean epistemic uncertainty over Monte Carlo's.
        nll_difference: Its negative log-likelihood minus Monte Carlo's, in nats; None without targets.
        cost: Its time over that of a plain pass.
        sampling_cost: Monte Carlo's.
        advice: What to do.
        rank_interval: Where the rank correlation of many such examples lies, with 95 % confidence, by the bootstrap.
        median_epistemic_ratio: The median over examples of the epistemic uncertainty over Monte Carlo's.
        epistemic_ratios: The same of the surer half of the examples, and of the other; None for numbers.
        lost_accuracy: The accuracy of the mean's decisions minus that of single draws; None without labels.
        sketch_error: How far variances are from those without a sketch (`Streamlined(sketch=0)`), relative, the median
            over examples; None without a sketch.
    """

    how: str
    predictor: str
    examples: int
    draws: int
    variance_ratio: float
    rank_correlation: float
    noise_ceiling: float
    epistemic_ratio: float
    nll_difference: float | None
    cost: float
    sampling_cost: float
    advice: str
    rank_interval: tuple[float, float] | None = None
    median_epistemic_ratio: float | None = None
    sketch_error: float | None = None
    epistemic_ratios: tuple[float, float] | None = None
    lost_accuracy: float | None = None

    def __str__(self) -> str:
        """Show everything in a few lines."""
        nll = "no targets" if self.nll_difference is None else f"{self.nll_difference:+.4f} nats"
        low, high = self.rank_interval or (self.rank_correlation, self.rank_correlation)
        interval = "" if self.rank_interval is None else f"{low:.3f} to {high:.3f}; "
        sure, unsure = self.epistemic_ratios or (math.nan, math.nan)
        halves = "" if self.epistemic_ratios is None else f"; surer half {sure:.3f}, other {unsure:.3f}"
        ratio = self.median_epistemic_ratio
        median = "" if ratio is None else f" (median example: {ratio:.3f}{halves})"
        lost = [] if self.lost_accuracy is None else [f"  one draw loses    {self.lost_accuracy:.1%} of accuracy"]
        sketch = [] if self.sketch_error is None else [f"  sketch            variances within {self.sketch_error:.1%}"]
        return "\n".join(
            [
                f"{self.predictor}, against {self.draws} draws on {self.examples} examples",
                f"  variance ratio    {self.variance_ratio:.3f}",
                f"  rank correlation  {self.rank_correlation:.3f} ({interval}two halves of the draws: "
                f"{self.noise_ceiling:.3f})",
                f"  epistemic ratio   {self.epistemic_ratio:.3f}{median}",
                *sketch,
                *lost,
                f"  NLL difference    {nll}",
                f"  cost              {self.cost:.1f} plain passes (draws: {self.sampling_cost:.1f})",
                self.advice,
            ]
        )


@renamed(num_samples="num_draws")
def check(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    how: str | Predictor = "streamlined",
    views: Views | Sequence[Any] | str | None = None,
    num_draws: int = 200,
    max_batches: int | None = None,
    variance_scale: float | Mapping[str, float] = 1.0,
    seed: int = 0,
) -> Check:
    """Compare a predictor without draws with Monte Carlo on your own network and data.

    Args:
        posterior: The posterior.
        loader: Batches of inputs, or of (inputs, targets), which are then scored too.
        how: The predictor.
        views: As in `predict`, for both.
        num_draws: How many draws Monte Carlo has.
        max_batches: How many batches to look at; None takes all.
        variance_scale: As in `predict`.
        seed: Of the draws.

    Returns:
        The comparison; `print` it. `advice` says whether to trust the predictor here.

    Costs S plain passes and one prediction without draws for each batch.

    Example:
        >>> from torch import nn
        >>> from bayesify import BayesAdapter, convert
        >>> posterior = convert(nn.Linear(4, 3), BayesAdapter())
        >>> found = check(posterior, [torch.randn(50, 4, generator=torch.Generator().manual_seed(0))])
        >>> 0.9 < found.variance_ratio < 1.1  # exact for a linear network
        True
    """
    require_posterior(posterior)
    predictor = as_predictor(how, posterior, among=lambda one: not one.random)
    if num_draws < 4:
        raise ValueError(f"num_draws must be at least 4, to compare two halves, but it is {num_draws}.")
    device = posterior_device(posterior)
    halves: list[list[Prediction]] = [[], [], []]
    fast: list[Prediction] = []
    whole: list[Tensor] = []
    unsketched = _unsketched(predictor)
    seconds = {"plain": 0.0, "fast": 0.0, "draws": 0.0}
    scores: list[tuple[float, float, float]] = []
    answers: list[tuple[float, float, float]] = []
    for batch in islice(loader, max_batches):
        batch = to_device(batch, device)
        inputs = inputs_of(batch)
        predict(posterior, inputs, how=predictor, views=views, variance_scale=variance_scale)
        began = time.perf_counter()
        with torch.no_grad(), evaluation_mode(posterior):
            posterior.reference(inputs)
        plain = time.perf_counter()
        fast.append(predict(posterior, inputs, how=predictor, views=views, variance_scale=variance_scale))
        done = time.perf_counter()
        options: dict[str, Any] = {"views": views, "num_draws": num_draws // 2}
        drawn = [predict(posterior, inputs, seed=seed + half, **options) for half in (0, 1)]
        end = time.perf_counter()
        for name, taken in zip(seconds, (plain - began, done - plain, end - done), strict=True):
            seconds[name] += taken
        if unsketched is not None and "backward pass" in str(getattr(fast[-1], "predictor", "")):
            exact = predict(posterior, inputs, how=unsketched, views=views, variance_scale=variance_scale)
            whole.append(exact.output_variance.flatten().double())
        mixed = Prediction.mixture(drawn, [0.5, 0.5])
        for half, prediction in zip(halves, (*drawn, mixed), strict=True):
            half.append(prediction)
        if batch is not inputs and (targets := _targets(posterior, batch)) is not None:
            likelihood = posterior.likelihood
            (nll, count), (other, _) = (
                likelihood.total_nll(one.log_prob(likelihood.marked(targets)), targets) for one in (fast[-1], mixed)
            )
            scores.append((nll.item(), other.item(), count.item()))
            answers.extend(_answers(posterior, inputs, targets, fast[-1], views=views, seed=seed))
    if not fast:
        raise ValueError("The loader gave no batch. Check its data set and sampler.")
    found = Prediction.join(fast)
    first, second, every = (Prediction.join(half) for half in halves)
    own, one, two, both = (each.output_variance.flatten().double() for each in (found, first, second, every))
    drawn_spread = _debiased(both, one, two)
    ratio = float(own.sum() / drawn_spread.sum().clamp_min(torch.finfo(own.dtype).tiny))
    rank = _rank_correlation(own, drawn_spread)
    ceiling = _rank_correlation(one, two)
    known, *parts = (each.score("epistemic").double() for each in (found, every, first, second))
    drawn_known = _debiased(*parts)
    epistemic = known.sum() / drawn_known.sum()
    median, ratios = _median_ratios(known, drawn_known, every)
    lost = _lost_accuracy(answers)
    total = sum(count for _, _, count in scores)
    difference = sum(nll - other for nll, other, _ in scores) / total if total else None
    name = predictor.name if predictor == as_predictor(predictor.name) else repr(predictor)
    return Check(
        how=name,
        predictor=str(getattr(found, "predictor", name)),
        examples=len(found),
        draws=2 * (num_draws // 2),
        variance_ratio=ratio,
        rank_correlation=rank,
        noise_ceiling=ceiling,
        epistemic_ratio=float(epistemic),
        nll_difference=difference,
        cost=seconds["fast"] / max(seconds["plain"], 1e-9),
        sampling_cost=seconds["draws"] / max(seconds["plain"], 1e-9),
        advice=_with_members(
            predictor, _advice(predictor, name, ratio, rank, ceiling, (median, *(ratios or ())), lost)
        ),
        rank_interval=_interval(own, drawn_spread),
        median_epistemic_ratio=median,
        sketch_error=_relative_error(own, torch.cat(whole)) if whole else None,
        epistemic_ratios=ratios,
        lost_accuracy=lost,
    )


def _unsketched(predictor: Predictor) -> Predictor | None:
    """Return the same predictor without a sketch, if it has one."""
    if isinstance(predictor, Streamlined | Linearised) and predictor.sketch:
        return replace(predictor, sketch=0)
    return None


def _relative_error(found: Tensor, exact: Tensor) -> float:
    some = exact > 0
    return float((found[some] / exact[some] - 1).abs().median()) if bool(some.any()) else 0.0


def _debiased(every: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return what infinitely many draws would have, of all draws and of two halves of them.

    The mutual information and the variance of S draws are too small by c / S, and c is what halves differ by.

    >>> draws = torch.tensor([1.0, 2.0, 4.0, 9.0])
    >>> one, two, every = (part.var(correction=0) for part in (draws[:2], draws[2:], draws))
    >>> _debiased(every, one, two) == 2 * every - (one + two) / 2
    tensor(True)
    """
    return (2 * every - (first + second) / 2).clamp_min(0)


def _median_ratios(
    known: Tensor, drawn: Tensor, prediction: Prediction
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the median of ratios over all examples, and over the surer half and the other."""
    some = drawn > 0
    if not bool(some.any()):
        return None, None
    ratio = known[some] / drawn[some]
    total = getattr(prediction, "total", None)
    if total is None or len(ratio) < 4:
        return float(ratio.median()), None
    order = prediction.score("total")[some].argsort()
    middle = len(order) // 2
    return float(ratio.median()), (float(ratio[order[:middle]].median()), float(ratio[order[middle:]].median()))


def _answers(
    posterior: Posterior, inputs: Any, targets: Tensor, mean: Prediction, *, views: Any, seed: int
) -> list[tuple[float, float, float]]:
    """Return how many decisions of the mean outputs are right, how many of single draws on average, and of how many."""
    logits, labels = getattr(mean, "logits_mean", None), posterior.likelihood.labels(targets)
    if logits is None or labels is None:
        return []
    labels = labels.reshape(logits.shape[:-1])
    counted = labels >= 0
    drawn = predict(posterior, inputs, views=views, num_draws=SINGLE, seed=seed, keep_samples=True)
    samples = getattr(drawn, "samples", None)
    if samples is None:
        return []
    each = (samples.argmax(-1) == labels)[:, counted].sum().item() / len(samples)
    return [((logits.argmax(-1) == labels)[counted].sum().item(), each, counted.sum().item())]


def _lost_accuracy(answers: Sequence[tuple[float, float, float]]) -> float | None:
    number = sum(count for _, _, count in answers)
    return sum(mean - one for mean, one, _ in answers) / number if number else None


def _interval(one: Tensor, other: Tensor) -> tuple[float, float] | None:
    """Return a 95 % interval of Spearman's correlation over examples, by the bootstrap; None of fewer than four."""
    number = len(one)
    if number < 4:
        return None
    generator = torch.Generator().manual_seed(0)
    one, other = one.cpu(), other.cpu()
    found = []
    for _ in range(min(REPLICATES, max(FEWEST, MOST // number))):  # one at a time: positions of images are many
        rows = torch.randint(number, (number,), generator=generator)
        found.append(_rank_correlation(one[rows], other[rows]))
    low, high = torch.tensor(found, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high


def _targets(posterior: Posterior, batch: Any) -> Tensor | None:
    try:
        targets = posterior.split_batch(batch)[1]
    except ValueError:
        return None
    return targets if isinstance(targets, Tensor) else None


def _rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return Spearman's correlation; 0 where one of the two is constant.

    >>> _rank_correlation(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([3.0, 4.0, 5.0]))
    1.0
    """
    ranks = torch.stack([_ranks(one), _ranks(other)])
    if bool((ranks.std(1) == 0).any()):
        return 0.0
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _ranks(x: Tensor) -> Tensor:
    """Return ranks over the last dimension; equal values share the mean of theirs.

    >>> _ranks(torch.tensor([5.0, 1.0, 1.0]))
    tensor([3.0000, 1.5000, 1.5000], dtype=torch.float64)
    """
    ordered = x.sort(-1).values
    low, high = (torch.searchsorted(ordered, x.contiguous(), side=side) for side in ("left", "right"))
    return (low + high + 1).double() / 2


def _with_members(predictor: Predictor, advice: str) -> str:
    """Say, where something is wrong, that it may be that members are too far apart for one pass."""
    if isinstance(predictor, Streamlined) and predictor.members == "matched" and not advice.startswith("Trust"):
        return f"{advice} Members may be too far apart for one Gaussian: Streamlined() takes a pass for each."
    return advice


def _advice(
    predictor: Predictor,
    how: str,
    ratio: float,
    rank: float,
    ceiling: float,
    epistemic: Sequence[float | None] = (),
    lost: float | None = None,
) -> str:
    if ratio == 0:
        return "No output has any variance, so there is nothing to compare; posterior.learned may say why."
    if lost is not None and lost > LOST:
        return (
            f"Do not trust how={how!r} here: one draw loses {lost:.1%} of accuracy, so that weights move too far for "
            "what is known around their mean. Use how='sampling', or a posterior with less noise."
        )
    if rank < 0.9 * ceiling:
        other = "linearised" if how != "linearised" else "sampling"
        return f"Do not trust how={how!r} here: it orders the examples differently from draws. Try how={other!r}."
    if not LOW <= ratio <= HIGH:
        return (
            f"how={how!r} orders the examples as draws do, but its variances are off by a factor of {1 / ratio:.2g}: "
            "fit it, scale = fit_variance_scale(posterior, val_loader), and pass variance_scale=scale."
        )
    wrong = [value for value in epistemic if value is not None and not LOW <= value <= HIGH]
    if wrong:
        worst = max(wrong, key=lambda value: abs(math.log(max(value, 1e-9))))
        whose = (
            "" if worst == epistemic[0] else " of the surer half" if worst == epistemic[1] else " of the unsure half"
        )
        more = "how=Streamlined(directions=2) may be right; else c" if predictor == Streamlined() else "C"
        return (
            f"how={how!r} orders the examples as draws do, with variances of the right size, but do not trust the size "
            f"of its epistemic uncertainty: that{whose} is {worst:.2g} times theirs. {more}ompare it with itself "
            "alone, or use how='sampling'."
        )
    return f"Trust how={how!r} here: it orders the examples as draws do, with variances of the right size."
