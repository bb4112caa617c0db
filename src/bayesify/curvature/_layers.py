"""Sums over examples of squared gradients, layer by layer: memory is a pass's, and a few examples' of a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.trees import slice_rows
from bayesify.laws.gaussian.law import Plan
from bayesify.laws.gaussian.site import Arrangement, Site
from bayesify.layers import ExampleGradients, Family, example_gradients, layer_type

__all__ = ["Call", "add_squares", "add_squares_alone", "calls_kept", "gradients", "ready"]

# Layers whose batch may stand anywhere but in their last dimensions; in others it must come first.
_ANYWHERE: tuple[Family, ...] = ("linear", "embedding", "layer norm", "rms norm")


@dataclass
class Call:
    """One call of a layer: its input and output, and where the examples are."""

    site: Site
    layer: nn.Module
    x: Tensor
    output: Tensor
    batch: Arrangement = field(repr=False)

    def example_gradients(self, grad: Tensor) -> ExampleGradients:
        """Return the gradients of each example, from the output's."""
        return example_gradients(self.layer, self.batch.split(self.x), self.batch.split(grad))


def ready(plan: Plan, network: nn.Module) -> tuple[dict[str, Site], list[str]]:
    """Return the layers whose gradients can be told apart by example, and the parameters of all others.

    A layer that was not called has no gradient; if none was, the network could not be looked at.
    """
    sites, others = {}, list(plan.shared)
    looked = any(site.calls for site in plan.sites.values())
    for name, site in plan.sites.items():
        family = layer_type(network.get_submodule(name)).family
        dims = [call.dim if call is not None else None for call in site.calls]
        first = family not in _ANYWHERE
        if family is not None and looked and None not in dims and not (first and any(dims)):
            sites[name] = site
        else:
            others += site.random.values()
    return sites, others


@contextmanager
def calls_kept(network: nn.Module, sites: Mapping[str, Site], rows: int) -> Iterator[list[Call]]:
    """Keep the calls of some layers in the pass inside, in the order in which they are made."""
    calls: list[Call] = []
    counts: dict[str, int] = defaultdict(int)

    def keep(site: Site) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            x = args[0] if args else kwargs["input"]
            index = counts[site.name]
            counts[site.name] += 1
            known = site.calls[index] if index < len(site.calls) else None
            batch = Arrangement.find(x, rows, known)
            if known is None or batch.dim is None:
                raise ValueError(
                    f"Layer {site.name!r} is called otherwise for this batch than for a single example, so that the "
                    f"gradients of examples cannot be told apart. Exclude it: convert(..., exclude={site.name!r})."
                )
            if not output.requires_grad:
                output = output.detach().requires_grad_()
            calls.append(Call(site, layer, x.detach(), output, batch))
            return output.clone()  # what the network may change in place

        return hook

    handles = [
        network.get_submodule(name).register_forward_hook(keep(site), with_kwargs=True) for name, site in sites.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def gradients(output: Tensor, calls: Sequence[Call], column: Tensor) -> list[Tensor | None]:
    """Return the gradient of <column, output> in each call's output; None where it does not reach."""
    if not calls or not output.requires_grad:
        return [None] * len(calls)
    inputs = [call.output for call in calls]
    found = torch.autograd.grad(output, inputs, column, retain_graph=True, allow_unused=True)
    return list(found)


@torch.no_grad()
def add_squares(calls: Sequence[Call], grads: Sequence[Tensor | None], sums: Mapping[str, Tensor]) -> None:
    """Add sum_n (sum over positions and calls of the gradient of example n)^2 to each parameter's sum."""
    by_site: dict[str, list[tuple[Call, Tensor]]] = defaultdict(list)
    for call, grad in zip(calls, grads, strict=True):
        if grad is not None:
            by_site[call.site.name].append((call, grad))
    for pairs in by_site.values():
        random = pairs[0][0].site.random
        first, *others = (call.example_gradients(grad) for call, grad in pairs)
        if random.get("weight") in sums:
            sums[random["weight"]].add_(first.summed_squares(*others))
        if random.get("bias") in sums:
            sums[random["bias"]].add_(first.summed_bias_squares(*others))


def add_squares_alone(
    run: Callable[[Any], Tensor],
    inputs: Any,
    columns: Callable[[Tensor, slice], Iterator[Tensor]],
    parameters: Mapping[str, nn.Parameter],
    sums: Mapping[str, Tensor],
    rows: int,
) -> None:
    """Add squared gradients of any parameters, however they are used: each example passes alone.

    Args:
        run: The network.
        inputs: B examples.
        columns: Gives the columns of the curvature for the output of some of the rows.
        parameters: By name.
        sums: What is added to, by name.
        rows: B.
    """
    for row in range(rows):
        part = slice(row, row + 1)
        output = run(slice_rows(inputs, row, row + 1) if rows > 1 else inputs)
        if not output.requires_grad:
            return
        for column in columns(output.detach(), part):
            found = torch.autograd.grad(output, list(parameters.values()), column, retain_graph=True, allow_unused=True)
            for name, grad in zip(parameters, found, strict=True):
                if grad is not None:
                    sums[name].add_(grad.square())
