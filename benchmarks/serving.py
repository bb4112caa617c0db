"""`bayesify serve` under load, on this machine's loopback: CIFAR-10, ResNet-20, two replicas.

`BAYESIFY_DATA=... python -m benchmarks.serving --work FOLDER latency overload kill soak` makes three guards once (the
plain network, and BayesAdapter's noise in one streamlined pass and in 20 draws), starts the service for each,
and asks them in turn, with images of the test set as JSON. Everything is bounded in count and in time.

With `--server uvicorn` it is one process of the application, without Ray; with `--server litserve` it is LitServe.

- latency: 1, 8 and 64 clients, each of whom asks again when it is answered. Seconds of this machine are as busy as the
  machine, so that beside requests a second and percentiles there are the processor's seconds of all processes of the
  service for a request, whose ratios count.
- overload: twice as many requests a second as it answered before, whether it answers or not: what was refused, what was
  late, what was wrong (by the same guard in this process), and how long after the end it answers as before.
- kill: `kill -9` of a replica while eight clients ask: how many requests failed, and when both replicas answer again.
- soak: a few requests a second for `--minutes`, and the memory of all processes of the service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify.decide import Guard
from bayesify.serve import Limits, Service, application
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained
from experiments.records import ROOT, Records

__all__ = ["resnet20"]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GUARDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": ("map", {"how": "mean"}),
    "streamlined": ("bayes-adapter", {"how": "streamlined"}),
    "draws": ("bayes-adapter", {"how": "sampling", "num_draws": 20}),
}
BATCHES = "batches.txt"  # in which LitServe's workers note what they decided together
SEEN, IMAGES = 1200, 64  # validation images of a guard; images that are asked about


def resnet20() -> torch.nn.Module:
    """Return the network, for `--model benchmarks.serving:resnet20`."""
    return pretrained("resnet20")


def make_guards(work: Path) -> None:
    """Make the guards that are not there."""
    data = load("cifar10", "val")
    dataset = TensorDataset(cifar_inputs(data.inputs[:SEEN]), data.targets[:SEEN])
    for name, (method, options) in GUARDS.items():
        if not (work / name / "guard.json").exists():
            posterior = bayesify.convert(resnet20(), method)
            loader = DataLoader(dataset, batch_size=100)
            Guard.fit(posterior, loader, max_risk=0.05, class_names=CLASSES, **options).save(work / name)


# -- the service ------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A service that runs.

    Attributes:
        process: Of the command.
        url: Where it answers.
        ray: Whether it is on Ray Serve.
    """

    process: psutil.Process
    url: str
    ray: bool = True

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the processes that requests go through, by what they do."""
        found: dict[str, list[psutil.Process]] = {"replica": [], "proxy": [], "watch": []}
        if not self.ray:
            return {"replica": [self.process, *self.process.children(recursive=True)]}
        for one in self.process.children(recursive=True):
            try:
                title = " ".join(one.cmdline())
            except psutil.Error:
                continue
            if "ServeReplica" in title:
                found["watch" if "Watch" in title else "replica"].append(one)
            elif "ProxyActor" in title:
                found["proxy"].append(one)
        return found

    def seconds(self) -> float:
        """Return the processor's seconds of all of them so far."""
        times = [one.cpu_times() for some in self.processes().values() for one in some]
        return sum(time.user + time.system for time in times)

    def memory(self) -> dict[str, float]:
        """Return the memory of all of them, in MB."""
        return {
            name: round(sum(one.memory_info().rss for one in some) / 2**20, 1)
            for name, some in self.processes().items()
        }


@contextmanager
def served(work: Path, name: str, port: int, timeout: float) -> Iterator[Running]:
    """Start the service of a guard, and stop it."""
    command = [sys.executable, "-m", "bayesify", "serve", str(work / name), "--model", "benchmarks.serving:resnet20"]
    command += ["--image-size", "32", "--normalise", "imagenet", "--port", str(port), "--timeout", str(timeout)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "answers" in line:
                break
        else:
            raise RuntimeError(f"{name} did not start")
        print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
        try:
            yield Running(psutil.Process(process.pid), f"http://127.0.0.1:{port}")
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=180)


