"""The curvature of the negative log-likelihood in a network's outputs, as vectors whose outer products add up to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

__all__ = ["Curvature", "columns", "output_hessian", "unit_noise"]

Curvature = Literal["ggn", "fisher"]
Restore = Callable[[Tensor], Tensor]

MOST_COLUMNS = 2048


def unit_noise(likelihood: Likelihood) -> bool:
    """Return whether curvature is of unit noise: of a noise that is one number, which can so be chosen afterwards."""
    return isinstance(likelihood, Gaussian) and likelihood.single_variance() is not None


def columns(
    likelihood: Likelihood,
    output: Tensor,
    target: Tensor,
    *,
    curvature: Curvature,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Give tensors s_1, ..., s_R of the output's shape, with sum_r s_r s_r' the curvature of each example.

    "ggn": -d^2 ln p / df^2 in expectation over the label, which is diag p - p p' for classes, p (1 - p) for yes or no,
    and 1 / noise variance for numbers (1 where the noise is one number, see `unit_noise`). It is exact with R
    the number of outputs of an example (C - 1 for C classes), or, with `samples`, an unbiased estimate from so many
    labels drawn from the network's own prediction. "fisher": the gradient of ln p of the true label (of unit
    noise where the noise is one number).

    Args:
        likelihood: What the outputs mean.
        output: (B, ...).
        target: The labels; positions that do not count have no curvature.
        curvature: "ggn" or "fisher".
        samples: The number of labels drawn; None is exact.
        generator: For these.
    """
    if curvature == "fisher":
        yield _score(likelihood, output, target)
        return
    _require_known(likelihood)
    if samples is not None:
        for _ in range(samples):
            yield _drawn_score(likelihood, output, target, generator) / math.sqrt(samples)
        return
    factor, restore = _factor(likelihood, output, target)
    positions, rank = factor.shape[1], factor.shape[3]
    if positions * rank > MOST_COLUMNS:
        raise ValueError(
            f"The exact GGN of outputs {tuple(output.shape[1:])} takes {positions * rank:,} backward passes for each "
            f"batch, and {MOST_COLUMNS:,} are the most that are made. Draw labels instead: Laplace(samples=1)."
        )
    for position in range(positions):
        for column in range(rank):
            alone = torch.zeros_like(factor[..., column])
            alone[:, position] = factor[:, position, :, column]
            yield restore(alone)


def output_hessian(likelihood: Likelihood, output: Tensor, target: Tensor) -> Tensor:
    """Return the GGN's curvature of each example and position in its outputs, (B, T, F, F).

    T counts what lies between the batch and the outputs, or classes, of one position; with (B,) outputs F is one.
    """
    _require_known(likelihood)
    factor, _ = _factor(likelihood, output, target)
    if isinstance(likelihood, Categorical):
        return factor @ factor.mT
    last = output.shape[-1] if output.ndim > 1 else 1
    return factor.square().reshape(len(output), -1, last).diag_embed()


def _require_known(likelihood: Likelihood) -> None:
    if not isinstance(likelihood, Categorical | Bernoulli | Gaussian):
        raise ValueError(
            f"The GGN of a {type(likelihood).__name__} likelihood is unknown. Use the empirical Fisher, "
            "Laplace(curvature='fisher'), which needs ln p alone."
        )


def _score(likelihood: Likelihood, output: Tensor, target: Tensor) -> Tensor:
    """Return d ln p(target | output) / d output, of unit noise where the noise is one number."""
    with torch.enable_grad():
        leaf = output.detach().requires_grad_()
        log_prob = likelihood.log_prob(leaf, target).sum()
        (score,) = torch.autograd.grad(log_prob, leaf)
    if unit_noise(likelihood):
        assert isinstance(likelihood, Gaussian)
        score = score * likelihood.moments(output.detach())[1].reshape(-1)[0].to(score.dtype)
    return score


def _drawn_score(likelihood: Likelihood, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return d ln p / d output of a label that is drawn from the prediction at every position that counts."""
    output = output.detach()
    if isinstance(likelihood, Categorical):  # e_y - p; ln p would leave out a label that happens to be ignore_index
        probs = likelihood.classes_last(output).softmax(-1)
        drawn = torch.multinomial(probs.flatten(0, -2), 1, generator=generator).view(probs.shape[:-1])
        counted = (target.long() != likelihood.ignore_index)[..., None]
        score = functional.one_hot(drawn, probs.shape[-1]) - probs
        return (score * counted).movedim(-1, _class_dim(likelihood, output)).to(output.dtype)
    if isinstance(likelihood, Bernoulli):
        uniform = torch.rand(target.shape, generator=generator, dtype=output.dtype, device=output.device)
        return _score(likelihood, output, (uniform < output.reshape(target.shape).sigmoid()).to(output.dtype))
    assert isinstance(likelihood, Gaussian)
    mean, variance = likelihood.moments(output)
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    return _score(likelihood, output, mean + (noise if unit_noise(likelihood) else variance.sqrt() * noise))


def _class_dim(likelihood: Categorical, output: Tensor) -> int:
    return likelihood.class_dim if likelihood.class_dim is not None else (-1 if output.ndim <= 3 else 1)


def _factor(likelihood: Likelihood, output: Tensor, target: Tensor) -> tuple[Tensor, Restore]:
    """Return S, (B, T, F, R), with S S' the curvature at each position, and what puts (B, T, F) back in place."""
    output = output.detach()
    if isinstance(likelihood, Categorical):
        logits = likelihood.classes_last(output)
        shape, dim = logits.shape, _class_dim(likelihood, output)
        counted = (target.long() != likelihood.ignore_index).reshape(len(output), -1)
        flat = logits.reshape(len(output), -1, shape[-1])
        factor = _class_factor(flat.softmax(-1)) * counted[..., None, None]
        return factor, lambda s: s.reshape(shape).movedim(-1, dim).to(output.dtype)
    shape = output.shape
    flat = output.reshape(len(output), -1, 1)
    if isinstance(likelihood, Bernoulli):
        probs = flat.sigmoid()
        return (probs * (1 - probs)).sqrt()[..., None], lambda s: s.reshape(shape)
    assert isinstance(likelihood, Gaussian)
    if unit_noise(likelihood):
        return torch.ones_like(flat)[..., None], lambda s: s.reshape(shape)
    _, variance = likelihood.moments(output)
    precise = variance.rsqrt().reshape(len(output), *shape[1:-1], -1)
    if likelihood.noise_std == "head":  # the information of a Gaussian in its mean and log variance
        precise = torch.cat([precise, torch.full_like(precise, math.sqrt(0.5))], -1)
    return precise.to(output.dtype).reshape(len(output), -1, 1)[..., None], lambda s: s.reshape(shape)


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
