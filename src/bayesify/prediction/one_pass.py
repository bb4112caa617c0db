"""Predictors that need no draws."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from bayesify._core.trees import slice_rows
from bayesify.laws import LastLayerLaplacePosterior, Posterior
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction.closed_form import ClosedForm
from bayesify.prediction.components import Component, gaussian_components
from bayesify.prediction.linearised import LinearisedPass, Plan, make_plan
from bayesify.prediction.linearised.output_variances import all_variances, margin_variances
from bayesify.prediction.linearised.principal import Head, look, principal_variances
from bayesify.prediction.outputs import OutputMoments, class_position, prediction_of
from bayesify.prediction.scales import Scale, check_scales
from bayesify.prediction.streamlined import MomentsPass
from bayesify.prediction.streamlined.moments import NoRuleError

__all__ = ["OnePass", "make_one_pass", "one_pass_of"]


_WORDS = {
    "linearised": "linearised: one backward pass for each output",
    "margin": "streamlined: one backward pass for the margin of the top two (positions share weights)",
    "principal": "streamlined: one backward pass for where the logits move most (positions share weights)",
    "moments": "streamlined: means and variances in one forward pass",
    "covariance": "streamlined: means and covariances in one forward pass",
    "per-head": "streamlined: means and variances in one forward pass, with covariances within heads",
}
FORWARD = ("moments", "covariance", "per-head")
Engine = Literal["linearised", "moments", "margin", "principal", "covariance", "per-head"]


class OnePass:
    """A predictor for one posterior; what it learns about the network serves all batches.

    Args:
        posterior: The posterior.
        how: "linearised", "covariance", "per-head", "moments", "margin", "principal", or "streamlined", which takes one
            of the last three.
        inputs: A batch to learn from.
    """

    def __init__(self, posterior: Posterior, how: str, inputs: Any) -> None:
        self.posterior = posterior
        posterior.prepare(inputs)
        self.laws = gaussian_components(posterior)
        self.head: Head | None = None
        self.plan: Plan | None = None
        self.passes: list[MomentsPass] = []
        self.engine: Engine = self._choose(how, inputs)
        if self.engine in FORWARD:
            self.passes = [self._forward(law) for law in self.laws]
        elif self.plan is None:
            self.plan = make_plan(posterior, self.laws[0], inputs)
        self.others: dict[frozenset[tuple[str, float]], OnePass] = {}

    @property
    def layers(self) -> list[str]:
        """Return the names of the layers with Gaussian tensors, in their order."""
        return list(dict.fromkeys(layer_of(name) for name in self.laws[0].variances))

    def scaled(self, scales: Mapping[str, float]) -> OnePass:
        """Return the predictor of the posterior whose layers' variances are multiplied by numbers."""
        check_scales(scales, self.layers)
        key = frozenset(scales.items())
        if key not in self.others:
            made = copy.copy(self)
            made.laws = [
                law.scaled({name: scales.get(layer_of(name), 1.0) for name in law.variances}) for law in self.laws
            ]
            made.passes = [self._forward(law) for law in made.laws] if self.engine in FORWARD else []
            made.plan = None if self.plan is None else replace(self.plan, factors={})
            self.others = {key: made}  # the last one alone: each holds a copy of all variances
        return self.others[key]

    @property
    def differentiated(self) -> bool:
        """Whether the last prediction took backward passes, or derivatives of single functions."""
        return self.backward or any(one.settings.derivatives for one in self.passes)

    @property
    def backward(self) -> bool:
        """Whether a prediction takes backward passes."""
        return self.engine not in FORWARD

    @property
    def looped(self) -> bool:
        """Whether examples are looped over."""
        return self.backward and self.plan is not None and bool(self.plan.looped)

    def _forward(self, law: Component, engine: Engine | None = None) -> MomentsPass:
        engine = engine or self.engine
        first_order = self.posterior.method.first_order
        covariance, per_head = engine == "covariance", engine == "per-head"
        return MomentsPass(self.posterior, law, first_order=first_order, covariance=covariance, per_head=per_head)

    def _choose(self, how: str, inputs: Any) -> Any:
        """Choose the engine.

        Variances that are carried forward count positions as (partly) independent, and networks add up positions whose
        noise comes from the same weights, layer after layer: most of the variance can be lost, and its order over
        examples. A backward pass is right for them, for one number of each example, and with a last linear layer that
        number gives the size of all logits' covariance.
        """
        if how in ("linearised", *FORWARD):
            return how
        posterior, law = self.posterior, self.laws[0]
        outputs, self.head = look(posterior, law, inputs)
        classes = class_position(posterior.likelihood, outputs) is not None
        single = outputs.ndim <= 2 and (classes or outputs.numel() == 1)
        if how == "margin" and not single:
            raise ValueError(
                f"how='margin' is for one decision or one number for each example, and the network's output is "
                f"{tuple(outputs.shape[1:])}. Use how='streamlined' or how='linearised'."
            )
        whole = single and classes and self.head is not None
        if how == "principal" and not whole:
            raise ValueError(
                "how='principal' is for classifiers whose logits come from a last nn.Linear. Use how='streamlined' or "
                "how='linearised'."
            )
        if how != "streamlined":
            return how
        best = "linearised" if not single else "principal" if whole else "margin"
        with suppress(ValueError):  # a network that no backward pass can be planned for
            self.plan = make_plan(posterior, law, inputs)
        if single and self.plan is not None and self.plan.positions and not self.plan.looped:
            return best
        if self.plan is None:
            return "moments"
        try:
            self._forward(law, "moments")(slice_rows(inputs, 0, 1))
        except (NoRuleError, ValueError):  # an operation that only derivatives are known of
            return best
        return "moments"

    @property
    def words(self) -> str:
        """Say which engine it is."""
        return _WORDS[self.engine]

    def moments(self, inputs: Any, *, scale: Scale = 1.0, input_variance: Tensor | None = None) -> list[OutputMoments]:
        """Return the outputs' moments for each component of the posterior."""
        if isinstance(scale, Mapping):
            return self.scaled(scale).moments(inputs, input_variance=input_variance)
        if input_variance is not None and self.engine not in FORWARD:
            raise ValueError("Only how='moments' takes an input_variance; this prediction needs backward passes.")
        found = []
        for index, law in enumerate(self.laws):
            if self.engine in FORWARD:
                mean, variance = self.passes[index](inputs, input_variance)
            else:
                mean, variance = self._backward(law, inputs)
            found.append(OutputMoments(mean, variance, self.words, weight=law.weight).times(scale))
        return found

    def _backward(self, law: Component, inputs: Any) -> tuple[Tensor, Tensor]:
        assert self.plan is not None
        if self.engine == "principal":
            assert self.head is not None
            with self.head.watched():
                made = LinearisedPass(self.posterior, law, self.plan, inputs)
            return made.outputs, principal_variances(made, law, self.head)
        made = LinearisedPass(self.posterior, law, self.plan, inputs)
        variances = margin_variances if self.engine == "margin" else all_variances
        return made.outputs, variances(made, self.posterior.likelihood)

    def predict(
        self,
        inputs: Any,
        *,
        num_samples: int | None,
        seed: int,
        scale: Scale = 1.0,
        input_variance: Tensor | None = None,
    ) -> Prediction:
        """Return the prediction for a batch."""
        moments = self.moments(inputs, scale=scale, input_variance=input_variance)
        return prediction_of(self.posterior.likelihood, moments, num_samples=num_samples, seed=seed)


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to.

    >>> layer_of("encoder.0.weight")
    'encoder.0'
    """
    return name.rpartition(".")[0]


def make_one_pass(posterior: Posterior, how: str, inputs: Any) -> OnePass | ClosedForm:
    """Return the predictor of this name for a posterior, or raise with what works instead."""
    if isinstance(posterior, LastLayerLaplacePosterior):
        if how == "per-head":
            raise ValueError(
                "how='per-head' is for attentions with random values, and only the last linear layer is random here. "
                "Use how='streamlined'."
            )
        # Outputs are linear in what is random: every approximation is the closed form.
        return ClosedForm(posterior)
    if how == "closed-form":
        posterior.output_gaussian(inputs)  # says what there is instead
    return OnePass(posterior, how, inputs)


def one_pass_of(posterior: Posterior, how: str, inputs: Any) -> OnePass | ClosedForm:
    """Return the predictor of a posterior, which is kept until the posterior changes."""
    known: dict[str, tuple[Any, OnePass | ClosedForm]] = posterior.noise.predictors
    state = _state(posterior)
    if how not in known or known[how][1].posterior is not posterior or known[how][0] != state:
        known[how] = (state, make_one_pass(posterior, how, inputs))
    return known[how][1]


def _state(posterior: Posterior) -> tuple[Any, ...]:
    """Return what changes when a tensor of the posterior does, or what its outputs mean.

    A version does not count what is written through `.data`, so a sum is looked at too.
    """
    with torch.no_grad():
        tensors = [*posterior.parameters(), *posterior.buffers()]
        versions = [(id(t), 0 if t.is_inference() else t._version, t.data_ptr(), t.dtype) for t in tensors]
        sums = [t.sum().item() for t in tensors if t.is_floating_point()]
    return (id(posterior.likelihood), *versions, *(number for number in sums if number == number))
