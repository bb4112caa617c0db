"""Which layers can have noise for each example; found out once, by looking at two passes without noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from bayesify.laws.gaussian.kernels import has_kernel
from bayesify.laws.gaussian.site import Site
from bayesify.laws.noise import BatchDim
from bayesify.laws.tensors import tensor_of
from bayesify.laws.trace import look_at_layers

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """How a stochastic pass is arranged.

    Attributes:
        sites: The layers whose noise differs between examples, by name.
        shared: Names of the parameters with one draw for all examples of a pass.
    """

    sites: dict[str, Site]
    shared: tuple[str, ...]


def make_plan(network: nn.Module, names: Iterable[str], inputs: Any) -> Plan:
    """Find the layers that can have noise for each example.

    That are layers of exactly a registered type that share no parameter with another module, and whose parameters
    nobody else reads. Two passes without noise, on one example twice and three times, show where the batch is in each
    layer's input and how often it is called.

    Args:
        network: The network.
        names: Its random parameters.
        inputs: Arguments and keyword arguments of a batch.
    """
    wanted = list(names)
    candidates = _candidates(network, wanted)
    own = [tensor_of(network, full) for site in candidates.values() for full in site.random.values()]
    seen = look_at_layers(network, candidates, own, inputs)
    sites = {}
    for name, site in candidates.items():
        if any(seen.is_read_outside(tensor_of(network, full)) for full in site.random.values()):
            continue
        calls = seen.calls.get(name, ())
        if BatchDim(None) in calls and len(set(calls)) > 1:
            continue  # one weight that acts with a batch and without: all examples have the same
        sites[name] = Site(name, site.random, calls)
    covered = {full for site in sites.values() for full in site.random.values()}
    return Plan(sites, tuple(name for name in wanted if name not in covered))


def _candidates(network: nn.Module, names: list[str]) -> dict[str, Site]:
    holders = Counter(id(p) for module in network.modules() for p in module._parameters.values() if p is not None)
    by_owner: dict[str, dict[str, str]] = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        by_owner.setdefault(owner, {})[last] = name
    found = {}
    for owner, random in by_owner.items():
        module = network.get_submodule(owner)
        alone = all(holders[id(p)] == 1 for p in module._parameters.values() if p is not None)
        if has_kernel(module) and alone:
            found[owner] = Site(owner, random)
    return found
