"""One of C classes per example, pixel or token."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify._core.maths import at_least_float32, entropy, label_log_prob
from bayesify.likelihoods.categorical_stream import CategoricalStream
from bayesify.likelihoods.likelihood import Likelihood
from bayesify.likelihoods.pooling import Pooling, Temperatures, check_pooling, normalised
from bayesify.likelihoods.pooling_fit import Pooled, fit_pooled, held_out_nll
from bayesify.likelihoods.prediction import ClassificationPrediction
from bayesify.likelihoods.softmax_integrals import average_softmax, covariance_root

__all__ = ["Categorical", "check_exponent", "independent_variances", "room_for"]

LITTLE = 0.05  # a variance of logits of which first order is right to a few percent


class Categorical(Likelihood):
    """Classes, from logits: p(y = c) = softmax(logits)_c.

    Dense outputs are (B, C, H, W) for images and (B, T, C) for tokens, as torch's and transformers' networks
    return them; `class_dim` says otherwise. Predictions have the class dimension last.

    Args:
        class_dim: The dimension of the classes; None takes the last of two or three, and dimension 1 of more.
        ignore_index: The label of positions that do not count.
        exponent: Of the power mean that pools draws: 1 averages probabilities, 0 log-probabilities; `calibrate` fits
            it.

    Attributes:
        temperature: What divides the logits, (); or one for each part of a mixture, (M,).
    """

    kind = "categorical"
    temperature: Tensor

    def __init__(self, *, class_dim: int | None = None, ignore_index: int = -100, exponent: float = 1.0) -> None:
        super().__init__()
        self.class_dim = class_dim
        self.ignore_index = ignore_index
        self.exponent = check_exponent(exponent)
        self.register_buffer("temperature", torch.ones(()))

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        exponent = {} if self.exponent == 1 else {"exponent": self.exponent}
        return {"class_dim": self.class_dim, "ignore_index": self.ignore_index, **exponent}

    def extra_repr(self) -> str:
        """Show what differs from the default."""
        words = {
            "class_dim": self.class_dim,
            "ignore_index": None if self.ignore_index == -100 else self.ignore_index,
            "exponent": None if self.exponent == 1 else self.exponent,
        }
        return ", ".join(f"{name}={value}" for name, value in words.items() if value is not None)

    def classes_last(self, output: Tensor, *, lead: int = 1) -> Tensor:
        """Move the class dimension to the end, in at least float32; `lead` dimensions come before the event."""
        dim = self.softmax_dim(output.ndim - lead + 1)
        logits = at_least_float32(output if dim == -1 else output.movedim(dim if dim < 0 else dim + lead - 1, -1))
        if logits.shape[-1] == 1:
            raise ValueError(
                f"The network's output has the shape {tuple(output.shape[lead - 1 :])}, with one class. For yes or no "
                "from one logit use likelihood='binary'; for numbers use likelihood='regression'."
            )
        return logits

    def softmax_dim(self, ndim: int) -> int:
        """Return which dimension of an output with this number of dimensions holds the classes."""
        return self.class_dim if self.class_dim is not None else (-1 if ndim <= 3 else 1)

    def num_classes(self, output: Tensor) -> int:
        """Return the size of that dimension."""
        return output.shape[self.softmax_dim(output.ndim)]

    def centre(self, output: Tensor) -> Tensor:
        """Return the logits without their mean over classes."""
        return output - output.mean(self.softmax_dim(output.ndim), keepdim=True)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ln softmax(logits)_target, (B, ...)."""
        log_probs = functional.log_softmax(self.classes_last(output), dim=-1)
        return label_log_prob(log_probs, target.long(), self.ignore_index)

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean of -ln softmax(logits)_target over positions that count: one kernel, not `log_prob`'s ten."""
        whole = self._fits(output, target)
        logits, labels = self.classes_last(output), target.long()
        if logits.ndim > 2:
            logits = logits.movedim(-1, 1)
        if whole:
            return functional.cross_entropy(logits, labels)
        total = functional.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="sum")
        counted = self._counted(target).sum()
        if target.device.type == "cpu" and target.numel() and not counted:
            warnings.warn(
                f"All {target.numel()} targets of a batch are ignore_index = {self.ignore_index}, so that nothing is "
                "learned from it. Check the labels, or give Categorical another ignore_index.",
                stacklevel=2,
            )
        return total / counted.clamp_min(1)

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return ln softmax of draws' logits (S, B, ...), (S, B, ..., C)."""
        return functional.log_softmax(self.classes_last(outputs, lead=2), dim=-1)

    def weight(self, target: Tensor) -> Tensor:
        """Return which positions count."""
        return self._counted(target).float()

    def _counted(self, target: Tensor) -> Tensor:
        return target.long() != self.ignore_index  # bytes would take 156 for -100

    def labels(self, target: Tensor) -> Tensor:
        """Return the labels, -100 where they do not count."""
        return self.marked(target)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise where logits and labels do not fit.

        Values of labels are checked only where that needs no wait for a device.
        """
        self._fits(output, target)

    def _fits(self, output: Tensor, target: Tensor) -> bool:
        """Check, and return whether it is known that there are labels and that all of them count."""
        if output.ndim < 2:
            raise ValueError(
                f"The network's output has the shape {tuple(output.shape)}; classification needs logits (B, C). For a "
                "single logit per example use likelihood='binary'; for numbers use likelihood='regression'."
            )
        logits = self.classes_last(output)
        if target.is_floating_point():
            raise ValueError(
                f"The targets are {target.dtype}; classification needs integer labels. For numbers use "
                "likelihood='regression', for several yes-or-no answers likelihood='binary'."
            )
        if logits.shape[:-1] != target.shape:
            raise ValueError(
                f"Logits of shape {tuple(output.shape)} do not fit targets of shape {tuple(target.shape)}: targets "
                f"must be {tuple(logits.shape[:-1])}. A network with other outputs needs another likelihood or "
                "class_dim."
            )
        if target.device.type == "cpu" and target.numel():
            least, most = (int(label) for label in target.aminmax())
            if least >= 0 and most < logits.shape[-1]:
                return not least <= self.ignore_index <= most
            counted = target[self._counted(target)]
            low, high = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
            if low < 0 or high >= logits.shape[-1]:
                raise ValueError(
                    f"Labels run from {low} to {high}, but the network has {logits.shape[-1]} outputs, so labels must "
                    f"be 0 to {logits.shape[-1] - 1} (or ignore_index = {self.ignore_index}). For yes or no from a "
                    "single logit use likelihood='binary'."
                )
        return False

    def output_factor(
        self,
        output: Tensor,
        target: Tensor | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return S, (B, T, C, C - 1), with S S' = diag p - p p'; or columns e_y - p of labels y drawn from p."""
        probs = self.classes_last(output.detach()).softmax(-1)
        probs = probs.reshape(len(output), -1, probs.shape[-1])
        if num_draws is None:
            factor = _class_factor(probs)
        else:
            flat = probs.flatten(0, 1)
            drawn = [torch.multinomial(flat, 1, generator=generator).view(probs.shape[:-1]) for _ in range(num_draws)]
            columns = [functional.one_hot(labels, probs.shape[-1]) - probs for labels in drawn]
            factor = torch.stack(columns, -1) / math.sqrt(num_draws)
        return factor if target is None else factor * self._counted(target).reshape(*probs.shape[:2], 1, 1)

    @torch.no_grad()
    def calibrate(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        parts: Sequence[int] = (),
        pooling: Pooling | float = "probs",
        temperatures: Temperatures = "one",
    ) -> tuple[float, float]:
        """Fit the temperature T: minimise -mean ln (1/S) sum_s softmax(logits_s / T)_target (Guo et al. 2017).

        With another pooling the power mean takes the average's place; see `fit_pooled`.
        """
        check_pooling(pooling, temperatures)
        logits, labels, examples = self._gathered(batches)
        found, before, after = fit_pooled(
            logits,
            labels,
            start=Pooled(self.temperature, self.exponent),
            parts=parts or [0] * len(logits),
            examples=examples,
            pooling=pooling,
            temperatures=temperatures,
        )
        self.temperature = found.temperature.to(self.temperature)
        self.exponent = found.exponent
        return before, after

    @torch.no_grad()
    def held_out_nll(self, batches: Sequence[tuple[Tensor, Tensor]], *, parts: Sequence[int] = ()) -> Tensor:
        """Return the mean NLL of each example, (E,), as `calibrate` would leave it, fitted on other examples."""
        logits, labels, examples = self._gathered(batches)
        start = Pooled(self.temperature, self.exponent)
        return held_out_nll(logits, labels, start=start, parts=parts or [0] * len(logits), examples=examples)

    def _gathered(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (S, N, C), labels (N,), and which example each is of, of the positions that count."""
        counted = [self._counted(target) for _, target in batches]
        logits = torch.cat([self.classes_last(o, lead=2)[:, c] for (o, _), c in zip(batches, counted, strict=True)], 1)
        labels = torch.cat([t[c] for (_, t), c in zip(batches, counted, strict=True)]).long()
        if labels.numel() == 0:
            raise ValueError("There is no label to calibrate on: every target is ignore_index.")
        return logits, labels, _examples(counted)

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Have as many temperatures as will be loaded."""
        self.temperature = room_for(self.temperature, tensors)

    @property
    def tempers(self) -> bool:
        """Whether logits have to be divided by a temperature: not by 1, where that is known without a wait."""
        temperature = self.temperature
        known = temperature.ndim == 0 and temperature.is_cpu
        return torch.compiler.is_compiling() or not known or temperature.item() != 1

    def tempered(self, logits: Tensor, part: int = 0) -> Tensor:
        """Return logits divided by the temperature of a part."""
        return logits / (self.temperature if self.temperature.ndim == 0 else self.temperature[part])

    def stream(self, *, keep_samples: bool = False) -> CategoricalStream:
        """Return a collector of draws."""
        return CategoricalStream(self, keep_samples)

    def integrate(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, part: int = 0
    ) -> ClassificationPrediction:
        """Return the prediction of Gaussian logits: the same averages that draws have, at points that are fixed.

        See `average_softmax`. Where all variances are small, first order takes the place of the differences for the
        epistemic part and the model variance, which rounding would swallow.
        """
        logits = self.tempered(self.classes_last(mean), part)
        logits = logits - logits.mean(-1, keepdim=True)
        if covariance is None:
            assert variance is not None
            own = self.tempered(self.tempered(self.classes_last(variance).clamp_min(0), part), part)
            root, centred = own.sqrt(), _centred_variance(own)
        else:
            covariance = self.tempered(self.tempered(at_least_float32(covariance), part), part)
            covariance = _centred(covariance).to(logits.dtype)
            own = centred = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)
            root = covariance_root(covariance)
        flat = average_softmax(
            logits.flatten(0, -2),
            root.reshape(-1, *root.shape[logits.ndim - 1 :]),
            positions=logits.shape[1:-1].numel(),
            exponent=self.exponent,
        )
        log_probs, votes = flat.log_probs.view_as(logits), flat.votes.view_as(logits)
        aleatoric, squares = (x.view(logits.shape[:-1]) for x in (flat.entropy, flat.squares))
        probs, total = log_probs.exp(), entropy(log_probs)
        # First order: a logit's move m has the information m' F m / 2 and moves p by F m, F = diag p - p p'.
        product = own * probs if covariance is None else (covariance @ probs[..., None])[..., 0]
        along = (probs * product).sum(-1)
        information = _information(log_probs, own, covariance)
        spread = (probs**2 * (own - 2 * product + along[..., None])).sum(-1)
        little = own.amax(-1) < LITTLE
        epistemic = torch.where(little, information, total - aleatoric).clamp_min(0)
        epistemic = torch.minimum(epistemic, total)
        made = ClassificationPrediction(
            log_probs=log_probs,
            aleatoric=total - epistemic,
            epistemic=epistemic,
            variation_ratio=(1 - votes.amax(-1)).clamp_min(0),
            model_variance=torch.where(little, spread, squares - (probs**2).sum(-1)).clamp_min(0),
            logits_mean=logits,
            logits_variance=centred,
        )
        if self.exponent == 1:
            return made
        return made.repooled(*normalised(flat.pooled.view_as(logits)), self.exponent)


