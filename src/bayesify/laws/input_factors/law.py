"""A mixture of Gaussians over the factors of layer inputs (iBNN)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayesify._core.random import Key, keyed_rows, spread_keys
from bayesify._core.state import state_of
from bayesify.laws.components import Component
from bayesify.laws.input_factors.kl import Divergence, divergence
from bayesify.laws.input_factors.latents import Latent, Layer, find_layers
from bayesify.laws.input_factors.scaling import CommonFactors, DrawnFactors, Factors, scaled_forward
from bayesify.laws.kept import KeptDraws
from bayesify.laws.law import Law, Rescaling, check_count
from bayesify.laws.passes import Arranged, BatchDim, Kind, Pass, Patch, Refusal
from bayesify.laws.patching import forbid_fused_layers
from bayesify.laws.recomputation import without_guards
from bayesify.laws.stacking import whole_stack
from bayesify.laws.trace import Trace

__all__ = ["FactorPlan", "InputFactorLaw", "inverse_softplus"]


class FactorPlan:
    """How a stochastic pass is arranged.

    Attributes:
        layers: The layers with factors of their own for each example.
        shared: Latents with one draw for all examples of a pass, which then have one component: of weights that are
            read outside their layers, or that act on something without a batch.
        calls: For each layer and each of its calls, where the batch is.
    """

    def __init__(self, network: nn.Module, layers: Sequence[Layer], latents: Sequence[Latent], trace: Trace) -> None:
        self.calls = {layer.name: _batches(layer, trace) for layer in layers}
        parameters = {latent.parameter: network.get_parameter(latent.parameter) for latent in latents}
        shared = {
            latent.parameter
            for layer in layers
            for latent in _latents_of(layer)
            if trace.is_read_outside(parameters[latent.parameter]) or not _splits(layer, trace)
        }
        own, common = [], []
        for layer in layers:
            found = _latents_of(layer)
            if shared.isdisjoint(latent.parameter for latent in found):
                own.append(layer)
            else:
                common += found  # a layer is shared as a whole: its bias goes with its weight
        self.layers, self.shared = tuple(own), tuple(dict.fromkeys(common))


class InputFactorLaw(Law):
    """q(Z) = (1/K) sum_k prod_n N(z_n; m_kn, softplus(rho_kn)^2), where each layer computes U (z o x) + b.

    There is one factor z for each input feature of a linear layer, each input channel of a convolution, and each
    dimension of an embedding; attention has its own for query, key, value and output projection. The component k is the
    same in all layers. Layers that share a weight share its factors.

    A draw folds into the weights, W = U diag(z), and costs a plain pass. A fresh pass has factors of their own for each
    example: an elementwise product in front of each layer, the same over tokens, positions and repeated calls.

    Args:
        network: The network; its own tensors are U and b.
        modules: The names of the modules whose inputs have factors.
        components: K.
        bias: Whether each bias has one factor too, as if it were the weight of an input that is always one.
        own: Values of U, b and other tensors that take the places of the network's own.

    Attributes:
        component_means: The means m, (K, N) for N factors; ones at first.
        component_rhos: rho, which softplus turns into standard deviations, (K, N); -inf, no noise, at first.
    """

    name = "input-factors"
    traced: frozenset[Kind] = frozenset({"fresh"})

    def __init__(
        self,
        network: nn.Module,
        *,
        modules: Sequence[str],
        components: int,
        bias: bool = False,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(network, own)
        self.layers, self.latents = find_layers(network, modules, bias=bias)
        size = sum(latent.size for latent in self.latents)
        weights = [network.get_parameter(latent.parameter) for latent in self.latents]
        dtype = torch.promote_types(weights[0].dtype, torch.float32)  # half precision has no room beside one
        for weight in weights[1:]:
            dtype = torch.promote_types(dtype, weight.dtype)
        ones = torch.ones(components, size, dtype=dtype, device=weights[0].device)
        self.num_parts = components
        self.component_means = nn.Parameter(ones)
        self.component_rhos = nn.Parameter(torch.full_like(ones, -math.inf))
        self._warned = False
        self._kept = KeptDraws()
        forbid_fused_layers(network, {network.get_submodule(layer.name) for layer in self.layers})

    @property
    def num_components(self) -> int:
        """Return the number K of components."""
        return len(self.component_means)

    @property
    def component_stds(self) -> Tensor:
        """Return the standard deviations, (K, N)."""
        return softplus(self.component_rhos)

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the folded weights."""
        return [latent.parameter for latent in self.latents]

    # -- passes -------------------------------------------------------------------------------------------------

    def patch(self, p: Pass) -> Patch:
        """Return folded weights; in a fresh pass forwards with factors for each example."""
        own = self.own.as_dict()
        if p.kind == "mean":
            return Patch({**own, **self.folded(self.centre(p.part if isinstance(p.part, int) else None))})
        if p.kind == "draw" and len(p.keys) == 1:
            return Patch({**own, **self.folded(self.factors(p.key))})
        plan = self.plan(p.trace or Trace())
        if p.kind == "draw":
            rows = self._rows(p.keys)
            rows = rows if p.rows == 1 else rows.repeat_interleave(p.rows, 0)
            return Patch(own, self._scaled(plan, DrawnFactors(self._by_latent(rows), plan.calls, p=p)))
        components = self._components_of(p, plan)
        factors = self._fresh(components)
        forwards = self._scaled(plan, Factors(self._by_latent(factors), plan.calls))
        shared = {}
        if plan.shared:  # one component for the whole pass
            names = {latent.parameter for latent in plan.shared}
            folded = self.folded(self._fresh(components[:1])[0])
            shared = {name: tensor for name, tensor in folded.items() if name in names}
        return Patch({**own, **shared}, forwards)

    def _by_latent(self, factors: Tensor) -> dict[Latent, Tensor]:
        # One split, whose gradient is one joint tensor; slices would each add to all of it.
        return dict(zip(self.latents, torch.split(factors, [latent.size for latent in self.latents], 1), strict=True))

    def _scaled(self, plan: FactorPlan, present: Factors) -> dict[nn.Module, Callable[..., Any]]:
        """Return forwards of the plan's layers that multiply by factors."""
        return {
            (module := self.network.get_submodule(layer.name)): scaled_forward(module, layer, present)
            for layer in plan.layers
        }

    def together(self, trace: Trace | None) -> Arranged:
        """Return "rows" where every layer can have factors for each row: one weight then serves all draws."""
        return "one" if trace is None or self.plan(trace).shared else "rows"

    def centre(self, component: int | None = None) -> Tensor:
        """Return the mean factors of one component, or the mixture's mean, (N,)."""
        return self.component_means.mean(0) if component is None else self.component_means[component]

    def factors(self, key: Key) -> Tensor:
        """Return the factors of a draw, (N,): a component and its noise."""
        return self._drawn([key])[0]

    def _rows(self, keys: tuple[Key, ...]) -> Tensor:
        """Return the factors of several draws, (S, N); from memory if they are those of before."""
        if torch.is_grad_enabled():
            return self._drawn(keys)
        means = self.component_means
        state, numbers = state_of([means, self.component_rhos]), len(keys) * means.shape[1]
        return whole_stack(self._kept.get(keys, state, numbers, lambda: {"inputs": self._drawn(keys)})["inputs"])

    def _drawn(self, keys: Sequence[Key]) -> Tensor:
        """Return the factors of draws, (S, N), z_s = m_k + s_k e_s with the component k of each."""
        number, means = self.num_components, self.component_means
        parts = [(key.path[0] if key.path else key.index) % number for key in keys]
        which, noise = torch.tensor(parts, device=means.device), keyed_rows(keys, "inputs", means[0].shape, means)
        return means.index_select(0, which) + self.component_stds.index_select(0, which) * noise.to(means.dtype)

    def folded(self, factors: Tensor) -> dict[str, Tensor]:
        """Return the weights W = U diag(z) for factors (N,), by name."""
        return {latent.parameter: latent.fold(self.tensor(latent.parameter), factors) for latent in self.latents}

    def _components_of(self, p: Pass, plan: FactorPlan) -> Tensor:
        if isinstance(p.part, int):
            return torch.full((p.rows,), p.part, device=self.component_means.device)
        given = p.part
        if given is None:
            return self.assign(p.rows, trace=p.trace)
        if len(given) != p.rows:
            raise ValueError(
                f"{len(given)} components were assigned to a batch of {p.rows} examples: give one for each."
            )
        if plan.shared and bool((given != given[:1]).any()):
            raise ValueError(
                f"Different components were assigned to the rows of one pass, but {_why_one(plan)} Assign one, or "
                "exclude these layers."
            )
        return given

    def _fresh(self, assigned: Tensor) -> Tensor:
        """Return new factors for each example, (B, N)."""
        means = self.component_means.index_select(0, assigned)
        return means + self.component_stds.index_select(0, assigned) * torch.randn_like(means)

    def plan(self, trace: Trace) -> FactorPlan:
        """Return which layers have factors for each example."""

        def make() -> FactorPlan:
            found = FactorPlan(self.network, self.layers, self.latents, trace)
            norms = (m for m in self.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
            if found.shared and any(norms) and not self._warned:
                self._warned = True
                warnings.warn(
                    f"With IBNN, {_why_one(found)} Batch normalisation then sees one component at a time in training, "
                    "and the average of all in prediction. Exclude these layers: convert(..., exclude=[...]).",
                    stacklevel=2,
                )
            return found

        plan: FactorPlan = trace.conclude(("factors", id(self)), make)
        return plan

    def one_component(self, trace: Trace | None) -> bool:
        """Return whether all rows of a pass have one component: where a weight is read outside its layer, say.

        A row whose other layers had another component would belong to none that prediction uses.
        """
        return trace is not None and bool(self.plan(trace).shared)

    def independent_rows(self, trace: Trace | None) -> bool:
        """Return whether two rows of a fresh pass have different noise in every layer."""
        return trace is not None and not self.plan(trace).shared

    # -- components ---------------------------------------------------------------------------------------------

    def assign(self, rows: int, repeats: int = 1, *, same: bool = False, trace: Trace | None = None) -> Tensor:
        """Assign the rows of a batch that is repeated S times to components, as evenly as can be.

        Copy s of example i gets component (first + i + shift_s) mod K, so that every copy of the batch, which is a pass
        of its own, has all components: batch normalisation then sees in training what it sees in prediction. The
        shifts go on where the copy before ended, and one further after each round, so that the counts of all copies
        together differ by at most one, and up to K copies of an example have different components. They are 0 if all
        copies are to have the `same`; the counts then differ by S where K does not divide B. The first is random, so
        that no component is ahead. Where a pass has `one_component`, copy s has (first + s) mod K in all its rows.

        Args:
            rows: B.
            repeats: S.
            same: Whether the copies of an example share a component.
            trace: What is known of the network for such inputs.

        Returns:
            Components (S B,), in the order x0, x1, ..., x0, x1, ...
        """
        device, number = self.component_means.device, self.num_components
        first = torch.randint(number, (), device=device)
        if self.one_component(trace):
            copies = torch.zeros(repeats, dtype=torch.long) if same else torch.arange(repeats)
            return (copies.to(device).repeat_interleave(rows) + first) % number
        over = rows % number
        one_round = number // math.gcd(number, over)
        shifts = [0 if same else copy * over + copy // one_round for copy in range(repeats)]
        order = torch.arange(rows, device=device) + torch.tensor(shifts, device=device)[:, None]
        return (order.reshape(-1) + first) % number

    def check_part(self, part: int) -> None:
        """Raise unless there is such a component."""
        if not 0 <= part < self.num_components:
            raise IndexError(f"There is no component {part}: there are {self.num_components}, from 0 on.")

    def keys(self, num_draws: int | None, seed: int) -> list[Key]:
        """Spread the draws evenly over the components; which of them get one more, the seed decides."""
        return list(spread_keys(check_count(num_draws, self.default_draws), seed, self.num_components))

    def components(self, trace: Trace | None = None) -> list[Component]:
        """Return one component for each of the mixture, over the factors of each parameter."""
        variances = self.component_stds.detach().square()
        means = self.component_means.detach()
        own = self.own.as_dict()
        return [
            Component(
                self.by_parameter(means[part]),
                self.by_parameter(variances[part]),
                own,
                place=lambda factors: self.multiplied(factors, trace),
                part=part,
            )
            for part in range(self.num_components)
        ]

    def by_parameter(self, factors: Tensor) -> dict[str, Tensor]:
        """Split factors (N,) by the names of the parameters that they belong to."""
        return {latent.parameter: factors[latent.span].clone() for latent in self.latents}

    def multiplied(self, factors: Mapping[str, Tensor], trace: Trace | None = None) -> Patch:
        """Return a patch in which layers meet these factors, the same for every example, which may be random tensors.

        Layers have their inputs multiplied. A weight that is read outside its layer is multiplied itself.
        """
        network = self.network
        plan = None if trace is None else self.plan(trace)
        layers, shared = (self.layers, ()) if plan is None else (plan.layers, plan.shared)
        present = CommonFactors({latent: factors[latent.parameter].unsqueeze(0) for latent in self.latents}, {})
        forwards = {
            (module := network.get_submodule(layer.name)): scaled_forward(module, layer, present) for layer in layers
        }
        weights = {}
        for latent in shared:
            weight = self.tensor(latent.parameter).detach()
            product = weight.view(latent.parameter_view) * factors[latent.parameter].reshape(latent.factor_view)
            weights[latent.parameter] = product.view(weight.shape)
        return Patch(weights, forwards)

    def rescaling(self) -> Rescaling | Refusal:
        """Return what multiplies the standard deviations of all components, and leaves their means alone."""
        before = self.component_rhos.detach().clone()
        if not bool((before > -math.inf).any()):
            return Refusal("All factors have the standard deviation 0, and so is any multiple. Convert with start_std.")

        @torch.no_grad()
        def rescale(factor: float) -> None:
            wider = before if factor == 1 else inverse_softplus(softplus(before) * factor)
            self.component_rhos.copy_(wider)

        return rescale

    # -- plain networks -----------------------------------------------------------------------------------------

    def component(self, component: int) -> nn.Module:
        """Return the mean of one component as a plain network, W = U diag(m_k): a copy of its own."""
        self.check_part(component)
        return self.to_network(self.centre(component))

    def mean_network(self) -> nn.Module:
        """Return the mixture's mean as a plain network."""
        return self.to_network(self.centre())

    @torch.no_grad()
    def to_network(self, factors: Tensor) -> nn.Module:
        """Return a copy of the network with factors (N,) folded into its weights."""
        network = without_guards(copy.deepcopy(self.network))
        for name, tensor in self.folded(factors).items():
            network.get_parameter(name).copy_(tensor)
        return network

    def kl(self, prior_std: float, kind: Divergence = "mean") -> Tensor:
        """Return the divergence from the prior N(1, prior_std^2) of every factor, in nats; see `kl` for the kinds."""
        return divergence(kind, self.component_means, self.component_stds, prior_std)


def inverse_softplus(std: Tensor) -> Tensor:
    """Return rho with softplus(rho) = std.

    >>> softplus(inverse_softplus(torch.tensor([0.05, 3.0])))
    tensor([0.0500, 3.0000])
    """
    return std + torch.log(-torch.expm1(-std))


def _why_one(plan: FactorPlan) -> str:
    layers = dict.fromkeys(latent.parameter.rpartition(".")[0] for latent in plan.shared)
    return (
        f"the weights of {list(layers)} are read outside their layers, or where there is no batch, so that all "
        "rows of a pass have one component."
    )


def _latents_of(layer: Layer) -> list[Latent]:
    found: list[Any] = [*layer.weights, layer.bias, layer.output, layer.output_bias]
    return [latent for latent in found if latent is not None]


def _batches(layer: Layer, trace: Trace) -> tuple[BatchDim | None, ...]:
    calls = trace.calls.get(layer.name, ())
    return tuple(call.output if layer.side == "output" else call.input for call in calls)


def _splits(layer: Layer, trace: Trace) -> bool:
    """Return whether each example can have its own factors in every call of a layer."""
    for call in trace.calls.get(layer.name, ()):
        batch, shape = (call.output, call.output_shape) if layer.side == "output" else (call.input, call.input_shape)
        if batch is None or batch.dim is not None or shape is None:
            continue
        if not (shape[0] == 1 and len(shape) > 1 and layer.dim % len(shape) > 0):
            return False
    return True
