"""From a network, or several, to a posterior."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bayesify._core.files import fingerprint
from bayesify._core.sharing import Shared, constants, copied
from bayesify.laws import Draw, Law, MemberLaw, PointLaw, Posterior
from bayesify.laws.members import rebase
from bayesify.laws.recomputation import without_guards
from bayesify.layers import adapter_modules
from bayesify.likelihoods import Likelihood
from bayesify.methods import MAP, DeepEnsemble, Method, as_method, inherit
from bayesify.selection import Conversion, ConversionRow, Patterns, Selection

__all__ = ["Conversion", "ConversionRow", "Patterns", "Selection", "build", "convert", "describe", "ensemble"]


def convert(
    network: nn.Module,
    method: Method | type[Method] | str,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    likelihood: str | Likelihood = "classification",
    share: bool = True,
) -> Posterior:
    """Make a posterior of a trained network; the network itself is left untouched.

    Of a network with an adapter of peft (LoRA and others) the adapter becomes random and nothing else, unless `include`
    says otherwise.

    Args:
        network: Any module: a bare layer, or a whole model. Its weights become the posterior's starting point.
        method: What becomes random and how it is learned: `MCDropout(p=0.1)`, or a method's name.
        include: Convert only these modules: patterns on qualified names (with all that is inside), or exact types.
        exclude: Leave these modules deterministic; wins over `include`.
        likelihood: What the outputs mean: a name ("classification", "binary", "multilabel", "regression",
            "heteroscedastic", "student-t", "counts", "negative-binomial"), or a `Likelihood`.
        share: Whether the posterior reads frozen parameters (`requires_grad=False`), and whole-number matrices of
            quantised layers, where the network has them, instead of copying them: a large base is in memory once. They
            are copied when they begin to learn or are moved. False copies all, for a network that is going to be
            changed in place, as by merging an adapter.

    Returns:
        The posterior. `posterior.conversion` says for each module whether it was converted, and why not.

    Raises:
        ValueError: A pattern matches nothing, or there is nothing to convert; the message lists what there is.

    Example:
        >>> from bayesify import MCDropout
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        >>> print(convert(network, MCDropout()).conversion)
        module  type     parameters  random  why
        0       Linear   40          no      not a dropout layer
        2       Dropout  0           yes     masks with p=0.1
        3       Linear   27          no      not a dropout layer
    """
    resolved = as_method(method)
    if isinstance(network, Posterior):
        raise TypeError("The network is a posterior already. Convert the original network instead.")
    if not isinstance(network, nn.Module):
        raise TypeError(f"convert needs a torch.nn.Module, but got a {type(network).__name__}.")
    selection = Selection(include, exclude)
    selection.check(network)
    if include is None and not resolved.beside_adapters:
        names = adapter_modules(network)
        selection = selection if names is None else selection.within_adapter(names)
    _warn_of_nan(network)
    return build(network, resolved, selection, likelihood, share=share)


def _warn_of_nan(network: nn.Module) -> None:
    broken = [
        name
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
        if tensor.is_floating_point() and not is_lazy(tensor) and tensor.device.type != "meta" and _has_nan(tensor)
    ]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        warnings.warn(
            f"The network's {', '.join(map(repr, broken[:3]))}{more} hold NaN, and so will what it predicts. Its "
            "training probably diverged: load a checkpoint from before, or train again with a smaller learning rate.",
            stacklevel=3,
        )


def _has_nan(tensor: Tensor) -> bool:
    # A sum takes no memory; that of large numbers may be NaN too.
    return bool(tensor.detach().sum().isnan()) and bool(tensor.isnan().any())


def build(
    network: nn.Module,
    method: Method,
    selection: Selection,
    likelihood: str | Likelihood,
    *,
    frozen: Iterable[str] | None = None,
    share: bool = True,
) -> Posterior:
    """Build a posterior on a copy of the network, and note what the network's own tensors are.

    `frozen` names the parameters that do not learn, which decides what can be random; None asks the network. Their
    memory is the network's own where it is to be shared.
    """
    names = None if frozen is None else set(frozen)
    shared = constants(network, names) if share else []
    made = without_guards(copied(network, shared))
    if names is not None:
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in names)
    held = [name for name, parameter in made.named_parameters() if not parameter.requires_grad]
    modes = [(module, module.training) for module in made.modules()]
    law, table = method.build(made, selection)
    posterior = Posterior(made, law, method=method)
    posterior.shared = Shared(made, shared)
    posterior.conversion = table
    posterior.learning = method.state(posterior)
    posterior.frozen = held
    posterior.train(network.training)
    for module, training in modes:  # a layer that was frozen in evaluation mode stays so
        module.training = training
    posterior.set_likelihood(likelihood)
    # A state may also hold what `get_extra_state` gives, which can be anything.
    state = {name: value for name, value in network.state_dict().items() if isinstance(value, Tensor)}
    posterior.origin = {fingerprint(tensor): name for name, tensor in state.items()}
    return posterior


def ensemble(members: Sequence[nn.Module], *, likelihood: str | Likelihood = "classification") -> Posterior:
    """Make one posterior of several networks of one architecture, or of several posteriors of them.

    Args:
        members: Networks, trained or yet to be fitted, `[make_network() for _ in range(5)]`; or posteriors of whatever
            method, trained apart. They are left untouched. Of samples that have batch-normalisation statistics of
            their own (SGLD), each is a member.
        likelihood: What the outputs mean; posteriors have theirs, and the first one's counts.

    Returns:
        A posterior with an equal share for each member. `predict` averages them. Networks can be trained further by
        `fit`; posteriors are fitted before they are put together.

    Example:
        >>> posterior = ensemble([nn.Linear(2, 3) for _ in range(4)])
        >>> len(posterior.law.parts)
        4
    """
    if not members:
        raise ValueError("An ensemble needs at least one network, but the list is empty.")
    posteriors = [member for member in members if isinstance(member, Posterior)]
    if posteriors and len(posteriors) < len(members):
        raise TypeError("An ensemble is of networks or of posteriors, not of both. Convert the networks first: MAP().")
    networks = [member.network for member in posteriors] or list(members)
    shapes = [{name: tuple(t.shape) for name, t in network.state_dict().items()} for network in networks]
    for index, other in enumerate(shapes):
        if other != shapes[0]:
            differing = sorted(name for name in {*other, *shapes[0]} if other.get(name) != shapes[0].get(name))
            raise ValueError(
                f"Network {index} differs from the first in {differing[:5]}. Members must have one architecture; "
                "average the predictions of different ones instead."
            )
    if posteriors:
        return _mixture(posteriors)
    posterior = convert(networks[0], DeepEnsemble(members=len(networks), start="network"), likelihood=likelihood)
    with torch.no_grad():
        for part, network in zip(cast(MemberLaw, posterior.law).laws, networks, strict=True):
            state = network.state_dict()
            for name, tensor in part.own.as_dict().items():
                tensor.copy_(state[name])
    return posterior


def _mixture(posteriors: Sequence[Posterior]) -> Posterior:
    """Return the mixture of posteriors, whose laws then share the first one's network."""
    first = posteriors[0]
    shared = first.plain_network(share=True)
    parts: list[Law] = []
    sources: list[dict[str, Any]] = []
    draws = 0
    for posterior in posteriors:
        if posterior.statistics is not None:
            networks = _functions(posterior)
            parts += [PointLaw(shared, _differing(network, shared)) for network in networks]
            sources += [{"law": MAP().to_dict(), "converted": []} for _ in networks]
            draws += len(networks)
            continue
        law = copy.deepcopy(posterior.law, {id(posterior.network): shared})
        rebase(law, _differing(posterior.network, shared))
        parts.append(law)
        sources.append(_source(posterior))
        draws += posterior.default_draws
    law = MemberLaw(shared, parts, sources=sources)
    law.default_draws = draws
    made = Posterior(shared, law)
    inherit(made, first)
    return made.train(first.training)


