"""A mode is that of who entered it: threads, coroutines, generators and forked processes leave none behind."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from bayesify import ABNN, IBNN, SWAG, BayesAdapter, DeepEnsemble, MCDropout, convert, predict
from bayesify.laws import Key
from tests.laws.networks import mlp

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def posterior():
    return convert(mlp(), MCDropout())


def in_thread(function):
    """Return what a function returns in another thread, which must not wait for this one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "another thread is kept waiting"
    return found[0]


MODES = {
    "kind": (lambda posterior: posterior.mean(), "mean", "fresh"),
    "keys": (lambda posterior: posterior.drawn(Key(3)), (Key(3),), ()),
    "part": (lambda posterior: posterior.member(2), 2, None),
}


@pytest.fixture(params=MODES)
def part(request):
    """What reads a part of the present pass, what enters it, the value inside and outside."""
    method = DeepEnsemble(members=3) if request.param == "part" else MCDropout()
    posterior = convert(mlp(), method)
    enter, inside, outside = MODES[request.param]
    return (lambda: getattr(posterior.present(), request.param)), (lambda: enter(posterior)), inside, outside


def test_coroutines_that_overlap_leave_no_mode(part):
    read, enter, inside, outside = part
    seen = []

    async def hold(before, during):
        await asyncio.sleep(before)
        with enter():
            await asyncio.sleep(during)
            seen.append(read())

    async def look():
        await asyncio.sleep(0.015)  # while both are inside
        return read()

    async def main():
        *_, looked = await asyncio.gather(hold(0, 0.02), hold(0.01, 0.03), look())
        return looked

    assert asyncio.run(main()) == outside
    assert seen == [inside, inside]
    assert read() == outside


def test_passes_of_coroutines_have_their_own_mode(posterior):
    with posterior.mean():
        silent = posterior(X)

    async def silently():
        with posterior.mean():
            for _ in range(5):
                await asyncio.sleep(0)
                assert torch.equal(posterior(X), silent)

    async def fresh():
        for _ in range(5):
            await asyncio.sleep(0)
            assert not torch.equal(posterior(X), silent)
            assert float(predict(posterior, X).epistemic.max()) > 0

    async def main():
        await asyncio.gather(silently(), fresh(), silently(), fresh())

    asyncio.run(main())
    assert not torch.equal(posterior(X), posterior(X))


def test_tasks_that_are_started_inside_a_mode_have_it_until_it_ends(posterior):
    async def main():
        ended = asyncio.Event()

        async def later():
            first = posterior.present().kind == "mean"
            await ended.wait()
            return first, posterior.present().kind == "mean"

        with posterior.mean():
            task = asyncio.create_task(later())
            thread = await asyncio.to_thread(lambda: posterior.present().kind == "mean")
            await asyncio.sleep(0)
        ended.set()
        return thread, await task

    assert asyncio.run(main()) == (True, (True, False))


def suspended(enter):
    with enter():
        yield


def test_a_suspended_generator_keeps_no_other_thread_waiting(posterior, part):
    read, enter, inside, outside = part
    generator = suspended(enter)
    next(generator)
    assert read() == inside  # its caller is inside meanwhile, as the docstring says
    assert in_thread(read) == outside
    assert in_thread(lambda: not torch.equal(posterior(X), posterior(X)))
    generator.close()
    assert read() == outside


@pytest.mark.parametrize("end", ["close", "collect"])
@pytest.mark.slow
def test_a_generator_that_another_thread_ends_leaves_nothing(posterior, part, end):
    read, enter, _, outside = part
    generator = [suspended(enter)]
    next(generator[0])
    in_thread(generator[0].close if end == "close" else lambda: (generator.clear(), gc.collect()))
    assert read() == outside
    assert in_thread(lambda: posterior.lock.acquire(blocking=False) and posterior.lock.release() is None)
    assert not torch.equal(posterior(X), posterior(X))


