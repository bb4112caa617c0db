"""What a user of the command line brings, networks and data; and how they read what it says."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bayesify.data import photo_patches, read_digits

NOT_A_FUNCTION = 3


def make_network(hidden=32):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))


def make_normed():
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)
    return nn.Sequential(*layers)


def make_trained():
    """Return a network that knows its sixty training digits by heart, so that a prior matters."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    images, labels = few_digits("train").tensors
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return network.eval()


def make_pixels():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))


def make_regressor():
    return nn.Linear(3, 1)


def make_small(inputs=4, outputs=2):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def dense():
    return nn.Conv2d(1, 10, 1)


def broken():
    raise RuntimeError("out of coffee")


def no_network():
    return [1, 2]


def few_digits(split):
    return TensorDataset(*read_digits(split).part(slice(60)).tensors)


def no_val(split):
    return None if split == "val" else few_digits(split)


def photos(split):
    assert split == "test"
    return TensorDataset(photo_patches(50))


def line(split):
    x = torch.linspace(-1, 1, {"train": 40, "val": 20, "test": 10}[split])[:, None].expand(-1, 3)
    noise = 0.1 * torch.randn(len(x), 1, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(-1, keepdim=True) + noise)


def bad_data(split):
    raise RuntimeError("disk on fire")


def without_split():
    return few_digits("test")


def unboxed(text):
    """Return text without the frames around it and the lines that they break."""
    return " ".join(text.translate(dict.fromkeys(map(ord, "│─╭╮╰╯"))).split())
