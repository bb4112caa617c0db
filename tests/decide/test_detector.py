"""The detector: exact threshold, exact p-values, finite-sample guarantee."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayesify.decide import Detector


def test_threshold_is_the_conformal_order_statistic() -> None:
    """With n = 19 and 0.9 the 18th smallest score is the threshold; 100 x 0.55 is 55."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.arange(1, 20)[torch.randperm(19, generator=generator)]
    assert Detector.fit(scores, id_acceptance=0.9).threshold == 18
    assert Detector.fit(torch.arange(1, 100), id_acceptance=0.55).threshold == 55
    assert Detector.fit(torch.arange(1, 100), id_acceptance=0.551).threshold == 56


@settings(max_examples=60, deadline=None)
@given(
    calibration=st.lists(st.integers(0, 12), min_size=19, max_size=60),
    scores=st.lists(st.integers(-1, 13), min_size=1, max_size=10),
    id_acceptance=st.sampled_from([0.1, 0.5, 0.8, 0.9, 0.95]),
)
def test_p_values_and_decisions_agree(calibration: list[int], scores: list[int], id_acceptance: float) -> None:
    """P-values count by definition, and OOD means p <= 1 - id_acceptance, with ties."""
    detector = Detector.fit(calibration, id_acceptance=id_acceptance)
    result = detector(scores)
    count = len(calibration)
    for score, p_value, ood in zip(scores, result.p_value.tolist(), result.is_ood.tolist(), strict=True):
        assert p_value == (1 + sum(c >= score for c in calibration)) / (count + 1)
        assert ood == (p_value <= 1 - id_acceptance + 1e-12)
        assert ood == (score > detector.threshold)
    accepted = sum(c <= detector.threshold for c in calibration)
    assert accepted >= id_acceptance * count


def test_acceptance_rate_of_new_inputs() -> None:
    """Over calibration sets of 30 the mean acceptance is ceil(31 x 0.9) / 31, above 0.9.

    For uniform scores acceptance is the threshold, Beta(28, 3) with standard deviation 0.052;
    over 20 000 sets five standard errors are 0.0019. The plain 0.9 quantile (rank 27) would give
    0.871 and fail.
    """
    generator = torch.Generator().manual_seed(0)
    sets = torch.rand(20_000, 30, generator=generator, dtype=torch.float64)
    rank = int(sets[0].argsort().argsort()[sets[0] == Detector.fit(sets[0], id_acceptance=0.9).threshold]) + 1
    assert rank == 28
    mean = sets.sort(dim=1).values[:, rank - 1].mean().item()
    assert mean == pytest.approx(28 / 31, abs=0.0019)


def test_shape_and_infinite_scores() -> None:
    """Decisions keep the shape of dense scores; infinity is as OOD as it gets."""
    detector = Detector.fit(range(99))
    result = detector(torch.tensor([[-math.inf, 50.0], [94.5, math.inf]]))
    assert result.is_ood.tolist() == [[False, False], [True, True]]
    assert result.p_value[0, 0] == 1
    assert result.p_value[1, 1] == 0.01


def test_too_few_scores() -> None:
    """19 scores are just enough for 0.95, 18 are refused with the number needed."""
    assert Detector.fit(range(19), id_acceptance=0.95).threshold == 18
    with pytest.raises(ValueError, match="at least 19 in-distribution scores"):
        Detector.fit(range(18), id_acceptance=0.95)


def test_round_trip_through_json() -> None:
    """What was saved decides exactly alike, including p-values."""
    scores = torch.randn(200, generator=torch.Generator().manual_seed(0))
    detector = Detector.fit(scores, id_acceptance=0.9)
    loaded = Detector.from_dict(json.loads(json.dumps(detector.to_dict(), allow_nan=False)))
    assert torch.equal(loaded.calibration, scores.double().sort().values)
    assert torch.equal(loaded(scores).p_value, detector(scores).p_value)
    assert (loaded.id_acceptance, loaded.threshold) == (detector.id_acceptance, detector.threshold)


def test_bad_states() -> None:
    """A wrong kind, an unknown version and missing fields are named."""
    state = Detector.fit(range(19)).to_dict()
    with pytest.raises(ValueError, match="state is of 'Abstainer'"):
        Detector.from_dict({**state, "kind": "Abstainer"})
    with pytest.raises(ValueError, match="version 2 is unknown"):
        Detector.from_dict({**state, "version": 2})
    del state["tpr"]
    with pytest.raises(ValueError, match="lacks tpr"):
        Detector.from_dict(state)


def test_bad_input_and_frozen() -> None:
    """NaN, infinite calibration scores and impossible shares are refused; fitted is fixed."""
    detector = Detector.fit(range(19))
    with pytest.raises(ValueError, match="scores contains NaN"):
        detector([math.nan])
    with pytest.raises(ValueError, match="id_scores contains infinite"):
        Detector.fit([math.inf] * 30)
    for id_acceptance in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="id_acceptance is"):
            Detector.fit(range(19), id_acceptance=id_acceptance)
    with pytest.raises(dataclasses.FrozenInstanceError):
        detector.id_acceptance = 0.5  # type: ignore[misc]
