"""The temperatures and the power mean of draws that validation data ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.maths import minimise
from bayesify.likelihoods.pooling import Pooling, Temperatures

__all__ = ["ERRORS", "Pooled", "fit_pooled", "folds_of", "held_out_nll"]

FOLDS = 5
LOWEST, HIGHEST = -4.0, 4.0  # of the logarithm of a temperature
CROSS_VALIDATED = 2**19  # numbers of the draws' logits, at most: more examples do not change which way is best
FITTED = 2**22  # numbers at most that a few temperatures are fitted to, but no fewer than 20,000 positions
POSITIONS = 20_000
AT_ONCE = 2**22  # numbers at a time
STEPS = 40
ERRORS = 5  # wrong answers, without which no temperature is lowered: right ones alone would drive it to zero
SPREAD = math.log(2)  # how far a part's temperature may be from its own, beside what is common to all
RULED_OUT = -1e30  # stands for -inf, whose slope in a temperature is no number


@dataclass(frozen=True)
class Pooled:
    """A way to pool tempered draws.

    Attributes:
        temperature: One, (), or one for each part, (M,).
        exponent: Of the power mean.
    """

    temperature: Tensor
    exponent: float

    def log_prob(self, logits: Tensor, labels: Tensor, parts: Tensor) -> Tensor:
        """Return ln p of the labels, (N,), in float64.

        Args:
            logits: Of the draws, (S, N, C).
            labels: (N,).
            parts: Which part of a mixture each draw is of, (S,).
        """
        return _log_prob(self.temperature.double().log(), self.exponent, logits, labels, parts)


def _log_prob(logs: Tensor, exponent: float | Tensor, logits: Tensor, labels: Tensor, parts: Tensor) -> Tensor:
    """Return ln p of the labels for logarithms of temperatures and an exponent; both may have gradients."""
    scale = (-(logs if logs.ndim == 0 else logs[parts][:, None, None])).exp()
    log_probs = functional.log_softmax(logits.double() * scale, -1)
    if isinstance(exponent, Tensor):
        pooled = (exponent * log_probs).logsumexp(0) / exponent
    elif exponent == 1:  # normalised already, so that the label's own probabilities are all that is needed
        picked = log_probs.gather(-1, labels.expand(len(logits), -1)[..., None])[..., 0]
        return picked.logsumexp(0) - math.log(len(logits))
    else:
        pooled = (exponent * log_probs).logsumexp(0) / exponent if exponent else log_probs.mean(0)
    return functional.log_softmax(pooled, -1).gather(-1, labels[:, None])[:, 0]


def _in_chunks(logits: Tensor) -> list[slice]:
    rows = max(1, AT_ONCE // max(1, logits.shape[0] * logits.shape[2]))
    return [slice(start, start + rows) for start in range(0, logits.shape[1], rows)]


def _nll(way: Pooled, logits: Tensor, labels: Tensor, parts: Tensor) -> float:
    total = sum(float(way.log_prob(logits[:, some], labels[some], parts).sum()) for some in _in_chunks(logits))
    return -total / len(labels)


@dataclass(frozen=True)
class _Way:
    """A family of poolings, of which the best is fitted."""

    exponent: float | None  # None is fitted
    each: bool  # a temperature for each part

    @property
    def order(self) -> tuple[int, bool]:
        """Return how simple it is, simplest first: the average of probabilities with one temperature."""
        return int(self.each) + int(self.exponent is None), self.exponent != 1

    def fit(self, logits: Tensor, labels: Tensor, parts: Tensor, start: Pooled, *, tolerance: float = 1e-6) -> Pooled:
        """Return the best of the family."""
        count = int(parts.max()) + 1 if self.each else 1
        fixed = 1.0 if self.exponent is None else self.exponent

        def loss(log: float) -> float:
            return _nll(Pooled(torch.tensor(log).double().exp(), fixed), logits, labels, parts)

        before = float(start.temperature.double().log().mean())
        lowest = _lowest(before, logits, labels)
        best, _ = minimise(loss, lowest, HIGHEST, start=before, tolerance=tolerance)
        if self.exponent is not None and count == 1:
            return Pooled(torch.tensor(best, dtype=torch.float64).exp(), fixed)
        common = torch.tensor(best, dtype=torch.float64)
        own = self._own(count, best, logits, labels, parts, fixed, lowest) if self.each else None
        return _descended(common, own, self.exponent, logits, labels, parts, lowest)

    @staticmethod
    def _own(
        count: int, best: float, logits: Tensor, labels: Tensor, parts: Tensor, exponent: float, lowest: float
    ) -> Tensor:
        """Return the logarithm of the temperature that suits each part alone, (M,); the common one without draws."""
        found = torch.full((count,), best, dtype=torch.float64)
        for part in range(count):
            some = logits[parts == part]
            alone = torch.zeros(len(some), dtype=torch.long, device=logits.device)

            def loss(log: float, some: Tensor = some, alone: Tensor = alone) -> float:
                return _nll(Pooled(torch.tensor(log).double().exp(), exponent), some, labels, alone)

            if len(some):
                found[part] = minimise(loss, lowest, HIGHEST, start=best, tolerance=1e-3)[0]
        return found


def _lowest(before: float, logits: Tensor, labels: Tensor) -> float:
    """Return the least logarithm of a temperature: what there is now, where there are too few errors to go below."""
    wrong = sum(
        int((functional.softmax(logits[:, some], -1).mean(0).argmax(-1) != labels[some]).sum())
        for some in _in_chunks(logits)
    )
    return LOWEST if wrong >= ERRORS else max(LOWEST, before)


def _descended(
    common: Tensor,
    own: Tensor | None,
    exponent: float | None,
    logits: Tensor,
    labels: Tensor,
    parts: Tensor,
    lowest: float,
) -> Pooled:
    """Minimise the NLL in several numbers, by L-BFGS: an exponent, and a temperature or one of each part.

    Those of parts are T_m = T t_m exp(d_m), t_m being what suits part m alone, and |d_m| at most ln 2. Without that
    limit parts that are alike are torn apart: one is made uniform by a large temperature, as a floor under the other's
    probabilities. That is a weight and no calibration, and two parts that agreed then disagree about every input, most
    where they are sure.
    """
    logits = logits.clamp_min(RULED_OUT)
    common = common.to(logits.device) if own is None else torch.zeros_like(common, device=logits.device)
    common.requires_grad_()
    apart = None if own is None else torch.zeros_like(own, device=logits.device).requires_grad_()

    def logs() -> Tensor:
        if own is None or apart is None:
            return common.clamp(lowest, HIGHEST)
        return (own.to(common) + common + SPREAD * apart.tanh()).clamp(lowest, HIGHEST)

    inner = torch.zeros((), dtype=torch.float64, device=logits.device, requires_grad=exponent is None)
    known = [one for one in (common, apart, inner) if one is not None and one.requires_grad]
    optimizer = torch.optim.LBFGS(known, max_iter=STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-10)

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for some in _in_chunks(logits):
            with torch.enable_grad():
                value = inner.sigmoid().clamp(1e-3, 1.0) if exponent is None else exponent
                found = -_log_prob(logs(), value, logits[:, some], labels[some], parts)
                loss = found.sum() / len(labels)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    temperature = logs().detach().exp()
    return Pooled(temperature, float(inner.detach().sigmoid().clamp(1e-3, 1.0)) if exponent is None else exponent)


def _ways(pooling: Pooling | float, temperatures: Temperatures, draws: int, parts: int) -> list[_Way]:
    """Return the families to compare, the simplest first."""
    exponents: tuple[float | None, ...]
    if not isinstance(pooling, str):
        exponents = (float(pooling),)
    elif pooling == "probs" or draws == 1:  # one distribution is its own average
        exponents = (1.0,)
    else:
        exponents = {"log-probs": (0.0,), "power": (None,), "auto": (1.0, 0.0, None)}[pooling]
    each = {"one": (False,), "each": (parts > 1,), "auto": (False, True) if parts > 1 else (False,)}[temperatures]
    return sorted((_Way(exponent, one) for exponent in exponents for one in each), key=lambda way: way.order)


def fit_pooled(
    logits: Tensor,
    labels: Tensor,
    *,
    start: Pooled,
    parts: Sequence[int],
    examples: Tensor | None = None,
    pooling: Pooling | float = "probs",
    temperatures: Temperatures = "one",
) -> tuple[Pooled, float, float]:
    """Return the pooling of least NLL, and the NLL before and after, which is never worse.

    Where several families are possible ("auto"), each is fitted on four fifths of the examples and scored on the last,
    five times; the best is taken where it beats the simplest by more than a standard error of their difference, else
    the simplest. Of very many positions (pixels, tokens) some are taken, since numbers as few as these need no more.
    With fewer than five wrong answers no temperature falls below what there is now: of right answers alone the
    likelihood has no maximum, and of a few wrong ones a wild one.

    Args:
        logits: Of the draws, (S, N, C).
        labels: (N,).
        start: What there is now.
        parts: Which part of a mixture each draw is of.
        examples: Which example each position is of, (N,): folds and errors are over examples; None counts positions.
        pooling: "probs", "log-probs", "power" with an exponent between the two, "auto", or an exponent.
        temperatures: "one", "each" for one of each part, or "auto".
    """
    if not bool(logits.amax(-1).isfinite().all()):  # -inf is a class that is ruled out
        raise ValueError("The draws' logits are not finite, so there is nothing to calibrate. Fit the posterior again.")
    of = torch.tensor(list(parts), device=logits.device)
    ways = _ways(pooling, temperatures, len(logits), int(of.max()) + 1)
    examples = torch.arange(len(labels), device=labels.device) if examples is None else examples
    way = ways[0] if len(ways) == 1 else _chosen(ways, logits, labels, of, examples, start)
    before = _nll(start, logits, labels, of)
    some = _some_positions(logits)
    found = way.fit(logits[:, some], labels[some], of, start)
    after = _nll(found, logits, labels, of)
    # A start of another family may fit these data better; what was asked for is taken all the same, unless it is alike.
    same = start.temperature.shape == found.temperature.shape and (way.exponent in (None, start.exponent))
    return (start, before, before) if same and not after <= before else (found, before, after)


def _some_positions(logits: Tensor) -> slice | Tensor:
    """Return all positions of (S, N, C), or so many at random, of all examples, that fitting takes seconds."""
    most = max(POSITIONS, FITTED // max(1, logits.shape[0] * logits.shape[2]))
    if logits.shape[1] <= most:
        return slice(None)
    order = torch.randperm(logits.shape[1], generator=torch.Generator().manual_seed(0))
    return order[:most].to(logits.device)


def held_out_nll(
    logits: Tensor,
    labels: Tensor,
    *,
    start: Pooled,
    parts: Sequence[int],
    examples: Tensor,
    pooling: Pooling | float = "auto",
    temperatures: Temperatures = "auto",
) -> Tensor:
    """Return the mean NLL of each example, (E,), by what `fit_pooled` chooses, fitted on others.

    The family is chosen on all examples, and its numbers on those of other folds.

    Args:
        logits: As in `fit_pooled`, and all others.
        labels: (N,).
        start: What there is now.
        parts: Which part of a mixture each draw is of.
        examples: Which example each position is of, (N,).
        pooling: The families to choose from.
        temperatures: Likewise.
    """
    of = torch.tensor(list(parts), device=logits.device)
    ways = _ways(pooling, temperatures, len(logits), int(of.max()) + 1)
    way = ways[0] if len(ways) == 1 else _chosen(ways, logits, labels, of, examples, start)
    folds, number = folds_of(examples)
    if number < 2:
        raise ValueError("Calibration on other examples needs at least two, and there is one. Give more.")
    return _per_example(_compared([way], logits, labels, of, folds, number, examples, start)[1][0], examples)


def _chosen(
    ways: Sequence[_Way], logits: Tensor, labels: Tensor, parts: Tensor, examples: Tensor, start: Pooled
) -> _Way:
    """Return the family with the least cross-validated NLL, or the simplest where it is as good."""
    folds, number = folds_of(examples, most=CROSS_VALIDATED // max(1, logits.shape[0] * logits.shape[2]))
    if number < 2:
        return ways[0]
    return ways[_compared(ways, logits, labels, parts, folds, number, examples, start)[0]]


def _compared(
    ways: Sequence[_Way],
    logits: Tensor,
    labels: Tensor,
    parts: Tensor,
    folds: Tensor,
    number: int,
    examples: Tensor,
    start: Pooled,
) -> tuple[int, Tensor]:
    """Return which family is best, and the NLL of each at each position, fitted on the other folds, (W, N)."""
    scores = torch.full((len(ways), len(labels)), torch.nan, dtype=torch.float64, device=logits.device)
    for fold in range(number):
        learn, judge = (folds != fold) & (folds >= 0), folds == fold
        for index, way in enumerate(ways):
            fitted = way.fit(logits[:, learn], labels[learn], parts, start, tolerance=1e-3)
            scores[index, judge] = -fitted.log_prob(logits[:, judge], labels[judge], parts)
    judged = folds >= 0
    best = int(scores[:, judged].mean(1).argmin())
    gain = _per_example((scores[0] - scores[best])[judged], examples[judged])
    error = float(gain.std()) / math.sqrt(len(gain))
    return (best if float(gain.mean()) > error else 0), scores


def _per_example(values: Tensor, examples: Tensor) -> Tensor:
    """Return the mean over the positions of each example, (E,)."""
    _, groups = torch.unique(examples, return_inverse=True)
    count = int(groups.max()) + 1
    sums, counts = (
        torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, groups, one)
        for one in (values, torch.ones_like(values))
    )
    return sums / counts


def folds_of(examples: Tensor, *, most: int | None = None) -> tuple[Tensor, int]:
    """Return a fold for each position, alike for all of one example, -1 for those left out, and their number."""
    _, groups = torch.unique(examples, return_inverse=True)
    count = int(groups.max()) + 1
    number = min(FOLDS, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(groups.device)
    kept = count if most is None else max(number, min(count, most * count // max(1, len(examples))))
    fold = torch.full((count,), -1, device=groups.device).scatter(
        0, order[:kept], torch.arange(kept, device=groups.device) % number
    )
    return fold[groups], number
