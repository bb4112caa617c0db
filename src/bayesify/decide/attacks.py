"""Attacks on a posterior, to test detectors with: inputs close to given ones on which it goes wrong.

Attack libraries (foolbox, torchattacks, ART) ask a network for logits: `PredictiveNetwork` is a posterior's average as
such a network, with new draws in every call, and all of their gradient attacks run on it. They cannot take a goal that
looks at the draws one by one, such as the mutual information that a detector uses, nor keep memory independent of the
number of draws; `pgd` does both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from bayesify._core.deprecation import renamed
from bayesify._core.modes import evaluation_mode
from bayesify.laws import Posterior
from bayesify.likelihoods import Likelihood
from bayesify.methods.ood_regularizer import mutual_information
from bayesify.prediction.features import check_output, evaluate_draw, features_read

__all__ = ["PredictiveNetwork", "disagreement_avoided", "features_moved", "fgsm", "pgd", "surprise"]

Goal = Callable[[Tensor], Tensor]


def surprise(likelihood: Likelihood, targets: Tensor) -> Goal:
    """Return the goal -ln (1/S) sum_s p_s(target): to make the posterior's average wrong."""

    def goal(outputs: Tensor) -> Tensor:
        log_probs = likelihood.log_probs(outputs)
        picked = log_probs.gather(-1, targets.expand(log_probs.shape[:-1])[..., None])[..., 0]
        return math.log(len(picked)) - picked.logsumexp(0)

    return goal


def disagreement_avoided(likelihood: Likelihood, targets: Tensor, weight: float = 10.0) -> Goal:
    """Return the goal of `surprise`, less `weight` times the mutual information of the draws.

    An attacker who knows that the mutual information is watched tries to be wrong and unnoticed: a detector is as good
    as it is against this.
    """
    wrong = surprise(likelihood, targets)
    return lambda outputs: wrong(outputs) - weight * mutual_information(likelihood.log_probs(outputs))


def features_moved(references: Tensor) -> Goal:
    """Return the goal |f / |f| - r / |r||^2 with f the average of the draws' features (B, D) and r the references.

    It breaks the verification of two inputs as of one kind; give the other input's features.
    """
    fixed = nn.functional.normalize(references, dim=-1)
    return lambda outputs: (nn.functional.normalize(outputs.mean(0), dim=-1) - fixed).square().sum(-1)


@renamed(num_samples="num_draws")
def pgd(
    posterior: Posterior,
    inputs: Tensor,
    goal: Tensor | Goal,
    *,
    radius: float = 0.031,
    step: float = 0.003,
    steps: int = 20,
    num_draws: int | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    preprocess: Callable[[Tensor], Tensor] | None = None,
    random_start: bool = True,
    output: str = "prediction",
    fresh_draws: bool = True,
    seed: int = 0,
) -> Tensor:
    """Climb a goal by signed gradient steps inside the ball |x - inputs|_inf <= radius (Madry et al. 2018).

    Every step has new draws, or with `fresh_draws=False` the same: one of them is an attack on one function, by an
    attacker who has a network and not the posterior. The gradient of a goal of all draws is taken in two passes for
    each draw, one without a graph that says how the goal depends on its outputs, and one with; memory does not grow
    with the number of draws.

    Args:
        posterior: Any posterior with draws.
        inputs: (B, ...), as they are before `preprocess`.
        goal: The true labels (B,), for `surprise`; or a function of the draws' outputs (S, B, ...) that returns (B,).
        radius: Of the ball; the paper has .031 for CIFAR.
        step: The length of a step.
        steps: Their number.
        num_draws: Draws in a step; None takes the posterior's own number.
        bounds: What values inputs can have.
        preprocess: What inputs go through before the network: normalisation.
        random_start: Whether to begin at a random point of the ball.
        output: What the goal looks at: "prediction", the network's outputs, or "features" as in `predict`, which
            with `features_moved` is the attack on open-set verification.
        fresh_draws: Whether every step has draws of its own.
        seed: Of the start and of the draws.

    Returns:
        The changed inputs (B, ...), with values inside the bounds.

    Example:
        >>> from bayesify import MCDropout, convert
        >>> posterior = convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)), MCDropout())
        >>> x, labels = torch.rand(5, 4), torch.arange(5) % 3
        >>> bool((pgd(posterior, x, labels, radius=0.1, num_draws=4) - x).abs().max() <= 0.1 + 1e-6)
        True
    """
    if radius < 0 or step <= 0 or steps < 0:
        raise ValueError(f"radius and steps must be at least 0 and step above 0: {radius}, {steps} and {step}.")
    low, high = bounds
    if inputs.numel() and not (low <= float(inputs.min()) and float(inputs.max()) <= high):
        raise ValueError(
            f"The inputs go from {float(inputs.min()):.4g} to {float(inputs.max()):.4g}, outside the bounds {bounds}. "
            "Give the bounds of these inputs; normalisation belongs into preprocess=."
        )
    check_output(output)
    goal = surprise(posterior.likelihood, goal) if isinstance(goal, Tensor) else goal
    x = inputs.detach()
    if random_start:
        generator = torch.Generator().manual_seed(seed)
        start = torch.rand(inputs.shape, generator=generator, dtype=inputs.dtype).to(inputs.device)
        x = (x + radius * (2 * start - 1)).clamp(low, high)
    for index in range(steps):
        gradient = _gradient(posterior, x, goal, num_draws, preprocess, seed + 1 + index * fresh_draws, output)
        x = (x + step * gradient.sign()).clamp(inputs - radius, inputs + radius).clamp(low, high)
    return x


