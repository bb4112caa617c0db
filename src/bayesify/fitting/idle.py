"""Does each member of an average know anything? One that was not trained hides in it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.likelihoods import Likelihood

__all__ = ["Draws"]

ERRORS = 3  # standard errors of an accuracy
FEWEST = 50  # labels, below which nothing is said


class Draws:
    """What each draw says alone of labels, beside the constant answer that suits them best.

    The best constant answer is the classes' frequencies f: its NLL is their entropy -sum_c f_c ln f_c, its accuracy
    max_c f_c. A draw is idle if its NLL is not below that and its accuracy is not above it by three standard errors
    (an overconfident one has the former alone), while the best draw's is above both by as much: else labels cannot be
    known, or there are too few to tell.

    Example:
        >>> from bayesify import Categorical
        >>> labels = torch.arange(60) % 3
        >>> sure, nothing = 5 * torch.eye(3)[labels], torch.zeros(60, 3)
        >>> draws = Draws()
        >>> draws.add(Categorical(), [sure, nothing, sure], labels)
        >>> draws.idle()
        [1]
    """

    def __init__(self) -> None:
        self.nll = self.right = self.labels = torch.zeros(0, dtype=torch.float64)

    def add(self, likelihood: Likelihood, outputs: Sequence[Tensor], targets: Tensor) -> None:
        """Add the outputs of all draws for a batch; numbers that are no labels are not counted."""
        marked = likelihood.marked(targets)
        if len(outputs) < 2 or marked.is_floating_point():
            return
        found = [_alone(likelihood, one, targets) for one in outputs]
        nll, right = (torch.tensor(values, dtype=torch.float64) for values in zip(*found, strict=True))
        labels = marked[marked >= 0].long().flatten().bincount().double().cpu()
        if len(self.nll):
            longest = max(len(labels), len(self.labels))
            nll, right = nll + self.nll, right + self.right
            labels = _padded(labels, longest) + _padded(self.labels, longest)
        self.nll, self.right, self.labels = nll, right, labels

    def idle(self) -> list[int]:
        """Return which draws know no more than the classes' frequencies, where another one does."""
        count = float(self.labels.sum())
        if count < FEWEST or not bool(self.right.isfinite().all()):
            return []
        nll, accuracy = self._constant()
        margin = ERRORS * math.sqrt(max(accuracy * (1 - accuracy), 1 / count) / count)
        right = self.right / count
        knows = (self.nll / count < nll) | (right > accuracy + margin)
        behind = (right.max() > accuracy + margin) & (right < right.max() - margin)
        return (~knows & behind).nonzero()[:, 0].tolist()

    def warn(self) -> None:
        """Warn of idle draws."""
        idle = self.idle()
        if not idle:
            return
        count = float(self.labels.sum())
        nll, accuracy = self._constant()
        which, each = ", ".join(map(str, idle)), torch.stack([self.nll, 100 * self.right], 1) / count
        said, best = each[idle[0]].tolist(), float(each[:, 1].max())
        warnings.warn(
            f"Of {len(each)} draws, counted from 0, draw {which} answers no better than a constant would: its NLL "
            f"alone is {said[0]:.3f} and its accuracy {said[1]:.1f} %. The classes' frequencies give {nll:.3f} and "
            f"{100 * accuracy:.1f} %, the best draw is right in {best:.1f} %. It did not learn, and blurs the average: "
            "fit again with a lower learning rate, with clip_norm=1.0, or with another seed.",
            stacklevel=5,  # the call of fit
        )

    def _constant(self) -> tuple[float, float]:
        share = self.labels / self.labels.sum()
        return float(torch.special.entr(share).sum()), float(share.max())


def _alone(likelihood: Likelihood, output: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return the summed NLL and the number of right answers of one draw; NaN where nothing can be right."""
    total, _ = likelihood.total_nll(likelihood.mixture_log_prob([output], targets), targets)
    right = likelihood.from_samples(output[None]).correct(likelihood.marked(targets))
    return float(total), math.nan if right is None else float(right.sum())


def _padded(counts: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(counts, (0, size - len(counts)))
