"""What one posterior gets wrong, and what another says of the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.evaluation.evaluation import Evaluation
from bayesify.likelihoods.prediction import ClassificationPrediction

__all__ = ["SURE", "Mistakes", "find_mistakes"]

SURE = 0.99


@dataclass(frozen=True)
class Mistakes:
    """What a network gets wrong, the answers that it is surest of first, and what a posterior says of the same inputs.

    Attributes:
        rows: Their places among the test examples, (M,).
        targets: What they are, (M,).
        labels: What the network says, (M,).
        before: The probability that the network gives to its answers, (M,).
        after: The probability that the posterior gives to these same answers, (M,).
        prediction: The posterior's, of the mistakes.
    """

    rows: Tensor
    targets: Tensor
    labels: Tensor
    before: Tensor
    after: Tensor
    prediction: ClassificationPrediction

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.rows)

    def sure(self, level: float = SURE) -> tuple[int, int]:
        """Return how many of the answers have at least a probability, before and after."""
        return int((self.before >= level).sum()), int((self.after >= level).sum())


def find_mistakes(plain: Evaluation, other: Evaluation) -> Mistakes | None:
    """Return the mistakes of one evaluation as another sees them; None where there are none, or not one of an example.

    Args:
        plain: Whose mistakes.
        other: Of the same examples in the same order.
    """
    before, after = plain.prediction, other.prediction
    if not (isinstance(before, ClassificationPrediction) and isinstance(after, ClassificationPrediction)):
        return None
    if plain.targets.ndim != 1 or before.label.ndim != 1 or not torch.equal(plain.targets, other.targets):
        return None
    wrong = (before.counted(plain.targets) & ~before.correct(plain.targets)).nonzero().flatten()
    if not len(wrong):
        return None
    rows = wrong[before.confidence[wrong].argsort(descending=True, stable=True)]
    labels, seen = before.label[rows], after[rows]
    assert isinstance(seen, ClassificationPrediction)
    believed = seen.probs.gather(-1, labels[:, None])[:, 0]
    return Mistakes(rows, plain.targets[rows], labels, before.confidence[rows], believed, seen)
