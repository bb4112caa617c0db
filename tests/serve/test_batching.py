"""Batches of requests that wait together; who would be late is refused at once."""

import asyncio
import threading

import pytest

from bayesify.serve import Batcher, LateError, OverloadError, Pace


class Clock:
    """Seconds that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Gate:
    """A `decide` that waits until it is told to go on, and remembers its batches."""

    def __init__(self):
        self.batches, self.gate, self.begun = [], threading.Event(), threading.Event()

    def __call__(self, batch):
        self.batches.append(list(batch))
        self.begun.set()
        assert self.gate.wait(30)
        return [value if isinstance(value, Exception) else 10 * value for value in batch]


async def begun(gate):
    await asyncio.get_running_loop().run_in_executor(None, gate.begun.wait)


def test_what_waits_is_one_batch_up_to_its_size():
    async def run():
        gate = Gate()
        batcher = Batcher(gate, max_rows=4, timeout=30)
        tasks = [asyncio.create_task(batcher(0, rows=1))]
        await begun(gate)
        tasks += [asyncio.create_task(batcher(value, rows=1)) for value in range(1, 7)]
        await asyncio.sleep(0)
        gate.gate.set()
        answers = await asyncio.gather(*tasks)
        await batcher.close()
        return gate.batches, answers

    batches, answers = asyncio.run(run())
    assert batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert answers == [0, 10, 20, 30, 40, 50, 60]


def test_rows_count_and_a_large_request_is_a_batch_of_its_own():
    async def run():
        gate = Gate()
        batcher = Batcher(gate, max_rows=4, timeout=30)
        tasks = [asyncio.create_task(batcher(0, rows=1))]
        await begun(gate)
        tasks += [asyncio.create_task(batcher(rows, rows=rows)) for rows in (3, 9, 2, 2)]
        await asyncio.sleep(0)
        gate.gate.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return gate.batches

    assert asyncio.run(run()) == [[0], [3], [9], [2, 2]]


def test_who_would_be_late_is_refused_with_the_seconds_to_wait():
    async def run():
        gate, clock = Gate(), Clock()
        batcher = Batcher(gate, max_rows=8, timeout=16.0, clock=clock)
        batcher.note(rows=2, seconds=2.0)  # a second for a row
        first = asyncio.create_task(batcher(0, rows=5))  # idle: let in
        await begun(gate)
        assert batcher.wait == pytest.approx(5.0)
        clock.now += 2.0
        assert batcher.wait == pytest.approx(3.0)
        second = asyncio.create_task(batcher(1, rows=4))  # 3 + 4 of the 8 seconds that may be spoken for
        await asyncio.sleep(0)
        assert batcher.wait == pytest.approx(7.0)
        with pytest.raises(OverloadError) as refused:
            await batcher(2, rows=2)
        assert refused.value.retry_after == pytest.approx(7.0)
        third = asyncio.create_task(batcher(3, rows=1))  # a smaller one still fits
        await asyncio.sleep(0)
        gate.gate.set()
        answers = await asyncio.gather(first, second, third)
        await batcher.close()
        return answers

    assert asyncio.run(run()) == [0, 10, 30]


def test_an_idle_network_takes_everything_so_that_a_wrong_average_mends_itself():
    async def run():
        batcher = Batcher(lambda batch: list(batch), max_rows=8, timeout=1.0)
        batcher.note(rows=1, seconds=1e6)
        for _ in range(100):
            await batcher(1, rows=1)
        await batcher.close()
        return batcher.row_seconds

    assert asyncio.run(run()) < 1.0  # 1e6 * 0.8 ** 100 = 2e-4


def test_late_requests_fail_alone_and_those_in_the_queue_are_not_decided():
    async def run():
        gate = Gate()
        batcher = Batcher(gate, max_rows=8, timeout=30)
        slow = asyncio.create_task(batcher(0, rows=1, seconds=0.01))
        await begun(gate)
        queued = asyncio.create_task(batcher(1, rows=1, seconds=0.01))
        patient = asyncio.create_task(batcher(2, rows=1))
        for task in (slow, queued):
            with pytest.raises(LateError):
                await task
        gate.gate.set()
        answer = await patient
        await batcher.close()
        return gate.batches, answer

    assert asyncio.run(run()) == ([[0], [2]], 20)


def test_exceptions_belong_to_their_requests():
    async def run():
        gate = Gate()
        gate.gate.set()
        batcher = Batcher(gate, max_rows=8, timeout=30)
        found = await asyncio.gather(batcher(1, rows=1), batcher(KeyError("x"), rows=1), return_exceptions=True)
        broken = Batcher(lambda batch: [], max_rows=8, timeout=30)
        with pytest.raises(RuntimeError, match="0 answers to 1 requests"):
            await broken(1, rows=1)
        again = await batcher(3, rows=1)  # it goes on
        await batcher.close()
        await broken.close()
        return found, again

    found, again = asyncio.run(run())
    assert found[0] == 10
    assert isinstance(found[1], KeyError)
    assert again == 30


def test_closing_answers_what_is_there():
    async def run():
        gate = Gate()
        batcher = Batcher(gate, max_rows=1, timeout=30)
        tasks = [asyncio.create_task(batcher(value, rows=1)) for value in range(3)]
        await begun(gate)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        gate.gate.set()
        await closing
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [0, 10, 20]


def test_pace_is_littles_law():
    clock = Clock()
    pace = Pace(clock)
    assert pace.wait == 0
    for _ in range(400):  # an answer every half second, with three inside
        while pace.inside < 3:
            pace.enter()
        clock.now += 0.5
        pace.leave()
    assert pace.wait == pytest.approx(2 * 0.5, rel=1e-3)
    for _ in range(2):
        pace.leave()
    clock.now += 1000.0  # nobody inside: that is no time between answers
    pace.enter()
    clock.now += 0.5
    pace.leave()
    pace.enter()
    assert pace.wait == pytest.approx(0.5, rel=0.05)
    pace.leave(answered=False)  # a refusal costs time and is no answer
    assert pace.inside == 0


@pytest.mark.parametrize(("rows", "timeout"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_settings_are_checked(rows, timeout):
    with pytest.raises(ValueError, match="at least 1 row"):
        Batcher(list, max_rows=rows, timeout=timeout)
