"""A mixture of Gaussians over the factors of layer inputs."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayesify._core.trees import call
from bayesify.laws.input_factors.factor_plan import Plan, make_plan
from bayesify.laws.input_factors.kl import Divergence, divergence
from bayesify.laws.input_factors.latents import find_layers
from bayesify.laws.input_factors.scaling import CommonPass, Pass, scaled_forward
from bayesify.laws.noise import Key, keyed_numbers, shuffled
from bayesify.laws.patching import forbid_fused_layers, patched_forward
from bayesify.laws.posterior import Posterior
from bayesify.laws.recomputation import without_guards
from bayesify.laws.swap import find_slots, swapped
from bayesify.laws.tensors import owners, tensor_of

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["InputMixturePosterior", "inverse_softplus"]


class InputMixturePosterior(Posterior):
    """q(Z) = (1/K) sum_k prod_n N(z_n; m_kn, softplus(rho_kn)^2), where each layer computes U (z o x) + b.

    There is one factor z for each input feature of a linear layer, each input channel of a convolution, and each
    dimension of an embedding; attention has its own for query, key, value and output projection. The component k is the
    same in all layers. Layers that share a weight share its factors.

    A draw folds into the weights, W = U diag(z), and costs a plain pass. A fresh pass has factors of their own for each
    example: an elementwise product in front of each layer, the same over tokens, positions and repeated calls.

    Args:
        network: A copy of the user's network; its own tensors are U and b.
        method: How it is learned.
        names: The modules whose inputs have factors.
        components: K.
        bias: Whether each bias has one factor too, as if it were the weight of an input that is always one.

    Attributes:
        component_means: The means m, (K, N) for N factors; ones at first.
        component_rhos: rho, which softplus turns into standard deviations, (K, N); -inf, no noise, at first.
        kl_weight: What the divergence is multiplied by now.
    """

    kl_weight: Tensor

    def __init__(
        self, network: nn.Module, method: Method, *, names: Sequence[str], components: int, bias: bool = False
    ) -> None:
        super().__init__(network, method)
        self.layers, self.latents = find_layers(network, names, bias=bias)
        size = sum(latent.size for latent in self.latents)
        weights = [network.get_parameter(latent.parameter) for latent in self.latents]
        dtype = torch.promote_types(weights[0].dtype, torch.float32)  # half precision has no room beside one
        for weight in weights[1:]:
            dtype = torch.promote_types(dtype, weight.dtype)
        ones = torch.ones(components, size, dtype=dtype, device=weights[0].device)
        self.component_means = nn.Parameter(ones)
        self.component_rhos = nn.Parameter(torch.full_like(ones, -math.inf))
        self.register_buffer("kl_weight", torch.ones((), dtype=dtype, device=ones.device))
        self._plan: Plan | None = None
        forbid_fused_layers(network, {network.get_submodule(layer.name) for layer in self.layers})

    @property
    def components(self) -> int:
        """Return the number K of components."""
        return len(self.component_means)

    @property
    def component_stds(self) -> Tensor:
        """Return the standard deviations, (K, N)."""
        return softplus(self.component_rhos)

    # -- passes -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the folded weights of the present mode; in a fresh pass, of what has one draw for all examples."""
        noise = self.noise
        if noise.silent:
            return self._folded(self.centre(noise.member))
        if noise.keys:
            return self._folded(self.factors(noise.keys[0]))
        if self._plan is None or not self._plan.shared:
            return {}
        assigned = noise.assigned  # one component for the whole pass
        factors = self._fresh(self.assign(1) if assigned is None else assigned[:1])[0]
        names = {latent.parameter for latent in self._plan.shared}
        return {name: tensor for name, tensor in self._folded(factors).items() if name in names}

    def centre(self, component: int | None = None) -> Tensor:
        """Return the mean factors of one component, or the mixture's mean, (N,)."""
        return self.component_means.mean(0) if component is None else self.component_means[component]

    def factors(self, key: Key) -> Tensor:
        """Return the factors of a draw, (N,): a component and its noise."""
        means = self.component_means
        component = (key.member if key.member is not None else key.index) % self.components
        noise = keyed_numbers(key, "inputs", means[0].shape, means).to(means.dtype)
        return means[component] + self.component_stds[component] * noise

    def _folded(self, factors: Tensor) -> dict[str, Tensor]:
        names = [latent.parameter for latent in self.latents]
        return {
            name: latent.fold(tensor_of(self.network, name), factors)
            for name, latent in zip(names, self.latents, strict=True)
        }

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        noise = self.noise
        if noise.silent or noise.keys:
            return super()._run(args, kwargs)
        noise.guard.watch((id(self), "tensors"), self.sites)
        plan = self.plan((args, dict(kwargs)))
        components = self._present_components(noise.rows)
        factors = self._fresh(components)
        # One split, whose gradient is one joint tensor; slices would each add to all of it.
        parts = torch.split(factors, [latent.size for latent in self.latents], 1)
        present = Pass(dict(zip(self.latents, parts, strict=True)), plan.calls)
        forwards = {
            (module := self.network.get_submodule(layer.name)): scaled_forward(module, layer, present)
            for layer in plan.layers
        }
        with self.assigned(components), patched_forward(forwards):
            return super()._run(args, kwargs)

    def _present_components(self, rows: int) -> Tensor:
        if self.noise.member is not None:
            return torch.full((rows,), self.noise.member, device=self.component_means.device)
        given = self.noise.assigned
        if given is not None and len(given) != rows:
            raise ValueError(f"{len(given)} components were assigned to a batch of {rows} examples: give one for each.")
        if given is not None and self.one_component and bool((given != given[:1]).any()):
            raise ValueError(
                f"Different components were assigned to the rows of one pass, but {self._why_one()} Assign one, or "
                "exclude these layers."
            )
        return self.assign(rows) if given is None else given

    def _fresh(self, assigned: Tensor) -> Tensor:
        """Return new factors for each example, (B, N)."""
        means = self.component_means.index_select(0, assigned)
        return means + self.component_stds.index_select(0, assigned) * torch.randn_like(means)

    def plan(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Plan:
        """Return which layers have factors for each example, which the first call finds out from a batch."""
        if self._plan is None:
            self._plan = make_plan(self.network, self.layers, self.latents, inputs)
            norms = (m for m in self.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
            if self.one_component and any(norms):
                warnings.warn(
                    f"With IBNN, {self._why_one()} Batch normalisation then sees one component at a time in training, "
                    "and the average of all in prediction. Exclude these layers: convert(..., exclude=[...]).",
                    stacklevel=2,
                )
        return self._plan

    @property
    def one_component(self) -> bool:
        """Whether all rows of a pass have one component: where a weight is read outside its layer, or without a batch.

        A row whose other layers had another component would belong to none that prediction uses. Known after the first
        pass, or `prepare`.
        """
        return self._plan is not None and bool(self._plan.shared)

    def _why_one(self) -> str:
        assert self._plan is not None
        layers = dict.fromkeys(latent.parameter.rpartition(".")[0] for latent in self._plan.shared)
        return (
            f"the weights of {list(layers)} are read outside their layers, or where there is no batch, so that all "
            "rows of a pass have one component."
        )

    def reference(self, inputs: Any) -> Tensor:
        """Return what the network returns with every factor at one."""
        with self.noise.lock, self.noise.mode(silent=True):
            return self.read(call(self.network, inputs))

    def independent_rows(self, inputs: Any) -> bool:
        """Return whether two rows of a fresh pass have different noise in every layer."""
        return not self.plan(call(lambda *args, **kwargs: (args, kwargs), inputs)).shared

    def prepare(self, inputs: Any) -> None:
        """Find out which weights are read outside their layers."""
        self.plan(call(lambda *args, **kwargs: (args, kwargs), inputs))

    # -- factors from outside -----------------------------------------------------------------------------------

    def by_parameter(self, factors: Tensor) -> dict[str, Tensor]:
        """Split factors (N,) by the names of the parameters that they belong to."""
        return {latent.parameter: factors[latent.span].clone() for latent in self.latents}

    @contextmanager
    def multiplied(self, network: nn.Module, factors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let a network's layers meet these factors, the same for every example, which may be random tensors.

        Layers have their inputs multiplied. A weight that is read outside its layer is multiplied itself.
        """
        layers = self.layers if self._plan is None else self._plan.layers
        shared = () if self._plan is None else self._plan.shared
        present = CommonPass({latent: factors[latent.parameter].unsqueeze(0) for latent in self.latents}, {})
        forwards = {
            (module := network.get_submodule(layer.name)): scaled_forward(module, layer, present) for layer in layers
        }
        weights = {
            latent.parameter: tensor_of(network, latent.parameter).detach().view(latent.parameter_view)
            * factors[latent.parameter].reshape(latent.factor_view)
            for latent in shared
        }
        weights = {name: weight.view(tensor_of(network, name).shape) for name, weight in weights.items()}
        with patched_forward(forwards), swapped(find_slots(network, weights), weights):
            yield

    # -- components ---------------------------------------------------------------------------------------------

    def assign(self, rows: int, repeats: int = 1, *, same: bool = False) -> Tensor:
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

        Returns:
            Components (S B,), in the order x0, x1, ..., x0, x1, ...
        """
        device = self.component_means.device
        first = torch.randint(self.components, (), device=device)
        if self.one_component:
            copies = torch.zeros(repeats, dtype=torch.long) if same else torch.arange(repeats)
            return (copies.to(device).repeat_interleave(rows) + first) % self.components
        over = rows % self.components
        one_round = self.components // math.gcd(self.components, over)
        shifts = [0 if same else copy * over + copy // one_round for copy in range(repeats)]
        order = torch.arange(rows, device=device) + torch.tensor(shifts, device=device)[:, None]
        return (order.reshape(-1) + first) % self.components

    @contextmanager
    def assigned(self, components: Tensor) -> Iterator[None]:
        """Give the rows of passes inside these components."""
        with self.noise.of_components(components):
            yield

    @contextmanager
    def of_component(self, component: int) -> Iterator[InputMixturePosterior]:
        """Let means be those of one component, and all rows of fresh passes its own."""
        self._check(component)
        with self.noise.of_member(component):
            yield self

    def _check(self, component: int) -> None:
        if not 0 <= component < self.components:
            raise IndexError(f"There is no component {component}: there are {self.components}, from 0 on.")

    def keys(self, num_samples: int | None, seed: int) -> list[Key]:
        """Spread the draws evenly over the components; which of them get one more, the seed decides."""
        order = shuffled(self.components, seed)
        members = sorted(order[index % self.components] for index in range(self._count(num_samples)))
        return [Key(seed, index, member) for index, member in enumerate(members)]

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a folded weight."""
        return owners(self.network, [latent.parameter for latent in self.latents])

    # -- plain networks -----------------------------------------------------------------------------------------

    def component(self, component: int) -> nn.Module:
        """Return the mean of one component as a plain network, W = U diag(m_k): a copy of its own."""
        self._check(component)
        return self.export(self.centre(component))

    def mean_network(self) -> nn.Module:
        """Return the mixture's mean as a plain network."""
        return self.export(self.centre())

    @torch.no_grad()
    def export(self, factors: Tensor) -> nn.Module:
        """Return a copy of the network with factors (N,) folded into its weights."""
        network = without_guards(copy.deepcopy(self.network))
        for name, tensor in self._folded(factors).items():
            network.get_parameter(name).copy_(tensor)
        return network

    def kl(self, prior_std: float, kind: Divergence = "mean") -> Tensor:
        """Return the divergence from the prior N(1, prior_std^2) of every factor, in nats; see `_kl` for the kinds."""
        return divergence(kind, self.component_means, self.component_stds, prior_std)


def inverse_softplus(std: Tensor) -> Tensor:
    """Return rho with softplus(rho) = std.

    >>> softplus(inverse_softplus(torch.tensor([0.05, 3.0])))
    tensor([0.0500, 3.0000])
    """
    return std + torch.log(-torch.expm1(-std))
