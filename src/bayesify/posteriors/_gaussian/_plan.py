"""Which layers can have noise for each example; found out once, by looking at two passes without noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._modes import evaluation_mode
from bayesify._tree import repeat_rows, slice_rows
from bayesify.posteriors._batch_dims import grown
from bayesify.posteriors._forward import Watch, patched_forward, storage
from bayesify.posteriors._gaussian._kernels import has_kernel
from bayesify.posteriors._gaussian._site import Site
from bayesify.posteriors._noise import BatchDim

__all__ = ["Plan", "make_plan", "tensor_of"]


@dataclass(frozen=True)
class Plan:
    """How a stochastic pass is arranged.

    Attributes:
        sites: The layers whose noise differs between examples, by name.
        shared: Names of the parameters with one draw for all examples of a pass.
    """

    sites: dict[str, Site]
    shared: tuple[str, ...]


def tensor_of(network: nn.Module, name: str) -> Tensor:
    """Return a parameter, or what is in its place for the time of a pass."""
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(network.get_submodule(owner), last)
    return found


def make_plan(network: nn.Module, names: Iterable[str], run: Callable[[Any], Any], inputs: Any) -> Plan:
    """Find the layers that can have noise for each example.

    That are layers of exactly a registered type that share no parameter with another module, and whose parameters
    nobody else reads. Two passes without noise, on one example twice and three times, show where the batch is in each
    layer's input and how often it is called.

    Args:
        network: The network.
        names: Its random parameters.
        run: Runs it on inputs.
        inputs: Arguments and keyword arguments of a batch.
    """
    wanted = list(names)
    candidates = _candidates(network, wanted)
    modules = {name: network.get_submodule(name) for name in candidates}
    own = [tensor_of(network, full) for site in candidates.values() for full in site.random.values()]
    watch = Watch(own)
    seen: list[dict[str, list[torch.Size]]] = []
    try:
        one = slice_rows(inputs, 0, 1)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), evaluation_mode(network):
            for rows in (2, 3):
                shapes: dict[str, list[torch.Size]] = {name: [] for name in modules}
                watched = {
                    module: watch.allowed(_recorded(module.forward, shapes[name])) for name, module in modules.items()
                }
                with patched_forward(watched), watch:
                    run(repeat_rows(one, rows))
                seen.append(shapes)
    except Exception:  # the pass that follows says what is wrong; without one, the shape has to do
        seen = []
    sites = {}
    for name, site in candidates.items():
        if any(storage(tensor_of(network, full)) in watch.found for full in site.random.values()):
            continue
        calls = _calls(seen[0][name], seen[1][name]) if seen else ()
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


def _recorded(forward: Callable[..., Any], shapes: list[torch.Size]) -> Callable[..., Any]:
    def recording(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        shapes.append(x.shape)
        return forward(*args, **kwargs)

    return recording


def _calls(two: list[torch.Size], three: list[torch.Size]) -> tuple[BatchDim | None, ...]:
    if len(two) != len(three):
        return ()
    return tuple(grown(a, b) for a, b in zip(two, three, strict=True))
