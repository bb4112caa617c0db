"""Does bfloat16 run on this CPU? Some kernels end the process, so another one tries first."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

# What ends the process leaves no line for itself, nor for those after it.
TRIAL = """
import torch
from tests.conformance.cases import EXAMPLES

for name, example in EXAMPLES.items():
    network = example.network().float().train()
    x = example.inputs(4)
    x = x.float() if x.is_floating_point() else x
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = network(x).float().square().sum()
        loss.backward()
    except RuntimeError as error:
        print(name, str(error).splitlines()[0], sep="|", flush=True)
    else:
        print(name, "", sep="|", flush=True)
"""


@functools.cache
def _trial() -> dict[str, str]:
    """Return, by example, why bfloat16 does not run; empty where it does."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, text=True, timeout=120, cwd=root)
    found = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    return {**found, "": f"the process that tried ended with {done.returncode}"}


def require_bfloat16(name: str = "mlp") -> None:
    """Skip the present test, with the reason, where an example's network does not run in bfloat16."""
    reason = _trial().get(name, _trial()[""])
    if reason:
        pytest.skip(f"no bfloat16 for {name!r} on this CPU: {reason}")
