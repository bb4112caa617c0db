"""The same guard on LitServe, to compare: `python -m benchmarks.serving latency --server litserve --guards plain ...`.

As LitServe does it by itself: two workers, batches of at most 64 that are closed after five milliseconds, one example a
request. Needs litserve (benchmarks/requirements.txt).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import litserve
import torch
from torch import Tensor

from bayesify.data import Batch
from bayesify.decide import Guard
from bayesify.decide.lines import lines_of
from benchmarks.serving import BATCHES, resnet20

__all__ = ["API"]


class API(litserve.LitAPI):
    """What LitServe asks for."""

    def __init__(self, folder: str, **options: Any) -> None:
        """Remember which guard."""
        super().__init__(**options)
        self.folder = folder

    def setup(self, device: str) -> None:
        """Load the guard in a worker."""
        del device
        torch.set_num_threads(1)
        self.guard = Guard.load(self.folder, resnet20())
        self.guard(torch.zeros(2, 3, 32, 32))

    def decode_request(self, request: dict[str, Any]) -> Tensor:
        """Read the one example of a request."""
        return torch.tensor(request["inputs"][0])

    def batch(self, inputs: Sequence[Tensor]) -> Tensor:
        """Put examples together."""
        return torch.stack(list(inputs))

    def predict(self, x: Tensor) -> list[dict[str, Any]]:
        """Decide, and note how many were decided together."""
        with (Path(self.folder) / BATCHES).open("a") as file:
            file.write(f"{len(x)}\n")
        return list(lines_of(Batch(list(range(len(x))), None), self.guard(x)))

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take them apart."""
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        """Write the answer of one."""
        return {"verdicts": [output]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="the guard's folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    asked = parser.parse_args()
    api = API(asked.work, max_batch_size=64, batch_timeout=0.005, api_path="/predict")
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=2, timeout=asked.timeout, restart_workers=True
    )
    server.run(host="127.0.0.1", port=asked.port, generate_client_file=False, num_api_servers=1, log_level="error")
