"""Independent Gaussian weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify._core.maths import at_least_float32
from bayesify._core.trees import call
from bayesify.laws.gaussian.kernels import KERNELS
from bayesify.laws.gaussian.plan import Plan, make_plan
from bayesify.laws.gaussian.site import NoiseKind, Pass, Site
from bayesify.laws.noise import Key, keyed_numbers
from bayesify.laws.norm_statistics import statistics_kept, tracking_norms
from bayesify.laws.patching import forbid_fused_layers, patched_forward
from bayesify.laws.posterior import Posterior
from bayesify.laws.tensors import TensorTree, owners, tensor_of

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["GaussianPosterior"]


class GaussianPosterior(Posterior):
    """q(w) = N(mu, diag exp(2 psi)): the network's own parameters are the means, `log_std` holds psi by their names.

    Whatever learns the two, they are the whole posterior. An entry whose psi is -inf is not random: it stays at its
    mean, and has no part in `kl` and `entropy`.

    A draw is w = mu + exp(psi) e with e a function of the key and the parameter's name, put in the parameter's place: a
    draw costs a plain pass and one normal number for each weight, and any module can be random. A fresh pass has noise
    that differs between examples wherever a layer's type has a kernel for it (see `noise`), which makes gradients far
    less noisy: the variance of their mean falls with the batch size. Modules without one (attention, recurrent layers,
    your own), and layers with a tied weight or one that another module reads, have one draw for all examples of a
    pass. A module that is called twice has one draw in both calls.

    Args:
        network: A copy of the user's network; its parameters are the means.
        method: How it is learned.
        log_stds: psi by the parameter's name; `nn.Parameter`s are trained, plain tensors are kept as buffers.
        prior_means: The prior's means by name, kept as buffers, where they are not zero.
        noise: How a fresh pass is random: "exemplar", an independent draw for each example; "local", the same with the
            weights integrated out where that is exact (linear layers that see one row per example, once); "flipout",
            one draw with random signs for each example; "shared", one draw for all; "auto" takes, layer by layer, the
            fastest of the first three. Biases, scales and shifts always have an independent draw for each example,
            unless "shared".
        keep_statistics: Whether normalisation uses its running statistics in training too, and leaves them alone.

    Example:
        >>> from bayesify import MAP
        >>> network = nn.Linear(2, 1, bias=False)
        >>> posterior = GaussianPosterior(network, MAP(), log_stds={"weight": torch.zeros(1, 2)})
        >>> x = torch.eye(2)
        >>> torch.equal(posterior.draw(3)(x), posterior.draw(3)(x)), posterior.entropy()
        (True, tensor(2.8379))
    """

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        *,
        log_stds: Mapping[str, Tensor],
        prior_means: Mapping[str, Tensor] | None = None,
        noise: NoiseKind = "auto",
        keep_statistics: bool = False,
    ) -> None:
        super().__init__(network, method)
        self.keep_statistics = keep_statistics
        for name, log_std in log_stds.items():
            if log_std.shape != (mean := network.get_parameter(name)).shape:
                raise ValueError(
                    f"The standard deviations of {name!r} have the shape {tuple(log_std.shape)}, and the parameter "
                    f"has {tuple(mean.shape)}. They must be equal."
                )
        self.log_std = TensorTree(log_stds)
        self.prior_mean = TensorTree(prior_means or {})
        self.noise_kind: NoiseKind = noise
        self._plan: Plan | None = None
        forbid_fused_layers(network, self.sites())

    @property
    def names(self) -> list[str]:
        """Return the names of the random parameters."""
        return list(self.log_std.as_dict())

    # -- passes -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the drawn weights of the present mode; in a fresh pass, of what has one draw for all examples."""
        if self.noise.silent:
            return {}
        if self.noise.keys:
            return self.weights(self.noise.keys[0])
        shared = self.names if self.noise_kind == "shared" or self._plan is None else self._plan.shared
        return {name: self._weight(name, None) for name in shared}

    def weights(self, key: Key) -> dict[str, Tensor]:
        """Return the weights of a draw by name."""
        return {name: self._weight(name, key) for name in self.names}

    def _weight(self, name: str, key: Key | None) -> Tensor:
        mean, log_std = tensor_of(self.network, name), tensor_of(self.log_std, name)
        if key is not None:
            noise = keyed_numbers(key, name, mean.shape, mean)
        else:
            noise = torch.randn(mean.shape, dtype=torch.promote_types(mean.dtype, torch.float32), device=mean.device)
        return mean + (log_std.exp() * noise).to(mean.dtype)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.keep_statistics:
            self.noise.guard.watch((id(self), "norms"), lambda: tracking_norms(self.network).values())
        with statistics_kept(self.network, self.keep_statistics):
            return self._run_noisy(args, kwargs)

    def _run_noisy(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        noise = self.noise
        if noise.silent or noise.keys or self.noise_kind == "shared":
            return super()._run(args, kwargs)
        self.noise.guard.watch((id(self), "tensors"), self.sites)
        plan = self.plan((args, dict(kwargs)))
        present = Pass(noise.rows, self.noise_kind, self.log_std.as_dict(), noise.foreign)
        forwards = {
            (module := self.network.get_submodule(name)): _noisy(module, site, present)
            for name, site in plan.sites.items()
        }
        with patched_forward(forwards):
            return super()._run(args, kwargs)

    def plan(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Plan:
        """Return which layers have noise for each example, which the first call finds out from a batch."""
        if self._plan is None:
            self._plan = make_plan(self.network, self.names, inputs)
        return self._plan

    def independent_rows(self, inputs: Any) -> bool:
        """Return whether two rows of a fresh pass have different noise in every random layer."""
        if self.noise_kind == "shared":
            return False
        plan = self.plan(call(lambda *args, **kwargs: (args, kwargs), inputs))
        return not plan.shared and all(None not in (b and b.dim for b in s.calls) for s in plan.sites.values())

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a random parameter."""
        return owners(self.network, self.names)

    # -- the distribution -----------------------------------------------------------------------------------------

    def _vectors(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return means, log standard deviations and prior means of what is random, as vectors."""
        names = self.names
        means = _joined([tensor_of(self.network, name) for name in names])
        log_stds = _joined([tensor_of(self.log_std, name) for name in names])
        prior = self.prior_mean.as_dict()
        return means, log_stds, _joined([prior[name] for name in names]) if prior else 0.0

    def kl(self, prior_std: float) -> Tensor:
        """Return the divergence from the prior N(m, prior_std^2), with m zero or `prior_means`.

        KL = sum ln(prior_std) - psi + (exp(2 psi) + (mu - m)^2) / (2 prior_std^2) - 1/2, in nats.
        """
        if not 0 < prior_std < math.inf:
            raise ValueError(f"prior_std must be positive and finite, but it is {prior_std}.")
        mean, log_std, centre = self._vectors()
        each = math.log(prior_std) - log_std - 0.5
        each = each + ((2 * log_std).exp() + (mean - centre) ** 2) / (2 * prior_std**2)
        return torch.where(log_std > -math.inf, each, 0).sum()

    def entropy(self) -> Tensor:
        """Return the differential entropy, sum psi + (1 + ln 2 pi) / 2, in nats."""
        _, log_std, _ = self._vectors()
        return torch.where(log_std > -math.inf, log_std + 0.5 * (1 + math.log(2 * math.pi)), 0).sum()


def _noisy(module: nn.Module, site: Site, present: Pass) -> Any:
    kernel = KERNELS[type(module)]

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else kwargs.pop("input")
        return kernel(module, x, present.visit(site, x), *args[1:], **kwargs)

    return forward


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([at_least_float32(tensor).reshape(-1) for tensor in tensors])
