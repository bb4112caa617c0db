"""Is the run well: finite losses, and accuracy that does not fall."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.trees import split_batch, to_device
from bayesify.fitting.backend import Engine
from bayesify.fitting.idle import Draws
from bayesify.laws import LossTerms, Posterior

__all__ = [
    "Measured",
    "NonFiniteError",
    "check_finite",
    "measure",
    "summed_nll",
    "validation_nll",
    "warn_if_less_likely",
    "warn_if_worse",
]


class NonFiniteError(ArithmeticError):
    """A loss became infinite or not a number; `fit` raises it, and the message names the first module that did."""


def check_finite(terms: LossTerms, posterior: Posterior, batch: Any, stage: str, *, epoch: int, step: int) -> None:
    """Stop a run whose loss is not finite, naming the first module that is to blame."""
    if all(math.isfinite(value.item()) for value in terms.values()):
        return
    values = ", ".join(f"{name}={value.item():g}" for name, value in terms.items())
    raise NonFiniteError(
        f"The loss of {stage} is not finite at step {step} of epoch {epoch} ({values}). "
        f"{_first_non_finite(posterior, batch)} Lower the learning rate, clip the gradients (clip_norm=1.0), or check "
        "the inputs."
    )


def _first_non_finite(posterior: Posterior, batch: Any) -> str:
    inputs, _ = split_batch(batch)
    found: list[str] = []
    for name, parameter in posterior.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"The parameter {name.removeprefix('network.')!r} holds values that are not finite."

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not found and not bool(output.isfinite().all()):
                found.append(f"The first module with such an output is {name!r} ({type(module).__name__}).")

        return hook

    leaves = [(n, m) for n, m in posterior.network.named_modules() if next(m.children(), None) is None]
    handles = [module.register_forward_hook(watch(name or "(network)")) for name, module in leaves]
    inputs = to_device(inputs, next(posterior.parameters()).device)
    try:
        with torch.no_grad():
            output = posterior.require_method().outputs(posterior, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not found and bool(output.isfinite().all()):
        if not _chains_finite(posterior, inputs):
            return "A chain has gone where the network's output is not finite: its steps are too large."
        return (
            "Every module's output is finite: the targets, or a term of the loss beside the likelihood, are to blame."
        )
    return found[0] if found else "The network's output is not finite, though each module's is."


@torch.no_grad()
def _chains_finite(posterior: Posterior, inputs: Any) -> bool:
    return posterior.require_method().finite(posterior, inputs)


@torch.no_grad()
def summed_nll(
    posterior: Posterior, batch: Any, num_draws: int, autocast: AbstractContextManager[Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Return -sum ln (1/S) sum_s p(y | x, pass s) over a batch, and how many targets count."""
    method = posterior.require_method()
    inputs, targets = posterior.split_batch(batch)
    with autocast or nullcontext():
        outputs = [method.outputs(posterior, inputs) for _ in range(num_draws)]
    log_prob = posterior.likelihood.mixture_log_prob(outputs, targets)
    total, count = posterior.likelihood.total_nll(log_prob, targets)
    return total.double(), count.double()


def validation_nll(posterior: Posterior, loader: Iterable[Any], engine: Engine, num_draws: int) -> float:
    """Return -mean ln (1/S) sum_s p(y | x, pass s) over a loader."""
    total = count = torch.zeros((), dtype=torch.float64)
    for batch in loader:
        part, number = summed_nll(posterior, to_device(batch, engine.device), num_draws, engine.autocast())
        total, count = total + part, count + number
    if not count.item():
        raise ValueError("The validation loader gave no example. Check its data set and sampler.")
    found = (total / count).item()
    if math.isnan(found):  # early stopping could not compare it
        raise NonFiniteError("The validation NLL is not a number. Check the validation inputs and targets for NaN.")
    return found


@dataclass(frozen=True, eq=False)
class Measured:
    """What the original network, or a posterior's average, does with some examples.

    Attributes:
        accuracy: The share of all positions that is right; None where the likelihood knows no such thing.
        right: For each example the share of its positions that is right.
        nll: For each example the mean -ln p of its positions.
        draws: What each draw says alone.
    """

    accuracy: float | None
    right: Tensor
    nll: Tensor
    draws: Draws = field(default_factory=Draws)


