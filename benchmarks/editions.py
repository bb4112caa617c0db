"""The speed of two versions of the package beside each other, as ratios with intervals.

`python -m benchmarks.editions --first TREE/src --second TREE2/src` runs each version in a process of its own, with the
same interpreter, one at a time and in turn, and prints for each row the median over repeats of the second's time over
the first's, with a 95 % bootstrap interval of that median. A row is marked if even the lower end is above 1.05. What is
taken is the processor's time, with one thread (`--threads 2` for two) that does not spin while it waits; a short call
is repeated within a measurement until that takes 20 ms. `--rows WORD ...` takes the rows that contain one of the words.

Networks are an MLP 784-400-400-10 and ResNet-20 on 8 x 8 images, which keeps what a pass costs besides its
convolutions in sight. Posteriors have learned for some steps, all with the same data. A training step is timed inside
`fit`: the median time from one optimizer step to the next.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import inspect
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

RESULTS = Path(__file__).parent / "results" / "editions.json"
NETWORKS = ("mlp", "resnet20")
DRAWS = 20
LEAST = 0.02  # seconds of a measurement
Call = Callable[[], Any]


# -- what is measured: in the worker -----------------------------------------------------------------------------------


def network_and_data(name: str, rows: int) -> tuple[Any, Any, Any]:
    """Return a network in evaluation mode, inputs and targets."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    targets = torch.arange(rows) % 10
    if name == "mlp":
        layers = nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
        return nn.Sequential(*layers).eval(), torch.rand(rows, 784), targets

    class Block(nn.Module):  # here, and not from experiments, which may differ between the versions
        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(width, out, 3, stride=out // width, padding=1, bias=False)
            self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
            self.extra = (out - width) // 2

        def forward(self, x: Any) -> Any:
            h = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            if self.extra:
                x = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))
            return torch.relu(h + x)

    widths = [16, *[16] * 3, *[32] * 3, *[64] * 3]
    blocks = [Block(a, b) for a, b in pairwise(widths)]
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(*stem, *blocks, *head).eval(), torch.randn(rows, 3, 8, 8), targets


def setting(function: Any, *names: str) -> str:
    """Return the first of several names that a function takes: the present one, or the one before."""
    parameters = inspect.signature(function).parameters
    for name in names:
        if name in parameters:
            return name
    raise TypeError(f"{function.__name__} takes none of {names}.")


def make_method(name: str, network: str) -> Any:
    """Return a method with the settings that are measured."""
    import bayesify as b

    quick = {"epochs": 2}
    layers = "linear" if network == "mlp" else "conv"
    bank = {setting(b.SGLD, "samples_per_chain", "num_samples"): 20, "epochs": 10, "lr": 0.01}
    distilled = {"latent": 8, "hidden": (16,), "steps": 10, setting(b.APD, "num_bn_draws", "num_draws"): DRAWS}
    makers: dict[str, Callable[[], Any]] = {
        "map": b.MAP,
        "mc-dropout": lambda: b.MCDropout(p=0.1, insert_before=layers),
        "deep-ensemble": lambda: b.DeepEnsemble(members=3, start="perturbed", **quick),
        "swag": lambda: b.SWAG(**quick),
        "bayes-adapter": lambda: b.BayesAdapter(**quick),
        "laplace last-layer": lambda: b.Laplace(structure="last-layer"),
        "laplace diagonal": lambda: b.Laplace(structure="diagonal"),
        "laplace kronecker": lambda: b.Laplace(structure="kronecker"),
        "abnn": lambda: b.ABNN(**quick),
        "ibnn": lambda: b.IBNN(**quick),
        "ibnn S=1": lambda: b.IBNN(repeats=1, **quick),
        "ibnn S=2": lambda: b.IBNN(repeats=2, **quick),
        "sgld": lambda: b.SGLD(**bank),
        "apd": lambda: b.APD(**bank, **distilled),
    }
    return makers[name]()


@lru_cache(maxsize=1)
def fitted(method: str, network: str) -> Any:
    """Return a posterior that has learned for some steps."""
    import bayesify

    module, x, y = network_and_data(network, 16)
    posterior = bayesify.convert(module, make_method(method, network))
    if posterior.method.learns:
        bayesify.fit(posterior, [(x, y)] * 4, num_data=1000, progress=False)
    return posterior


def converting(method: str, network: str) -> Call:
    """Time `convert`."""
    import bayesify

    module, settings = network_and_data(network, 1)[0], make_method(method, network)
    return lambda: bayesify.convert(module, settings)


def predicting(method: str, network: str, rows: int, how: str) -> Call:
    """Time a prediction."""
    import bayesify

    posterior, inputs = fitted(method, network), network_and_data(network, rows)[1]
    draws = {setting(bayesify.predict, "num_draws", "num_samples"): DRAWS} if how == "sampling" else {}
    return lambda: bayesify.predict(posterior, inputs, how=how, seed=0, **draws)


