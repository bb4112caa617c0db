"""One of two processes is killed in the middle of a fit."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fitting.killed import work
from tests.processes import run_ranks

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


def _read(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_ranks(work, str(folder), None) == [0, 0]
    return _read(folder)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_other_with_a_sentence_and_the_run_resumes(killed, undisturbed, tmp_path):
    codes = run_ranks(work, str(tmp_path), killed)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 3
    sentence = (tmp_path / f"{1 - killed}.txt").read_text()
    assert f"Another process of this run has ended, or did not answer in time, so process {1 - killed} of 2" in sentence
    assert sentence.endswith(f"the run goes on from its checkpoint, {tmp_path / 'run'}.")
    assert run_ranks(work, str(tmp_path), None) == [0, 0]
    for found, expected in zip(_read(tmp_path), undisturbed, strict=True):
        assert found["resumed"] is not None
        assert expected["resumed"] is None
        assert found["state"].keys() == expected["state"].keys()
        for name, tensor in expected["state"].items():
            assert torch.equal(found["state"][name], tensor), name
