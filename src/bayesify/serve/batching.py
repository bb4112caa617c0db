"""Requests that wait together are decided together, and one that would be late is told so at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

__all__ = ["Batcher", "LateError", "OverloadError", "Pace"]

DECAY = 0.8  # of what earlier batches say about the seconds of a row
REMEMBERED = 0.98  # likewise of the seconds between answers, of which there are more
SHARE = 0.5  # of the time that a request has, that may be spoken for when it is let in


class OverloadError(Exception):
    """The queue is so long that a request would be late.

    Attributes:
        retry_after: In how many seconds there should be room.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"The queue is full: try again in {retry_after:.1f} seconds.")
        self.retry_after = retry_after


class LateError(Exception):
    """A request that was let in was not decided in time."""


@dataclass(eq=False)
class _Job:
    """A request in the queue."""

    inputs: Any
    rows: int
    future: asyncio.Future[Any]


class Pace:
    """Say how long a request that comes now will take, by Little's law: those inside times the seconds between answers.

    The seconds are a decayed average over the time in which somebody is inside, and so hold all that a request costs
    besides the network: reading its body, writing its answer, waiting for a busy processor.

    Args:
        clock: Seconds that only go up.

    >>> pace = Pace(iter([0.0, 0.3]).__next__)
    >>> pace.enter(), pace.enter(), pace.leave(), round(pace.wait, 3)
    (None, None, None, 0.3)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.inside = clock, 0
        self._since, self._busy, self._answers = 0.0, 0.0, 0.0

    @property
    def wait(self) -> float:
        """In how many seconds those inside will be answered, as far as is known."""
        return self.inside * self._busy / self._answers if self._answers else 0.0

    def enter(self) -> None:
        """Let a request in."""
        if not self.inside:
            self._since = self.clock()
        self.inside += 1

    def leave(self, *, answered: bool = True) -> None:
        """Let it out; one that asked for nothing that costs does not count as an answer."""
        now = self.clock()
        self._busy, self._since = self._busy + now - self._since, now
        self.inside -= 1
        if answered:
            self._busy, self._answers = REMEMBERED * self._busy, REMEMBERED * (self._answers + 1)


class Batcher:
    """Collect requests while a batch is being decided; then decide all that wait, up to `max_rows`.

    An idle network starts at once, since nothing is gained by waiting, and a busy one gets larger batches the busier it
    is; there is no waiting time to choose. A request is let in if what waits before it can be done in time: rows before
    it times the seconds of a row, a decayed average over batches, of which at most `SHARE` of `timeout` may be spoken
    for. An idle network lets everything in, so that a wrong average mends itself. Memory is bounded by the same rule.

    Args:
        decide: Takes the inputs of the requests of a batch, returns an answer, or an exception, for each. It runs in a
            thread, one call at a time.
        max_rows: Rows of a batch; a larger request is a batch of its own.
        timeout: Seconds that a request may take.
        clock: Seconds that only go up.

    >>> async def twice() -> list[int]:
    ...     batcher = Batcher(lambda batch: [2 * value for value in batch], max_rows=8, timeout=1.0)
    ...     return await asyncio.gather(*(batcher(value, rows=1) for value in range(3)))
    >>> asyncio.run(twice())
    [0, 2, 4]
    """

    def __init__(
        self,
        decide: Callable[[list[Any]], Sequence[Any]],
        *,
        max_rows: int,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_rows < 1 or not timeout > 0:
            raise ValueError(f"A batch has at least 1 row and a request some time, not {max_rows} and {timeout}.")
        self.decide, self.max_rows, self.timeout, self.clock = decide, max_rows, timeout, clock
        self._queue: deque[_Job] = deque()
        self._waiting = 0  # rows in the queue
        self._running = 0  # rows of the batch that is being decided
        self._began = 0.0
        self._seconds, self._rows = 0.0, 0.0  # decayed sums over batches
        self._loop: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decide")

    @property
    def row_seconds(self) -> float:
        """How long a row takes, as far as is known."""
        return self._seconds / self._rows if self._rows else 0.0

    @property
    def wait(self) -> float:
        """In how many seconds what is here will be done, as far as is known."""
        running = self._running * self.row_seconds - (self.clock() - self._began) if self._running else 0.0
        return max(0.0, running) + self._waiting * self.row_seconds

    def note(self, rows: int, seconds: float) -> None:
        """Learn from a batch how long rows take."""
        self._seconds, self._rows = DECAY * self._seconds + seconds, DECAY * self._rows + rows

    async def __call__(self, inputs: Any, *, rows: int, seconds: float | None = None) -> Any:
        """Return the answer to a request, or raise its exception.

        Args:
            inputs: What `decide` takes for it.
            rows: How many rows it has.
            seconds: What is left of its time; None is all of it.

        Raises:
            OverloadError: It would be late, and was not let in.
            LateError: It was let in, and is late.
        """
        left = self.timeout if seconds is None else seconds
        wait = self.wait
        if self._running + self._waiting and wait + rows * self.row_seconds > SHARE * left:
            raise OverloadError(max(wait, self.row_seconds))
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._work())
        job = _Job(inputs, rows, asyncio.get_running_loop().create_future())
        self._queue.append(job)
        self._waiting += rows
        self._wake.set()
        try:
            return await asyncio.wait_for(job.future, max(left, 0.0))
        except asyncio.TimeoutError as error:
            raise LateError(f"The request was not decided within {self.timeout:g} seconds.") from error

    async def close(self, seconds: float = math.inf) -> None:
        """Let what is here be decided, for at most so many seconds, and stop."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained(), None if seconds == math.inf else seconds)
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
        self._thread.shutdown(wait=False)

    async def _drained(self) -> None:
        while self._queue or self._running:
            await asyncio.sleep(0.01)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            jobs = self._next()
            if not jobs:
                self._wake.clear()
                continue
            self._running, self._began = sum(job.rows for job in jobs), self.clock()
            try:
                answers = await loop.run_in_executor(self._thread, self.decide, [job.inputs for job in jobs])
                if len(answers) != len(jobs):
                    raise RuntimeError(f"There are {len(answers)} answers to {len(jobs)} requests.")
            except Exception as error:
                answers = [error] * len(jobs)
            self.note(self._running, self.clock() - self._began)
            self._running = 0
            for job, answer in zip(jobs, answers, strict=True):
                if job.future.done():
                    continue
                if isinstance(answer, BaseException):
                    job.future.set_exception(answer)
                else:
                    job.future.set_result(answer)

    def _next(self) -> list[_Job]:
        """Take from the queue what fits into a batch; who no longer waits is left out."""
        jobs: list[_Job] = []
        rows = 0
        while self._queue and (not jobs or rows + self._queue[0].rows <= self.max_rows):
            job = self._queue.popleft()
            self._waiting -= job.rows
            if not job.future.done():
                jobs.append(job)
                rows += job.rows
        return jobs
