"""A million rows through `bayesify decide` and through Ray Data: seconds of CPU, peak memory, and whether they agree.

`python -m benchmarks.deciding --rows 1000000` makes a table of random rows (a Parquet file in a temporary folder), a
small network (8 inputs, 32 hidden units, 4 classes) with a guard of 4 draws of dropout, and then runs in processes of
their own

- `decide`: the command line, to a file of JSON lines;
- `guard`: the same rows as one tensor, without any reading and writing, which is what the verdicts alone cost;
- `plain`: the plain network on that tensor, the unit of the others;
- `ray`: `bayesify.integrations.ray.score` with two workers, to Parquet files.

Seconds are of CPU, of the process and its children, so that other work on the machine hardly changes them; those of Ray
hold its own processes, looked at twice a second. Peak memory is that of the largest process, and of Ray also the sum
of all. Verdicts and labels of `decide` and `ray` are compared. Written to `benchmarks/results/deciding.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayesify
from bayesify.data import Number, TableEncoding
from bayesify.decide import Guard

__all__ = ["make_network"]

RESULT = Path(__file__).parent / "results" / "deciding.json"
INPUTS, HIDDEN, CLASSES, DRAWS, BATCH, WORKERS = 8, 32, 4, 4, 4096, 2
COLUMNS = [f"x{i}" for i in range(INPUTS)]


def make_network() -> nn.Module:
    """Return the network, the same each time."""
    torch.manual_seed(0)
    layers = nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(*layers).eval()


def prepare(folder: Path, rows: int) -> None:
    """Write the table and the guard."""
    import pyarrow
    import pyarrow.parquet

    network = make_network()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, INPUTS, generator=generator)
    seen = torch.randn(4000, INPUTS, generator=generator)
    with torch.no_grad():
        labels = (network(seen) + 0.02 * torch.randn(4000, CLASSES, generator=generator)).argmax(1)
    posterior = bayesify.convert(network, bayesify.MCDropout())
    guard = Guard.fit(posterior, [(seen, labels)], max_risk=0.1, num_draws=DRAWS)
    guard.save(folder / "guard")
    columns = {"id": pyarrow.array(range(rows))}
    columns |= {name: pyarrow.array(x[:, i].numpy()) for i, name in enumerate(COLUMNS)}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet", row_group_size=65_536)


def loaded(folder: Path) -> Guard:
    """Load the guard."""
    return Guard.load(folder / "guard", make_network())


class Watch(threading.Thread):
    """Look at the children of this process twice a second: seconds of CPU and peak memory, by process."""

    def __init__(self) -> None:
        """Begin."""
        super().__init__(daemon=True)
        self.seconds: dict[int, float] = {}
        self.peaks: dict[int, float] = {}
        self.start()

    def run(self) -> None:
        """Look, as long as the process lives."""
        import psutil

        while True:
            for child in psutil.Process().children(recursive=True):
                try:
                    times, status = child.cpu_times(), Path(f"/proc/{child.pid}/status").read_text()
                except (psutil.Error, OSError):
                    continue
                self.seconds[child.pid] = times.user + times.system
                peak = [line for line in status.splitlines() if line.startswith("VmHWM")]
                self.peaks[child.pid] = int(peak[0].split()[1]) / 1024 if peak else 0.0
            time.sleep(0.5)


def part(name: str, folder: Path) -> dict[str, Any]:
    """Run one way through all rows, and return what it cost beyond importing."""
    import pyarrow.parquet

    torch.set_num_threads(1)
    source = folder / "rows.parquet"
    watch = Watch() if name == "ray" else None
    start = time.process_time()
    if name == "decide":
        from bayesify.cli import main

        words = ["decide", folder / "guard", "--model", "benchmarks.deciding:make_network", "--data", source]
        words += ["--batch-size", BATCH, "--out", folder / "decide.jsonl", "--keep", "id", "--quiet"]
        words += [word for column in COLUMNS for word in ("--column", column)]
        assert main([str(word) for word in words]) == 0
    elif name == "ray":
        import ray

        from bayesify.integrations.ray import score

        ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False, object_store_memory=2**30)
        ray.data.DataContext.get_current().enable_progress_bars = False
        encoding = TableEncoding(tuple(Number(column, 0.0, 1.0) for column in COLUMNS))
        rows = ray.data.read_parquet(str(source))
        score(rows, loaded(folder), encoding, workers=WORKERS, batch_size=BATCH, keep=["id"]).write_parquet(
            str(folder / "ray")
        )
        ray.shutdown()
    else:
        table = pyarrow.parquet.read_table(source, columns=COLUMNS)
        x = torch.stack([torch.tensor(table[column].to_numpy()) for column in COLUMNS], 1)
        guard, network = loaded(folder), make_network()
        start = time.process_time()
        for rows in x.split(BATCH):
            if name == "plain":
                with torch.no_grad():
                    network(rows).softmax(1)
            else:
                guard(rows).codes.sum()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if watch is None:
        return {"seconds": seconds, "peak_mb": peak}
    peaks = [peak, *watch.peaks.values()]
    return {"seconds": seconds + sum(watch.seconds.values()), "peak_mb": max(peaks), "sum_mb": sum(peaks)}


def agreement(folder: Path) -> dict[str, Any]:
    """Return how the lines of `decide` and the files of Ray differ."""
    import pyarrow.dataset

    fields = ["id", "verdict", "label", "confidence", "total", "epistemic", "p_value"]
    found = pyarrow.dataset.dataset(folder / "ray").to_table(columns=fields).sort_by("id")
    rows = iter(zip(*(found[name].to_pylist() for name in fields), strict=True))
    count, words, apart = 0, 0, 0.0
    with (folder / "decide.jsonl").open() as file:
        for line, row in zip(file, rows, strict=True):
            own = json.loads(line)
            count += 1
            words += any(own[name] != value for name, value in zip(fields[:3], row[:3], strict=True))
            apart = max(apart, *(abs(own[name] - value) for name, value in zip(fields[3:], row[3:], strict=True)))
    return {"rows": count, "different verdicts or labels": words, "numbers apart": apart}


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run a part in a process of its own."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.deciding", "--part", name, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(name, found, flush=True)
    return found


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--names", default="plain,guard,decide,ray")
    parser.add_argument("--part")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.part == "prepare":
        prepare(arguments.folder, arguments.rows)
        return
    if arguments.part:
        print(json.dumps(part(arguments.part, arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "rows.parquet").exists():
            prepare(folder, arguments.rows)
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        kept = kept if kept.get("rows") == arguments.rows else {"rows": arguments.rows, "parts": {}}
        sizes = {"inputs": INPUTS, "hidden": HIDDEN, "classes": CLASSES, "draws": DRAWS, "batch": BATCH}
        kept |= {**sizes, "workers": WORKERS, "torch": torch.__version__}
        for name in arguments.names.split(","):
            kept["parts"][name] = run(name, folder)
            if (folder / "decide.jsonl").exists() and (folder / "ray").exists():
                kept["agreement"] = agreement(folder)
            RESULT.write_text(json.dumps(kept, indent=2) + "\n")
    print(json.dumps(kept.get("agreement")))


if __name__ == "__main__":
    main()
