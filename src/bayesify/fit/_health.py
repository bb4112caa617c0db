"""Is the run well: finite losses, and accuracy that does not fall."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._tree import split_batch, to_device
from bayesify.fit._engine import Engine
from bayesify.posteriors import LossTerms, Posterior

__all__ = ["NonFiniteError", "accuracy", "check_finite", "validation_nll", "warn_if_worse"]


class NonFiniteError(ArithmeticError):
    """A loss became infinite or not a number."""


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
            output = posterior.method.outputs(posterior, inputs)
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
    chains = getattr(posterior, "chain_outputs", None)
    return chains is None or bool(chains(inputs).isfinite().all())


@torch.no_grad()
def validation_nll(posterior: Posterior, loader: Iterable[Any], engine: Engine, num_samples: int) -> float:
    """Return -mean ln (1/S) sum_s p(y | x, pass s) over a loader."""
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    count = torch.zeros((), dtype=torch.float64, device=engine.device)
    for batch in loader:
        inputs, targets = posterior.split_batch(to_device(batch, engine.device))
        with engine.autocast():
            outputs = [posterior.method.outputs(posterior, inputs) for _ in range(num_samples)]
        log_probs = torch.stack([posterior.likelihood.log_prob(output, targets) for output in outputs])
        nll = math.log(num_samples) - log_probs.double().logsumexp(0)
        weight = posterior.likelihood.weight(targets)
        total += (nll if weight is None else nll * weight).sum()
        count += nll.numel() if weight is None else weight.sum()
    if not count.item():
        raise ValueError("The validation loader gave no example. Check its data set and sampler.")
    found = (total / count).item()
    if math.isnan(found):  # early stopping could not compare it
        raise NonFiniteError("The validation NLL is not a number. Check the validation inputs and targets for NaN.")
    return found


@torch.no_grad()
def accuracy(
    posterior: Posterior, loader: Iterable[Any], *, original: bool, max_batches: int | None
) -> tuple[float, int] | None:
    """Return the accuracy of the original network, or of the posterior's average, and on how many examples.

    None where the likelihood knows no accuracy.
    """
    device = next(posterior.parameters()).device
    right, count = 0, 0
    for batch in islice(loader, max_batches):
        inputs, targets = posterior.split_batch(to_device(batch, device))
        if original:
            outputs = [posterior.reference(inputs)]
        else:
            outputs = [posterior.evaluate(inputs, [key])[0] for key in posterior.keys(None, seed=0)[:8]]
        posterior.likelihood.check(outputs[0], targets)
        probs = [posterior.likelihood.from_samples(output[None]) for output in outputs]
        if not hasattr(probs[0], "log_probs"):
            return None
        mean = torch.stack([p.log_probs for p in probs]).logsumexp(0)  # type: ignore[attr-defined]
        labels = targets if targets.ndim == mean.ndim - 1 else targets[..., 0]
        kept = labels.long() != getattr(posterior.likelihood, "ignore_index", -100)
        right += int(((mean.argmax(-1) == labels.long()) & kept).sum())
        count += int(kept.sum())
    return (right / count, count) if count else None


def warn_if_worse(before: float, after: float, count: int, tolerance: float) -> None:
    """Warn if the accuracy fell by more than the tolerance."""
    if before - after > tolerance:
        warnings.warn(
            f"Accuracy fell from {100 * before:.2f} % (the original network) to {100 * after:.2f} % on {count:,} "
            "examples. Lower the learning rate or the noise, or fit for more epochs.",
            stacklevel=3,
        )