def predicting_first(method: str, network: str, how: str) -> Iterator[Call]:
    """Time the first prediction of each of several posteriors."""
    import bayesify

    module, inputs, _ = network_and_data(network, 8)
    draws = {setting(bayesify.predict, "num_draws", "num_samples"): DRAWS} if how == "sampling" else {}
    while True:
        posterior = bayesify.convert(module, make_method(method, network))
        yield partial(bayesify.predict, posterior, inputs, how=how, seed=0, **draws)


def training(method: str, network: str, rows: int) -> Call:
    """Time a step of `fit`; the call returns its own time."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import bayesify

    module, x, y = network_and_data(network, rows)
    batches = [(x, y)] * (16 if network == "mlp" else 5)

    def fit() -> float:
        posterior = bayesify.convert(module, make_method(method, network))
        ends: list[float] = []
        hook = register_optimizer_step_post_hook(lambda *_: ends.append(time.process_time()))
        try:
            bayesify.fit(posterior, batches, epochs=1, num_data=1000, progress=False)
        finally:
            hook.remove()
        return statistics.median(b - a for a, b in pairwise(ends))

    return fit


def surveying(method: str, network: str) -> Iterator[Call]:
    """Time the pass over the data that finds the curvature: two batches of 64."""
    import bayesify

    module, x, y = network_and_data(network, 64)
    while True:
        posterior = bayesify.convert(module, make_method(method, network))
        yield partial(bayesify.fit, posterior, [(x, y)] * 2, num_data=1000, progress=False)


def storing(method: str, network: str, verb: str) -> Call:
    """Time saving or loading."""
    import bayesify

    posterior, module = fitted(method, network), network_and_data(network, 1)[0]
    folder = tempfile.mkdtemp(prefix="editions-")
    bayesify.save(posterior, folder)
    return partial(bayesify.save, posterior, folder) if verb == "save" else partial(bayesify.load, folder, module)


def rows() -> dict[str, Callable[[], Call | Iterator[Call]]]:
    """Return what is measured, by name: methods stay together, so that each learns once."""
    draws = ("map", "mc-dropout", "deep-ensemble", "swag", "bayes-adapter", "laplace last-layer", "laplace diagonal",
             "laplace kronecker", "abnn", "ibnn", "sgld", "apd")  # fmt: skip
    steps = ("mc-dropout", "deep-ensemble", "swag", "bayes-adapter", "abnn", "ibnn S=1", "ibnn S=2", "sgld")
    kept = ("bayes-adapter", "swag", "sgld", "abnn")
    hows = {
        "mean": ("bayes-adapter", "laplace diagonal", "ibnn"),
        "streamlined": ("mc-dropout", "bayes-adapter", "laplace last-layer", "laplace diagonal", "abnn", "ibnn"),
        "linearised": ("mc-dropout", "bayes-adapter", "laplace diagonal"),
    }
    found: dict[str, Callable[[], Call | Iterator[Call]]] = {}
    for network in NETWORKS:
        # ABNN needs norms; a dense matrix of 4010 weights takes minutes
        left_out = {"mlp": ("abnn", "laplace last-layer"), "resnet20": ("apd",)}[network]
        for m in (m for m in draws if m not in left_out):
            found[f"convert, {m}, {network}"] = partial(converting, m, network)
            for how in ("sampling", *(how for how, known in hows.items() if m in known)):
                for size in (1, 16 if (network, how) == ("resnet20", "linearised") else 128):
                    found[f"predict {how}, {m}, {network}, batch {size}"] = partial(predicting, m, network, size, how)
            for verb in ("save", "load") if m in kept else ():
                found[f"{verb}, {m}, {network}"] = partial(storing, m, network, verb)
        for m in (m for m in ("mc-dropout", "bayes-adapter", "ibnn", "abnn") if m not in left_out):
            for how in ("sampling", "streamlined"):
                found[f"first prediction, {how}, {m}, {network}"] = partial(predicting_first, m, network, how)
        for m in (m for m in steps if m not in left_out):
            found[f"training step, {m}, {network}"] = partial(training, m, network, 100 if network == "mlp" else 32)
        for m in (m for m in draws if m.startswith("laplace") and m not in left_out):
            found[f"survey, {m}, {network}"] = partial(surveying, m, network)
    return found


def timed(call: Call) -> float:
    """Return the processor's time of a call, or what a call that times itself returns."""
    began = time.process_time()
    result = call()
    return result if isinstance(result, float) else time.process_time() - began