def test_contexts_that_end_in_another_order_leave_nothing(posterior):
    first, second = posterior.mean(), posterior.drawn(Key(1))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (posterior.present().kind, posterior.present().keys) == ("draw", (Key(1),))
    second.__exit__(None, None, None)
    assert (posterior.present().kind, posterior.present().keys) == ("fresh", ())


METHODS = {
    "dropout": MCDropout(),
    "adapter": BayesAdapter(),
    "shared": BayesAdapter(estimator="shared"),
    "mixture": IBNN(),
    "norms": ABNN(),
    "members": DeepEnsemble(members=3),
    "vectors": SWAG(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # that a posterior has learned nothing
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_eight_threads_give_what_one_gives(name):
    torch.manual_seed(0)
    random = nn.Dropout(0.5) if name == "dropout" else nn.Identity()  # torch's own is random in training mode
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), random, nn.Linear(8, 3)).double().train()
    posterior = convert(network, METHODS[name])
    x = torch.randn(5, 4, dtype=torch.float64)

    def work(index):
        with ExitStack() as stack:
            if index % 3 == 0 and name in ("norms", "members"):
                stack.enter_context(posterior.member(index % 2))
            if index % 4 == 1:
                stack.enter_context(posterior.drawn(posterior.keys(3, index)[-1]))
                return posterior(x).detach()
            if index % 4 == 2 and name not in ("norms", "members"):
                stack.enter_context(posterior.mean())
                return posterior(x).detach()
            return predict(posterior, x, seed=index, num_draws=4, chunk_size=2).log_probs

    serial = [work(index) for index in range(24)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(work, range(24)))
    finally:
        sys.setswitchinterval(interval)
    assert all(map(torch.equal, serial, together))
    assert all(module.training for module in posterior.network.modules())
    assert (posterior.present().kind, posterior.present().keys, posterior.present_part) == ("fresh", (), None)


FORK = """
import os, signal, threading
import torch
from torch import nn
from bayesify import BayesAdapter, MCDropout, convert, predict
from bayesify.laws import Key, modes

torch.set_num_threads(1)

class Waits(nn.Module):
    def forward(self, x):
        if waiting.is_set():
            entered.set()
            act()
        return x

waiting, entered, leave = threading.Event(), threading.Event(), threading.Event()
posterior = convert(nn.Sequential(nn.Linear(4, 8), Waits(), nn.Linear(8, 3)), BayesAdapter())
other = convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), MCDropout())
x, own = torch.randn(2, 4), posterior.network[0].weight
expected = predict(posterior, x, seed=0).probs

def child():
    assert posterior.network[0].weight is own, "swapped tensors"
    assert torch.equal(predict(posterior, x, seed=0).probs, expected)
    predict(other, x)

def forked(body):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that hangs is killed
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def run():
    with torch.no_grad():
        posterior.draw(0)(x)

def busy():
    with other.lock:
        entered.set()
        leave.wait(20)

def free(one):
    assert one.lock.acquire(timeout=1), "a lock is held for ever"

def check(action, target, body):
    "Fork while `target` runs in another thread, or, without one, in this thread's pass."
    global act
    entered.clear(), leave.clear(), waiting.set()
    act = action
    thread = threading.Thread(target=target)
    thread.start()
    entered.wait()
    body()
    waiting.clear(), leave.set()
    thread.join()
    assert posterior.network[0].weight is own
    assert torch.equal(predict(posterior, x, seed=0).probs, expected)

def outside():
    assert posterior.network[0].weight is not own
    waiting.clear()
    forked(child)

print("another thread is inside a pass")
check(lambda: leave.wait(.3), run, outside)

print("another thread never leaves its pass")
modes._WAIT = .2
check(lambda: leave.wait(20), run, lambda: (waiting.clear(), forked(lambda: (predict(other, x), free(posterior)))))

print("this thread is inside a pass, and another, which waits for it, is inside one of another posterior")
modes._WAIT = 60.0
check(lambda: forked(lambda: (free(posterior), free(other))), busy, run)
forked(child)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_finds_the_network_as_it_is_and_does_not_hang():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
