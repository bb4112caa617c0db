"""Several processes and one folder: savers beside each other, readers beside savers, savers that are killed."""

import os
import random
import signal

import pytest

import bayesify
from tests.processes import FORKS
from tests.storage.savers import read_often, read_tag, save_all, save_for_ever, tagged

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool():
    with FORKS.Pool(4) as found:
        yield found


def run_together(pool, folder, first):
    """Let two processes save while two others read; return what was read, and what is there at the end."""
    bayesify.save(tagged(first), folder)
    ours, theirs = range(first + 1, first + 4), range(first + 4, first + 7)
    savers = [pool.apply_async(save_all, (folder, list(tags))) for tags in (ours, theirs)]
    readers = [pool.apply_async(read_often, (folder, 8)) for _ in range(2)]
    for saver in savers:
        saver.get(60)
    seen = {tag for reader in readers for tag in reader.get(60)}
    assert seen <= {first, *ours, *theirs}
    last = read_tag(folder)
    assert last in (ours[-1], theirs[-1])
    assert len(os.listdir(folder)) <= 3  # the configuration, its tensors, and those of the version before
    return seen, last


def check_runs(pool, folder, runs):
    together = [run_together(pool, folder / str(run), 10 * run + 1) for run in range(runs)]
    assert any(len(seen) > 1 for seen, _ in together)  # some did read while others saved


def test_savers_and_readers_of_one_folder_never_meet_a_part(pool, tmp_path):
    check_runs(pool, tmp_path, 4)


def test_200_runs_of_savers_and_readers_never_meet_a_part(pool, tmp_path):
    check_runs(pool, tmp_path, 200)


def check_kills(folder, kills):
    """Kill savers at random moments; return how many of them left something behind."""
    moments, orphans = random.Random(0), 0
    bayesify.save(tagged(1), folder)
    for _ in range(kills):
        here, there = FORKS.Pipe()
        process = FORKS.Process(target=save_for_ever, args=(folder, there))
        process.start()
        here.recv()
        process.join(moments.uniform(0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert read_tag(folder) in range(1, 5)
        orphans += len(os.listdir(folder)) > 3
        bayesify.save(tagged(moments.randint(1, 4)), folder)
        assert len(os.listdir(folder)) <= 3, os.listdir(folder)
        read_tag(folder)
    return orphans


def test_a_saver_that_is_killed_leaves_a_whole_version(tmp_path):
    check_kills(tmp_path, 6)


def test_100_savers_that_are_killed_leave_a_whole_version(tmp_path):
    assert check_kills(tmp_path, 100) > 5  # the moments were not all harmless
