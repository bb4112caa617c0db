"""Two guards: of two numbers, whose answer is the larger one, and of images of four by four pixels."""

from pathlib import Path

import pytest
import torch

from bayesify import convert
from bayesify.data import ImageEncoding
from bayesify.decide import Guard
from tests.serve.nets import larger, quarters


@pytest.fixture(scope="session")
def guard():
    x = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
    return Guard.fit(convert(larger(), "map"), [(x, x.argmax(1))], max_risk=0.05, class_names=["left", "right"])


@pytest.fixture(scope="session")
def image_guard():
    x = torch.randn(600, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    network = quarters()
    with torch.no_grad():
        y = network(x).argmax(1)
    y[::25] = 0  # labels that are a little noisy, as labels are
    return Guard.fit(convert(network, "map"), [(x, y)], max_risk=0.1, class_names=["cat", "dog", "owl"])


@pytest.fixture(scope="session")
def images():
    return ImageEncoding("file", Path(), (4, 4), "RGB", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.fixture
def inputs():
    return torch.randn(12, 2, generator=torch.Generator().manual_seed(2))
