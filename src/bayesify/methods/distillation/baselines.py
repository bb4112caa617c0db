"""Simpler distributions of a bank's samples, to justify a generator against."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.laws import BankPosterior, GeneratorPosterior, MixturePosterior, SWAGPosterior
from bayesify.methods import SWAG, Generator, Mixture, inherit
from bayesify.methods.pca import reduce_samples

__all__ = ["fit_mixture", "fit_pca", "fit_swag", "make_generator_posterior"]


def make_generator_posterior(
    bank: BankPosterior, how: str, latent: int, hidden: tuple[int, ...], num_draws: int, *, residual: bool
) -> GeneratorPosterior:
    """Return a generator over a bank's weights that has learned nothing."""
    names = tuple(bank.codec.names)
    shape: dict[str, Any] = {"latent": latent, "hidden": hidden, "num_draws": num_draws, "residual": residual}
    method = Generator(how=how, source=_source(bank), names=names, **shape)
    posterior = GeneratorPosterior(copy.deepcopy(bank.network), method, names=list(names), **shape)
    inherit(posterior, bank)
    return posterior


@torch.no_grad()
def fit_pca(bank: BankPosterior, samples: Tensor, rank: int, num_draws: int, *, residual: bool) -> GeneratorPosterior:
    """Return the Gaussian w = mean + V S z with the samples' first principal axes V and standard deviations S.

    Args:
        bank: Where the samples are from.
        samples: (M, D).
        rank: How many axes.
        num_draws: For networks with batch normalisation.
        residual: Whether each weight's variance along other axes is added as independent noise.
    """
    reduction = reduce_samples(samples, rank)
    posterior = make_generator_posterior(bank, "pca", min(rank, len(samples) - 1), (), num_draws, residual=residual)
    into = posterior.generator[-1]
    assert isinstance(into, nn.Linear)
    std = reduction.coordinates.std(0) * reduction.scale
    into.weight.zero_()
    into.weight[:, : len(std)] = reduction.basis.T * std
    into.bias.copy_(reduction.mean)
    if residual:
        posterior.residual_std.copy_(reduction.residual_variance.sqrt())
    return posterior


def fit_mixture(bank: BankPosterior, samples: Tensor, components: int, num_draws: int, seed: int) -> MixturePosterior:
    """Return a mixture of diagonal Gaussians, fitted by expectation maximisation."""
    try:
        from sklearn.mixture import GaussianMixture
    except ImportError as error:
        raise ImportError("how='mixture' needs scikit-learn: pip install 'bayesify[demo]'.") from error
    if not 1 <= components <= len(samples):
        raise ValueError(f"A mixture of {components} components needs as many samples, and there are {len(samples)}.")
    names = tuple(bank.codec.names)
    method = Mixture(components=components, num_draws=num_draws, source=_source(bank), names=names)
    posterior = MixturePosterior(
        copy.deepcopy(bank.network), method, names=list(names), components=components, num_draws=num_draws
    )
    rows = samples.cpu().double().numpy()
    # A component of one sample must keep some width: a millionth of all weights' average variance.
    least = max(float(rows.var(0).mean()) * 1e-6, 1e-12)
    found = GaussianMixture(components, covariance_type="diag", reg_covar=least, random_state=seed).fit(rows)
    with torch.no_grad():
        posterior.shares.copy_(torch.from_numpy(found.weights_))
        posterior.means.copy_(torch.from_numpy(found.means_))
        posterior.stds.copy_(torch.from_numpy(found.covariances_).sqrt())
    return posterior


def fit_swag(bank: BankPosterior, samples: Tensor, rank: int, num_draws: int) -> SWAGPosterior:
    """Return SWAG with the samples as its snapshots; a rank of 0 is their means and variances alone."""
    converted = bank.conversion.converted if bank.conversion is not None else ()
    own = [name for name, p in bank.network.named_parameters() if name.rpartition(".")[0] in converted]
    if set(own) - set(bank.codec.names) and bank.method.name == "bank":
        raise ValueError(
            "SWAG holds all parameters of the layers it has, and this bank only some of theirs. Use how='pca'."
        )
    posterior = SWAGPosterior(
        copy.deepcopy(bank.network), SWAG(rank=rank, num_draws=num_draws), names=bank.codec.names, rank=rank, scale=1.0,
        num_draws=num_draws,
    )  # fmt: skip
    for row in samples:
        posterior.collect(row)
    return posterior


def _source(bank: BankPosterior) -> str:
    return getattr(bank.method, "source", "") or bank.method.name
