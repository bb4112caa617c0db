"""A run that is killed goes on, and ends as if nothing had happened."""

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import bayesify
from bayesify._core.files import write_tensors
from tests.fitting.runs import SCENARIOS, network, run


@functools.cache
def uninterrupted(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = run(name, Path(folder))
    assert found is not None
    return found


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["numbers"] == expected["numbers"]
    assert found["state"].keys() == expected["state"].keys()
    for name, tensor in expected["state"].items():
        assert torch.equal(found["state"][name], tensor), name


@pytest.mark.parametrize("name", ["map", "swag", "ensemble"])
@pytest.mark.slow
def test_what_a_run_comes_to_does_not_depend_on_its_checkpoints(name: str, tmp_path: Path):
    _assert_same(run(name, tmp_path, checkpoint=False), uninterrupted(name))


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.slow
def test_a_run_killed_again_and_again(name: str, tmp_path: Path):
    expected = uninterrupted(name)
    chance = random.Random(name)
    kills = 1 if "workers" in name else 4  # a killed process's workers notice after five seconds, and are waited for
    killed, found = 0, None
    while found is None:
        kill_at = chance.randint(1, len(expected["events"])) if killed < kills else None
        found = run(name, tmp_path, kill_at)
        killed += found is None
    assert killed > 0
    _assert_same(found, expected)


def _places(events: list[str], name: str) -> list[int]:
    """Return the first and the last event of each kind, or else every fourth and eighth one."""
    if name == "ensemble":
        kinds = set(events)
        return sorted(
            {*(events.index(kind) + 1 for kind in kinds)} | {len(events) - events[::-1].index(k) for k in kinds}
        )
    return list(range(4, len(events), 8 if name == "swag" else 4))


@pytest.mark.parametrize("name", ["adam and accumulation", "ensemble", "swag"])
@pytest.mark.slow
def test_a_run_killed_anywhere(name: str, tmp_path: Path):
    """Within a group of accumulated batches; between members, around each file; within `finish`."""
    expected = uninterrupted(name)
    for place in _places(expected["events"], name):
        folder = tmp_path / str(place)
        assert run(name, folder, place) is None
        _assert_same(run(name, folder), expected)


@pytest.mark.slow
def test_a_finished_run_returns_at_once(tmp_path: Path):
    first = run("swag", tmp_path)
    again = run("swag", tmp_path)
    assert again["events"] == []
    _assert_same(again, first)


def _small() -> tuple[bayesify.Posterior, list[Any]]:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    return bayesify.convert(network(), bayesify.MAP()), [(x, torch.arange(8) % 3)] * 2


def _fit(folder: Path, **options: Any) -> bayesify.History:
    posterior, batches = _small()
    if "likelihood" in options:
        posterior.set_likelihood(options.pop("likelihood"))
    settings = {"epochs": 1, "num_data": 8, "progress": False, "accuracy_tolerance": 1.0, **options}
    return bayesify.fit(posterior, batches, checkpoint=folder, **settings)


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_checkpoint(tmp_path: Path, kept: float):
    _fit(tmp_path)
    file = tmp_path / "checkpoint.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(ValueError, match=r"damaged or not a safetensors file .* delete it and run again"):
        _fit(tmp_path)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"epochs": 3}, "epochs was 1 and is 3"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"num_data": 9}, "num_data was 8 and is 9"),
        ({"accumulate": 2}, "accumulate was 1 and is 2"),
        ({"clip_norm": 1.0}, "clip_norm was None and is 1.0"),
        ({"likelihood": "regression"}, "likelihood.kind was 'categorical' and is 'gaussian'"),
    ],
)
def test_changed_settings(tmp_path: Path, setting: dict[str, Any], word: str):
    _fit(tmp_path)
    with pytest.raises(ValueError, match=f"belongs to another run: {word}.*begin anew"):
        _fit(tmp_path, **setting)


def test_another_method(tmp_path: Path):
    _fit(tmp_path)
    _, batches = _small()
    other = bayesify.convert(network(), bayesify.MAP(lr=0.5))
    with pytest.raises(ValueError, match=r"belongs to another run: method\.lr was .* and is 0.5"):
        bayesify.fit(other, batches, checkpoint=tmp_path, epochs=1, num_data=8, progress=False)


def test_another_optimizer(tmp_path: Path):
    with pytest.raises(StopError):
        _fit(tmp_path, epochs=2, checkpoint_steps=1, optimizer=lambda groups: Stopping(groups, lr=0.1))
    with pytest.raises(ValueError, match=r"optimiser\.type was 'Stopping' and is 'Adam'"):
        _fit(tmp_path, epochs=2, optimizer=lambda groups: torch.optim.Adam(groups))


def test_another_format(tmp_path: Path):
    write_tensors(tmp_path / "checkpoint.safetensors", {"a": torch.zeros(1)}, {"format": 99})
    with pytest.raises(ValueError, match="has format 99, and this bayesify reads format 2"):
        _fit(tmp_path)


def test_the_caller_sees_that_a_run_was_resumed(tmp_path: Path):
    with pytest.raises(StopError):
        _fit(tmp_path, epochs=2, checkpoint_steps=1, optimizer=lambda groups: Stopping(groups, lr=0.1))
    history = _fit(tmp_path, epochs=2, checkpoint_steps=1, optimizer=lambda groups: Stopping(groups, lr=0.1, at=0))
    assert history.resumed_from == ("map", 1)
    assert [record.epoch for record in history.epochs] == [1, 2]
    again = _fit(tmp_path, epochs=2, optimizer=lambda groups: Stopping(groups, lr=0.1))
    assert again.resumed_from is None


class StopError(Exception):
    pass


class Stopping(torch.optim.SGD):
    """Fails in the second epoch's second step."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, at: int = 4) -> None:
        super().__init__(groups, lr=lr)
        self.at = at

    def step(self, closure: Any = None) -> None:
        self.at -= 1
        if self.at == 0:
            raise StopError
        super().step(closure)
