"""Yes or no, for one or several outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bayesify._math import at_least_float32
from bayesify.likelihoods._base import Likelihood, Stream
from bayesify.likelihoods._categorical import Categorical, fit_temperature
from bayesify.prediction import ClassificationPrediction

__all__ = ["Bernoulli"]


class Bernoulli(Likelihood):
    """Yes or no from one logit: p(y = 1) = sigmoid(logit), for each output on its own.

    A logit l is the pair of logits (0, l), so predictions are those of two classes: `probs` is (B, ..., 2), with
    the probability of yes last. A last output dimension of size one is dropped.
    """

    kind = "bernoulli"
    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ln p(target), (B, ...)."""
        logits = at_least_float32(_squeeze(output, target.ndim))
        return -functional.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return ln p of no and yes for draws' logits (S, B, ...), (S, B, ..., 2)."""
        return functional.log_softmax(at_least_float32(_pairs(outputs, lead=2)), dim=-1)

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """Return where the more probable answer is the target."""
        return (_squeeze(output, target.ndim) > 0) == (target > 0.5)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise where logits and targets do not fit."""
        if _squeeze(output, target.ndim).shape != target.shape:
            raise ValueError(
                f"Logits of shape {tuple(output.shape)} do not fit targets of shape {tuple(target.shape)}: a binary "
                "likelihood needs one logit per target. For classes use likelihood='classification'."
            )
        if target.device.type == "cpu" and target.numel() and not bool(((target >= 0) & (target <= 1)).all()):
            raise ValueError("Targets of a binary likelihood must lie between 0 and 1.")

    @torch.no_grad()
    def calibrate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """Fit the temperature of the logits; a soft target counts as the nearer answer."""
        logits = torch.cat([_pairs(output, lead=2).flatten(1, -2) for output, _ in batches], dim=1)
        return fit_temperature(self.temperature, logits, torch.cat([t.flatten() > 0.5 for _, t in batches]).long())

    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector of draws."""
        return _BernoulliStream(self._pair(), keep_samples)

    def from_moments(self, mean: Tensor, variance: Tensor) -> ClassificationPrediction:
        """Return the prediction of Gaussian logits by the probit approximation sigmoid(m / sqrt(1 + pi v / 8))."""
        # A pair (-l/2, l/2) has the variances of its centred logits v/4, and softmax of it is sigmoid(l); scaling the
        # pair by 1/sqrt(1 + pi v / 8) is the binary probit.
        variance = _squeeze_last(at_least_float32(variance)) / self.temperature**2
        pairs = _pairs(at_least_float32(mean))
        plain = self._pair().from_moments(pairs, torch.zeros_like(pairs))
        damped = self._pair().from_moments(
            pairs / (1 + torch.pi / 8 * variance).sqrt()[..., None], torch.zeros_like(pairs)
        )
        spread = 2 * (plain.probs[..., 0] * plain.probs[..., 1]) ** 2 * variance
        epistemic = torch.minimum(_information(pairs[..., 1] / self.temperature, variance), damped.total)
        return ClassificationPrediction(
            log_probs=damped.log_probs,
            aleatoric=damped.total - epistemic,
            epistemic=epistemic,
            variation_ratio=damped.variation_ratio,
            model_variance=torch.minimum(spread, 1 - (damped.probs**2).sum(-1)),
            logits_mean=plain.logits_mean,
            logits_variance=(variance / 4)[..., None].expand_as(plain.log_probs),
        )

    def _pair(self) -> Categorical:
        pair = Categorical(class_dim=-1)
        pair.temperature = self.temperature
        return pair


def _information(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the mutual information of the answer and its Gaussian logit, H[E p] - E H[p], by quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(32)
    nodes, shares = (torch.from_numpy(x).to(mean) for x in (points, weights / weights.sum()))
    logits = mean[..., None] + variance.sqrt()[..., None] * nodes
    yes = torch.sigmoid(logits)
    average = (yes * shares).sum(-1)
    each = functional.softplus(logits) - logits * yes  # H[p] = ln(1 + e^l) - l p
    entropy: Tensor = torch.special.entr(average) + torch.special.entr(1 - average)
    return (entropy - (each * shares).sum(-1)).clamp_min(0)


def _squeeze(output: Tensor, ndim: int) -> Tensor:
    return output[..., 0] if output.ndim == ndim + 1 and output.shape[-1] == 1 else output


def _squeeze_last(output: Tensor, *, lead: int = 1) -> Tensor:
    return output[..., 0] if output.ndim > lead and output.shape[-1] == 1 else output


def _pairs(output: Tensor, *, lead: int = 1) -> Tensor:
    logits = _squeeze_last(output, lead=lead)
    return torch.stack([torch.zeros_like(logits), logits], dim=-1)


class _BernoulliStream(Stream):
    def __init__(self, pair: Categorical, keep_samples: bool) -> None:
        self.inner = pair.stream(keep_samples=keep_samples)

    def add(self, outputs: Tensor) -> None:
        self.inner.add(_pairs(outputs, lead=2))

    def result(self) -> ClassificationPrediction:
        return self.inner.result()
