"""What every function accepts, and how it refuses the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bayesify import measure

LABELLED: list[Callable[..., Any]] = [
    measure.accuracy,
    measure.nll,
    measure.brier,
    measure.ece,
    measure.adaptive_ece,
    measure.classwise_ece,
    measure.reliability,
]

BAD_PROBLEMS = [
    ([[0.5, 0.5]], [0, 1], "labels have shape"),
    ([[0.5, 0.5]], [[0, 1]], "labels have shape"),
    ([[0.5, 0.5]], [2], "labels go from 2 to 2 but there are 2 classes"),
    ([[0.5, 0.5]], [-1], "ignore_index"),
    ([[0.5, 0.5]], [0.0], "labels.long"),
    ([[0.5, 0.5]], [-100], "at least one labelled position"),
    ([[0.5, 0.6]], [0], "softmax"),
    ([[1.5, -0.5]], [0], "negative"),
    ([[math.nan, 0.5]], [0], "probs contains NaN"),
    ([[math.inf, 0.5]], [0], "infinite"),
    ([[1.0]], [0], "one class only"),
    (0.5, 1, "has shape"),
    ([1.2], [1], "sigmoid"),
    ([-0.2], [1], "sigmoid"),
    ([], [], "probs is empty"),
    ([[0.5, 0.5], [1.0]], [0, 1], "equal lengths"),
    (["half"], [0], "cannot be read as numbers"),
    (torch.tensor([[0.5 + 0j, 0.5]]), [0], "complex"),
]


@pytest.mark.parametrize("function", LABELLED)
@pytest.mark.parametrize(("probs", "labels", "message"), BAD_PROBLEMS)
def test_bad_problems(function: Callable[..., Any], probs: object, labels: object, message: str) -> None:
    """Every labelled function refuses every bad problem with the same sentence."""
    with pytest.raises(ValueError, match=message):
        function(probs, labels)


@pytest.mark.filterwarnings("error")
def test_containers_and_precisions_agree() -> None:
    """Tensors, arrays (reversed, read-only) and lists give one number, without a warning."""
    probs = torch.tensor([[0.875, 0.125], [0.25, 0.75], [0.5, 0.5]], requires_grad=True)
    array = probs.detach().numpy()
    frozen = array.astype(np.float64)
    frozen.setflags(write=False)
    labels = np.array([0, 1, 1], dtype=np.int32)
    expected = -(math.log(0.875) + math.log(0.75) + math.log(0.5)) / 3
    cases: list[tuple[Any, Any]] = [
        (probs, torch.tensor([0, 1, 1], dtype=torch.uint8)),
        (probs.to(torch.bfloat16), torch.tensor([False, True, True])),
        (array[::-1], labels[::-1]),
        (frozen, labels),
        (array.tolist(), labels.tolist()),
    ]
    for values, index in cases:
        assert measure.nll(values, index) == pytest.approx(expected, rel=1e-14)
        assert isinstance(measure.nll(values, index), float)


def test_lists_keep_double_precision() -> None:
    """A Python float is not rounded to float32 on the way."""
    assert measure.rmse([0.1], [0.0]) == 0.1
    assert measure.entropy([[0.1, 0.9]]).item() == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9), rel=1e-15)


def test_rounded_probabilities_are_accepted() -> None:
    """The softmax of many half-precision logits passes; a sum off by a percent does not."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 1000, generator=generator)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        probs = logits.softmax(-1).to(dtype)
        assert measure.accuracy(probs, probs.argmax(-1)) == 1
    with pytest.raises(ValueError, match=r"off by up to 0\.01"):
        measure.accuracy([[0.5, 0.51]], [0])


def test_every_public_name_is_exported() -> None:
    """The package exports exactly what its files declare."""
    from bayesify.evaluation.measures import (
        calibration,
        classification,
        detection,
        regression,
        selective,
        uncertainty,
    )

    files = (calibration, classification, detection, regression, selective, uncertainty)
    declared = sorted(name for file in files for name in file.__all__)
    assert sorted(measure.__all__) == declared
    assert all(getattr(measure, name).__doc__ for name in declared)
