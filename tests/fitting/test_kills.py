"""SIGKILL at random moments of `fit`, twice in a run, for every method: all end with equal weights."""

import random
from pathlib import Path

import pytest
import torch

from bayesify.methods import list_methods
from tests.fitting.runs import EVERY_METHOD, run

RUNS = 3  # of two kills each, for each of the scenarios: 102 kills


def test_every_method_is_among_them():
    assert {name.partition(",")[0] for name in EVERY_METHOD} >= list_methods().keys()
    assert 2 * RUNS * len(EVERY_METHOD) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_METHOD)
def test_a_run_killed_twice_at_any_call_ends_with_equal_weights(name: str, tmp_path: Path):
    expected = run(name, tmp_path / "whole", anywhere=True)
    assert expected is not None
    chance = random.Random(name)
    attempts = done = 0
    while done < RUNS:
        attempts += 1
        assert attempts <= 10 * RUNS, "the runs end before they are killed"
        folder, killed, found = tmp_path / str(attempts), 0, None
        while found is None:
            # What is left after a kill is less than the whole, and a run that has ended cannot be killed.
            last = expected["calls"] if killed == 0 else expected["calls"] // 3
            found = run(name, folder, chance.randint(1, last) if killed < 2 else None, anywhere=True)
            killed += found is None
        done += killed == 2
        assert found["numbers"] == expected["numbers"]
        assert found["state"].keys() == expected["state"].keys()
        for key, tensor in expected["state"].items():
            assert torch.equal(found["state"][key], tensor), key
