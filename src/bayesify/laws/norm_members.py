"""Members with noise in their normalisation layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify.laws.batch_dims import learn_batch_dims
from bayesify.laws.members import MembersPosterior
from bayesify.laws.noise import Key, Noise
from bayesify.laws.norm_noise import NormNoise, detach_noise
from bayesify.laws.norm_statistics import statistics_kept, tracking_norms
from bayesify.laws.patching import forbid_fused_layers
from bayesify.laws.recomputation import without_guards

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["NormMembersPosterior"]


class NormMembersPosterior(MembersPosterior):
    """M members, each with its own normalisation parameters, and noise in the normalisation layers.

    The network is stored once; a member costs the tensors given for it. A draw is a member and its layers' noise.

    Args:
        network: A copy of the user's network, with noise attached.
        members: For each member, its own tensors by their name in `network`.
        method: How the members are learned.
        noise: What the attached layers take their noise from.
        keep_statistics: Whether normalisation uses its running statistics in training too, and leaves them alone.

    Attributes:
        eta: How much more each class counts for each member, (M, C); (M, 0) before the first loss says C.
    """

    eta: Tensor

    def __init__(
        self,
        network: nn.Module,
        members: Sequence[Mapping[str, Tensor]],
        method: Method,
        *,
        noise: Noise,
        keep_statistics: bool,
    ) -> None:
        super().__init__(network, members, method)
        self.noise = noise
        self.keep_statistics = keep_statistics
        like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
        self.register_buffer("eta", like.new_zeros(len(members), 0).detach())
        forbid_fused_layers(network, self._noisy_sites())

    # -- passes ---------------------------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.keep_statistics:
            self.noise.guard.watch((id(self), "norms"), lambda: tracking_norms(self.network).values())
        with statistics_kept(self.network, self.keep_statistics):
            return super()._run(args, kwargs)

    def reference(self, inputs: Any) -> Tensor:
        """Return what the user's network returns."""
        with statistics_kept(self.network, self.keep_statistics):
            return super().reference(inputs)

    def _learn_batch_dims(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Noise per example has to know the batch in fresh passes too.
        if self.noise.batch_dims is None and not self.noise.in_pass:
            learn_batch_dims(self.network, self.noise, lambda inputs: self._run(*inputs), (args, dict(kwargs)))

    # -- as weights -----------------------------------------------------------------------------------------

    def plain_network(self) -> nn.Module | None:
        """Return a copy without noise; None where the noise is no scale of a layer's."""
        network = without_guards(copy.deepcopy(self.network))
        return network if all(detach_noise(module) for module in list(network.modules())) else None

    def drawn_tensors(self, key: Key) -> dict[str, Tensor]:
        """Return the member's tensors, with the draw's noise in the scales of its layers."""
        tensors = {**super().drawn_tensors(key)}
        with self.noise.mode(keys=(key,)), self.noise.one_pass(1):
            for path, module in self.network.named_modules():
                noise, name = getattr(module, "output_noise", None), f"{path}.weight".removeprefix(".")
                gamma = tensors.get(name, getattr(module, "weight", None))
                scaled = noise.scaled(gamma) if isinstance(noise, NormNoise) and gamma is not None else None
                if scaled is not None:
                    tensors[name] = scaled.detach()
        return tensors

    # -- state ----------------------------------------------------------------------------------------------

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the number of classes from the tensors that will be loaded."""
        found = tensors.get("eta")
        if found is not None and found.ndim == 2 and len(found) == len(self.eta):
            self.eta = self.eta.new_zeros(found.shape)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}eta" in state_dict:
            self.make_room({"eta": state_dict[f"{prefix}eta"]})
        super()._load_from_state_dict(state_dict, prefix, *args)
