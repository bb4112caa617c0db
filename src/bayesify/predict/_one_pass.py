"""Predictors that need no draws."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify._tree import call, slice_rows
from bayesify.posteriors import Posterior
from bayesify.predict._laws import Law, laws
from bayesify.predict._outputs import OutputMoments, class_position, prediction_of
from bayesify.predict.linearised import LinearisedPass, Plan, make_plan
from bayesify.predict.linearised._outputs import all_variances, margin_variances
from bayesify.predict.streamlined import MomentsPass
from bayesify.prediction import Prediction

__all__ = ["OnePass", "one_pass_of"]


_WORDS = {
    "linearised": "linearised: one backward pass for each output",
    "margin": "streamlined: one backward pass for the margin of the top two (convolutions share their weights)",
    "moments": "streamlined: means and variances in one forward pass",
}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class OnePass:
    """A predictor for one posterior; what it learns about the network serves all batches.

    Args:
        posterior: The posterior.
        how: "linearised", "moments", "margin", or "streamlined", which takes one of the last two.
        inputs: A batch to learn from.
    """

    def __init__(self, posterior: Posterior, how: str, inputs: Any) -> None:
        self.posterior = posterior
        posterior.prepare(inputs)
        self.laws = laws(posterior)
        self.engine: Literal["linearised", "moments", "margin"] = _chosen(posterior, self.laws[0], how, inputs)
        self.plan: Plan | None = None
        self.passes: list[MomentsPass] = []
        if self.engine == "moments":
            first_order = posterior.method.first_order
            self.passes = [MomentsPass(posterior, law, first_order=first_order) for law in self.laws]
        else:
            self.plan = make_plan(posterior, self.laws[0], inputs)
        self.state = _state(posterior)

    @property
    def words(self) -> str:
        """Say which engine it is."""
        return _WORDS[self.engine]

    def moments(self, inputs: Any, *, scale: float = 1.0, input_variance: Tensor | None = None) -> list[OutputMoments]:
        """Return the outputs' moments for each component of the posterior."""
        if input_variance is not None and self.engine != "moments":
            raise ValueError("Only how='moments' takes an input_variance; this prediction needs backward passes.")
        found = []
        for index, law in enumerate(self.laws):
            if self.engine == "moments":
                mean, variance = self.passes[index](inputs, input_variance)
            else:
                mean, variance = self._backward(law, inputs)
            found.append(OutputMoments(mean, variance if scale == 1 else variance * scale, self.words))
        return found

    def _backward(self, law: Law, inputs: Any) -> tuple[Tensor, Tensor]:
        assert self.plan is not None
        made = LinearisedPass(self.posterior, law, self.plan, inputs)
        variances = margin_variances if self.engine == "margin" else all_variances
        return made.outputs, variances(made, self.posterior.likelihood)

    def predict(
        self,
        inputs: Any,
        *,
        num_samples: int | None,
        seed: int,
        scale: float = 1.0,
        input_variance: Tensor | None = None,
    ) -> Prediction:
        """Return the prediction for a batch."""
        moments = self.moments(inputs, scale=scale, input_variance=input_variance)
        return prediction_of(self.posterior.likelihood, moments, num_samples=num_samples, seed=seed)


def one_pass_of(posterior: Posterior, how: str, inputs: Any) -> OnePass:
    """Return the predictor of a posterior, which is kept until the posterior changes."""
    known: dict[str, OnePass] = posterior.noise.predictors
    if how not in known or known[how].posterior is not posterior or known[how].state != _state(posterior):
        known[how] = OnePass(posterior, how, inputs)
    return known[how]


def _state(posterior: Posterior) -> tuple[Any, ...]:
    """Return what changes when a tensor of the posterior does, or what its outputs mean.

    A version does not count what is written through `.data`, so a sum is looked at too.
    """
    with torch.no_grad():
        tensors = [*posterior.parameters(), *posterior.buffers()]
        versions = [(id(t), 0 if t.is_inference() else t._version, t.data_ptr(), t.dtype) for t in tensors]
        sums = [t.sum().item() for t in tensors if t.is_floating_point()]
    return (id(posterior.likelihood), *versions, *(number for number in sums if number == number))


def _chosen(posterior: Posterior, law: Law, how: str, inputs: Any) -> Any:
    """Choose the engine.

    Variances that are carried forward count positions as (partly) independent. Convolutions that overlap undo that:
    they add up neighbours whose noise comes from the same weights, layer after layer, and most of the variance is lost.
    A backward pass is right for them, for one number of each example.
    """
    one = slice_rows(inputs, 0, 1)
    with posterior.noise.mode(silent=True), law.place(posterior.network, {**law.fixed, **law.means}), torch.no_grad():
        outputs = posterior.read(call(posterior.network, one))
    single = outputs.ndim <= 2 and (class_position(posterior.likelihood, outputs) is not None or outputs.numel() == 1)
    if how == "margin" and not single:
        raise ValueError(
            f"how='margin' is for one decision or one number for each example, and the network's output is "
            f"{tuple(outputs.shape[1:])}. Use how='moments' or how='linearised'."
        )
    if how != "streamlined":
        return how
    return "margin" if single and _overlapping(posterior.network) else "moments"


def _overlapping(network: nn.Module) -> bool:
    """Return whether a convolution's windows overlap; an image cut into patches has none of that."""
    return any(
        isinstance(module, _CONVOLUTIONS) and any(k > s for k, s in zip(module.kernel_size, module.stride, strict=True))
        for module in network.modules()
    )
