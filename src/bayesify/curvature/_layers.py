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
from bayesify.curvature._rules import RULES, embedding_squares, per_example
from bayesify.laws.gaussian.plan import Plan
from bayesify.laws.gaussian.site import Arrangement, Site

__all__ = ["Call", "add_squares", "add_squares_alone", "calls_kept", "gradients", "ready"]

CHUNK = 2**22  # numbers of one layer's gradients, of some examples, at a time
# Layers whose batch may stand anywhere but in their last dimensions; in others it must come first.
_ANYWHERE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)


@dataclass
class Call:
    """One call of a layer: its input and output, and where the examples are."""

    site: Site
    layer: nn.Module
    x: Tensor
    output: Tensor
    batch: Arrangement = field(repr=False)

    def split(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input and its output's gradient as (B, r, ...)."""
        return self.batch.split(self.x), self.batch.split(grad)


def ready(plan: Plan, network: nn.Module) -> tuple[dict[str, Site], list[str]]:
    """Return the layers whose gradients can be told apart by example, and the parameters of all others.

    A layer that was not called has no gradient; if none was, the network could not be looked at.
    """
    sites, others = {}, list(plan.shared)
    looked = any(site.calls for site in plan.sites.values())
    for name, site in plan.sites.items():
        layer = network.get_submodule(name)
        dims = [call.dim if call is not None else None for call in site.calls]
        first = not isinstance(layer, _ANYWHERE)
        known = type(layer) in RULES or type(layer) is nn.Embedding
        if known and looked and None not in dims and not (first and any(dims)):
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


def add_squares(calls: Sequence[Call], grads: Sequence[Tensor | None], sums: Mapping[str, Tensor]) -> None:
    """Add sum_n (sum over positions and calls of the gradient of example n)^2 to each parameter's sum."""
    by_site: dict[str, list[tuple[Call, Tensor]]] = defaultdict(list)
    for call, grad in zip(calls, grads, strict=True):
        if grad is not None:
            by_site[call.site.name].append((call, grad))
    for pairs in by_site.values():
        _add_site(pairs, sums)


def _add_site(pairs: list[tuple[Call, Tensor]], sums: Mapping[str, Tensor]) -> None:
    call = pairs[0][0]
    wanted = {key: sums[name] for key, name in call.site.random.items() if name in sums}
    splits = [call.split(grad) for call, grad in pairs]
    rows = call.batch.rows
    if isinstance(call.layer, nn.Embedding):
        if "weight" in wanted:
            wanted["weight"] += embedding_squares(call.layer, splits)
        return
    if len(pairs) == 1 and type(call.layer) is nn.Linear and splits[0][1].numel() == rows * splits[0][1].shape[-1]:
        # One position: the squares of an outer product are the outer product of the squares.
        x, grad = (t.reshape(rows, -1).square() for t in splits[0])
        if "weight" in wanted:
            wanted["weight"] += grad.T @ x
        if "bias" in wanted:
            wanted["bias"] += grad.sum(0)
        return
    size = max(1, CHUNK // max(1, sum(p.numel() for p in call.layer.parameters(recurse=False))))
    for start in range(0, rows, size):
        part = slice(start, start + size)
        total: dict[str, Tensor] = {}
        for x, grad in splits:
            for key, found in per_example(call.layer, x[part], grad[part]).items():
                total[key] = total[key] + found if key in total else found
        for key, sum_ in wanted.items():
            sum_ += total[key].square().sum(0)


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
