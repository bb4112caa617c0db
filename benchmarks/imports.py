"""What `import bayesify` costs, as a share of `import torch` in the same process.

`python -m benchmarks.imports` starts several processes and shows the least share, which leaves out what else the
machine was doing; it ends with an error if that is above the given one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

__all__ = ["import_share"]

PROBE = """
import json, time
start = time.perf_counter()
import torch
of_torch = time.perf_counter() - start
start = time.perf_counter()
import bayesify
print(json.dumps((time.perf_counter() - start) / of_torch))
"""


def import_share(runs: int = 5) -> float:
    """Return the seconds of `import bayesify` after `import torch`, divided by those of torch: the least of the runs.

    Compiled files are there from the second run on, as for a user.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-c", PROBE]
        found = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
            for _ in range(max(runs, 2))
        ]
    return float(min(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--most", type=float, default=0.2, help="the largest share that is no error")
    arguments = parser.parse_args()
    share = import_share(arguments.runs)
    print(f"import bayesify takes {share:.3f} of import torch")
    if share > arguments.most:
        sys.exit(f"That is more than {arguments.most}.")
