"""What estimators of tables need beside a posterior: a network, batches, units and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bayesify.data import Split
from bayesify.laws import Posterior
from bayesify.likelihoods import Likelihood, RegressionPrediction
from bayesify.storage import save

__all__ = ["Batches", "Standardise", "Units", "as_tensor", "mlp", "packed", "unpacked"]

Array = npt.NDArray[Any]


class Standardise(nn.Module):
    """The first layer of a network for tables: (x - mean) / std, with what a training set had of each column."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def learn(self, inputs: Tensor) -> None:
        """Take mean and standard deviation of each column (N, D); a constant one is only centred."""
        wide = inputs.double()
        mean, std = wide.mean(0), wide.std(0, correction=0)
        self.mean.copy_(mean)
        self.std.copy_(std.where(std > 1e-12 * mean.abs(), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return standardised columns."""
        return (x - self.mean) / self.std


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Return a network of linear layers and ReLU behind a `Standardise`.

    >>> [type(layer).__name__ for layer in mlp(4, (8,), 3)]
    ['Standardise', 'Linear', 'ReLU', 'Linear']
    """
    layers: list[nn.Module] = [Standardise(inputs)]
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Batches:
    """Batches of a split, each taken by one indexing and not example by example; a loader for `fit`."""

    def __init__(self, split: Split, batch_size: int, *, shuffled: bool = False) -> None:
        self.dataset = split
        self.batch_size = batch_size
        self.shuffled = shuffled

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = len(self.dataset)
        order = torch.randperm(size) if self.shuffled else torch.arange(size)
        for rows in torch.split(order, self.batch_size):
            yield self.dataset.inputs[rows], self.dataset.targets[rows]


@dataclass(frozen=True)
class Units:
    """How the targets that a network learns, (y - mean) / scale, are told from the user's."""

    mean: Array
    scale: Array

    @classmethod
    def of(cls, targets: Array, likelihood: Likelihood, *, wanted: bool) -> Units:
        """Return those in which targets are standardised, where that is wanted and the likelihood has a scale."""
        if not wanted or likelihood.kind not in ("gaussian", "student-t"):
            return cls(np.zeros(targets.shape[1:]), np.ones(targets.shape[1:]))
        scale = targets.std(0)
        return cls(targets.mean(0), np.where(scale > 0, scale, 1.0))

    def inside(self, targets: Array) -> Array:
        """Return targets as the network learns them."""
        found: Array = (targets - self.mean) / self.scale
        return found

    def outside(self, prediction: RegressionPrediction) -> RegressionPrediction:
        """Return a prediction in the user's units, in float64."""
        mean, scale = torch.from_numpy(np.asarray(self.mean)), torch.from_numpy(np.asarray(self.scale))
        squares = {name: getattr(prediction, name) for name in ("aleatoric", "epistemic", "view_epistemic")}
        more: dict[str, Any] = (
            {} if prediction.samples is None else {"samples": prediction.samples.double() * scale + mean}
        )
        more |= {name: tensor.double() * scale**2 for name, tensor in squares.items() if tensor is not None}
        return replace(prediction, mean=prediction.mean.double() * scale + mean, **more)


def as_tensor(x: Array) -> Tensor:
    """Return whole numbers as they are, and others in single precision."""
    whole = np.issubdtype(x.dtype, np.integer)
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64 if whole else np.float32))


def packed(posterior: Posterior) -> dict[str, bytes]:
    """Return the files of a whole posterior, JSON and safetensors, by name."""
    with TemporaryDirectory() as folder:
        save(posterior, folder, whole=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def unpacked(files: dict[str, bytes], folder: str) -> None:
    """Write files where `load` finds them."""
    for name, content in files.items():
        (Path(folder) / Path(name).name).write_bytes(content)
