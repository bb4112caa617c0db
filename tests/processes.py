"""Processes that tests start: forked in milliseconds from one server that has imported what they need."""

import multiprocessing

__all__ = ["FORKS"]

FORKS = multiprocessing.get_context("forkserver")
# There is one server for all of them, and one list: a second call of this anywhere would take the place of the first.
# torch._dynamo is what torch's optimisers import at their first step, which takes seconds.
FORKS.set_forkserver_preload(
    ["torch._dynamo", "tests.conformance.processes", "tests.fitting.runs", "tests.storage.savers"]
)