def work(threads: int) -> None:
    """Answer lines of JSON: {"prepare": row} with the time of a call, {"measure": times} with the mean time."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    table, call, answers = rows(), None, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints must not come between the answers
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "prepare" in question:
                call = table[question["prepare"]]()
                times = 2
            else:
                times = question["measure"]
            gc.collect()
            seconds = [timed(next(call) if isinstance(call, Iterator) else call) for _ in range(times)]
            answer: dict[str, Any] = {"seconds": seconds[-1] if "prepare" in question else statistics.mean(seconds)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


# -- the comparison: in the parent -------------------------------------------------------------------------------------


class Worker:
    """A process with one version of the package."""

    def __init__(self, source: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_WAIT_POLICY": "passive"}
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
        # -P: the folder of this file is not searched, in which other benchmarks have names of packages
        command = [sys.executable, "-P", __file__, "--work", str(threads)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        stdin: IO[str] | None = self.process.stdin
        stdout: IO[str] | None = self.process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(question), file=stdin, flush=True)
        if not (line := stdout.readline()):
            raise SystemExit(f"The worker ended with {self.process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0)
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[49], medians[1949]


def compare(first: Worker, second: Worker, row: str, repeats: int) -> dict[str, Any]:
    """Return the ratio of a row's times, measured in turn; who begins changes."""
    ready = [worker.ask(prepare=row) for worker in (first, second)]
    if errors := [f"{name}: {r['error']}" for name, r in zip(("first", "second"), ready, strict=True) if "error" in r]:
        return {"error": "; ".join(errors)}
    calls = 1 if row.startswith("training") else min(200, max(1, round(LEAST / max(ready[0]["seconds"], 1e-6))))
    times: dict[Worker, list[float]] = {first: [], second: []}
    for repeat in range(repeats):
        for worker in (first, second) if repeat % 2 else (second, first):
            answer = worker.ask(measure=calls)
            if "error" in answer:
                return answer
            times[worker].append(answer["seconds"])
    ratios = [b / a for a, b in zip(times[first], times[second], strict=True)]
    low, high = interval(ratios)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "first_ms": round(1e3 * statistics.median(times[first]), 4),
        "second_ms": round(1e3 * statistics.median(times[second]), 4),
        "calls": calls,
    }


def commit(source: Path) -> str:
    """Return the commit of a source tree, with a mark if it was changed."""
    git = ["git", "-C", str(source)]
    try:
        name = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True, stderr=subprocess.DEVNULL).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "--", "."], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + (" with changes" if changed else "")


def main() -> None:
    """Print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=Path, help="the folder that holds the package of the first version")
    parser.add_argument("--second", type=Path)
    parser.add_argument("--rows", nargs="*", default=[], help="words, or patterns with *: rows that have one")
    parser.add_argument("--repeats", type=int, default=12, help="below 6 the intervals say nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--result", type=Path, default=RESULTS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.work)
    names = [r for r in rows() if not arguments.rows or any(fnmatch.fnmatch(r, f"*{w}*") for w in arguments.rows)]
    if arguments.list:
        return print(*names, sep="\n")
    for source in (arguments.first, arguments.second):
        if source is None or not (source / "bayesify").is_dir():
            parser.error(f"--first and --second are folders that hold the package; {source} does not")
    from importlib.metadata import version

    began = time.perf_counter()
    record: dict[str, Any] = {
        "command": "python -m benchmarks.editions " + " ".join(sys.argv[1:]),
        "first": commit(arguments.first),
        "second": commit(arguments.second),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "processor": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "rows": {},
    }
    first, second = (Worker(source, arguments.threads) for source in (arguments.first, arguments.second))
    print(f"{'second over first':58}{'ratio':>7}   {'95 % interval':15}{'first, ms':>11}")
    for name in names:
        row = record["rows"][name] = compare(first, second, name, arguments.repeats)
        if "error" in row:
            print(f"{name:58}{row['error'][:110]}", flush=True)
            continue
        low, high = row["interval"]
        mark = "  SLOWER" if low > 1.05 else ""
        print(f"{name:58}{row['ratio']:7.3f}   {low:.3f} - {high:.3f}  {row['first_ms']:11.3f}{mark}", flush=True)
    for worker in (first, second):
        worker.end()
    record["seconds"] = round(time.perf_counter() - began)
    record["processor_seconds"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)
    measured = [row for row in record["rows"].values() if "ratio" in row]
    slower = [name for name, row in record["rows"].items() if "ratio" in row and row["interval"][0] > 1.05]
    middle = statistics.median(row["ratio"] for row in measured) if measured else float("nan")
    spent = f"{record['seconds']} s, {record['processor_seconds']} s of the processor"
    print(f"{len(measured)} rows in {spent}; median ratio {middle:.3f}; slower: {slower or 'none'}")
    arguments.result.parent.mkdir(exist_ok=True)
    arguments.result.write_text(json.dumps(record, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
