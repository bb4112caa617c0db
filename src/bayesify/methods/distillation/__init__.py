"""From a bank of weight samples to a posterior that makes new ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast

import torch

from bayesify._core.deprecation import renamed
from bayesify._core.progress import bar
from bayesify.laws import GeneratorLaw, Posterior
from bayesify.methods.banks import inherit, require_bank
from bayesify.methods.distillation.agreement import Agreement, agreement
from bayesify.methods.distillation.baselines import fit_mixture, fit_pca, fit_swag, make_generator_posterior
from bayesify.methods.gan import Game, make_players
from bayesify.methods.pca import Reduction, fold_generator, reduce_samples
from bayesify.prediction import predict

__all__ = ["Agreement", "agreement", "distill"]

Algorithm = Literal["wgan-gp", "wgan", "gan", "pca", "mixture", "swag"]


@renamed(how="algorithm", num_draws="num_bn_draws")
def distill(
    bank: Posterior,
    algorithm: Algorithm = "wgan-gp",
    *,
    inputs: Any = None,
    loader: Iterable[Any] | None = None,
    latent: int = 32,
    hidden: tuple[int, ...] = (100, 100, 100),
    components: int = 10,
    rank: int | None = None,
    residual: bool = False,
    steps: int = 5000,
    batch: int = 100,
    critic_steps: int = 5,
    lr: float | None = None,
    check_steps: int = 250,
    patience: int = 6,
    num_bn_draws: int = 50,
    seed: int = 0,
    progress: bool = True,
) -> Posterior:
    """Learn a posterior that makes weights like those of a bank, and is smaller than it (Wang et al. 2018).

    The adversarial kinds train a generator w = G(z) against a critic, in the coordinates of the samples in their own
    span: distances and the critic's gradients are the same there, and D columns become at most M - 1. The basis is
    folded into the last layer afterwards, which then has the paper's shape, (H + 1) D numbers. Unlike the paper's, the
    coordinates are centred and scaled to unit variance, generated weights stay in the samples' affine hull, and
    coordinates of small variance, which a generator of H units cannot reach anyway, are left out.

    Args:
        bank: From `sample_bank`, or an SGLD posterior after `fit`.
        algorithm: "wgan-gp" (penalty at interpolates), "wgan" (clipped), "gan"; or a baseline: "pca" (a Gaussian of
            rank `latent`), "mixture" (`components` diagonal Gaussians by EM; needs scikit-learn), "swag" (diagonal plus
            rank `latent`, fitted to the samples; the diagonal alone, which streamlined prediction needs, if that is 0).
        inputs: Held-out inputs. If given, the predictions on them are compared with the bank's every `check_steps`
            steps, training stops after `patience` comparisons without a better one, and the best generator is taken.
        loader: Training batches, which networks with batch normalisation need for their statistics.
        latent: The size of z.
        hidden: Sizes of the hidden layers of generator and critic.
        components: Of "mixture".
        rank: The largest number of coordinates, those of largest variance; None takes as many as a generator can
            reach, its last hidden size.
        residual: Give back to each weight, as independent noise, the variance that other coordinates have: for one
            more network of memory.
        steps: Generator steps, at most.
        batch: Samples in a minibatch.
        critic_steps: For each generator step.
        lr: None takes 5e-4 for "wgan-gp", and those of the paper's code for the other two.
        check_steps: Generator steps between comparisons.
        patience: Comparisons without a better one, before training stops.
        num_bn_draws: For networks with batch normalisation: how many draws get statistics.
        seed: Of everything random.
        progress: Whether to show a progress bar.

    Returns:
        A posterior like any other: draws, `predict`, `save`. `posterior.agreements` has the comparisons by step.

    Example:
        >>> from bayesify import ensemble, predict, sample_bank
        >>> from torch import nn
        >>> bank = sample_bank(ensemble([nn.Linear(2, 3) for _ in range(8)]), 8)
        >>> posterior = distill(bank, latent=4, hidden=(8,), steps=3, progress=False)
        >>> predict(posterior, torch.ones(1, 2), num_draws=30).probs.shape
        torch.Size([1, 3])
    """
    law = require_bank(bank, "distill takes a bank")
    _check(bank, algorithm, hidden, latent, steps, loader)
    samples = law.samples[law.rows].to(torch.promote_types(law.samples.dtype, torch.float32))
    agreements: dict[int, Agreement] = {}
    if algorithm == "swag":
        made = fit_swag(bank, samples, latent, num_bn_draws)
    elif algorithm == "mixture":
        made = fit_mixture(bank, samples, components, num_bn_draws, seed)
    elif algorithm == "pca":
        made = fit_pca(bank, samples, latent, num_bn_draws, residual=residual)
    else:
        made = make_generator_posterior(bank, algorithm, latent, hidden, num_bn_draws, residual=residual).eval()
        reduction = reduce_samples(samples, rank or hidden[-1])
        if residual:
            cast(GeneratorLaw, made.law).residual_std.copy_(reduction.residual_variance.sqrt())
        random = torch.Generator(device=samples.device).manual_seed(seed)
        players = make_players(reduction.coordinates.shape[1], latent, hidden, samples, random)
        game = Game(*players, kind=algorithm, batch=batch, critic_steps=critic_steps, lr=lr, random=random)
        agreements = _play(game, made, reduction, bank, inputs, loader, steps, check_steps, patience, progress)
    inherit(made, bank)
    made.eval()
    made.law.changed()
    if loader is not None:
        made.refresh_statistics(loader)
    made.agreements = agreements  # type: ignore[assignment]
    return made


def _play(
    game: Game,
    posterior: Posterior,
    reduction: Reduction,
    bank: Posterior,
    inputs: Any,
    loader: Iterable[Any] | None,
    steps: int,
    check_steps: int,
    patience: int,
    progress: bool,
) -> dict[int, Agreement]:
    """Train, and take the best generator there was; return the comparisons by step."""
    reference = None if inputs is None else predict(bank, inputs, seed=0)
    generator = cast(GeneratorLaw, posterior.law).generator
    number = min(len(require_bank(bank, "")), 50)
    found: dict[int, Agreement] = {}
    best: tuple[float, int, dict[str, torch.Tensor]] | None = None
    for step in bar(range(1, steps + 1), "distill", shown=progress):
        game.step(reduction.coordinates)
        if reference is None or (step % check_steps and step != steps):
            continue
        fold_generator(game.generator, reduction, generator)
        if loader is not None:
            posterior.refresh_statistics(loader, max_batches=10)
        found[step] = agreement(posterior, reference, inputs, num_draws=number)
        if best is None or found[step].total < best[0]:
            state = {name: tensor.clone() for name, tensor in game.generator.state_dict().items()}
            best = (found[step].total, step, state)
        elif step - best[1] >= patience * check_steps:
            break
    if best is not None:
        game.generator.load_state_dict(best[2])
    fold_generator(game.generator, reduction, generator)
    return found


def _check(
    bank: Posterior, algorithm: str, hidden: tuple[int, ...], latent: int, steps: int, loader: Iterable[Any] | None
) -> None:
    count = len(require_bank(bank, ""))
    kinds = Algorithm.__args__  # type: ignore[attr-defined]
    if algorithm not in kinds:
        raise ValueError(f"algorithm must be one of {list(kinds)}, but it is {algorithm!r}.")
    if count < 2:
        raise ValueError(f"The bank has {count} samples, and a distribution needs at least two. Fit it first.")
    if (
        latent < (algorithm != "swag")
        or steps < 1
        or (not hidden and algorithm != "pca")
        or any(size < 1 for size in hidden)
    ):
        raise ValueError("latent, steps and every hidden size must be at least 1, and there must be a hidden layer.")
    if bank.statistics is not None and loader is None:
        raise ValueError("The network has batch normalisation, whose statistics need training data: pass loader=...")
