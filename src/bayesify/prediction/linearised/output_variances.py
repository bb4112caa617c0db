"""Which variances a linearised pass is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bayesify.likelihoods import Likelihood
from bayesify.prediction.linearised.linearisation import LinearisedPass
from bayesify.prediction.outputs import class_position, independent_variances

__all__ = ["all_variances", "margin_variances"]


def all_variances(found: LinearisedPass, likelihood: Likelihood) -> Tensor:
    """Return the variance of every output, by one backward pass each; of logits, after centring over classes.

    Softmax does not see a shift of all logits, so that the variance of centred logits is what counts, and it depends on
    covariances that single logits' variances do not show. It is returned as that of independent logits.
    """
    outputs = found.outputs
    classes = class_position(likelihood, outputs)
    event = outputs.shape[1:]
    columns = list(_basis(event, None if classes is None else classes % outputs.ndim - 1, outputs))
    values = []
    for index, column in enumerate(columns):
        values.append(found.variance(column.expand_as(outputs), last=index == len(columns) - 1))
    variance = torch.stack(values, -1).view(outputs.shape[0], *event)
    if classes is None:
        return variance
    return independent_variances(variance.movedim(classes, -1)).movedim(-1, classes)


def _basis(event: torch.Size, classes: int | None, like: Tensor) -> Iterator[Tensor]:
    """Yield the function of an example's outputs that picks each of them, or each centred logit."""
    for index in range(event.numel()):
        column = torch.zeros(event, dtype=like.dtype, device=like.device)
        column.view(-1)[index] = 1
        yield column if classes is None else column - column.mean(classes, keepdim=True)


def margin_variances(found: LinearisedPass, likelihood: Likelihood) -> Tensor:
    """Return logits' variances from one backward pass: equal for all classes, right for the top two's difference.

    With independent logits of variance v, the difference of two has 2 v. Regression with one output is exact.
    """
    outputs = found.outputs
    if class_position(likelihood, outputs) is None:
        return found.variance(torch.ones_like(outputs), last=True).view(-1, *(1,) * (outputs.ndim - 1))
    top = outputs.topk(2, -1).indices
    margin = torch.zeros_like(outputs).scatter_(1, top[:, :1], 1.0).scatter_(1, top[:, 1:], -1.0)
    return (found.variance(margin, last=True) / 2)[:, None].expand_as(outputs)
