"""Recursive Laplace: the posterior of the data so far is the prior of the data to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from bayesify._core.modes import modes_kept
from bayesify._core.trees import to_device
from bayesify.fitting.processes import add_up
from bayesify.laws import LaplaceLaw, Pass, Posterior
from bayesify.methods import Laplace
from bayesify.methods.laplace_survey import LaplaceSurvey

__all__ = ["Recursive"]


class Recursive:
    """New data for a Laplace approximation N(w, P^-1).

    With g the gradient of the new data's -ln p and H their curvature, both at the present weights v, a Newton step is
    v <- v - (P + H)^-1 (g + P (v - w)). After the last one the precision is P + H at the new weights. That is exact
    where -ln p is quadratic, as for a linear regression with known noise, if w was the mode of what P came from.
    Kronecker factors are added, as a pass over all data would; the product of sums is not the sum of products.

    Args:
        posterior: Of `Laplace`, complete.
        num_data: How many new examples there are; None takes what is seen.
    """

    def __init__(self, posterior: Posterior, num_data: int | None) -> None:
        self.posterior, self.num_data = posterior, num_data
        self.law = cast(LaplaceLaw, posterior.law)
        self.law.require_complete()
        method = cast(Laplace, posterior.method)
        self.survey = LaplaceSurvey(
            posterior, 1, curvature=method.curvature, samples=method.mc_labels, prior=None, seed=method.seed
        )
        self.names = list(self.law.names)
        self.start = {name: self.law.tensor(name).detach().clone() for name in self.names}
        self.before = [tensor.clone() for tensor in self.law.curvature_tensors()]
        self.counts = [tensor.clone() for tensor in self._counts()]
        self.law.reopen_curvature()
        self.sums = [tensor.clone() for tensor in self.law.curvature_tensors()]
        self._put(self.before)

    def run(self, loader: Iterable[Any], steps: int, progress: Callable[[Iterable[Any]], Iterable[Any]]) -> None:
        """Make so many Newton steps, and end with the curvature at the new weights: a pass for each, and one more."""
        law = self.law
        try:
            for _ in range(steps):
                pull = self._pull()
                gradient = self._look(progress(loader), with_gradient=True)
                change = law.times_precision({name: gradient[name] + pull[name] for name in self.names}, -1)
                self._move({name: law.tensor(name) - change[name] for name in self.names})
                self._put(self.before)
            old = self._old_likelihood()
            self._look(progress(loader), with_gradient=False)
        except BaseException:
            self._move(self.start)
            self._put(self.before)
            for tensor, count in zip(self._counts(), self.counts, strict=True):
                tensor.copy_(count)
            law.complete.fill_(True)
            law.refresh()
            raise
        law.log_likelihood.add_(old)
        if (variance := self.posterior.likelihood.single_variance()) is not None:
            law.square_sum.sub_(2 * variance * old)
        law.refresh()

    @torch.no_grad()
    def _look(self, batches: Iterable[Any], *, with_gradient: bool) -> dict[str, Tensor]:
        """Add the new data's curvature to the old, and return their gradient."""
        law, posterior = self.law, self.posterior
        for tensor in (*law.curvature_tensors(), *self._counts()):
            tensor.zero_()
        gradient = {name: torch.zeros_like(self.start[name]) for name in self.names}
        device = next(posterior.parameters()).device
        with modes_kept(posterior):
            posterior.eval()
            for batch in batches:
                batch = to_device(batch, device)
                self.survey.look(batch)
                if with_gradient:
                    self._add_gradient(batch, gradient)
        sums = [*self.survey.sums(), *gradient.values()]
        add_up(sums)
        if not law.seen.item():
            raise ValueError("The loader gave no batch. Check its data set, batch size and drop_last.")
        factor = 1.0 if self.num_data is None else self.num_data / law.seen.item()
        for tensor in sums:
            tensor.mul_(factor)
        for tensor, known in zip(law.curvature_tensors(), self.sums, strict=True):
            tensor.add_(known)
        for tensor, known in zip(self._counts(), self.counts, strict=True):
            tensor.add_(known)
        law.complete_curvature(1.0)
        law.complete.fill_(True)
        law.refresh()
        return gradient

    def _add_gradient(self, batch: Any, gradient: dict[str, Tensor]) -> None:
        posterior, weights = self.posterior, [self.law.tensor(name) for name in self.names]
        inputs, targets = posterior.split_batch(batch)
        with torch.enable_grad():
            output = posterior.outputs(inputs, Pass("mean"))
            loss = -posterior.likelihood.log_prob(output, targets).sum()
            found = torch.autograd.grad(loss, weights, allow_unused=True)
        for name, part in zip(self.names, found, strict=True):
            if part is not None:
                gradient[name] += part

    def _pull(self) -> dict[str, Tensor]:
        """Return P (v - w), the gradient of the old posterior."""
        return self.law.times_precision({name: self.law.tensor(name) - self.start[name] for name in self.names})

    @torch.no_grad()
    def _old_likelihood(self) -> float:
        """Return by how much ln p of the old data has changed, to second order around the old mode."""
        away = {name: self.law.tensor(name) - self.start[name] for name in self.names}
        pull = self._pull()
        change = -0.5 * sum(float((pull[name] * away[name]).sum()) for name in self.names)
        for name in self.names:
            grown = self.law.tensor(name).double().square().sum() - self.start[name].double().square().sum()
            change += 0.5 * float(self.law._precision_of(name)) * float(grown)
        return change

    def _counts(self) -> list[Tensor]:
        law = self.law
        return [law.seen, law.log_likelihood, law.square_sum, law.targets]

    @torch.no_grad()
    def _move(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self.law.tensor(name).copy_(tensor)

    @torch.no_grad()
    def _put(self, tensors: list[Tensor]) -> None:
        for tensor, known in zip(self.law.curvature_tensors(), tensors, strict=True):
            tensor.copy_(known)