@torch.no_grad()
def measure(posterior: Posterior, loader: Iterable[Any], *, original: bool, max_batches: int | None) -> Measured | None:
    """Measure the original network, or the posterior's average over at most 8 draws; None if no example counts."""
    device = next(posterior.parameters()).device
    likelihood = posterior.likelihood
    right: list[Tensor] = []
    nll: list[Tensor] = []
    counts: list[Tensor] = []
    draws = Draws()
    for batch in islice(loader, max_batches):
        inputs, targets = posterior.split_batch(to_device(batch, device))
        if original:
            outputs = [posterior.reference(inputs)]
        else:
            outputs = [posterior.evaluate(inputs, [key])[0] for key in posterior.keys(None, seed=0)[:8]]
        likelihood.check(outputs[0], targets)
        draws.add(likelihood, outputs, targets)
        each = -likelihood.mixture_log_prob(outputs, targets)
        weight = likelihood.weight(targets)
        weight = torch.ones_like(each) if weight is None else weight.double()
        counts.append(weight.flatten(1).sum(1) if weight.ndim > 1 else weight)
        nll.append((each * weight).flatten(1).sum(1) if each.ndim > 1 else each * weight)
        hits = likelihood.from_samples(torch.stack(outputs)).correct(likelihood.marked(targets))
        if hits is not None:
            right.append(hits.double().flatten(1).sum(1) if hits.ndim > 1 else hits.double())
    count = torch.cat(counts) if counts else torch.zeros(())
    total = float(count.sum())
    if not total:
        return None
    kept = count > 0
    share = torch.cat(right) if right else count * 0
    return Measured(
        float(share.sum()) / total if right else None,
        (share / count)[kept].cpu(),
        (torch.cat(nll) / count)[kept].cpu(),
        draws,
    )


FALSE_ALARMS = 0.01  # how often a fit that changes accuracy by chance alone is warned of


def warn_if_worse(before: float, now: Measured, then: Measured | None, tolerance: float, advice: str) -> None:
    """Warn if the accuracy fell by more than the tolerance, and by more than chance explains.

    By chance as many examples get better as get worse, which the sign test (of one decision an example, McNemar's
    exact one) rejects in one of a hundred such fits. A run that was resumed does not know each example's answer any
    more: it compares the two shares as if they were of different examples, which warns more rarely.
    """
    assert now.accuracy is not None
    count = len(now.right)
    if before - now.accuracy <= tolerance:
        return
    if then is not None and len(then.right) == count:
        chance = _sign_test(int((now.right < then.right).sum()), int((now.right > then.right).sum()))
    else:
        spread = math.sqrt((before * (1 - before) + now.accuracy * (1 - now.accuracy)) / count)
        chance = 0.5 * math.erfc((before - now.accuracy) / max(spread, 1e-12) / math.sqrt(2))
    if chance < FALSE_ALARMS:
        warnings.warn(
            f"Accuracy fell from {100 * before:.2f} % (the original network) to {100 * now.accuracy:.2f} % on "
            f"{count:,} examples, which by chance has a probability of {chance:.1g}. {advice}",
            stacklevel=5,  # the call of fit
        )


def _sign_test(worse: int, better: int) -> float:
    """Return the probability of so many of worse + better, or more, if both were equally likely.

    >>> _sign_test(1, 0), _sign_test(8, 0)
    (0.5, 0.00390625)
    """
    number = worse + better
    half = -number * math.log(2)
    ways = (
        math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1) for k in range(worse, number + 1)
    )
    return min(1.0, math.fsum(math.exp(way + half) for way in ways))


def warn_if_less_likely(then: Measured, now: Measured, where: str, *, least: float, advice: str) -> None:
    """Warn if the NLL rose by more than `least` nats and three standard errors (one false alarm in 700)."""
    if len(now.nll) != len(then.nll) or len(now.nll) < 2:
        return
    rise = now.nll - then.nll
    mean, error = rise.mean().item(), rise.std().item() / math.sqrt(len(rise))
    if mean > max(least, 3 * error):
        warnings.warn(
            f"The NLL of {len(rise):,} {where} examples rose from {then.nll.mean().item():.4f} (the original network) "
            f"to {now.nll.mean().item():.4f} nats. {advice}",
            stacklevel=5,  # the call of fit
        )
