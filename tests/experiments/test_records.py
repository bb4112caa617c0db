"""Records: found again by configuration and seed alone, and whole whoever writes and whenever a process is killed."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bayesify
from experiments.records import Records, config_hash, plain, provenance, write_rows

ROOT = Path(__file__).parents[2]
WRITER = """
import sys, time
from pathlib import Path
from experiments.records import Records
path, log, who = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
number, seconds = int(sys.argv[4]), float(sys.argv[5])
records = Records(path)
def make(index):
    with log.open("a") as file:
        file.write(f"{who} {index}\\n")
    time.sleep(seconds)
    return {"index": index, "long": "x" * 10_000}
for index in range(number):
    records.row(f"{who} {index}", lambda: make(index), config={"index": index})
"""


def writer(folder: Path, who: str, number: int, seconds: float) -> subprocess.Popen:
    command = [
        sys.executable,
        "-c",
        WRITER,
        str(folder / "a.json"),
        str(folder / "log"),
        who,
        str(number),
        str(seconds),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def names(folder: Path) -> list[str]:
    return [row["name"] for row in json.loads((folder / "a.json").read_text())["rows"]]


def test_a_row_is_made_once_for_its_configuration_and_seed(tmp_path):
    path, made = tmp_path / "a.json", []

    def make():
        made.append(1)
        return {"nll": len(made)}

    method = bayesify.MAP(epochs=2)
    for _ in range(2):
        assert Records(path, {"images": 10}).row("a", make, config={"method": method}, seed=1) == {"nll": 1}
    # Another setting, method, name or seed is another row, and never the old one.
    assert Records(path, {"images": 20}).row("a", make, config={"method": method}, seed=1) == {"nll": 2}
    assert Records(path, {"images": 10}).row("a", make, config={"method": bayesify.MAP(epochs=3)}, seed=1) == {"nll": 3}
    assert Records(path, {"images": 10}).row("b", make, config={"method": method}, seed=1) == {"nll": 4}
    assert Records(path, {"images": 10}).row("a", make, config={"method": method}, seed=2) == {"nll": 5}
    assert len(Records(path).read()) == 5


def test_a_row_says_where_it_comes_from(tmp_path):
    Records(tmp_path / "a.json").row("a", lambda: {"nll": 1.0}, config={"method": bayesify.MAP()}, seed=3)
    (row,) = Records(tmp_path / "a.json").read()
    assert row["config"]["method"]["class"] == "MAP"
    assert row["hash"] == config_hash(row["config"])
    assert (row["name"], row["seed"], row["measures"]) == ("a", 3, {"nll": 1.0})
    assert row["seconds"] >= 0
    assert row["command"].startswith("python")
    found = row["provenance"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["bayesify"] == bayesify.__version__
    assert found["processor"]
    in_git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found["commit"] == (in_git.stdout.strip() or None)
    assert found["dirty"] in ((True, False) if in_git.stdout else (None,))


def test_outside_of_a_repository_no_commit_is_invented(monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.records.ROOT", tmp_path)
    found = provenance()
    assert (found["commit"], found["dirty"]) == (None, None)


def test_a_row_of_unknown_provenance_is_kept_until_it_is_made_again(tmp_path):
    path = tmp_path / "a.json"
    old = {
        "config": None,
        "hash": None,
        "provenance": "unknown",
        "command": "c",
        "seconds": None,
        "measures": {"nll": 0},
    }
    write_rows(path, [{"name": name, "seed": seed, **old} for name, seed in (("a", 0), ("a", 1), ("b", None))])
    records = Records(path)
    assert records.row("a", lambda: {"nll": 1}, seed=0) == {"nll": 1}, "nobody knows what made the old one"
    assert [(row["name"], row["seed"]) for row in records.read()] == [("a", 1), ("b", None), ("a", 0)]
    records.row("b", lambda: {"nll": 2}, seed=0)
    assert [row["measures"]["nll"] for row in records.read()] == [0, 1, 2]


def test_the_command_names_no_folder_of_this_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "digits", "--work", "/tmp/a", "--only", "map", "--results", "/tmp/b"])
    assert Records(None).command.endswith(" digits --only map")
    monkeypatch.setattr(sys, "argv", ["run.py", "--folder", "/tmp/a", "--how", "whole sum", "exact"])
    assert Records(None).command.endswith(" --how 'whole sum' exact")  # as a shell reads it


def test_a_trial_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Records(None).row("a", lambda: {"nll": 1}) == {"nll": 1}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(2)])
def test_what_has_no_text_is_no_configuration(value):
    with pytest.raises(TypeError, match="A configuration holds"):
        plain({"x": value})


def test_a_failure_keeps_nothing_of_its_row(tmp_path):
    records = Records(tmp_path / "a.json")
    records.row("a", lambda: {"nll": 1})
    with pytest.raises(ZeroDivisionError):
        records.row("b", lambda: 1 // 0)
    with pytest.raises(TypeError, match="JSON"):
        records.row("c", lambda: {"nll": torch.zeros(1)})
    assert [row["name"] for row in records.read()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_benchmark_is_kept_beside_its_earlier_runs(tmp_path, monkeypatch, capsys):
    from benchmarks import timing

    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    for ratio in (1.5, 1.25):
        timing.keep("steps", {"step of a layer": {"plain": 1.0, "ours": ratio}}, batch=128)
    first, second = Records(tmp_path / "steps.json").read()
    assert (first["measures"]["figures"]["ours"], second["measures"]["figures"]["ours"]) == (1.5, 1.25)
    assert first["hash"] == second["hash"]
    assert first["config"] == {"benchmark": "steps", "batch": 128, "name": "step of a layer"}
    assert set(second["provenance"]) >= {"commit", "dirty", "versions", "processor", "threads"}
    assert "1.250" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["abnn", "adapter", "ibnn", "laplace", "predict", "sgld", "streamlined"])
def test_every_benchmark_can_be_imported_and_has_rows(name):
    importlib.import_module(f"benchmarks.{name}")
    rows = Records(ROOT / "benchmarks" / "results" / f"{name}.json").read()
    assert rows
    assert all(row["measures"]["figures"] for row in rows)


@pytest.mark.slow
def test_a_killed_run_loses_the_row_in_progress_at_most_and_goes_on(tmp_path):
    process = writer(tmp_path, "one", 4, 1.0)
    limit = time.monotonic() + 60
    while "one 2" not in (text := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
        assert time.monotonic() < limit, text
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert names(tmp_path) == ["one 0", "one 1"]
    assert writer(tmp_path, "one", 4, 0.0).wait() == 0
    assert names(tmp_path) == ["one 0", "one 1", "one 2", "one 3"]
    assert (tmp_path / "log").read_text().split("\n")[:-1] == [f"one {index}" for index in (0, 1, 2, 2, 3)]


@pytest.mark.slow
def test_runs_side_by_side_keep_all_rows(tmp_path):
    processes = [writer(tmp_path, who, 25, 0.0) for who in ("one", "two")]
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted(names(tmp_path)) == sorted(f"{who} {index}" for who in ("one", "two") for index in range(25))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "log"]
