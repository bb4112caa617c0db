"""What the components of a mixture do: how good each is, how much they disagree, where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify import ClassificationPrediction, Posterior, predict
from bayesify.laws import InputFactorLaw

__all__ = ["Components", "look_at_components", "place_components", "plot_components"]

COLOURS = ("#E69F00", "#D55E00")


@dataclass(frozen=True)
class Components:
    """The components of a mixture posterior, one by one.

    Attributes:
        accuracy: Of each component's mean network, (K,).
        nll: Their negative log-likelihoods, (K,).
        disagreement: The share of examples to which two components give different labels, (K, K).
        positions: Each W_k, and then U, in the plane of the two first principal axes of the W_k, (K + 1, 2).
        explained: What share of the variance of the W_k each of these axes has, (2,).
    """

    accuracy: Tensor
    nll: Tensor
    disagreement: Tensor
    positions: Tensor
    explained: Tensor

    @property
    def mean_disagreement(self) -> float:
        """Return the mean over pairs of different components; 0 for one component."""
        count = len(self.disagreement)
        return float(self.disagreement.sum() / max(1, count * (count - 1)))


def look_at_components(posterior: Posterior, loader: Iterable[Any]) -> Components:
    """Predict with the mean of each component and compare.

    Args:
        posterior: Made by `IBNN`, of a classifier.
        loader: Batches of (inputs, targets), the same in each of K passes over it.

    Costs K plain passes over the loader; the positions cost nothing, since W_k = U diag(m_k).

    Example:
        >>> from bayesify import IBNN, convert
        >>> posterior = convert(torch.nn.Linear(4, 3), IBNN(components=2))
        >>> found = look_at_components(posterior, [(torch.randn(8, 4), torch.arange(8) % 3)])
        >>> found.accuracy.shape, found.disagreement.diagonal()
        (torch.Size([2]), tensor([0., 0.]))
    """
    law = _factors(posterior)
    batches = [posterior.split_batch(batch) for batch in loader]
    if not batches:
        raise ValueError("The loader gave no batch, so there is nothing to look at the components with.")
    targets = torch.cat([targets for _, targets in batches]).cpu()
    targets = posterior.likelihood.marked(targets)
    nll, right, labels = [], [], []
    for component in range(law.num_components):
        with posterior.member(component):
            prediction = predict(posterior, [(inputs, None) for inputs, _ in batches], how="mean")
        if not isinstance(prediction, ClassificationPrediction):
            raise TypeError("Accuracy and disagreement are of classifiers, and this posterior's likelihood is not.")
        counted = prediction.counted(targets)
        nll.append(-prediction.log_prob(targets)[counted].mean().float())
        right.append(prediction.correct(targets)[counted].float().mean())
        labels.append(prediction.label)
    answers = torch.stack(labels).cpu()
    apart = (answers[:, None] != answers[None]).float().flatten(2).mean(-1)
    positions, explained = place_components(posterior)
    return Components(torch.stack(right).cpu(), torch.stack(nll).cpu(), apart, positions, explained)


def _factors(posterior: Posterior) -> InputFactorLaw:
    if not isinstance(posterior.law, InputFactorLaw):
        raise TypeError(f"Only posteriors that IBNN made have components, and this is {posterior.law.described()}.")
    return posterior.law


@torch.no_grad()
def place_components(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Return where the components' weights lie in the plane that shows most of their variance, and U.

    W_k = U diag(m_k), so <W_i, W_j> = sum_n c_n m_in m_jn with c_n the squared norm of column n of
    U: principal components of N numbers for each component, not of all weights.

    Returns:
        Positions (K + 1, 2), U last, and the share of variance of each axis, (2,).
    """
    law = _factors(posterior)
    norms = torch.empty_like(law.component_means[0], dtype=torch.float64)
    for latent in law.latents:
        weight = posterior.network.get_parameter(latent.parameter).double().reshape(latent.parameter_view)
        others = [d for d, size in enumerate(latent.factor_view) if size == 1 and weight.shape[d] > 1]
        squared = weight.square().sum(others) if others else weight.square()
        norms[latent.span] = squared.reshape(-1)
    means = law.component_means.double()
    points = torch.cat([means, torch.ones_like(means[:1])]) * norms.sqrt()
    centred = points - points[:-1].mean(0)
    _, sizes, axes = torch.linalg.svd(centred[:-1], full_matrices=False)
    axes = torch.cat([axes, axes.new_zeros(2, axes.shape[1])])[:2]
    sizes = torch.cat([sizes, sizes.new_zeros(2)])
    return centred @ axes.T, sizes[:2] ** 2 / (sizes**2).sum().clamp_min(torch.finfo(sizes.dtype).tiny)


def plot_components(components: Components, path: str | Path) -> Path:
    """Draw where the components' weights lie around the shared ones, and how often each pair disagrees.

    Args:
        components: From `look_at_components`.
        path: The file; its ending says the format.

    Returns:
        The path.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "components", "text.parse_math": False}):
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        plane, pairs = figure.subplots(1, 2)
        points = components.positions.numpy()
        plane.scatter(points[:-1, 0], points[:-1, 1], color=COLOURS[0], label="components", zorder=3)
        for index, (x, y) in enumerate(points[:-1]):
            plane.annotate(f" {index}: {float(components.accuracy[index]):.1%}", (x, y))
        plane.scatter(*points[-1:].T, color=COLOURS[1], marker="*", s=120, label="U", zorder=3)
        share = [f"{float(value):.0%} of the variance" for value in components.explained]
        plane.set(xlabel=share[0], ylabel=share[1], title="Weights of the components, and their accuracy")
        plane.legend(frameon=False)
        shown = pairs.imshow(components.disagreement.numpy(), cmap="Blues", vmin=0)
        pairs.grid(visible=False)
        pairs.set(title="Share of examples with different labels", xlabel="component", ylabel="component")
        figure.colorbar(shown, ax=pairs)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
    return target
