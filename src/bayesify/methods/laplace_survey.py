"""The pass over the data that collects the curvature for Laplace, and the choice of its prior."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from bayesify._core.trees import batch_rows, call
from bayesify.curvature import (
    Call,
    Curvature,
    add_squares,
    add_squares_alone,
    calls_kept,
    columns,
    gradients,
    output_hessian,
    position_gradients,
    position_inputs,
    ready,
)
from bayesify.laws import DiagonalLaw, Key, KroneckerLaw, LaplaceLaw, LastLayerLaw, Pass, Posterior, generator_for
from bayesify.laws.gaussian.law import make_plan
from bayesify.laws.gaussian.site import Site
from bayesify.laws.laplace import choose_on_validation, last_features, prior_without_effect
from bayesify.laws.tensors import batch_norms
from bayesify.methods.method import Survey

__all__ = ["LaplaceSurvey"]


class LaplaceSurvey(Survey):
    """Collects the curvature of a posterior, and chooses its prior.

    Args:
        posterior: Whose buffers are filled.
        num_data: The number of training examples, which what is seen stands for.
        curvature: "ggn" or "fisher".
        samples: Labels to draw; None is exact.
        prior: How the prior precision is chosen; None keeps it.
        seed: Of drawn labels and draws.
    """

    def __init__(
        self,
        posterior: Posterior,
        num_data: int,
        *,
        curvature: Curvature,
        samples: int | None,
        prior: Literal["auto", "marginal-likelihood", "validation"] | None,
        seed: int,
    ) -> None:
        self.posterior = posterior
        self.law = cast(LaplaceLaw, posterior.law)
        self.num_data = num_data
        self.curvature = curvature
        self.samples = samples
        self.prior = prior
        self.seed = seed
        self._sites: dict[str, Site] | None = None
        self._others: list[str] = []

    def begin(self, val_loader: Iterable[Any] | None) -> None:
        """Refuse what has no curvature per example, and a search without data."""
        if self.prior == "validation" and val_loader is None:
            raise ValueError(
                "prior_precision='validation' is chosen on validation data: fit(..., val_loader=loader), or use "
                "prior_precision='marginal-likelihood', which needs none."
            )
        likelihood = self.posterior.likelihood
        if likelihood.single_variance() is None and likelihood.at_start():
            warnings.warn(
                f"The likelihood {likelihood} has parameters that Laplace does not learn, and they are where they "
                "started. Set them first, posterior.likelihood.learn(outputs, targets), with the network's outputs on "
                "training data; or train the network with them: fit(..., epochs=...).",
                stacklevel=2,
            )
        network = self.posterior.network
        tracked = batch_norms(network).values()
        for name, module in network.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in tracked:
                raise ValueError(
                    f"Module {name!r} normalises by the statistics of the batch, so that an example has no curvature "
                    "of its own. Give it running statistics (track_running_stats=True) and train those first."
                )

    def reset(self) -> None:
        """Forget the data."""
        self.law.reset_curvature()

    # -- the pass ---------------------------------------------------------------------------------------------------

    def look(self, batch: Any) -> None:
        """Add the curvature of a batch."""
        posterior = self.posterior
        inputs, targets = posterior.split_batch(batch)
        if self.law.layer is not None:
            output = self._look_at_last_layer(cast(LastLayerLaw, self.law), inputs, targets)
        else:
            output = self._look_at_layers(inputs, targets)
        self._count(output.detach(), targets, batch_rows(inputs))

    @torch.no_grad()
    def _count(self, output: Tensor, targets: Tensor, rows: int) -> None:
        law, likelihood = self.law, self.posterior.likelihood
        log_prob = likelihood.log_prob(output, targets)
        if not bool(log_prob.isfinite().all()):
            raise ValueError(
                "ln p of a training example is not finite, so there is no curvature. Check the inputs, the targets "
                "and the network's weights for values that are not finite."
            )
        law.log_likelihood.add_(log_prob.sum())
        law.seen.add_(rows)
        if (residuals := likelihood.residuals(output, targets)) is not None:
            law.square_sum.add_(residuals.square().sum())
            law.targets.add_(residuals.numel())

    @torch.no_grad()
    def _look_at_last_layer(self, law: LastLayerLaw, inputs: Any, targets: Tensor) -> Tensor:
        posterior = self.posterior
        output, features = last_features(posterior, law.layer, inputs)
        posterior.likelihood.check(output, targets)
        count = law.outputs_count
        if self.curvature == "ggn":
            hessians = output_hessian(posterior.likelihood, output, targets).reshape(-1, count, count)
            law.add_hessians(features.flatten(0, 1), hessians.to(features.dtype))
        else:
            (score,) = columns(posterior.likelihood, output, targets, curvature="fisher")
            law.add_gradients(features, score.reshape(*features.shape[:2], count))
        return output

    def _look_at_layers(self, inputs: Any, targets: Tensor) -> Tensor:
        posterior, law = self.posterior, cast(KroneckerLaw, self.law)
        sites = self._plan(inputs)
        rows = batch_rows(inputs)
        sums = law.curvature.as_dict()
        blocks = self._blocks
        with torch.enable_grad():
            with calls_kept(posterior.network, sites, rows) as calls:
                output = posterior.outputs(inputs, Pass("mean"))
            posterior.likelihood.check(output, targets)
            factored = [one for one in calls if one.site.random.get("weight") in blocks]
            squared = [one for one in calls if any(name in sums for name in one.site.random.values())]
            for one in factored:
                for patch in position_inputs(one):
                    law.add_inputs(one.site.random["weight"], patch)
            for column in self._columns(output.detach(), targets, "batch"):
                grads = gradients(output, calls, column)
                self._add(law, calls, grads, factored, squared)
            output = output.detach()
            if self._others:
                self._look_at_others(inputs, targets, sums, rows)
        return output

    def _add(
        self,
        law: KroneckerLaw,
        calls: list[Call],
        grads: list[Tensor | None],
        factored: list[Call],
        squared: list[Call],
    ) -> None:
        of = {id(one): grad for one, grad in zip(calls, grads, strict=True)}
        add_squares(squared, [of[id(one)] for one in squared], law.curvature.as_dict())
        for one in factored:
            grad = of[id(one)]
            if grad is not None:
                law.add_gradients(one.site.random["weight"], position_gradients(one, grad))

    def _look_at_others(self, inputs: Any, targets: Tensor, sums: dict[str, Tensor], rows: int) -> None:
        """Take parameters that no layer's rule covers, each example alone."""
        posterior = self.posterior
        parameters = {name: posterior.network.get_parameter(name) for name in self._others}
        with _learning(parameters.values()):
            add_squares_alone(
                lambda some: posterior.outputs(some, Pass("mean")),
                inputs,
                lambda output, part: self._columns(output, targets[part], f"example {part.start}"),
                parameters,
                sums,
                rows,
            )

    def _columns(self, output: Tensor, targets: Tensor, which: str) -> Iterator[Tensor]:
        generator = None
        if self.samples is not None:  # a function of how far the pass is, so that it can go on where it was
            generator = generator_for(Key(self.seed, int(self.law.seen)), which, output.device)
        return columns(
            self.posterior.likelihood,
            output,
            targets,
            curvature=self.curvature,
            samples=self.samples,
            generator=generator,
        )

    @property
    def _blocks(self) -> dict[str, Any]:
        return getattr(self.law, "blocks", {})

    def _plan(self, inputs: Any) -> dict[str, Site]:
        """Find out, from the first batch, how each layer is called; the parameters that are left go to `_others`."""
        if self._sites is not None:
            return self._sites
        network, law = self.posterior.network, self.law
        sites, others = ready(make_plan(network, law.names, self.posterior.trace(inputs)), network)
        lost = [name for name in self._blocks if name in others]
        if lost:
            layer = self._blocks[lost[0]].layer
            raise ValueError(
                f"Layer {layer!r} has no Kronecker factors: its weight is read outside it, or it acts on something "
                f"without a batch. Exclude it, convert(..., exclude={layer!r}), or use structure='diagonal'."
            )
        arguments = call(lambda *args, **kwargs: (args, kwargs), inputs)
        sums = cast(DiagonalLaw, law).curvature.as_dict()
        self._sites, self._others = sites, _used(network, [name for name in others if name in sums], arguments)
        return sites

    def sums(self) -> list[Tensor]:
        """Return the curvature's, and those beside it."""
        law = self.law
        return [*law.curvature_tensors(), law.seen, law.log_likelihood, law.square_sum, law.targets]

    # -- the prior --------------------------------------------------------------------------------------------------

    def end(self, val_loader: Iterable[Any] | None) -> None:
        """Finish the curvature and choose the prior."""
        self.law.finish_curvature(self.num_data)
        self.law.maximise_evidence(fixed_precision=self.prior is None)
        if val_loader is not None and self.prior in ("auto", "validation"):
            choose_on_validation(self.posterior, val_loader, seed=self.seed)
        if self.prior is not None and (sentence := prior_without_effect(self.law)):
            warnings.warn(sentence, stacklevel=6)  # the call of fit

    def tolerated_rise(self) -> float:
        """Return twice what the curvature promises, gamma / 2n nats for gamma parameters that the data determine.

        The mean loss of draws of N(w, H^-1) is that at w plus tr(H (H + delta)^-1) / 2n, as long as it is quadratic.
        """
        return max(super().tolerated_rise(), self.law.determined_parameters() / self.num_data)


@contextmanager
def _learning(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let gradients reach parameters for a while."""
    listed = list(parameters)
    before = [parameter.requires_grad for parameter in listed]
    try:
        for parameter in listed:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in zip(listed, before, strict=True):
            parameter.requires_grad_(flag)


def _used(network: nn.Module, names: list[str], arguments: Any) -> list[str]:
    """Return the parameters that the network reads at all: the others have no curvature, and cost no pass."""
    if not names:
        return []
    parameters = {name: network.get_parameter(name) for name in names}
    found: list[Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(value.sum())
        elif isinstance(value, dict):
            for inner in value.values():
                look(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                look(inner)

    with torch.enable_grad(), _learning(parameters.values()):
        look(network(*arguments[0], **arguments[1]))
        if not found:
            return []
        grads = torch.autograd.grad(torch.stack(found).sum(), list(parameters.values()), allow_unused=True)
    return [name for name, grad in zip(names, grads, strict=True) if grad is not None]
