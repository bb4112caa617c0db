"""A million rows through `acquire`: seconds, and how much memory the process grows by.

`python -m benchmarks.pool` makes rows batch by batch (1,000 of 32 numbers), and lets a small network with dropout
choose 100 of them by BALD, and by BatchBALD among 2,000 candidates; with the plain pass over the same rows in the same
run, and with a tenth of the rows, to show what grows with the pool.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from bayesify import MCDropout, convert
from bayesify.decide import acquire
from experiments.records import Records

__all__ = ["Pool"]


class Pool:
    """Rows that are made when they are asked for, the same in every round."""

    def __init__(self, rows: int, batch: int = 1000) -> None:
        """Have so many rows."""
        self.rows, self.batch = rows, batch

    def __iter__(self) -> Iterator[Tensor]:
        """Give batches."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.rows // self.batch):
            yield torch.randn(self.batch, 32, generator=generator)


def _peak() -> float:
    """Return the most memory that the process ever had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print and keep a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)).eval()
    posterior = convert(network, MCDropout())
    records = Records(Path(__file__).parent / "results" / "pool.json", {"rows": rows})
    acquire(posterior, Pool(1000), 100, num_draws=5)  # imports, and the dry run
    start = time.process_time()
    with torch.no_grad():
        for batch in Pool(rows):
            network(batch)
    plain = time.process_time() - start
    for name, number, options in (
        ("bald, a tenth", rows // 10, {"acquisition": "bald"}),
        ("bald", rows, {"acquisition": "bald"}),
        ("batch-bald, a tenth", rows // 10, {"acquisition": "batch-bald", "candidates": 2000}),
        ("batch-bald", rows, {"acquisition": "batch-bald", "candidates": 2000}),
    ):
        before, start = _peak(), time.process_time()
        found = acquire(posterior, Pool(number), 100 if "batch" not in name else 10, num_draws=5, **options)  # type: ignore[arg-type]
        seconds = time.process_time() - start
        measures = {
            "chosen": len(found),
            "seconds": seconds,
            "plain passes": seconds / (plain * number / rows),
            "added MB": _peak() - before,
        }
        print(name, measures, flush=True)
        records.append(name, measures, seconds=seconds)


if __name__ == "__main__":
    main()