def _information(log_probs: Tensor, own: Tensor, covariance: Tensor | None) -> Tensor:
    """Return E m' F m / 2 over moves m of the logits, F = diag p - p p', without a difference of large numbers.

    Moves are taken relative to that of the most probable class t, which changes nothing: with D their covariance and q
    the other classes' probabilities, (sum_c q_c D_cc - q' D q) / 2. Independent: sum_c p_c (1 - p_c) v_c / 2.
    """
    probs = log_probs.exp()
    if covariance is None:
        return (probs * -torch.expm1(log_probs) * own).sum(-1) / 2
    top = log_probs.argmax(-1, keepdim=True)
    others = probs.scatter(-1, top, 0.0)
    with_top = covariance.gather(-2, top[..., None].expand_as(covariance[..., :1, :]))[..., 0, :]
    of_top, rest = with_top.gather(-1, top), others.sum(-1)
    differences = own - 2 * with_top + of_top
    product = (covariance @ others[..., None])[..., 0]
    square = (others * (product - 2 * rest[..., None] * with_top)).sum(-1) + rest.square() * of_top[..., 0]
    return ((others * differences).sum(-1) - square) / 2


def check_exponent(exponent: float) -> float:
    """Return an exponent, which must be from 0 to 1."""
    if not 0 <= exponent <= 1:
        raise ValueError(f"exponent must be from 0 (log-probabilities) to 1 (probabilities), but it is {exponent}.")
    return float(exponent)


