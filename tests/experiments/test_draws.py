"""Curves over the number of draws, against a loop."""

import math

import pytest
import torch

from experiments.draws import draws_curve


@pytest.mark.parametrize("shape", [(9,), (3, 4)])
def test_curves_equal_a_loop(shape: tuple[int, ...]):
    torch.manual_seed(0)
    samples = torch.randn(5, *shape, 4, dtype=torch.float64).mul(2).softmax(-1)
    labels = torch.randint(4, shape)
    curve = draws_curve(samples, labels)
    flat, wanted = samples.reshape(5, -1, 4), labels.reshape(-1)
    for draws in range(5):
        for accuracy, nll, chosen in (
            (curve.accuracy, curve.nll, range(draws + 1)),
            (curve.single_accuracy, curve.single_nll, [draws]),
        ):
            right, loss = 0, 0.0
            for i, label in enumerate(wanted.tolist()):
                mean = [sum(float(flat[s, i, c]) for s in chosen) / len(chosen) for c in range(4)]
                right += max(range(4), key=mean.__getitem__) == label
                loss -= math.log(mean[label])
            assert float(accuracy[draws]) == pytest.approx(right / len(wanted), abs=1e-12)
            assert float(nll[draws]) == pytest.approx(loss / len(wanted), abs=1e-12)


def test_what_is_wrong_is_said():
    probs = torch.full((2, 3, 4), 0.25)
    with pytest.raises(ValueError, match="must be \\(S, N"):
        draws_curve(probs, [0, 1])
    with pytest.raises(ValueError, match="classes from 0 to 3"):
        draws_curve(probs, [0, 1, 4])
