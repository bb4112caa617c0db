"""One pass of a network on means and variances."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesify._core.trees import call, map_tensors
from bayesify.laws import Component, NoisySite, Posterior
from bayesify.prediction.outputs import independent_variances
from bayesify.prediction.streamlined.joint import Joint
from bayesify.prediction.streamlined.moments import (
    Correlated,
    Moments,
    NoRuleError,
    Settings,
    centre,
    using,
    variance_of,
)

__all__ = ["MomentsPass"]


class MomentsPass:
    """Runs a component of a posterior on means and variances.

    The network's own forward runs, on pairs in the place of activations, from the first random part on; what lies
    before it runs plainly.

    Args:
        posterior: The posterior.
        component: Which component of it.
        first_order: Linearise nonlinear functions; else match mean and variance of their outputs.
        covariance: Carry covariances of vectors, for stacks of linear layers and activations.
        per_head: Carry covariances within heads of attention into the output projection.
    """

    def __init__(
        self,
        posterior: Posterior,
        component: Component,
        *,
        first_order: bool,
        covariance: bool = False,
        per_head: bool = False,
    ) -> None:
        self.posterior = posterior
        self.component = component
        self.settings = Settings(first_order, covariance, per_head)
        self.weights = {name: self._random(name) for name in component.means}

    def __call__(self, inputs: Any, input_variance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the outputs.

        Args:
            inputs: A batch.
            input_variance: The variance of the batch's first tensor of numbers, if that is random too.
        """
        if input_variance is not None:
            inputs = _with_variance(inputs, input_variance)
        with torch.no_grad():
            try:
                output = self.run(inputs)
            except NoRuleError as error:
                raise self._located(inputs, str(error)) from None
        self._check_heads()
        if isinstance(output, Joint):
            return output.centre, self._visible(output)
        return centre(output), variance_of(output)

    def _check_heads(self) -> None:
        """Refuse to call a pass that left out covariances one that has them."""
        found = self.settings
        if found.per_head and (found.attentions == 0 or found.projected < found.attentions):
            raise ValueError(
                f"Streamlined(covariance='per-head') carried the covariances of {found.projected} of "
                f"{found.attentions} attentions with random values. It needs nn.MultiheadAttention or "
                "scaled_dot_product_attention, with values that are a linear layer's outputs, and a linear layer "
                "behind it. Use how='streamlined' or how='linearised'."
            )

    def _random(self, name: str) -> Moments:
        component = self.component
        mean, variance, rotated = component.means[name], component.variances[name], component.rotations.get(name)
        return Moments.make(mean, variance) if rotated is None else Correlated.turn(mean, variance, rotated)

    def _visible(self, output: Joint) -> Tensor:
        """Return variances: of logits, those of independent ones that have the same when they are centred."""
        covariance = output.covariance
        if self.posterior.likelihood.softmax_dim(output.centre.ndim) is None:
            return covariance.diagonal(dim1=-2, dim2=-1)
        centred = covariance - covariance.mean(-1, keepdim=True)
        centred = centred - centred.mean(-2, keepdim=True)
        return independent_variances(centred.diagonal(dim1=-2, dim2=-1))

    @torch.no_grad()
    def run(self, inputs: Any) -> Tensor:
        """Run the network on pairs, and return its output: a pair, or a plain tensor where nothing is random.

        Raises:
            NoRuleError: Of an operation without a rule, by its name alone.
        """
        posterior = self.posterior
        self.settings.attentions = self.settings.projected = 0
        patch = self.component.patch(posterior.network, self.weights, lambda site: partial(_noise, site))
        with using(self.settings), posterior.patched(patch):
            return posterior.read(call(posterior.network, inputs))

    def _located(self, inputs: Any, operation: str) -> NoRuleError:
        """Run again to see which module has an operation without a rule."""
        inside: list[str] = []
        handles = []
        for name, module in self.posterior.network.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
            handles.append(module.register_forward_hook(lambda *_: inside.pop() and None))
        where = "the network"
        try:
            self.run(inputs)
        except NoRuleError:
            where = f"module {inside[-1]!r}" if inside and inside[-1] else "the network's own forward"
        finally:
            for handle in handles:
                handle.remove()
        if self.settings.covariance:
            return NoRuleError(
                f"{operation} in {where} has no rule for covariances, which Streamlined(covariance='full') has for "
                "linear layers and functions of single entries alone. Use how='streamlined' or how='linearised'."
            )
        return NoRuleError(
            f"{operation} in {where} has no rule for means and variances. Add one: @bayesify.moment_rule("
            f"{operation}), see its docstring; or use how='streamlined', which then takes another way, or "
            "how='linearised'."
        )


def _noise(site: NoisySite, x: Tensor, *more: Any) -> Moments:
    """Return y = a x + (d x + s) e: Var = (a^2 + d^2) v + (d m + s)^2."""
    mean = centre(x)
    terms = site.terms(mean, *map_tensors(centre, more))
    variance = (terms.std_scale * mean + terms.std_shift).square()
    shared = None
    if terms.channel_dims is not None and mean.ndim > 2:
        shared = torch.ones(mean.shape[0], dtype=mean.dtype, device=mean.device)
    if isinstance(x, Moments):
        own = Moments.make(mean, variance, shared)
        before = x.like(mean, (terms.scale**2 + terms.std_scale**2) * x.variance)
        from bayesify.prediction.streamlined.products import joint_share

        shared = joint_share(own, before)
        variance = variance + before.variance
    return Moments.make(terms.scale * mean, variance, shared)


def _with_variance(inputs: Any, variance: Tensor) -> Any:
    """Make the first tensor of numbers in a batch random."""
    done = False

    def replace(tensor: Tensor) -> Tensor:
        nonlocal done
        if done or not tensor.is_floating_point():
            return tensor
        done = True
        spread = torch.as_tensor(variance, dtype=tensor.dtype, device=tensor.device)
        if not bool((spread >= 0).all()):
            raise ValueError("input_variance must not be negative.")
        try:
            return Moments.make(tensor, spread.expand_as(tensor))
        except RuntimeError as error:
            raise ValueError(
                f"input_variance has the shape {tuple(spread.shape)}, which does not broadcast to the inputs' "
                f"{tuple(tensor.shape)}."
            ) from error

    made = map_tensors(replace, inputs)
    if not done:
        raise ValueError("The inputs hold no tensor of numbers that could be uncertain.")
    return made
