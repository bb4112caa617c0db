"""Predictors that need no draws: which engine carries a posterior's Gaussians to the outputs, and what it found out."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from bayesify._core.state import state_of
from bayesify._core.trees import repeat_rows, slice_rows
from bayesify.laws import Component, Posterior, Refusal, Trace
from bayesify.laws.laplace import last_features
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction.linearised import LinearisedPass, Plan, make_plan
from bayesify.prediction.linearised.output_variances import (
    MOST_CLASSES,
    Head,
    all_variances,
    margin_variances,
    principal_moments,
)
from bayesify.prediction.matching import matched
from bayesify.prediction.outputs import OutputMoments, prediction_of
from bayesify.prediction.predictors import Predictor, Streamlined
from bayesify.prediction.streamlined import MomentsPass
from bayesify.prediction.streamlined.moments import NoRuleError
from bayesify.prediction.views import ONE, Views

__all__ = ["OnePass", "Scale", "one_pass_of"]

Scale = float | Mapping[str, float]
Way = Literal["linearised", "moments", "margin", "principal"]
_WORDS: dict[str, str] = {
    "linearised": "linearised: one backward pass for each output",
    "margin": "streamlined: one backward pass for the margin of the top two (positions share weights)",
    "principal": "streamlined: one backward pass for where the logits move most (positions share weights)",
    "none": "streamlined: means and variances in one forward pass",
    "full": "streamlined: means and covariances in one forward pass",
    "per-head": "streamlined: means and variances in one forward pass, with covariances within heads",
}
_CLOSED_FORM = "closed form: the covariance of the last layer's outputs in one forward pass"


class OnePass:
    """A predictor for one posterior; what it learns about the network serves all batches.

    Where the last layer alone is random, outputs are linear in what is random, and every approximation is their closed
    form. All other components of the posterior have one engine.

    Args:
        posterior: The posterior.
        predictor: `Streamlined` or `Linearised`.
        inputs: A batch to learn from.

    Raises:
        ValueError: The posterior or the network has no such prediction; says what it has.
    """

    def __init__(self, posterior: Posterior, predictor: Predictor, inputs: Any) -> None:
        trace = posterior.trace(inputs)
        found = posterior.components(trace)
        if isinstance(found, Refusal):
            raise ValueError(str(found))
        if isinstance(predictor, Streamlined) and predictor.members == "matched" and len(found) > 1:
            found = [matched(found, posterior.network, posterior.likelihood)]
        self.posterior = posterior
        self.components = found
        self.covariance = predictor.covariance if isinstance(predictor, Streamlined) else "none"
        self.directions = predictor.directions if isinstance(predictor, Streamlined) else 1
        self.signs: int = getattr(predictor, "sketch", 0)
        if self.covariance == "per-head" and all(one.dense is not None for one in found):
            raise ValueError(
                "Streamlined(covariance='per-head') is for attentions with random values, and only the last linear "
                "layer is random here. Use how='streamlined'."
            )
        self.factors = [1.0] * len(found)  # of closed forms
        self.head: Head | None = None
        self.plan: Plan | None = None
        self.others: dict[frozenset[tuple[str, float]], OnePass] = {}
        carried = [one for one in found if one.dense is None]
        first = next((one for one in carried if one.columns), carried[0] if carried else None)
        self.way: Way = "moments" if first is None else self._choose(predictor, first, inputs, trace)
        self.passes = self._forward_passes()

    @property
    def layers(self) -> list[str]:
        """Return the names of the layers with Gaussian tensors, in their order."""
        return list(dict.fromkeys(layer_of(name) for one in self.components for name in one.variances))

    def scaled(self, scales: Mapping[str, float]) -> OnePass:
        """Return the predictor of the posterior whose layers' variances are multiplied by numbers."""
        _check_scales(scales, self.layers)
        key = frozenset(scales.items())
        if key not in self.others:
            made = copy.copy(self)
            made.components = [
                one.scaled({name: scales.get(layer_of(name), 1.0) for name in one.variances}) for one in self.components
            ]
            made.factors = [1.0 if one.dense is None else scales.get(one.dense.layer, 1.0) for one in self.components]
            made.passes = made._forward_passes()
            made.plan = None if self.plan is None else replace(self.plan, factors={}, sketches={})
            self.others = {key: made}  # the last one alone: each holds a copy of all variances
        return self.others[key]

    @property
    def differentiated(self) -> bool:
        """Whether the last prediction took backward passes, or derivatives of single functions."""
        return self.backward or any(one is not None and one.settings.derivatives for one in self.passes)

    @property
    def backward(self) -> bool:
        """Whether a prediction takes backward passes."""
        return self.way != "moments"

    @property
    def looped(self) -> bool:
        """Whether examples are looped over."""
        return self.backward and self.plan is not None and bool(self.plan.looped)

    @property
    def words(self) -> str:
        """Say which engine it is."""
        if self.components[0].dense is not None:
            return _CLOSED_FORM
        found = _WORDS[self.covariance if self.way == "moments" else self.way]
        if self.way == "principal" and self.directions > 1:
            found = found.replace("one backward pass for", f"{self.directions} backward passes for")
        shared = [next(iter(one.columns.values())).shape[0] for one in self.components if one.columns]
        return f"{found}, with {max(shared)} directions that all weights share" if shared else found

    # -- the engine -------------------------------------------------------------------------------------------------

    def _forward_passes(self) -> list[MomentsPass | None]:
        """Return what carries each component forward, where that is the engine."""
        carried = self.way == "moments"
        return [self._forward(one) if carried and one.dense is None else None for one in self.components]

    def _forward(self, component: Component) -> MomentsPass:
        first_order = self.posterior.law.first_order
        covariance, per_head = self.covariance == "full", self.covariance == "per-head"
        return MomentsPass(self.posterior, component, first_order=first_order, covariance=covariance, per_head=per_head)

    def _choose(self, predictor: Predictor, component: Component, inputs: Any, trace: Trace) -> Way:
        """Choose the engine.

        Variances that are carried forward count positions as (partly) independent, and networks add up positions whose
        noise comes from the same weights, layer after layer: most of the variance can be lost, and its order over
        examples. A backward pass is right for them, for one number of each example, and with a last linear layer that
        number gives the size of all logits' covariance. Where one number is all there is (a regression output, yes or
        no, two classes) a backward pass is exact to first order, and what is carried forward loses what units of a
        layer have in common. Of many classes those that are alike move together, which it does not know either.
        """
        engine = predictor.engine if isinstance(predictor, Streamlined) else "linearised"
        if component.columns and (engine == "moments" or self.covariance != "none"):
            raise ValueError(
                "Weights move together here, along directions that all layers share, and variances that are carried "
                "forward know nothing of that. Use how='streamlined' or how='linearised'."
            )
        if engine == "moments" or self.covariance != "none":
            return "moments"
        if trace.failure is not None:
            self.posterior.reference(inputs)  # if it is the inputs that are wrong, the network says so
            if engine == "auto" and not component.columns:
                return "moments"
            raise ValueError(
                f"A dry run of the network on copies of one row failed ({trace.failure}), so that it is unknown where "
                "its activations have their batch, which a backward pass must know. Use how='sampling'."
            )
        if engine == "linearised":
            self.plan = make_plan(self.posterior, component, inputs)
            return "linearised"
        posterior = self.posterior
        outputs, self.head = _head(posterior, trace)
        classes = posterior.likelihood.softmax_dim(outputs.ndim) is not None
        single = outputs.ndim <= 2 and (classes or outputs[0].numel() == 1)
        whole = single and classes and self.head is not None
        best: Way = "linearised" if not single else "principal" if whole else "margin"
        if engine == "margin" and not single:
            raise ValueError(
                "Streamlined(engine='margin') is for one decision or one number for each example, and the network's "
                f"output is {tuple(outputs.shape[1:])}. Use how='streamlined' or how='linearised'."
            )
        if (engine == "principal" or self.directions > 1) and not whole:
            raise ValueError(
                "Streamlined(engine='principal') is for classifiers whose logits come from a last nn.Linear, and so "
                "are several directions. Use how='streamlined' or how='linearised'."
            )
        if engine != "auto" or component.columns or self.directions > 1:
            self.plan = make_plan(posterior, component, inputs)
            return best if engine == "auto" else "margin" if engine == "margin" else "principal"
        with suppress(ValueError):  # a network that no backward pass can be planned for
            self.plan = make_plan(posterior, component, inputs)
        number = outputs[0].numel()
        alone = single and (number <= 1 + classes or (whole and number > MOST_CLASSES))
        if single and self.plan is not None and (alone or self.plan.positions) and not self.plan.looped:
            return best
        if self.plan is None:
            return "moments"
        try:
            self._forward(component).run(repeat_rows(slice_rows(inputs, 0, 1), 2))
        except (NoRuleError, ValueError):  # an operation that only derivatives are known of
            return best
        return "moments"

    # -- predictions ------------------------------------------------------------------------------------------------

    def moments(
        self, inputs: Any, *, scale: Scale = 1.0, input_variance: Tensor | None = None, views: Views = ONE
    ) -> list[OutputMoments]:
        """Return the outputs' moments for each component of the posterior, on each view."""
        if isinstance(scale, Mapping):
            return self.scaled(scale).moments(inputs, input_variance=input_variance, views=views)
        if input_variance is not None and not all(self.passes):
            raise ValueError(
                "Only Streamlined(engine='moments') takes an input_variance; this prediction is "
                f"{self.words.partition(':')[0]!r} and takes inputs as they are."
            )
        if input_variance is not None and len(views) > 1:
            raise ValueError(
                "The variance of inputs is that of one view. Give views='identity' with an input_variance."
            )
        likelihood, found = self.posterior.likelihood, []
        for index, view in enumerate(views):
            seen = view(inputs)
            for component, forward, factor in zip(self.components, self.passes, self.factors, strict=True):
                mean, variance, covariance = self._moments(component, forward, seen, input_variance)
                made = OutputMoments(
                    mean, variance, self.words, covariance, component.weight, component.part, index
                ).times(scale * factor)
                found.append(made.undone(view, likelihood, inputs))
        return found

    def _moments(
        self, component: Component, forward: MomentsPass | None, inputs: Any, input_variance: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return mean, and variance or covariance, of the outputs of one component."""
        posterior = self.posterior
        if component.dense is not None:
            patch = component.at_mean(posterior.network)
            return component.dense.gaussian(*last_features(posterior, component.dense.layer, inputs, patch))
        if forward is not None:
            return *forward(inputs, input_variance), None
        assert self.plan is not None
        if self.way == "principal":
            assert self.head is not None
            with self.head.watched():
                made = LinearisedPass(posterior, component, self.plan, inputs, signs=self.signs)
            return made.outputs, *principal_moments(made, component, self.head, self.directions)
        several = self.way == "linearised"
        made = LinearisedPass(posterior, component, self.plan, inputs, signs=self.signs, several=several)
        variances = margin_variances if self.way == "margin" else all_variances
        return made.outputs, variances(made, posterior.likelihood), None

    def predict(
        self,
        inputs: Any,
        *,
        num_draws: int | None,
        seed: int,
        scale: Scale = 1.0,
        input_variance: Tensor | None = None,
        views: Views = ONE,
    ) -> Prediction:
        """Return the prediction for a batch."""
        moments = self.moments(inputs, scale=scale, input_variance=input_variance, views=views)
        return prediction_of(self.posterior.likelihood, moments, num_draws=num_draws, seed=seed)


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to.

    >>> layer_of("encoder.0.weight")
    'encoder.0'
    """
    return name.rpartition(".")[0]


def one_pass_of(posterior: Posterior, predictor: Predictor, inputs: Any) -> OnePass:
    """Return the predictor of a posterior for such inputs, which is kept until the posterior changes."""
    memo, state = posterior.trace(inputs).memo, _state(posterior)
    known: tuple[Any, OnePass] | None = memo.get(predictor)
    if known is None or known[0] != state:
        known = memo[predictor] = (state, OnePass(posterior, predictor, inputs))
    return known[1]


def _head(posterior: Posterior, trace: Trace) -> tuple[Tensor, Head | None]:
    """Return outputs, of which only the shape is known, and the linear layer that makes them, if there is one."""
    outputs = posterior.read(trace.output)
    if trace.last_linear is None or outputs.ndim != 2 or not trace.is_last(outputs):
        return outputs, None
    module = posterior.network.get_submodule(trace.last_linear)
    assert isinstance(module, nn.Linear)
    return outputs, Head(trace.last_linear, module)


def _check_scales(scales: Mapping[str, float], layers: Sequence[str]) -> None:
    """Raise where a layer has no scale, or a scale is no such number."""
    unknown = [layer for layer in scales if layer not in layers]
    if unknown:
        raise ValueError(f"There is no layer {unknown[0]!r} with Gaussian weights; there are {list(layers)}.")
    if any(not 0 <= scale < math.inf for scale in scales.values()):
        raise ValueError(f"Scales of variances must be at least 0 and finite, but they are {dict(scales)}.")


def _state(posterior: Posterior) -> tuple[Any, ...]:
    """Return what changes when a tensor of the posterior does, or what its outputs mean."""
    return (id(posterior.likelihood), *state_of((*posterior.parameters(), *posterior.buffers())))
