"""Processes that tests start: forked in milliseconds from one server that has imported what they need."""

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

__all__ = ["FORKS", "run_ranks", "run_script", "set_environment"]

FORKS = multiprocessing.get_context("forkserver")
# There is one server for all of them, and one list: a second call of this anywhere would take the place of the first.
# torch._dynamo is what torch's optimisers import at their first step, which takes seconds.
FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "tests.conformance.processes",
        "tests.fitting.ddp",
        "tests.fitting.killed",
        "tests.fitting.runs",
        "tests.prediction.shared",
        "tests.storage.savers",
    ]
)


def run_ranks(work: Callable[..., None], *args: Any, seconds: float = 240) -> list[int | None]:
    """Run `work(rank, port, *args)` in two processes, and return what each ended with; no longer than that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [FORKS.Process(target=work, args=(rank, port, *args)) for rank in range(2)]
    for process in started:
        process.start()
    until = time.monotonic() + seconds
    try:
        for process in started:
            process.join(max(0.0, until - time.monotonic()))
        assert not any(process.is_alive() for process in started), "the processes wait for each other"
        return [process.exitcode for process in started]
    finally:
        for process in started:
            if process.is_alive():
                process.kill()


def set_environment(rank: int, port: int) -> None:
    """Set what torchrun sets, for one of two processes."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
    )  # fmt: skip


def run_script(rank: int, port: int, code: str, folder: str) -> None:
    """Run a script in this process, as torchrun would, and write down what it says."""
    set_environment(rank, port)
    os.chdir(folder)
    with open(f"{rank}.txt", "w") as said, contextlib.redirect_stdout(said):
        exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
