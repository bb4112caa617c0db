"""Yes or no, for one or several outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.maths import at_least_float32
from bayesify.likelihoods.categorical import Categorical, fit_temperature
from bayesify.likelihoods.likelihood import Likelihood, Stream, variance_of
from bayesify.likelihoods.prediction import ClassificationPrediction

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

    def labels(self, target: Tensor) -> Tensor:
        """Return yes (1) or no (0); a soft target counts as the nearer answer."""
        return (target > 0.5).long()

    def num_classes(self, output: Tensor) -> int:
        """Return two."""
        del output
        return 2

    def output_factor(
        self,
        output: Tensor,
        target: Tensor | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return sqrt(p (1 - p)) of each output on its own, (B, N, 1, 1); or y - p of answers y drawn from p."""
        del target
        probs = at_least_float32(output.detach()).sigmoid().reshape(len(output), -1, 1)
        if num_draws is None:
            return (probs * (1 - probs)).sqrt()[..., None]
        uniform = torch.rand(*probs.shape, num_draws, generator=generator, dtype=probs.dtype, device=probs.device)
        return ((uniform < probs[..., None]).to(probs) - probs[..., None]) / math.sqrt(num_draws)

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

    def integrate(self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None) -> ClassificationPrediction:
        """Return the prediction of Gaussian logits, by quadrature, which is exact."""
        spread = _squeeze_last(variance_of(variance, covariance))
        return self._pair().integrate(_pairs(mean), torch.stack([torch.zeros_like(spread), spread], -1), None)

    def _pair(self) -> Categorical:
        pair = Categorical(class_dim=-1)
        pair.temperature = self.temperature
        return pair


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
