"""One of K classes that have an order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify._core.maths import IGNORED, at_least_float32, entropy, label_log_prob, minimise
from bayesify.likelihoods.categorical import LITTLE, Categorical
from bayesify.likelihoods.likelihood import Likelihood, Stream, variance_of
from bayesify.likelihoods.pooling import Pooling, Temperatures
from bayesify.likelihoods.pooling_fit import ERRORS
from bayesify.likelihoods.prediction import ClassificationPrediction
from bayesify.likelihoods.shapes import check_averaged, check_shapes, drop_one, has_wrong, own_factor
from bayesify.likelihoods.softmax_integrals import line

__all__ = ["Ordinal"]

AT_ONCE = 2**18  # numbers at a time
MOST_CLASSES = 10_000


class Ordinal(Likelihood):
    """Classes in an order (grades, stars, stages), from one score: p(y <= k) = sigmoid(threshold_k - score).

    The cumulative link model (McCullagh 1980), with K - 1 increasing thresholds that are learned beside the network.
    One score and not K - 1 logits, because then every draw of the weights has proper probabilities: logits of their own
    can cross. A network that was trained to regress the label has such a score, and thresholds between the labels,
    which is where they start; one with a loss of this family has thresholds already: give them. A head that adds K - 1
    biases b_k to a score s, with p(y > k) = sigmoid(s + b_k), is this one with thresholds -b_k and s alone as its
    output.

    A last dimension of size one is dropped; several outputs are as many answers, which share the thresholds.
    Predictions are those of K classes. `temperature` divides threshold - score.

    Args:
        num_classes: K, if no thresholds are given.
        thresholds: What they start from, K - 1 increasing numbers; None takes 1/2, 3/2, ...

    Example:
        >>> likelihood = Ordinal(thresholds=[-1.0, 1.0])
        >>> likelihood.from_samples(torch.zeros(1, 1, 1)).probs.detach()
        tensor([[0.2689, 0.4621, 0.2689]])
    """

    kind = "ordinal"
    temperature: Tensor

    def __init__(self, num_classes: int | None = None, *, thresholds: Sequence[float] | None = None) -> None:
        super().__init__()
        if thresholds is None:
            if num_classes is None:
                raise ValueError(
                    "An ordinal likelihood needs the number of classes, likelihood=Ordinal(num_classes=5), or the "
                    "thresholds between them, Ordinal(thresholds=[...])."
                )
            if not 2 <= num_classes <= MOST_CLASSES:
                raise ValueError(f"num_classes must be from 2 to {MOST_CLASSES:,}, but it is {num_classes}.")
            thresholds = [index + 0.5 for index in range(num_classes - 1)]
        values = torch.as_tensor(thresholds, dtype=torch.float64)
        if values.ndim != 1 or not len(values) or not bool(values.isfinite().all() and (values.diff() > 0).all()):
            raise ValueError(f"thresholds must be finite numbers that increase, but they are {list(thresholds)}.")
        if num_classes not in (None, len(values) + 1):
            raise ValueError(
                f"{num_classes} classes have {num_classes - 1} thresholds between them, not {len(values)}."
            )
        self.classes = len(values) + 1
        self.first = nn.Parameter(values[0].float())
        self.log_gaps = nn.Parameter(values.diff().log().float())
        self.register_buffer("temperature", torch.ones(()))

    @property
    def thresholds(self) -> Tensor:
        """Return the thresholds, (K - 1,): first + the sums of the gaps, which are positive."""
        return torch.cat([self.first[None], self.first + self.log_gaps.exp().cumsum(0)])

    def config(self) -> dict[str, Any]:
        """Return the number of classes; the thresholds are tensors."""
        return {"num_classes": self.classes}

    def extra_repr(self) -> str:
        """Show the number of classes."""
        return f"num_classes={self.classes}"

    def num_classes(self, output: Tensor) -> int:
        """Return K."""
        del output
        return self.classes

    # -- probabilities ------------------------------------------------------------------------------------------------

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ln p(target), (B, ...)."""
        return label_log_prob(self._log_probs(drop_one(output)), drop_one(target).long())

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return ln p of every class for draws' scores (S, B, ...), (S, B, ..., K)."""
        return self._log_probs(drop_one(outputs, lead=2))

    def _log_probs(self, score: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        """Return ln p, (..., K).

        With a, b the distances to the thresholds below and above, sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a)
        (1 - exp(a - b)), in which nothing cancels.
        """
        distance = self._distances(score, temperature)
        below, above = functional.logsigmoid(distance), functional.logsigmoid(-distance)
        gaps = torch.log(-torch.expm1(-self.log_gaps.exp() / temperature)).to(distance.dtype)
        return functional.pad(below, (0, 1)) + functional.pad(above, (1, 0)) + functional.pad(gaps, (1, 1))

    def _distances(self, score: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        score = at_least_float32(score)
        return (self.thresholds.to(score.dtype) - score[..., None]) / temperature

    def information(self, score: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        """Return E[-d^2 ln p / d score^2] = sum_k p_k (s_k + s_(k-1)), s the sigmoid's slopes at the thresholds."""
        probs, distance = self._log_probs(score, temperature).exp(), self._distances(score, temperature)
        slopes = distance.sigmoid() * (-distance).sigmoid()
        found: Tensor = (probs * (functional.pad(slopes, (0, 1)) + functional.pad(slopes, (1, 0)))).sum(-1)
        return found / temperature**2

    def output_factor(
        self,
        output: Tensor,
        target: Tensor | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the root of the Fisher information of each score, (B, N, 1, 1), or with random signs."""
        with torch.no_grad():
            found = self.information(drop_one(output.detach()))
        if target is not None:
            found = found * (drop_one(target) != IGNORED)
        return own_factor(found, num_draws=num_draws, generator=generator)

    # -- targets ------------------------------------------------------------------------------------------------------

    def weight(self, target: Tensor) -> Tensor:
        """Return which positions count."""
        return (drop_one(target) != IGNORED).float()

    def labels(self, target: Tensor) -> Tensor:
        """Return the labels."""
        return drop_one(target).long()

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise where scores and labels do not fit."""
        if target.is_floating_point():
            raise ValueError(
                f"The targets are {target.dtype}; an ordinal likelihood needs integer labels, 0 to {self.classes - 1}."
            )
        check_shapes(output, target, what="score")
        right = ((target >= 0) & (target < self.classes)) | (target == IGNORED)
        if has_wrong(target, right):
            counted = target[target != IGNORED]
            raise ValueError(
                f"Labels run from {int(counted.min())} to {int(counted.max())}, but there are {self.classes} classes "
                f"in order, so labels must be 0 to {self.classes - 1} (or {IGNORED}): Ordinal(num_classes=...)."
            )

    # -- predictions --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def calibrate(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        parts: Sequence[int] = (),
        pooling: Pooling | float = "probs",
        temperatures: Temperatures = "one",
    ) -> tuple[float, float]:
        """Fit the temperature T: minimise -mean ln (1/S) sum_s p_T(target | score s).

        With fewer than five wrong answers it is not lowered; see `fit_pooled`.
        """
        del parts
        check_averaged(pooling, temperatures, what="an ordinal likelihood has one temperature")
        scores = torch.cat([drop_one(outputs, lead=2).flatten(1) for outputs, _ in batches], 1).double()
        labels = torch.cat([drop_one(target).flatten() for _, target in batches]).long()
        scores, labels = scores[:, labels != IGNORED], labels[labels != IGNORED]
        if not labels.numel():
            raise ValueError(f"There is no label to calibrate on: every target is {IGNORED}.")
        if not bool(scores.isfinite().all()):
            raise ValueError("The draws' scores are not finite, so there is nothing to calibrate. Fit it again.")

        def loss(log_temperature: float) -> float:
            each = (self._log_probs(draw, math.exp(log_temperature)) for draw in scores)
            picked = torch.stack([label_log_prob(log_probs, labels) for log_probs in each])
            return math.log(len(picked)) - picked.logsumexp(0).mean().item()

        start = math.log(self.temperature.item())
        probs = torch.stack([self._log_probs(draw, self.temperature).exp() for draw in scores]).mean(0)
        few = int((probs.argmax(-1) != labels).sum()) < ERRORS
        best, value = minimise(loss, max(start, -4.0) if few else -4.0, 4.0, start=start)
        self.temperature.fill_(math.exp(best))
        return loss(start), value

    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector of draws."""
        return _OrdinalStream(self, keep_samples)

    def integrate(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, part: int = 0
    ) -> ClassificationPrediction:
        """Return the prediction of a Gaussian score: an integral over one number, by 128 equal steps.

        Where the variance is small, first order takes the place of differences that rounding would swallow.
        """
        del part
        score, spread = drop_one(mean), drop_one(variance_of(variance, covariance)).clamp_min(0)
        score, spread = at_least_float32(score), spread.to(at_least_float32(score).dtype)
        log_probs, aleatoric, squares, votes, mean_logits, of_logits = self._averages(score, spread.sqrt())
        little = spread < LITTLE * self.temperature**2
        total, probs = entropy(log_probs), log_probs.exp()
        information = self.information(score, self.temperature) * spread / 2
        slopes = self._slopes(score).square().sum(-1) * spread
        epistemic = torch.where(little, information, total - aleatoric).clamp_min(0)
        epistemic = torch.minimum(epistemic, total)
        return ClassificationPrediction(
            log_probs=log_probs,
            aleatoric=total - epistemic,
            epistemic=epistemic,
            variation_ratio=(1 - votes.amax(-1)).clamp_min(0),
            model_variance=torch.where(little, slopes, squares - probs.square().sum(-1)).clamp_min(0),
            logits_mean=mean_logits,
            logits_variance=of_logits,
        )

    def _slopes(self, score: Tensor) -> Tensor:
        """Return d p_k / d score, (..., K)."""
        distance = self._distances(score, self.temperature)
        slopes = distance.sigmoid() * (-distance).sigmoid() / self.temperature
        return functional.pad(slopes, (1, 0)) - functional.pad(slopes, (0, 1))

    def _averages(self, score: Tensor, std: Tensor) -> tuple[Tensor, ...]:
        """Return ln E p, E H, E p.p, votes, mean and variance of the centred ln p, over the score's Gaussian."""
        points, shares = (torch.from_numpy(array).to(score) for array in line())
        flat, stds = score.flatten(), std.flatten()
        rows, some = flat.shape[0], max(1, AT_ONCE // (self.classes * len(shares)))
        if not isinstance(rows, int) or rows <= some:  # a symbol, while a program is traced: all rows go together
            parts = [self._average(flat, stds, points[0], shares)]
        else:
            pairs = zip(torch.split(flat, some), torch.split(stds, some), strict=True)
            parts = [self._average(some_scores, some_stds, points[0], shares) for some_scores, some_stds in pairs]
        found = [torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True)]
        return tuple(each.reshape(*score.shape, *each.shape[1:]) for each in found)

    def _average(self, score: Tensor, std: Tensor, points: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
        each = self._log_probs(score[:, None] + std[:, None] * points, self.temperature)  # (N, P, K)
        log_probs = functional.log_softmax((each + shares.log()[:, None]).logsumexp(1), -1)
        probs = each.exp()
        votes = functional.one_hot(each.argmax(-1), self.classes).to(probs)
        logits = each - each.mean(-1, keepdim=True)
        average = torch.einsum("npk,p->nk", logits, shares)
        spread = torch.einsum("npk,p->nk", (logits - average[:, None]).square(), shares)
        return (
            log_probs,
            entropy(each, probs) @ shares,
            probs.square().sum(-1) @ shares,
            torch.einsum("npk,p->nk", votes, shares),
            average,
            spread,
        )


class _OrdinalStream(Stream):
    """Draws' ln p are logits of the classes."""

    def __init__(self, likelihood: Ordinal, keep_samples: bool) -> None:
        self.likelihood = likelihood
        self.inner = Categorical(class_dim=-1).stream(keep_samples=keep_samples)

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        del part
        scores = drop_one(outputs, lead=2)
        temperature = self.likelihood.temperature.to(at_least_float32(scores))
        self.inner.add(self.likelihood._log_probs(scores, temperature), view=view)

    def result(self) -> ClassificationPrediction:
        return replace(self.inner.result(), energy=None)  # of ln p it is 0
