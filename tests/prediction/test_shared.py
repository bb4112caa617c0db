"""Predictions that two processes share: the whole in each, equal to one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.prediction.shared import BATCH, DIVIDED, LOADERS, METHODS, ROWS, chosen, measured, work
from tests.processes import run_ranks

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    assert run_ranks(work, str(folder)) == [0, 0]
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, equal_nan=True, msg=name)
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("name", LOADERS)
def test_every_process_gets_the_whole_as_one_process_does(name, ranks):
    expected = measured(LOADERS[name]())
    for found in ranks:
        _assert_equal(found[name], expected)


@pytest.mark.parametrize("name", DIVIDED)
def test_a_loader_that_is_divided_already_is_not_divided_twice(name, ranks):
    """Nor are the examples there twice that a sampler repeats so that all have as many."""
    expected = measured(LOADERS["in order"]())
    for found in ranks:
        _assert_equal(found[name], expected)


@pytest.mark.parametrize("name", METHODS)
def test_draws_are_the_same_functions_in_all_processes(name, ranks):
    expected = measured(LOADERS["in order"](), name)
    for found in ranks:
        _assert_equal(found[f"method {name}"], expected)


def test_what_goes_by_validation_data_ends_with_the_numbers_of_one_process(ranks):
    expected = chosen()
    for found in ranks:
        _assert_equal(found["chosen"], expected)


def test_each_process_computes_its_share_alone(ranks):
    dry = 5  # rows of a dry run on two and on three copies of one
    for rank, found in enumerate(ranks):
        rows = [size for size in found["passes"] if size in (BATCH, ROWS % BATCH)]
        assert rows[-3:] == [[4, 4, 4], [4, 4, 3]][rank], found["passes"]
        assert sum(found["passes"]) <= ROWS // 2 + 1 + dry, found["passes"]


def test_a_tensor_is_each_processs_own(ranks):
    assert [found["tensor"] for found in ranks] == [ROWS, ROWS - 1]


def test_a_seed_that_is_not_given_is_the_first_processs(ranks):
    assert torch.equal(ranks[0]["seedless"], ranks[1]["seedless"])


def test_one_process_can_work_alone(ranks):
    assert ranks[0]["alone"] == ROWS


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("other data", "ValueError: The processes read different batches"),
        ("fewer", "ValueError: The processes read different batches, or a different number of them"),
        ("other weights", "ValueError: The processes hold posteriors with different weights"),
        ("short fit", "ValueError: The loader of process 1 ended after 2 batches, and others have more"),
        ("short loop", "ValueError: The loader of process 1 ended after 2 batches, and others have more"),
    ],
)
def test_what_cannot_be_shared_gets_a_sentence_in_every_process(name, sentence, ranks):
    for found in ranks:
        assert found[name].startswith(sentence)


def test_what_one_process_raises_ends_the_others(ranks):
    assert "the file is gone" in ranks[1]["broken"]
    assert ranks[0]["broken"].startswith("RuntimeError: Process 1 failed: KeyError: 'the file is gone'")
