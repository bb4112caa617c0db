"""The first-order predictive: exact variances of linear functions of the outputs, one backward pass each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from bayesify._core.trees import batch_rows, call, repeat_rows, slice_rows
from bayesify.laws import BatchDim, Component, NoisySite, Posterior
from bayesify.laws.recomputation import gradients_required, refuse
from bayesify.laws.trace import grown
from bayesify.layers import is_traced
from bayesify.prediction.linearised import norm_rules  # noqa: F401  registers its rules
from bayesify.prediction.linearised.accumulator import Batch, Factors, Ledger, Part
from bayesify.prediction.linearised.rules import NoiseCall, run
from bayesify.prediction.linearised.sketch import Sketch
from bayesify.prediction.linearised.tensor import RandomWeight, RotatedWeight

__all__ = ["LinearisedPass", "Plan", "make_plan"]

NOISE = ""  # stands for a noisy layer, which has no name among the tensors


@dataclass(frozen=True)
class Plan:
    """What two passes show of how a network uses its random tensors.

    Attributes:
        batches: Where the batch is in the input of each call, in their order.
        looped: The tensors that have to be looped over, example by example.
        positions: Whether a random tensor meets several positions of an example, tokens or pixels.
        factors: What the variances of matrices are a product of, as passes find it out.
        sketches: What stands for layers' input channels, likewise.
        sites: The modules at which randomness enters.
        apart: Why a backward pass is for one function of the outputs alone, if a pass has found that it is.
    """

    batches: list[Batch] = field(default_factory=list)
    looped: frozenset[str] = frozenset()
    positions: bool = False
    factors: dict[Part, Factors] = field(default_factory=dict)
    sketches: dict[tuple[Part, int], Sketch] = field(default_factory=dict)
    sites: frozenset[nn.Module] = frozenset()
    apart: list[str] = field(default_factory=list)


def make_plan(posterior: Posterior, component: Component, inputs: Any) -> Plan:
    """Find out where the batch is in every call, from one example twice and three times.

    Tensors that are used in a way without a formula are taken out, and a third pass, on two copies, shows that nothing
    else has changed.
    """
    one = slice_rows(inputs, 0, 1)
    sites = frozenset(posterior.law.sites() if component.means or component.noisy else ())

    def look(rows: int, looped: frozenset[str]) -> Ledger:
        ledger = Ledger(rows, None, _like(posterior))
        with torch.enable_grad(), _random_tensors(posterior, component, ledger, looped, sites):
            call(posterior.network, repeat_rows(one, rows))
        return ledger

    looped: frozenset[str] = frozenset()
    while True:
        two, three = look(2, looped), look(3, looped)
        if [names for _, names in two.calls] != [names for _, names in three.calls]:
            raise ValueError("The network takes another way for two examples than for three. Use how='sampling'.")
        batches = [_batch(a, b) for (a, _), (b, _) in zip(two.calls, three.calls, strict=True)]
        positions = any(len(shape) > 2 for shape, _ in two.calls)
        lost = {
            name for batch, (_, names) in zip(batches, two.calls, strict=True) if batch.dim is None for name in names
        }
        if NOISE in lost:
            raise ValueError("A noisy layer acts on something without a batch. Use how='sampling'.")
        found = lost | two.looped | three.looped
        found.update(*(component.rotations[name].names for name in found if name in component.rotations))
        if not found:
            return Plan(batches, looped, positions, sites=sites)
        looped |= found
        again = look(2, looped)
        kept = [
            (batch, (shape, left))
            for batch, (shape, names) in zip(batches, two.calls, strict=True)
            if (left := tuple(name for name in names if name not in looped))
        ]
        if not again.looped and [call for _, call in kept] == again.calls:
            positions = any(len(shape) > 2 for _, (shape, _) in kept)
            return Plan([batch for batch, _ in kept], looped, positions, sites=sites)


def _batch(two: torch.Size, three: torch.Size) -> Batch:
    found = grown(two, three)
    if found is not None and found.dim is None:
        return Batch(BatchDim(0), expand=True) if two[:1] == (1,) else Batch(None)
    return Batch(found)


class LinearisedPass:
    """A pass whose outputs' variances are to be had, to first order in what is random.

    Var[c.f(x)] = sum_p s_p^2 (d c.f(x) / d w_p)^2 for each example, by one vector-Jacobian product for all of them:
    layers add up the weighted squares of their derivatives on the way back. A derivative sums over all positions that
    share a weight, so that shared weights are treated exactly, and no Jacobian is ever stored.

    Args:
        posterior: The posterior.
        component: Which component of it.
        plan: From `make_plan`.
        inputs: A batch.
        signs: How many vectors of random signs stand for each layer's input channels, see `Sketch`; with 0 the sum
            over them is exact.
        several: Whether there will be many backward passes.
    """

    def __init__(
        self,
        posterior: Posterior,
        component: Component,
        plan: Plan,
        inputs: Any,
        *,
        signs: int = 0,
        several: bool = False,
    ) -> None:
        self.posterior, self.component, self.plan, self.inputs = posterior, component, plan, inputs
        self.ledger = Ledger(
            batch_rows(inputs),
            plan.batches,
            _like(posterior),
            plan.factors,
            signs=signs,
            sketches=plan.sketches,
            columns=component.columns,
            several=several,
        )
        with torch.enable_grad(), _random_tensors(posterior, component, self.ledger, plan.looped, plan.sites):
            self._outputs = posterior.read(call(posterior.network, inputs))
        if self._outputs.shape[0] != self.ledger.rows:
            raise ValueError(
                f"The network returned {self._outputs.shape[0]} rows for {self.ledger.rows} examples. Its first output "
                "dimension must be the batch."
            )
        self.outputs = self._outputs.detach()

    def variance(self, cotangent: Tensor, *, last: bool = False) -> Tensor:
        """Return Var[sum_k cotangent_bk out_bk], (B,); `last` frees the pass."""
        return self.variances(cotangent[None], last=last)[0]

    def variances(self, cotangents: Tensor, *, last: bool = False) -> Tensor:
        """Return Var[sum_k cotangent_nbk out_bk], (N, B), by one backward pass for all n, where the network can.

        It can unless an operation of it has no derivative for several gradients at a time (`torch.vmap`).
        """
        if len(cotangents) > 1 and not self.plan.apart and not is_traced(self.outputs):
            try:
                return self._together(cotangents, last=False)
            except RuntimeError as error:
                self.plan.apart.append(str(error))
        end = len(cotangents) - 1
        return torch.cat([self._together(one[None], last=last and n == end) for n, one in enumerate(cotangents)])

    def _together(self, cotangents: Tensor, *, last: bool) -> Tensor:
        def back(cotangent: Tensor) -> Tensor:
            anchor = self.ledger.anchor
            torch.autograd.grad(self._outputs, anchor, cotangent, retain_graph=not last, allow_unused=True)
            return cotangent

        self.ledger.clear(cotangents, len(cotangents))
        if self._outputs.requires_grad:
            try:
                if len(cotangents) == 1:
                    back(cotangents[0])
                else:
                    with warnings.catch_warnings():
                        warnings.filterwarnings("ignore", "There is a performance drop")  # to what a loop takes
                        torch.vmap(back)(cotangents)
            except CheckpointError:
                refuse("A layer", "where its random weights or noise are no longer in place")
        total, along = self.ledger.settle()
        if self.plan.looped:
            more, products = (torch.stack(one) for one in zip(*map(self._looped, cotangents), strict=True))
            total = total + more
            along = products if along is None else along + products
        return total if along is None else total + along.square().sum(-1)

    def _looped(self, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """Take the derivatives by tensors that are used in a way without a formula, one example after the other.

        Returns what they cause by themselves, (B,), and the derivatives along shared directions, (B, K).
        """
        posterior, component, found, products = self.posterior, self.component, [], []
        leaves = {name: component.means[name].clone().requires_grad_() for name in sorted(self.plan.looped)}
        means = replace(component, means={**component.means, **leaves})
        for row in range(self.ledger.rows):
            one = slice_rows(self.inputs, row, row + 1)
            with (
                torch.enable_grad(),
                _frozen(posterior.network),
                posterior.patched(means.at_mean(posterior.network)),
            ):
                output = posterior.read(call(posterior.network, one))[0]
            gradients = torch.autograd.grad(output, list(leaves.values()), cotangent[row], materialize_grads=True)
            found.append(_caused(component, dict(zip(leaves, gradients, strict=True))))
            along = [
                component.columns[name].flatten(1) @ gradient.flatten()
                for name, gradient in zip(leaves, gradients, strict=True)
                if name in component.columns
            ]
            products.append(sum(along, cotangent.new_zeros(along[0].shape if along else 0)))
        return torch.stack(found).to(cotangent.dtype), torch.stack(products).to(cotangent.dtype)


def _caused(component: Component, gradients: dict[str, Tensor]) -> Tensor:
    """Return sum_p s_p^2 g_p^2, of correlated tensors after their rotation."""
    parts = []
    for name, gradient in gradients.items():
        rotated = component.rotations.get(name)
        if rotated is None:
            parts.append((gradient.square() * component.variances[name]).sum())
        elif name == rotated.weight:
            bias = None if rotated.bias is None else gradients[rotated.bias][None]
            parts.append((rotated.turned(gradient[None], bias).square() * rotated.variance).sum())
    return torch.stack(parts).sum()


def _like(posterior: Posterior) -> Tensor:
    parameters = [p for p in posterior.network.parameters() if p.is_floating_point()]
    return parameters[0].detach() if parameters else torch.zeros(())


@contextmanager
def _random_tensors(
    posterior: Posterior, component: Component, ledger: Ledger, looped: frozenset[str], sites: frozenset[nn.Module]
) -> Iterator[None]:
    """Let the network meet its random tensors and noisy layers as the ledger needs them."""
    network = posterior.network
    tensors: dict[str, Tensor] = {
        name: mean if name in looped else _random(component, name, ledger) for name, mean in component.means.items()
    }

    def act(site: NoisySite) -> Callable[..., Tensor]:
        return lambda x, *more: _noise(site, ledger, x, *more)

    with (
        gradients_required(sites),
        _frozen(network),
        posterior.patched(component.patch(network, tensors, act)),
    ):
        yield


def _random(component: Component, name: str, ledger: Ledger) -> RandomWeight:
    mean, variance, rotated = component.means[name], component.variances[name], component.rotations.get(name)
    if component.columns:  # views of it are taken of the columns as well, by where they begin
        variance = variance.clone(memory_format=torch.contiguous_format)
    if rotated is None:
        return RandomWeight.make(mean, variance, ledger, name)
    return RotatedWeight.turn(mean, variance, ledger, name, rotated)


def _noise(site: NoisySite, ledger: Ledger, x: Tensor, *more: Any) -> Tensor:
    batch = ledger.visit(x, [NOISE])
    # The noise has the mean zero, so that to first order its width, which these tell, moves nothing: their means do.
    more = tuple(one.value.detach() if isinstance(one, RandomWeight) else one for one in more)
    return run(NoiseCall(ledger, ledger.arrange(x, batch), site.terms(x.detach(), *more)), x)


@contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    """Ask for no gradients of the network's own parameters for a while."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
