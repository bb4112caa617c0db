"""MCMC diagnostics of a sample bank: bulk effective sample size and rank-normalised split R-hat."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._core.modes import evaluation_mode
from bayesify.laws import Key, Posterior
from bayesify.methods import require_bank

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """How well chains have mixed.

    Attributes:
        ess: Effective sample sizes (bulk) of the network's outputs, one for each output of each input, (F,).
        r_hat: Split-R-hat, rank-normalised, of the same (Vehtari et al. 2021); 1 is mixed, above 1.01 is not.
        weight_ess: Effective sample sizes of the chosen weights, (W,).
        weight_r_hat: Split-R-hat of the same.
        draws: Samples of all chains together.
        gradient_noise: For each chain, the variance of the noise of its minibatches' gradients as a multiple of the
            injected noise's, (C,): standard deviations can be sqrt(1 + that) times the posterior's. NaN where it was
            not measured.
    """

    ess: Tensor
    r_hat: Tensor
    weight_ess: Tensor
    weight_r_hat: Tensor
    draws: int
    gradient_noise: Tensor

    def __str__(self) -> str:
        """Return the worst and the median of each."""
        lines = [f"{self.draws} samples"]
        for name, ess, r_hat in (
            ("outputs", self.ess, self.r_hat),
            ("weights", self.weight_ess, self.weight_r_hat),
        ):
            lines.append(
                f"{name}: effective samples {ess.min():.0f} at least, {ess.median():.0f} in the middle; split-R-hat "
                f"{r_hat.max():.3f} at most, {r_hat.median():.3f} in the middle"
            )
        noise = self.gradient_noise[~self.gradient_noise.isnan()]
        lines.append(
            f"gradient noise: {noise.max():.2g} of the injected noise's variance at most"
            if len(noise)
            else "gradient noise: not measured"
        )
        return "\n".join(lines)


@torch.no_grad()
def diagnose(bank: Posterior, inputs: Any, *, num_weights: int = 100, seed: int = 0) -> Diagnosis:
    """Measure how well a bank's chains have mixed, on function values and on some weights.

    Function values are what predictions are made of: weights can be swapped between units without changing them, so
    the weights' figures are often worse than what matters. A single chain is compared with itself, half against half.

    Args:
        bank: An SGLD posterior after `fit`, with at least four samples of each chain, or eight of a single one.
        inputs: A batch of inputs; the outputs on them are looked at.
        num_weights: How many weights, chosen at random.
        seed: Of that choice.

    Returns:
        The figures, by ArviZ, which `bayesify[diagnostics]` installs.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its own next version, once a day
            import arviz
    except ImportError as error:
        raise ImportError("diagnose needs ArviZ: pip install 'bayesify[diagnostics]'.") from error
    law = require_bank(bank, "diagnose takes a bank")
    weights = law.by_chain()
    chains, draws, columns = weights.shape
    least = 4 if chains > 1 else 8
    if draws < least:
        raise ValueError(
            f"Each chain needs at least {least} samples, and the shortest has {draws}. Raise samples_per_chain."
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(columns, generator=generator)[:num_weights].to(weights.device)
    each = len(law.samples) // chains
    rows = [chain * each + draw for chain in range(chains) for draw in range(draws)]
    with evaluation_mode(bank):
        outputs = torch.cat([bank.evaluate(inputs, [Key(0, row)]) for row in rows])
    values = outputs.reshape(chains, draws, -1).double().cpu()
    picked = weights[:, :, chosen].double().cpu()
    ess, r_hat = _figures(arviz, values)
    weight_ess, weight_r_hat = _figures(arviz, picked)
    shares = law.noise_shares().double().cpu()
    shares = torch.where(shares < 0, torch.nan, shares)
    return Diagnosis(ess, r_hat, weight_ess, weight_r_hat, draws=chains * draws, gradient_noise=shares)


def _figures(arviz: Any, array: Tensor) -> tuple[Tensor, Tensor]:
    """Return effective sample sizes and split-R-hats of each column of (chains, draws, columns)."""
    ess = [float(arviz.ess(array[:, :, index].numpy())) for index in range(array.shape[2])]
    if len(array) == 1:  # R-hat compares chains: the halves of one are two
        half = array.shape[1] // 2
        array = torch.cat([array[:, :half], array[:, -half:]])
    r_hat = [float(arviz.rhat(array[:, :, index].numpy())) for index in range(array.shape[2])]
    return torch.tensor(ess), torch.tensor(r_hat)
