"""Members that differ in normalisation parameters as one Gaussian, for which one pass is enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesify.laws import Component
from bayesify.layers import layer_type
from bayesify.likelihoods import Likelihood

__all__ = ["matched"]


def matched(components: Sequence[Component], network: nn.Module, likelihood: Likelihood) -> Component:
    """Return the Gaussian with the moments of members that differ in parameters of normalisation layers alone.

    Members k = 1, ..., M have parameters t_k and shares w_k. The Gaussian has the mean t = sum_k w_k t_k and moves
    along the directions sqrt(w_k) (t_k - t), in all layers together, so that to first order an output has the variance
    that it has over members, sum_k w_k (J (t_k - t))^2, beside that of the layers' own noise at t.

    Args:
        components: Those of the members.
        network: What they are of.
        likelihood: What the outputs mean.

    Raises:
        ValueError: The members are something else; says what to do.

    Example:
        >>> from bayesify import Categorical
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> found = [Component(fixed={"1.bias": torch.full((3,), value)}) for value in (1.0, 3.0)]
        >>> one = matched(found, network, Categorical())
        >>> one.means["1.bias"], one.columns["1.bias"].square().sum(0)
        (tensor([2., 2., 2.]), tensor([1.0000, 1.0000, 1.0000]))
    """
    first = components[0]
    plain = all(not (one.means or one.rotated or one.columns or one.place or one.dense) for one in components)
    if not plain or any(one.noisy != first.noisy for one in components):
        raise ValueError(
            "Streamlined(members='matched') is for members with the same noise in layers (ABNN), and these have random "
            "weights of their own. Use how='streamlined', which takes a pass for each."
        )
    temperature = getattr(likelihood, "temperature", None)
    if isinstance(temperature, Tensor) and temperature.ndim and bool((temperature != temperature[0]).any()):
        raise ValueError(
            "Members have temperatures of their own, which one Gaussian cannot have. Use how='streamlined', or "
            "calibrate with temperatures='one'."
        )
    total = sum(one.weight for one in components)
    shares = [one.weight / total for one in components]
    own = dict(network.state_dict(keep_vars=True))
    means, columns, fixed = {}, {}, {}
    for name in dict.fromkeys(name for one in components for name in one.fixed):
        each = torch.stack([one.fixed.get(name, own[name]).detach() for one in components])
        if bool((each == each[0]).all()):
            fixed[name] = each[0]
            continue
        _require_norm(name, own, network)
        weights = each.new_tensor(shares).view(-1, *(1,) * (each.ndim - 1))
        means[name] = (weights * each).sum(0)
        columns[name] = weights.sqrt() * (each - means[name])
    variances = {name: torch.zeros_like(mean) for name, mean in means.items()}
    return Component(means=means, variances=variances, fixed=fixed, noisy=first.noisy, columns=columns)


def _require_norm(name: str, own: dict[str, Tensor], network: nn.Module) -> None:
    layer = network.get_submodule(name.rpartition(".")[0])
    if not isinstance(own[name], nn.Parameter) or layer_type(type(layer)).norm is None:
        raise ValueError(
            f"Members differ in {name!r}, which is no scale or shift of a normalisation layer, so that they are too "
            "far apart for one pass. Use how='streamlined', which takes a pass for each."
        )
