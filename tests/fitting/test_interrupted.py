"""Every method, interrupted again and again wherever it reads data, ends as if nothing had happened."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import bayesify
from tests.conformance.cases import CASES, CLASSES, EXAMPLES, Case

EXAMPLE = EXAMPLES["mlp"]
ROWS, BATCH = 14, 2
BATCHES = -(-ROWS // BATCH)


class Fragile(Dataset[tuple[Tensor, Tensor]]):
    """Data that can be read so many times only."""

    def __init__(self, breaks_at: int | None = None) -> None:
        torch.manual_seed(2)
        self.x, self.y = EXAMPLE.inputs(ROWS), torch.arange(ROWS) % CLASSES
        self.breaks_at, self.reads = breaks_at, 0

    def __len__(self) -> int:
        return ROWS

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        self.reads += 1
        if self.reads == self.breaks_at:
            raise KeyboardInterrupt
        return [(self.x[row], self.y[row]) for row in rows]


def _fit(case: Case, folder: Path | None, data: Fragile) -> dict[str, Tensor]:
    posterior = bayesify.convert(EXAMPLE.network(), case.noisy)
    options: dict[str, Any] = {"progress": False, "accuracy_tolerance": 1.0, "checkpoint_steps": 1}
    if case.noisy.epochs:
        options["epochs"] = 2
    bayesify.fit(posterior, DataLoader(data, BATCH, shuffle=True), checkpoint=folder, **options)
    return posterior.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_interrupted_up_to_four_times_ends_with_equal_weights(case: Case, tmp_path: Path):
    """As a Laplace fit that was interrupted twice once did not: it had forgotten the order of its data."""
    data = Fragile()
    expected = _fit(case, None, data)
    chance = random.Random(case.name)
    for attempt in range(2):
        folder, interrupted = tmp_path / str(attempt), 0
        while interrupted < 4:
            # First anywhere; a run that goes on is soon interrupted again, mostly in the same pass over the data.
            last = BATCHES if interrupted else data.reads
            try:
                _fit(case, folder, Fragile(chance.randint(2, last)))
                break
            except KeyboardInterrupt:
                interrupted += 1
        found = _fit(case, folder, Fragile())
        assert interrupted > 0, attempt
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
