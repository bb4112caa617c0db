"""Two processes on one machine, as torchrun starts them."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.cases import CASES
from tests.conformance.processes import work
from tests.processes import FORKS

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Fit every method in two processes, and return what each came to."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = torch.multiprocessing.start_processes(
        work, args=(port, str(folder)), nprocs=2, join=False, start_method=FORKS.get_start_method()
    )
    until = time.monotonic() + 30 * len(CASES)  # many times what they take
    try:
        while not started.join(timeout=1):
            assert time.monotonic() < until, "the processes wait for each other"
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(params=[case.name for case in CASES])
def both(request: pytest.FixtureRequest, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found[request.param] for found in ranks]


def _assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_both_processes_end_with_the_same_posterior(both: list[dict[str, Any]]):
    _assert_equal(both[0]["state"], both[1]["state"])


def test_both_processes_have_the_same_history(both: list[dict[str, Any]]):
    assert both[0]["history"] == both[1]["history"]
    assert both[0]["accuracy"] == both[1]["accuracy"]


def test_steps_are_counted_by_what_a_process_sees(both: list[dict[str, Any]]):
    assert [record[2] for record in both[0]["history"]][:2] == [3, 6]


def test_the_loader_is_left_as_it_was(both: list[dict[str, Any]]):
    assert all(found["sampler untouched"] for found in both)


def test_a_run_that_was_broken_off_goes_on_to_the_same_end(both: list[dict[str, Any]]):
    for found in both:
        _assert_equal(found["state"], found["resumed"])


def test_the_first_process_decides_whose_checkpoint_it_is(ranks: list[dict[str, Any]]):
    for found in ranks:
        _assert_equal(found["checkpoint"]["one other"], found[CASES[0].name]["state"])
        assert "belongs to another run" in found["checkpoint"]["both others"]
