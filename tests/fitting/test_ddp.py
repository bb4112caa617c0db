"""Loops of one's own in two processes, through `DistributedDataParallel`."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.cases import CASES
from tests.fitting.ddp import DIVIDED, DRAWN, SILENT, gradients, outcome, silent, work
from tests.processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Train every method in two processes, and return what each came to."""
    folder = tmp_path_factory.mktemp("ranks")
    assert run_ranks(work, str(folder), seconds=600) == [0, 0]
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", SILENT, ids=str)
def test_without_noise_two_processes_are_one(case, ranks):
    expected = outcome(silent(case, slice(0, 8), ddp=False))
    for found in ranks:
        state = found["silent"][case.name]
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                state[name], tensor, rtol=1e-8, atol=1e-11, msg=f"{name}: {state[name]} {tensor}"
            )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_with_noise_both_processes_have_the_same_bits_after_each_step(case, ranks):
    for found in ranks:
        equal = found["equal"][case.name]
        assert len(equal) >= 7
        assert all(equal), equal


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_the_gradients_mean_is_that_of_one_process(case, ranks):
    """Along the gradient within three standard errors, and in each entry within as many as all of them allow.

    A change of the seeds alone would fail this in .3 % of the cases for the first, and in .3 % for the second.
    """
    one, two = gradients(case, slice(0, 8), 5000), ranks[0]["gradients"][case.name]
    assert torch.equal(two, ranks[1]["gradients"][case.name])
    direction = one.mean(0) / one.mean(0).norm()
    assert _distance(one @ direction, two @ direction) < 3
    assert _distance(one @ direction, 2 * (two @ direction)) > 3  # sums in the place of means would show
    varied = one.std(0) > 1e-9 * one.abs().max()
    torch.testing.assert_close(one[:, ~varied].mean(0), two[:, ~varied].mean(0), rtol=1e-9, atol=1e-9)
    bound = math.sqrt(2) * torch.special.erfinv(torch.tensor(1 - 0.0027 / int(varied.sum()), dtype=torch.float64))
    assert bool(varied.any())
    assert _distance(one[:, varied], two[:, varied]) < bound


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return by how many standard errors the means of draws differ, the most of all entries."""
    error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
    return ((one.mean(0) - other.mean(0)).abs() / error).max().item()


def test_a_process_with_fewer_batches_gets_a_sentence(ranks):
    for found in ranks:
        assert "different numbers of steps (epochs x steps: 2 x 3, 2 x 2)" in found["fewer"]
        assert "DistributedSampler" in found["fewer"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_in_parts_train_as_whole_ones_do_or_are_refused(case, ranks):
    for found in ranks:
        outcome = found["sharded"][case.name]
        if case.noisy.name in ("sgld", "apd"):
            assert "reads whole weights" in outcome
        else:
            assert outcome < 1e-9


@pytest.mark.parametrize("name", DIVIDED)
def test_a_transformer_in_parts_learns_as_a_whole_one_does_or_is_refused(name, ranks):
    for found in ranks:
        if name in ("bayes-adapter", "deep-ensemble"):  # which read, or replace, what a layer has divided
            assert "Call fully_shard(objective) alone" in found["transformer"][name]
        else:
            assert found["transformer"][name] < 1e-9
