"""What a network computes before its last layer, for each draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.laws import Key, Posterior
from bayesify.likelihoods import Stream
from bayesify.likelihoods.prediction import FeaturePrediction

__all__ = ["FeatureStream", "Features", "check_output", "evaluate_draw", "features_read"]


class Features:
    """The input of one module in the last pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: Tensor | None = None

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the first tensor that the module is given."""
        del module
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.seen = tensors[0] if tensors else None

    def of(self, outputs: Tensor) -> Tensor:
        """Return the features (S, B, ...) that belong to outputs (S, B, ...)."""
        if self.seen is None:
            raise ValueError(f"Module {self.name!r} was not called with a tensor, so it has no features.")
        draws, rows = outputs.shape[:2]
        seen = self.seen
        if len(seen) == draws * rows:
            return seen.view(draws, rows, *seen.shape[1:])
        if len(seen) == rows:  # nothing before it is random
            return seen.expand(draws, *seen.shape)
        raise ValueError(
            f"The input of module {self.name!r} has {len(seen)} rows for {rows} examples: its first dimension must be "
            "the batch. Name another module: output='features:<name>'."
        )


def check_output(output: str) -> None:
    """Refuse an unknown kind of output."""
    if output not in ("prediction", "features") and not output.startswith("features:"):
        raise ValueError(f"output must be 'prediction', 'features' or 'features:<module>', but it is {output!r}.")


@contextmanager
def features_read(posterior: Posterior, output: str, inputs: Any) -> Iterator[Features]:
    """Look at the input of a module in the passes inside.

    Args:
        posterior: The posterior.
        output: "features", the input of the linear layer that is called last; or "features:<module>".
        inputs: A batch, with whose first example the layer is found.
    """
    name = output.partition(":")[2] or _last_linear(posterior, inputs)
    try:
        module = posterior.network.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"The network has no module {name!r}; see network.named_modules().") from error
    features = Features(name)
    handle = module.register_forward_pre_hook(features.look, with_kwargs=True)
    try:
        yield features
    finally:
        handle.remove()


def evaluate_draw(posterior: Posterior, inputs: Any, key: Key, features: Features | None) -> Tensor:
    """Return one draw's outputs, or its features if they are read, (B, ...)."""
    outputs = posterior.evaluate(inputs, [key])
    return (outputs if features is None else features.of(outputs))[0]


def _last_linear(posterior: Posterior, inputs: Any) -> str:
    trace = posterior.trace(inputs)
    if trace.last_linear is None:
        if trace.failure is not None:
            posterior.reference(inputs)  # if it is the inputs that are wrong, the network says so
        raise ValueError(
            "The network calls no linear layer whose input could be its features"
            + (". " if trace.failure is None else f", as far as a dry run of it could tell ({trace.failure}). ")
            + "Name the module whose input they are: output='features:<name>'."
        )
    return trace.last_linear


class FeatureStream(Stream):
    """Mean and variance of draws' features, one group of draws at a time."""

    def __init__(self, features: Features, keep_samples: bool) -> None:
        self.features = features
        self.samples: list[Tensor] | None = [] if keep_samples else None
        self.count = 0
        self.mean = self.spread = torch.zeros(())

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        """Add the features of the pass that gave these outputs."""
        del part, view
        values = self.features.of(outputs)
        if self.samples is not None:
            self.samples.append(values.clone())
        number, mean = len(values), values.mean(0)
        spread = (values - mean).square().sum(0)
        if self.count:
            step, total = mean - self.mean, self.count + number
            mean = self.mean + step * (number / total)
            spread = self.spread + spread + step.square() * (self.count * number / total)
        self.mean, self.spread = mean, spread
        self.count += number

    def result(self) -> FeaturePrediction:
        """Return the average."""
        samples = None if self.samples is None else torch.cat(self.samples)
        return FeaturePrediction(self.mean, self.spread / self.count, samples)