def room_for(temperature: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the temperature, in the shape of one that will be loaded."""
    found = tensors.get("temperature")
    return temperature if found is None or found.ndim != 1 else temperature.new_ones(found.shape)


def _examples(counted: Sequence[Tensor]) -> Tensor:
    """Return for each position that counts which example it is of, over all batches."""
    found, first = [], 0
    for mask in counted:
        number = torch.arange(first, first + len(mask), device=mask.device)
        found.append(number.view(-1, *(1,) * (mask.ndim - 1)).expand(mask.shape)[mask])
        first += len(mask)
    return torch.cat(found)


def _class_factor(probs: Tensor) -> Tensor:
    """Return S, (..., C, C - 1), with S S' = diag p - p p'.

    diag p - p p' = D (I - q q') D with q = sqrt p, D = diag q. The reflection that takes q to -e_1 has the columns
    h_k = e_k - (q + e_1) q_k / (1 + q_1), k > 1, which span what is orthogonal to q, so that S = D (h_2, ..., h_C).
    """
    roots = probs.sqrt()
    rest = roots[..., 1:]
    shifted = torch.cat([roots[..., :1] + 1, rest], -1)
    basis = torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device)[:, 1:]
    basis = basis - shifted[..., :, None] * (rest / (1 + roots[..., :1]))[..., None, :]
    return roots[..., :, None] * basis


def _centred_variance(variance: Tensor) -> Tensor:
    """Return the variances of independent logits after their mean over classes is taken off."""
    classes = variance.shape[-1]
    return variance * (1 - 2 / classes) + variance.sum(-1, keepdim=True) / classes**2


def independent_variances(centred: Tensor) -> Tensor:
    """Return variances of independent logits whose centred logits have the given variances, (..., C).

    Logits with variances v, after their mean over classes is taken off, have u_c = v_c (1 - 2/C) + sum v / C^2. This is
    solved for v. Where no v >= 0 does it, the sum of u is kept.

    >>> independent_variances(torch.tensor([1.0, 1.0]))
    tensor([2., 2.])
    """
    classes = centred.shape[-1]
    total = centred.sum(-1, keepdim=True) / (1 - 1 / classes)
    if classes == 2:
        return (total / 2).expand_as(centred).clone()
    found = ((centred - total / classes**2) / (1 - 2 / classes)).clamp_min(0)
    kept = found.sum(-1, keepdim=True)
    return torch.where(kept > 0, found * (total / kept.clamp_min(torch.finfo(kept.dtype).tiny)), found)


def _centred(covariance: Tensor) -> Tensor:
    """Return the covariance of logits after their mean over classes is taken off, which softmax does not see."""
    covariance = covariance - covariance.mean(-1, keepdim=True)
    return covariance - covariance.mean(-2, keepdim=True)