@renamed(num_samples="num_draws")
def fgsm(
    posterior: Posterior,
    inputs: Tensor,
    goal: Tensor | Goal,
    *,
    radius: float = 0.031,
    num_draws: int | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    preprocess: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> Tensor:
    """Take one signed gradient step to the border of the ball (Goodfellow et al. 2015); arguments as `pgd`'s."""
    return pgd(
        posterior,
        inputs,
        goal,
        radius=radius,
        step=max(radius, 1e-30),
        steps=1,
        num_draws=num_draws,
        bounds=bounds,
        preprocess=preprocess,
        random_start=False,
        seed=seed,
    )


def _gradient(
    posterior: Posterior,
    x: Tensor,
    goal: Goal,
    num_draws: int | None,
    preprocess: Callable[[Tensor], Tensor] | None,
    seed: int,
    output: str = "prediction",
) -> Tensor:
    """Return the gradient of a goal of all draws, one draw's graph at a time."""
    keys = posterior.keys(num_draws, seed)
    ready = preprocess or (lambda values: values)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(posterior.lock)
        stack.enter_context(evaluation_mode(posterior))
        features = None
        if output != "prediction":
            features = stack.enter_context(features_read(posterior, output, ready(x)))
        with torch.no_grad():
            outputs = torch.stack([evaluate_draw(posterior, ready(x), key, features) for key in keys])
        with torch.enable_grad():
            outputs.requires_grad_()
            (weights,) = torch.autograd.grad(goal(outputs).sum(), outputs)
            total = torch.zeros_like(x)
            for key, weight in zip(keys, weights, strict=True):
                leaf = x.detach().clone().requires_grad_()
                value = evaluate_draw(posterior, ready(leaf), key, features)
                total += torch.autograd.grad(value, leaf, weight)[0]
    return total


class PredictiveNetwork(nn.Module):
    """A posterior's average as a network with logits, ln (1/S) sum_s p_s, for libraries that attack networks.

    Every call has new draws. Memory grows with their number.

    Args:
        posterior: A posterior of a classifier.
        num_draws: Draws in a call; None takes the posterior's own number.
    """

    @renamed(num_samples="num_draws")
    def __init__(self, posterior: Posterior, num_draws: int | None = None) -> None:
        super().__init__()
        self.posterior = posterior
        self.num_draws = num_draws

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities (B, ..., C)."""
        keys = self.posterior.keys(self.num_draws, int(torch.randint(2**31, ())))
        outputs = torch.cat([self.posterior.evaluate(x, [key]) for key in keys])
        return self.posterior.likelihood.log_probs(outputs).logsumexp(0) - math.log(len(outputs))