def _functions(posterior: Posterior) -> list[nn.Module]:
    """Return the functions of a posterior whose batch-normalisation statistics are each draw's, as plain networks."""
    if posterior.law.functions is None:
        raise ValueError(MemberLaw.NO_STATISTICS)
    if not (learned := posterior.learned):
        raise ValueError(f"A member has learned nothing yet: {learned}")
    return [Draw(posterior, key).network() for key in posterior.keys(posterior.law.functions, 0)]


def _differing(network: nn.Module, shared: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors in which a network differs from another, by name."""
    other = {**dict(shared.named_parameters()), **dict(shared.named_buffers())}
    found: dict[str, Tensor] = {}
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if not torch.equal(tensor, other[name]):
            copied = tensor.detach().clone()
            found[name] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    return found


def describe(posterior: Posterior) -> dict[str, Any]:
    """Return what a posterior can be built from again, for files: its method, or the configuration of a made law."""
    if posterior.method is not None:
        return posterior.method.to_dict()
    return {"name": posterior.law.name, "version": 1, **posterior.law.config()}


def _source(posterior: Posterior) -> dict[str, Any]:
    """Return what a member's law can be built from again, for files."""
    converted = posterior.conversion.converted if posterior.conversion else ()
    return {"law": describe(posterior), "converted": list(converted)}
