"""The loss of a posterior as a module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bayesify._core.processes import num_processes
from bayesify.fitting.shards import check_divided, is_divided
from bayesify.laws import LossTerms, Posterior, require_posterior
from bayesify.methods import OODRegularizer

__all__ = ["Objective"]


class Objective(nn.Module):
    """The loss of a posterior as a module: its forward pass takes a batch and returns the loss.

    What trains a module in several processes (`DistributedDataParallel`, `fully_shard`, Accelerate's `prepare`) looks
    at the forward pass of what it wraps, so it wraps this. Parameters and buffers are the posterior's, under the
    prefix `posterior.`. Every parameter that can learn takes part in the backward pass of several processes, so that
    none has to be looked for (`find_unused_parameters`) where a step trains one member of many.

    Args:
        posterior: From `convert`; it is trained in place.
        num_data: The number n of training examples, of all processes together.
        regularizer: How OOD inputs are asked to be uncertain; None takes the method's.

    Attributes:
        terms: The terms of the last loss by name, without gradients, in mean nats per example.

    Example:
        >>> from bayesify import BayesAdapter, convert
        >>> objective = Objective(convert(nn.Linear(4, 3), BayesAdapter()), num_data=6)
        >>> loss = objective((torch.randn(6, 4), torch.arange(6) % 3))
        >>> loss.backward()
        >>> list(objective.terms), bool(loss == objective.terms.total)
        (['nll', 'kl'], True)
    """

    def __init__(self, posterior: Posterior, *, num_data: int, regularizer: OODRegularizer | None = None) -> None:
        super().__init__()
        require_posterior(posterior)
        if not isinstance(num_data, int) or num_data < 1:
            raise ValueError(f"num_data is the number of training examples, a whole number, but it is {num_data!r}.")
        posterior.require_method().learning(posterior)  # chains are parameters, which wrappers must find
        self.posterior = posterior
        self.num_data = num_data
        self.regularizer = regularizer
        self.terms = LossTerms()
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.members = 1  # how many have their mean loss taken

    def forward(self, batch: Any, ood: Any = None) -> Tensor:
        """Return the loss of a batch.

        Where a `Learner` trains all members together, that is the sum of theirs, so that each has the gradient that it
        would have alone.

        Args:
            batch: `(inputs, targets)`, or a mapping with a target key; as many of each in every process.
            ood: OOD inputs, without targets.
        """
        posterior = self.posterior
        divided = is_divided(self)
        if divided:
            check_divided(self, posterior)
        try:
            with self.context():
                terms = posterior.loss(batch, num_data=self.num_data, ood=ood, regularizer=self.regularizer)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise ValueError(
                f"{type(posterior.method).__name__} reads weights beside the passes of their layers, as for its "
                "divergence, and there fully_shard of a module inside of the network has divided them again. Call "
                "fully_shard(objective) alone, or DistributedDataParallel(objective)."
            ) from error
        self.terms = LossTerms({name: value.detach() for name, value in terms.items()})
        total = terms.total if self.members == 1 else terms.total * self.members
        if not torch.is_grad_enabled():
            return total
        posterior.unfinished = not posterior.require_method().learns_by_loss or divided
        if num_processes() == 1:
            return total
        attached: Tensor = _Attached.apply(total, *(p for p in posterior.parameters() if p.requires_grad))  # type: ignore[no-untyped-call]
        return attached


class _Attached(torch.autograd.Function):
    """A number, with parameters in its graph that get no gradient from it.

    Processes wait for a message of each parameter, also of those that a step does not use.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, *parameters: Tensor) -> Tensor:
        ctx.number = len(parameters)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*grads, *[None] * ctx.number)