@contextmanager
def alone(work: Path, name: str, port: int, timeout: float, server: str) -> Iterator[Running]:
    """Start a guard on LitServe, or the application in one process of uvicorn, and stop it."""
    module = {"litserve": ["benchmarks.litserver"], "uvicorn": ["benchmarks.serving", "one"]}[server]
    command = [
        sys.executable,
        "-m",
        *module,
        "--work",
        str(work / name),
        "--port",
        str(port),
        "--timeout",
        str(timeout),
    ]
    began, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    (work / name / BATCHES).unlink(missing_ok=True)
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
                    if answer.status == 200:
                        break
            except OSError as error:
                if process.poll() is not None:
                    raise RuntimeError(f"{name} did not start") from error
                time.sleep(0.5)
        print(f"{name} on {server}: ready after {time.perf_counter() - began:.1f} s", flush=True)
        try:
            yield Running(psutil.Process(process.pid), url, ray=False)
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            for one in psutil.wait_procs([psutil.Process(process.pid), *family], timeout=30)[1]:
                one.kill()
            if server == "litserve":
                print("batches:", sorted(Counter((work / name / BATCHES).read_text().split()).items()), flush=True)


def serve_one(folder: Path, port: int, timeout: float) -> None:
    """Serve a guard in this process."""
    import uvicorn

    service = Service(Guard.load(folder, resnet20()), limits=Limits(timeout=timeout))
    uvicorn.run(application(service), host="127.0.0.1", port=port, log_level="error")


# -- clients ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What clients were answered.

    Attributes:
        statuses: HTTP statuses, or names of exceptions.
        seconds: Of each answer with 200.
        failed_at: When each request ended that failed, on `time.perf_counter`.
        wrong: Answers that are not the guard's.
        wall: Seconds of it all.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)
    wrong: int = 0
    wall: float = 0.0

    def measures(self) -> dict[str, Any]:
        """Return what is kept."""
        ordered = sorted(self.seconds) or [float("nan")]
        return {
            "statuses": dict(self.statuses),
            "wrong": self.wrong,
            "answered per second": round(len(self.seconds) / self.wall, 2),
            "p50 ms": round(1e3 * statistics.median(ordered), 1),
            "p99 ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
            "wall seconds": round(self.wall, 2),
        }


class Clients:
    """Ask about images, and compare what is answered with the guard's own verdicts."""

    def __init__(self, guard: Guard) -> None:
        data = load("cifar10", "test")
        inputs = cifar_inputs(data.inputs[:IMAGES])
        self.bodies = [json.dumps({"inputs": [_rounded(image)]}).encode() for image in inputs.tolist()]
        same = torch.tensor([json.loads(body)["inputs"][0] for body in self.bodies])
        self.expected = guard(same)

    async def ask(self, session: aiohttp.ClientSession, url: str, index: int, tally: Tally) -> None:
        """Ask once."""
        index %= IMAGES
        began = time.perf_counter()
        try:
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/predict", data=self.bodies[index], headers=headers) as answer:
                content = await answer.read()
                tally.statuses[str(answer.status)] += 1
                if answer.status == 200:
                    tally.seconds.append(time.perf_counter() - began)
                    tally.wrong += not self._right(json.loads(content)["verdicts"], index)
                elif answer.status != 503:
                    tally.failed_at.append(time.perf_counter())
                elif "Retry-After" not in answer.headers:
                    tally.statuses["503 without Retry-After"] += 1
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            tally.statuses[type(error).__name__] += 1
            tally.failed_at.append(time.perf_counter())

    def _right(self, lines: list[dict[str, Any]], index: int) -> bool:
        expected = self.expected[index]
        label = CLASSES[int(expected.label[0])]
        near = abs(lines[0]["confidence"] - float(expected.confidence[0])) < 1e-4
        return len(lines) == 1 and lines[0]["label"] == label and near

    async def closed(self, url: str, clients: int, more: Callable[[], bool]) -> Tally:
        """Let clients ask, each again when it is answered, while there is more to ask."""
        tally, asked = Tally(), 0
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

            async def client() -> None:
                nonlocal asked
                while more():
                    asked += 1
                    await self.ask(session, url, asked, tally)

            began = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(clients)))
            tally.wall = time.perf_counter() - began
        return tally

    async def open(self, url: str, rate: float, seconds: float) -> Tally:
        """Ask so many times a second, whether it is answered or not."""
        tally = Tally()
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            began, tasks = time.perf_counter(), []
            for number in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
                tasks.append(asyncio.create_task(self.ask(session, url, number, tally)))
            tally.wall = time.perf_counter() - began
            await asyncio.gather(*tasks)
        return tally


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else round(values, 4)


