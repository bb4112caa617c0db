"""Yes or no, for one or several outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.maths import at_least_float32
from bayesify.likelihoods.categorical import Categorical, check_exponent, room_for
from bayesify.likelihoods.likelihood import Likelihood, Stream, variance_of
from bayesify.likelihoods.pooling import Pooling, Temperatures
from bayesify.likelihoods.prediction import ClassificationPrediction

__all__ = ["Bernoulli"]


class Bernoulli(Likelihood):
    """Yes or no from one logit: p(y = 1) = sigmoid(logit), for each output on its own.

    A logit l is the pair of logits (0, l), so predictions are those of two classes: `probs` is (B, ..., 2), with
    the probability of yes last. A last output dimension of size one is dropped.

    Args:
        exponent: Of the power mean that pools draws; see `Categorical`.
    """

    kind = "bernoulli"
    temperature: Tensor

    def __init__(self, *, exponent: float = 1.0) -> None:
        super().__init__()
        self.exponent = check_exponent(exponent)
        self.register_buffer("temperature", torch.ones(()))

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {} if self.exponent == 1 else {"exponent": self.exponent}

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

    def calibrate(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        parts: Sequence[int] = (),
        pooling: Pooling | float = "probs",
        temperatures: Temperatures = "one",
    ) -> tuple[float, float]:
        """Fit temperature and pooling of the logits; a soft target counts as the nearer answer."""
        pair = self._pair()
        found = pair.calibrate(_labelled(batches), parts=parts, pooling=pooling, temperatures=temperatures)
        self.temperature, self.exponent = pair.temperature, pair.exponent
        return found

    def held_out_nll(self, batches: Sequence[tuple[Tensor, Tensor]], *, parts: Sequence[int] = ()) -> Tensor:
        """Return the mean NLL of each example, (E,), as `calibrate` would leave it, fitted on other examples."""
        return self._pair().held_out_nll(_labelled(batches), parts=parts)

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Have as many temperatures as will be loaded."""
        self.temperature = room_for(self.temperature, tensors)

    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector of draws."""
        return _BernoulliStream(self._pair(), keep_samples)

    def integrate(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, part: int = 0
    ) -> ClassificationPrediction:
        """Return the prediction of Gaussian logits, by quadrature, which is exact."""
        spread = _squeeze_last(variance_of(variance, covariance))
        pairs = torch.stack([torch.zeros_like(spread), spread], -1)
        return self._pair().integrate(_pairs(mean), pairs, None, part=part)

    def _pair(self) -> Categorical:
        pair = Categorical(class_dim=-1, exponent=self.exponent)
        pair.temperature = self.temperature
        return pair


def _squeeze(output: Tensor, ndim: int) -> Tensor:
    return output[..., 0] if output.ndim == ndim + 1 and output.shape[-1] == 1 else output


def _squeeze_last(output: Tensor, *, lead: int = 1) -> Tensor:
    return output[..., 0] if output.ndim > lead and output.shape[-1] == 1 else output


def _pairs(output: Tensor, *, lead: int = 1) -> Tensor:
    logits = _squeeze_last(output, lead=lead)
    return torch.stack([torch.zeros_like(logits), logits], dim=-1)


def _labelled(batches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return batches as of two classes."""
    pairs = [(_pairs(output, lead=2), target > 0.5) for output, target in batches]
    return [(output, target.long().reshape(output.shape[1:-1])) for output, target in pairs]


class _BernoulliStream(Stream):
    def __init__(self, pair: Categorical, keep_samples: bool) -> None:
        self.inner = pair.stream(keep_samples=keep_samples)

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        self.inner.add(_pairs(outputs, lead=2), part=part, view=view)

    def result(self) -> ClassificationPrediction:
        return self.inner.result()
