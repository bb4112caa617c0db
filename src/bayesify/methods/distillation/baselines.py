"""Simpler distributions of a bank's samples, to justify a generator against."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from bayesify.laws import GaussianMixtureLaw, GeneratorLaw, LowRankLaw, Posterior
from bayesify.methods.banks import inherit, source_of
from bayesify.methods.pca import reduce_samples
from bayesify.methods.swag import SWAG

__all__ = ["fit_mixture", "fit_pca", "fit_swag", "make_generator_posterior"]


def make_generator_posterior(
    bank: Posterior, algorithm: str, latent: int, hidden: tuple[int, ...], num_bn_draws: int, *, residual: bool
) -> Posterior:
    """Return a generator over a bank's weights that has learned nothing."""
    network = bank.plain_network()
    law = GeneratorLaw(
        network, names=bank.law.names, latent=latent, hidden=hidden, num_bn_draws=num_bn_draws, residual=residual,
        algorithm=algorithm, source=source_of(bank),
    )  # fmt: skip
    posterior = Posterior(network, law)
    inherit(posterior, bank)
    return posterior


@torch.no_grad()
def fit_pca(bank: Posterior, samples: Tensor, rank: int, num_bn_draws: int, *, residual: bool) -> Posterior:
    """Return the Gaussian w = mean + V S z with the samples' first principal axes V and standard deviations S.

    Args:
        bank: Where the samples are from.
        samples: (M, D).
        rank: How many axes.
        num_bn_draws: For networks with batch normalisation.
        residual: Whether each weight's variance along other axes is added as independent noise.
    """
    reduction = reduce_samples(samples, rank)
    posterior = make_generator_posterior(bank, "pca", min(rank, len(samples) - 1), (), num_bn_draws, residual=residual)
    law = cast(GeneratorLaw, posterior.law)
    into = law.generator[-1]
    assert isinstance(into, nn.Linear)
    std = reduction.coordinates.std(0) * reduction.scale
    into.weight.zero_()
    into.weight[:, : len(std)] = reduction.basis.T * std
    into.bias.copy_(reduction.mean)
    if residual:
        law.residual_std.copy_(reduction.residual_variance.sqrt())
    return posterior


def fit_mixture(bank: Posterior, samples: Tensor, components: int, num_bn_draws: int, seed: int) -> Posterior:
    """Return a mixture of diagonal Gaussians, fitted by expectation maximisation."""
    try:
        from sklearn.mixture import GaussianMixture
    except ImportError as error:
        raise ImportError("algorithm='mixture' needs scikit-learn: pip install 'bayesify[demo]'.") from error
    if not 1 <= components <= len(samples):
        raise ValueError(f"A mixture of {components} components needs as many samples, and there are {len(samples)}.")
    network = bank.plain_network()
    law = GaussianMixtureLaw(
        network, names=bank.law.names, components=components, num_bn_draws=num_bn_draws, source=source_of(bank)
    )
    rows = samples.cpu().double().numpy()
    # A component of one sample must keep some width: a millionth of all weights' average variance.
    least = max(float(rows.var(0).mean()) * 1e-6, 1e-12)
    found = GaussianMixture(components, covariance_type="diag", reg_covar=least, random_state=seed).fit(rows)
    with torch.no_grad():
        law.shares.copy_(torch.from_numpy(found.weights_))
        law.means.copy_(torch.from_numpy(found.means_))
        law.stds.copy_(torch.from_numpy(found.covariances_).sqrt())
    return Posterior(network, law)


def fit_swag(bank: Posterior, samples: Tensor, rank: int, num_bn_draws: int) -> Posterior:
    """Return SWAG with the samples as its snapshots; a rank of 0 is their means and variances alone."""
    converted = bank.conversion.converted if bank.conversion is not None else ()
    own = [name for name, p in bank.network.named_parameters() if name.rpartition(".")[0] in converted]
    if set(own) - set(bank.law.names) and bank.method is None:
        raise ValueError(
            "SWAG holds all parameters of the layers it has, and this bank only some of theirs. Use algorithm='pca'."
        )
    network = bank.plain_network()
    law = LowRankLaw(network, names=bank.law.names, rank=rank, scale=1.0, num_bn_draws=num_bn_draws)
    posterior = Posterior(network, law, method=SWAG(rank=rank, num_bn_draws=num_bn_draws))
    for row in samples:
        law.collect(row)
    return posterior
