"""From a bank of weight samples to a posterior that makes new ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify._progress import bar
from bayesify.distill._agreement import Agreement, agreement
from bayesify.distill._gan import Game
from bayesify.distill._reduction import Reduction, reduce_samples
from bayesify.methods import SWAG, Generator, Mixture, inherit
from bayesify.posteriors import BankPosterior, GeneratorPosterior, MixturePosterior, Posterior, SWAGPosterior
from bayesify.predict import predict

__all__ = ["Agreement", "agreement", "distill"]

How = Literal["wgan-gp", "wgan", "gan", "pca", "mixture", "swag"]


def distill(
    bank: BankPosterior,
    how: How = "wgan-gp",
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
    num_draws: int = 50,
    seed: int = 0,
    progress: bool = True,
) -> Posterior:
    """Learn a posterior that makes weights like those of a bank, and is smaller than it (Wang et al. 2018).

    The adversarial kinds train a generator w = G(z) against a critic, in the coordinates of the samples in their own
    span: distances and the critic's gradients are the same there, and D columns become at most M - 1. The basis is
    folded into the last layer afterwards, which then has the paper's shape, (H + 1) D numbers. Unlike the paper's, the
    coordinates are centred and scaled to unit variance, and generated weights stay in the samples' affine hull.

    Args:
        bank: From `sample_bank`, or an SGLD posterior after `fit`.
        how: "wgan-gp" (penalty at interpolates), "wgan" (clipped), "gan"; or a baseline: "pca" (a Gaussian of rank
            `latent`), "mixture" (`components` diagonal Gaussians by EM; needs scikit-learn), "swag" (diagonal plus rank
            `latent`, fitted to the samples).
        inputs: Held-out inputs. If given, the predictions on them are compared with the bank's every `check_steps`
            steps, training stops after `patience` comparisons without a better one, and the best generator is taken.
        loader: Training batches, which networks with batch normalisation need for their statistics.
        latent: The size of z.
        hidden: Sizes of the hidden layers of generator and critic.
        components: Of "mixture".
        rank: The largest number of coordinates; None takes all, which loses nothing.
        residual: Add back, as independent noise, the variance that `rank` leaves out.
        steps: Generator steps, at most.
        batch: Samples in a minibatch.
        critic_steps: For each generator step.
        lr: None takes that of the paper's code.
        check_steps: Generator steps between comparisons.
        patience: Comparisons without a better one, before training stops.
        num_draws: For networks with batch normalisation: how many draws get statistics.
        seed: Of everything random.
        progress: Whether to show a progress bar.

    Returns:
        A posterior like any other: draws, `predict`, `save`. `posterior.agreements` has the comparisons by step.

    Example:
        >>> from bayesify import ensemble, predict, sample_bank
        >>> bank = sample_bank(ensemble([nn.Linear(2, 3) for _ in range(8)]), 8)
        >>> posterior = distill(bank, latent=4, hidden=(8,), steps=3, progress=False)
        >>> predict(posterior, torch.ones(1, 2), num_samples=30).probs.shape
        torch.Size([1, 3])
    """
    _check(bank, how, hidden, latent, steps, loader)
    samples = bank.samples[bank.rows].to(torch.promote_types(bank.samples.dtype, torch.float32))
    made: Posterior
    agreements: dict[int, Agreement] = {}
    if how == "swag":
        made = _swag(bank, samples, latent, num_draws)
    elif how == "mixture":
        made = _mixture(bank, samples, components, num_draws, seed)
    else:
        shape = (hidden, latent) if how != "pca" else ((), min(latent, len(samples) - 1))
        method = Generator(latent=shape[1], hidden=shape[0], how=how, num_draws=num_draws, source=_source(bank))
        names = bank.codec.names
        generator = GeneratorPosterior(
            copy.deepcopy(bank.network), method, names=names, latent=shape[1], hidden=shape[0], num_draws=num_draws
        )
        inherit(generator, bank)
        generator.eval()
        reduction = reduce_samples(samples, shape[1] if how == "pca" else rank)
        if residual:
            generator.residual_std.fill_(reduction.residual_std)
        if how == "pca":
            _pca(generator, reduction)
        else:
            random = torch.Generator(device=samples.device).manual_seed(seed)
            game = Game(
                reduction.coordinates.shape[1], latent=latent, hidden=hidden, kind=how, batch=batch,
                critic_steps=critic_steps, lr=lr, like=samples[:0], generator=random,
            )  # fmt: skip
            agreements = _play(game, generator, reduction, bank, inputs, loader, steps, check_steps, patience, progress)
        made = generator
    inherit(made, bank)
    made.eval()
    if loader is not None:
        made.refresh_statistics(loader)
    made.agreements = agreements  # type: ignore[assignment]
    return made


def _play(
    game: Game,
    posterior: GeneratorPosterior,
    reduction: Reduction,
    bank: BankPosterior,
    inputs: Any,
    loader: Iterable[Any] | None,
    steps: int,
    check_steps: int,
    patience: int,
    progress: bool,
) -> dict[int, Agreement]:
    reference = None if inputs is None else predict(bank, inputs, seed=0)
    found: dict[int, Agreement] = {}
    best: tuple[float, int, dict[str, Tensor]] | None = None
    shown = bar(range(1, steps + 1), "distill", shown=progress)
    for step in shown:
        loss = game.step(reduction.coordinates)
        if not torch.isfinite(torch.tensor(loss)):
            raise ArithmeticError(f"The critic's loss is not finite at step {step}. Lower lr, or use how='wgan-gp'.")
        if reference is None or (step % check_steps and step != steps):
            continue
        _fold(game.generator, reduction, posterior)
        if loader is not None:
            posterior.refresh_statistics(loader, max_batches=10)
        found[step] = agreement(posterior, reference, inputs, num_samples=min(len(bank), 50))
        if best is None or found[step].total < best[0]:
            state = {name: tensor.clone() for name, tensor in game.generator.state_dict().items()}
            best = (found[step].total, step, state)
        elif step - best[1] >= patience * check_steps:
            break
    if best is not None:
        game.generator.load_state_dict(best[2])
    _fold(game.generator, reduction, posterior)
    return found


@torch.no_grad()
def _fold(small: nn.Sequential, reduction: Reduction, posterior: GeneratorPosterior) -> None:
    """Write a generator of coordinates into one of weights."""
    for source, target in zip(list(small)[:-1], list(posterior.generator)[:-1], strict=True):
        target.load_state_dict(source.state_dict())
    last, into = small[-1], posterior.generator[-1]
    assert isinstance(last, nn.Linear)
    assert isinstance(into, nn.Linear)
    reduction.fold(last, into)


@torch.no_grad()
def _pca(posterior: GeneratorPosterior, reduction: Reduction) -> None:
    """Give each coordinate its standard deviation, and independence."""
    into = posterior.generator[-1]
    assert isinstance(into, nn.Linear)
    std = reduction.coordinates.std(0) * reduction.scale
    into.weight.zero_()
    into.weight[:, : len(std)] = reduction.basis.T * std
    into.bias.copy_(reduction.mean)


def _mixture(bank: BankPosterior, samples: Tensor, components: int, num_draws: int, seed: int) -> MixturePosterior:
    try:
        from sklearn.mixture import GaussianMixture
    except ImportError as error:
        raise ImportError("how='mixture' needs scikit-learn: pip install 'bayesify[demo]'.") from error
    method = Mixture(components=components, num_draws=num_draws, source=_source(bank))
    posterior = MixturePosterior(
        copy.deepcopy(bank.network), method, names=bank.codec.names, components=components, num_draws=num_draws
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


def _swag(bank: BankPosterior, samples: Tensor, rank: int, num_draws: int) -> SWAGPosterior:
    method = SWAG(rank=rank, num_draws=num_draws)
    posterior = SWAGPosterior(
        copy.deepcopy(bank.network), method, names=bank.codec.names, rank=rank, scale=1.0, num_draws=num_draws
    )
    for row in samples:
        posterior.collect(row)
    return posterior


def _source(bank: BankPosterior) -> str:
    return getattr(bank.method, "source", "") or bank.method.name


def _check(
    bank: BankPosterior, how: str, hidden: tuple[int, ...], latent: int, steps: int, loader: Iterable[Any] | None
) -> None:
    if not isinstance(bank, BankPosterior):
        raise TypeError(
            f"distill takes a bank, but got a {type(bank).__name__}. Make one: sample_bank(posterior, 500)."
        )
    kinds = How.__args__  # type: ignore[attr-defined]
    if how not in kinds:
        raise ValueError(f"how must be one of {list(kinds)}, but it is {how!r}.")
    if len(bank) < 2:
        raise ValueError(f"The bank has {len(bank)} samples, and a distribution needs at least two. Fit it first.")
    if latent < 1 or steps < 1 or (not hidden and how != "pca") or any(size < 1 for size in hidden):
        raise ValueError("latent, steps and every hidden size must be at least 1, and there must be a hidden layer.")
    if bank.statistics.as_dict() and loader is None:
        raise ValueError("The network has batch normalisation, whose statistics need training data: pass loader=...")