def counted(number: int, seconds: float) -> Callable[[], bool]:
    """Return a function that is true so many times, for so many seconds."""
    end, left = time.monotonic() + seconds, number

    def more() -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and time.monotonic() < end

    return more


# -- the parts --------------------------------------------------------------------------------------------------------


def latency(
    running: dict[str, Running], clients: dict[str, Clients], requests: dict[int, int], seconds: float
) -> dict[str, dict[str, Any]]:
    """Measure 1, 8 and 64 clients of each guard, in turn."""
    for name, one in running.items():
        asyncio.run(clients[name].closed(one.url, 2, counted(4, seconds)))  # connections
    found: dict[str, dict[str, Any]] = {name: {} for name in running}
    for number, count in requests.items():
        for name, one in running.items():
            before = one.seconds()
            tally = asyncio.run(clients[name].closed(one.url, number, counted(count, seconds)))
            used = 1e3 * (one.seconds() - before) / max(1, len(tally.seconds))
            measures = {**tally.measures(), "service CPU ms per request": round(used, 2)}
            found[name][f"{number} clients"] = measures
            print(name, number, json.dumps(measures), flush=True)
    return found


def overload(running: Running, clients: Clients, seconds: float) -> dict[str, Any]:
    """Ask twice as often as it can answer."""
    calm = asyncio.run(clients.closed(running.url, 1, counted(20, seconds)))
    full = asyncio.run(clients.closed(running.url, 64, counted(10_000, seconds)))
    rate = 2 * len(full.seconds) / full.wall
    tally = asyncio.run(clients.open(running.url, rate, seconds))
    ended, usual = time.perf_counter(), 2 * statistics.median(calm.seconds)
    while True:
        one = asyncio.run(clients.closed(running.url, 1, counted(1, 60)))
        if (one.seconds and one.seconds[0] <= usual) or time.perf_counter() - ended > 60:
            break
    shed = tally.statuses["503"] / sum(tally.statuses.values())
    return {
        "asked per second": round(rate, 2),
        "calm p50 ms": calm.measures()["p50 ms"],
        **tally.measures(),
        "shed share": round(shed, 3),
        "recovered after seconds": round(time.perf_counter() - ended, 2),
    }


def kill(running: Running, clients: Clients, seconds: float) -> dict[str, Any]:
    """Kill a replica while eight clients ask."""
    killed: dict[str, float] = {}

    async def run() -> Tally:
        asking = asyncio.create_task(clients.closed(running.url, 8, counted(10_000, seconds)))
        await asyncio.sleep(seconds / 6)
        victim = running.processes()["replica"][0]
        victim.kill()
        killed["at"] = time.perf_counter()
        while len([one for one in running.processes()["replica"] if one.pid != victim.pid and _warm(one)]) < 2:
            if asking.done():
                break
            await asyncio.sleep(0.5)
        else:
            killed["again"] = time.perf_counter()
        return await asking

    tally = asyncio.run(run())
    failures = [when - killed["at"] for when in tally.failed_at]
    return {
        **tally.measures(),
        "failed": len(failures),
        "last failure after seconds": round(max(failures), 2) if failures else None,
        "two replicas again after seconds": round(killed["again"] - killed["at"], 2) if "again" in killed else None,
    }


