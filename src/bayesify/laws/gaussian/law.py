"""Independent Gaussian weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.maths import at_least_float32
from bayesify._core.random import Key, keyed_numbers, keyed_rows
from bayesify.laws.components import Component
from bayesify.laws.gaussian.kernels import has_kernel, kernel_of
from bayesify.laws.gaussian.site import Estimator, Site, Visits
from bayesify.laws.law import Law, Rescaling
from bayesify.laws.passes import BatchDim, Kind, Pass, Patch, Refusal
from bayesify.laws.patching import forbid_fused_layers
from bayesify.laws.stacking import Stack
from bayesify.laws.tensors import TensorTree, tensor_of
from bayesify.laws.trace import Trace

__all__ = ["GaussianLaw", "Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """How a stochastic pass is arranged.

    Attributes:
        sites: The layers whose noise differs between examples, by name.
        shared: Names of the parameters with one draw for all examples of a pass.
    """

    sites: dict[str, Site]
    shared: tuple[str, ...]


class GaussianLaw(Law):
    """q(w) = N(mu, diag exp(2 psi)): the network's own parameters are the means, `log_std` holds psi by their names.

    Whatever learns the two, they are the whole law. An entry whose psi is -inf is not random: it stays at its mean, and
    has no part in `kl` and `entropy`.

    A draw is w = mu + exp(psi) e with e a function of the key and the parameter's name, put in the parameter's place: a
    draw costs a plain pass and one normal number for each weight, and any module can be random. A fresh pass has noise
    that differs between examples wherever a layer's type has a kernel for it (see `estimator`), which makes gradients
    far less noisy: the variance of their mean falls with the batch size. Modules without one (attention, recurrent
    layers, your own), and layers with a tied weight or one that another module reads, have one draw for all examples of
    a pass. A module that is called twice has one draw in both calls.

    Args:
        network: The network; its parameters are the means.
        log_stds: psi by the parameter's name; `nn.Parameter`s are trained, plain tensors are kept as buffers.
        prior_means: The prior's means by name, kept as buffers, where they are not zero.
        estimator: How a fresh pass is random: "exemplar", an independent draw for each example; "local", the same with
            the weights integrated out where that is exact (linear layers that see one row per example, once);
            "flipout", one draw with random signs for each example; "shared", one draw for all; "auto" takes, layer by
            layer, the fastest of the first three. Biases, scales and shifts always have an independent draw for each
            example, unless "shared".
        keep_statistics: Whether normalisation uses its running statistics in training too, and leaves them alone.
        own: Means that take the places of the network's own.

    Example:
        >>> network = nn.Linear(2, 1, bias=False)
        >>> GaussianLaw(network, log_stds={"weight": torch.zeros(1, 2)}).entropy()
        tensor(2.8379)
    """

    name = "gaussian"
    stacks = True
    traced: frozenset[Kind] = frozenset({"fresh"})

    def __init__(
        self,
        network: nn.Module,
        *,
        log_stds: Mapping[str, Tensor],
        prior_means: Mapping[str, Tensor] | None = None,
        estimator: Estimator = "auto",
        keep_statistics: bool = False,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(network, own)
        self.keep_statistics = keep_statistics
        for name, log_std in log_stds.items():
            if log_std.shape != (mean := network.get_parameter(name)).shape:
                raise ValueError(
                    f"The standard deviations of {name!r} have the shape {tuple(log_std.shape)}, and the parameter "
                    f"has {tuple(mean.shape)}. They must be equal."
                )
        self.log_std = TensorTree(log_stds)
        self.prior_mean = TensorTree(prior_means or {})
        self.prior_log_std = TensorTree({})
        self.estimator: Estimator = estimator
        forbid_fused_layers(network, self.sites())

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the random parameters."""
        return list(self.log_std.as_dict())

    # -- passes -------------------------------------------------------------------------------------------------

    def patch(self, p: Pass) -> Patch:
        """Return drawn weights; in a fresh pass kernels with noise for each example, and weights where it has none."""
        own = self.own.as_dict()
        if p.kind == "mean":
            return Patch(own)
        if p.kind == "draw":
            return Patch({**own, **self.drawn(p.key)})
        if self.estimator == "shared" or p.trace is None:
            return Patch({**own, **self.drawn(None)})
        plan = self.plan(p.trace)
        visits = Visits(p.rows, self.estimator, self.log_std.as_dict(), p.ood_rows)
        forwards = {
            (module := self.network.get_submodule(name)): _noisy(module, site, visits)
            for name, site in plan.sites.items()
        }
        shared = {name: self._weight(name, None) for name in plan.shared}
        return Patch({**own, **shared}, forwards)

    def drawn(self, key: Key | None) -> dict[str, Tensor]:
        """Return the weights of a draw by name; of a new one where there is no key."""
        return {name: self._weight(name, key) for name in self.names}

    def stacked(self, keys: Sequence[Key]) -> dict[str, Stack]:
        """Return the weights of several draws, (S, ...), by name."""
        found: dict[str, Stack] = {}
        for name in self.names:
            mean = self.tensor(name)
            found[name] = self._moved(name, mean, keyed_rows(keys, name, mean.shape, mean))
        return found

    def _weight(self, name: str, key: Key | None) -> Tensor:
        mean = self.tensor(name)
        if key is not None:
            return self._moved(name, mean, keyed_numbers(key, name, mean.shape, mean))
        wide = torch.promote_types(mean.dtype, torch.float32)
        return self._moved(name, mean, torch.randn(mean.shape, dtype=wide, device=mean.device))

    def _moved(self, name: str, mean: Tensor, noise: Tensor) -> Tensor:
        """Return mean + std e, for one e or several; without gradients in the memory of e."""
        std = tensor_of(self.log_std, name).exp()
        if torch.is_grad_enabled() or noise.dtype != mean.dtype or std.dtype != noise.dtype:
            return mean + (std * noise).to(mean.dtype)
        return noise.mul_(std).add_(mean)

    def plan(self, trace: Trace) -> Plan:
        """Return which layers have noise for each example."""
        found: Plan = trace.conclude(("gaussian", id(self)), lambda: make_plan(self.network, self.names, trace))
        return found

    def independent_rows(self, trace: Trace | None) -> bool:
        """Return whether two rows of a fresh pass have different noise in every random layer."""
        if self.estimator == "shared" or trace is None:
            return False
        plan = self.plan(trace)
        return not plan.shared and all(None not in (b and b.dim for b in s.calls) for s in plan.sites.values())

    def components(self, trace: Trace | None = None) -> list[Component]:
        """Return one component with independent tensors."""
        del trace
        log_stds = self.log_std.as_dict()
        means = {name: self.tensor(name).detach() for name in log_stds}
        variances = {name: (2 * log_std.detach()).exp().to(means[name].dtype) for name, log_std in log_stds.items()}
        fixed = {name: tensor for name, tensor in self.own.as_dict().items() if name not in means}
        return [Component(means, variances, fixed)]

    def rescaling(self) -> Rescaling | Refusal:
        """Return what adds ln(factor) to every psi."""
        log_stds = self.log_std.as_dict()
        if not any(bool((log_std > -math.inf).any()) for log_std in log_stds.values()):
            return Refusal("All standard deviations are 0, and so is any multiple. Convert with a start_std above 0.")
        before = {name: log_std.detach().clone() for name, log_std in log_stds.items()}

        @torch.no_grad()
        def rescale(factor: float) -> None:
            for name, log_std in before.items():
                tensor_of(self.log_std, name).copy_(log_std + math.log(factor))

        return rescale

    # -- the distribution -----------------------------------------------------------------------------------------

    def _vectors(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return means, log standard deviations and prior means of what is random, as vectors."""
        names = self.names
        means = _joined([self.tensor(name) for name in names])
        log_stds = _joined([tensor_of(self.log_std, name) for name in names])
        prior = self.prior_mean.as_dict()
        return means, log_stds, _joined([prior[name] for name in names]) if prior else 0.0

    def kl(self, prior_std: float) -> Tensor:
        """Return the divergence from the prior N(m, prior_std^2), with m zero or `prior_mean`.

        KL = sum ln(prior_std) - psi + (exp(2 psi) + (mu - m)^2) / (2 prior_std^2) - 1/2, in nats. Where
        `prior_log_std` has the logarithm of a standard deviation for each weight, it is taken instead.
        """
        if not 0 < prior_std < math.inf:
            raise ValueError(f"prior_std must be positive and finite, but it is {prior_std}.")
        mean, log_std, centre = self._vectors()
        width: Tensor | float = math.log(prior_std)
        variance: Tensor | float = prior_std**2
        if known := self.prior_log_std.as_dict():
            width = _joined([known[name] for name in self.names])
            width = torch.where(log_std > -math.inf, width, 0)  # constants have no part in it
            variance = (2 * width).exp()
        each = width - log_std - 0.5
        each = each + ((2 * log_std).exp() + (mean - centre) ** 2) / (2 * variance)
        return torch.where(log_std > -math.inf, each, 0).sum()

    def entropy(self) -> Tensor:
        """Return the differential entropy, sum psi + (1 + ln 2 pi) / 2, in nats."""
        _, log_std, _ = self._vectors()
        return torch.where(log_std > -math.inf, log_std + 0.5 * (1 + math.log(2 * math.pi)), 0).sum()


def make_plan(network: nn.Module, names: Sequence[str], trace: Trace) -> Plan:
    """Find the layers that can have noise for each example.

    That are layers of exactly a registered type that share no parameter with another module, and whose parameters
    nobody else reads.

    Args:
        network: The network.
        names: Its random parameters.
        trace: What a dry run tells of it.
    """
    sites = {}
    for name, site in _candidates(network, names).items():
        if any(trace.is_read_outside(tensor_of(network, full)) for full in site.random.values()):
            continue
        calls = tuple(call.input for call in trace.calls.get(name, ()))
        if BatchDim(None) in calls and len(set(calls)) > 1:
            continue  # one weight that acts with a batch and without: all examples have the same
        sites[name] = Site(name, site.random, calls)
    covered = {full for site in sites.values() for full in site.random.values()}
    return Plan(sites, tuple(name for name in names if name not in covered))


def _candidates(network: nn.Module, names: Sequence[str]) -> dict[str, Site]:
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


def _noisy(module: nn.Module, site: Site, visits: Visits) -> Callable[..., Tensor]:
    kernel = kernel_of(module)
    assert kernel is not None

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else kwargs.pop("input")
        return kernel(module, x, visits.visit(site, x), *args[1:], **kwargs)

    return forward


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([at_least_float32(tensor).reshape(-1) for tensor in tensors])
