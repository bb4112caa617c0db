"""What holds for every test: one thread, one seed, no network, no window."""

import os
import random

# Read when the library in question is first imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import hypothesis
import numpy as np
import pytest
import torch

from tests.torchvision_stub import declare_torchvision_operators

# Sums then have one order on every machine; the runner has a process for each core.
torch.set_num_threads(1)

hypothesis.settings.register_profile("bayesify", deadline=None, derandomize=True)
hypothesis.settings.load_profile("bayesify")

declare_torchvision_operators()


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