def _warm(process: psutil.Process) -> bool:
    """Return whether a replica has loaded its guard: torch and the network are in memory, and it is no longer busy."""
    return process.memory_info().rss > 250 * 2**20


def soak(running: Running, clients: Clients, minutes: float, rate: float) -> dict[str, Any]:
    """Ask a few times a second for a long time, and look at the memory."""
    rows, total = [], Counter[str]()
    wrong = 0
    for minute in range(max(1, round(minutes))):
        tally = asyncio.run(clients.open(running.url, rate, 60.0))
        total.update(tally.statuses)
        wrong += tally.wrong
        rows.append(running.memory())
        print(f"minute {minute + 1}", json.dumps(rows[-1]), dict(tally.statuses), flush=True)
    return {"statuses": dict(total), "wrong": wrong, "MB by minute": rows}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["latency"], help="latency, overload, kill, soak")
    parser.add_argument("--work", type=Path, required=True, help="folder of the guards")
    parser.add_argument("--guards", nargs="*", default=list(GUARDS), help="of the latency")
    parser.add_argument("--server", choices=["ray", "uvicorn", "litserve"], default="ray", help="uvicorn: one process")
    parser.add_argument("--requests", type=int, nargs=3, default=[100, 400, 1600], help="of 1, 8 and 64 clients")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, for each measurement")
    parser.add_argument("--timeout", type=float, default=2.0, help="of the service")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the soak")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second of the soak")
    parser.add_argument("--port", type=int, default=8200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.parts == ["one"]:
        serve_one(asked.work, asked.port, asked.timeout)
        return
    asked.work.mkdir(parents=True, exist_ok=True)
    make_guards(asked.work)
    settings = {"benchmark": "serving", "replicas": 2, "timeout": asked.timeout}
    records = Records(Path(__file__).parent / "results" / "serving.json", settings)

    def keep(name: str, measures: dict[str, Any], began: float, **config: Any) -> None:
        print(name, json.dumps(measures), flush=True)
        records.append(name, measures, config=config, seconds=time.perf_counter() - began)

    if "latency" in asked.parts:
        requests = dict(zip((1, 8, 64), asked.requests, strict=True))
        began = time.perf_counter()
        clients = {name: Clients(Guard.load(asked.work / name, resnet20())) for name in asked.guards}
        with ExitStack() as stack:
            running = {}
            for port, name in enumerate(asked.guards, asked.port):
                options = (asked.work, name, port, asked.timeout)
                one = served(*options) if asked.server == "ray" else alone(*options, asked.server)
                running[name] = stack.enter_context(one)
            for name, found in latency(running, clients, requests, asked.seconds).items():
                keep(f"latency, {name}, {asked.server}", found, began, requests=requests, server=asked.server)
    rest = [part for part in ("overload", "kill", "soak") if part in asked.parts]
    if rest:
        asking = Clients(Guard.load(asked.work / "plain", resnet20()))
        options = (asked.work, "plain", asked.port, asked.timeout)
        with served(*options) if asked.server == "ray" else alone(*options, asked.server) as service:
            for part in rest:
                began = time.perf_counter()
                if part == "soak":
                    found = soak(service, asking, asked.minutes, asked.rate)
                    keep(part, found, began, minutes=asked.minutes, rate=asked.rate, server=asked.server)
                else:
                    found = (overload if part == "overload" else kill)(service, asking, asked.seconds)
                    keep(part, found, began, seconds=asked.seconds, server=asked.server)


if __name__ == "__main__":
    main()
