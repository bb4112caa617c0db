"""The table of methods, one row each, and the networks that they are tried on."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import (
    ABNN,
    APD,
    IBNN,
    IVON,
    MAP,
    SGLD,
    SWAG,
    BayesAdapter,
    DeepEnsemble,
    Laplace,
    MCDropout,
    Method,
    Posterior,
)
from bayesify.laws import Key

CLASSES = 3


@dataclass(frozen=True)
class Case:
    """How a method is tried.

    Attributes:
        noisy: A configuration that is random after a short fit.
        silent: The same method with all noise scales at zero.
        variant: What tells several rows of one method apart.
    """

    noisy: Method
    silent: Method
    variant: str = ""

    @property
    def name(self) -> str:
        return self.noisy.name + self.variant

    def __str__(self) -> str:
        return self.name


CASES = (
    Case(MAP(epochs=2), MAP()),
    Case(MCDropout(p=0.5, epochs=2), MCDropout(p=0.0)),
    Case(
        DeepEnsemble(members=2, epochs=2),
        DeepEnsemble(members=2, start="network"),
    ),
    Case(
        SWAG(rank=2, num_bn_draws=4, epochs=3, snapshots_per_epoch=2, lr=0.1),
        SWAG(rank=2, num_bn_draws=4, scale=0.0),
    ),
    Case(
        ABNN(members=2, draws_per_member=2, alpha=0.5, epochs=2, lr=0.1),
        ABNN(members=2, draws_per_member=2, alpha=0.0, eta=0.0),
    ),
    Case(
        BayesAdapter(start_std=(0.05, 0.1), epochs=2, weight_decay=0.01),
        BayesAdapter(start_std=(0.0, 0.0)),
    ),
    Case(
        IVON(start_std=0.1, epochs=2, lr=0.1, beta2=0.9),
        IVON(start_std=0.0),
    ),
    Case(Laplace(), Laplace()),
    Case(
        Laplace(structure="diagonal", prior_precision=10.0),
        Laplace(structure="diagonal"),
        variant=", diagonal",
    ),
    Case(
        Laplace(structure="kronecker", prior_per="layer", mc_labels=2),
        Laplace(structure="kronecker"),
        variant=", kronecker",
    ),
    Case(
        IBNN(components=2, draws_per_component=2, epochs=2, start_std=(0.3, 0.1), weights="joint", latent_lr=0.1),
        IBNN(components=2, draws_per_component=2, means_std=0.0, start_std=(0.0, 0.0)),
    ),
    Case(
        SGLD(samples_per_chain=4, epochs=3, lr=0.5, weight_decay=0.0, burn_in=0.3),
        SGLD(samples_per_chain=4),
    ),
    Case(
        SGLD(samples_per_chain=2, chains=2, together=True, epochs=3, lr=0.5, weight_decay=0.0, burn_in=0.3),
        SGLD(samples_per_chain=2, chains=2, together=True),
        variant=", together",
    ),
    Case(
        APD(
            chains=2,
            hidden=(6,),
            latent=4,
            steps=4,
            num_bn_draws=4,
            samples_per_chain=4,
            epochs=3,
            lr=0.5,
            weight_decay=0.0,
        ),
        APD(hidden=(6,), latent=4, num_bn_draws=4, samples_per_chain=4),
    ),
    Case(
        APD(
            online=True,
            thin=1,
            round_samples=2,
            chains=2,
            restart=True,
            hidden=(6,),
            latent=4,
            steps=4,
            num_bn_draws=4,
            samples_per_chain=4,
            epochs=3,
            lr=0.5,
            weight_decay=0.0,
        ),
        APD(online=True, hidden=(6,), latent=4, num_bn_draws=4, samples_per_chain=4),
        variant=", online",
    ),
)


# -- what a posterior can do: asked of itself, here alone -----------------------------------------------------------


def is_random(posterior: Posterior) -> bool:
    """Return whether draws differ at all."""
    return posterior.law.functions != 1


def has_mean(posterior: Posterior) -> bool:
    """Return whether there is a mean network."""
    return posterior.has_mean() is True


def several_keys(posterior: Posterior, seed: int, most: int = 3) -> list[Key]:
    """Return the keys of a few draws, as many as there are."""
    return posterior.keys(min(most, len(posterior.keys(None, seed))), seed)


# -- networks ---------------------------------------------------------------------------------------------------


class Sentence(nn.Module):
    """Tokens through an LSTM, with the classes' weights tied to the projection's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(5)
        self.dropout = nn.Dropout(0.3)
        self.project = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.project.weight
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        x = self.dropout(self.norm(states[:, -1]))
        return self.head(self.again(torch.tanh(self.project(x))))


class Attention(nn.Module):
    """A transformer layer and a class token's head."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x * self.scale).mean(1))


class Residual(nn.Module):
    """Joins activations from before and after its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.inner = nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.4), nn.Linear(6, 6), nn.GELU())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.head(x + self.inner(x))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.SELU(),
        nn.AlphaDropout(0.2), nn.Linear(8, CLASSES),
    )  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, 8, 3, groups=2, stride=2, dilation=2, padding="valid"),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 4, 2, bias=False),
        nn.PReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4, CLASSES),
    )


@dataclass(frozen=True)
class Example:
    """A network's factory and its inputs'."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]

    def network(self) -> nn.Module:
        """Return a network with weights and statistics as training leaves them."""
        torch.manual_seed(1)
        network = self.make().double()
        with torch.no_grad():
            for name, buffer in network.named_buffers():
                if buffer.is_floating_point():
                    buffer.add_(torch.rand_like(buffer) * (0.5 if name.endswith("var") else 0.1))
        return network.eval()


def _numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape, dtype=torch.float64)


EXAMPLES = {
    "mlp": Example(mlp, _numbers(4)),
    "convolutions": Example(convolutions, _numbers(2, 9, 9)),
    "sentence": Example(Sentence, lambda rows: torch.randint(7, (rows, 5))),
    "attention": Example(Attention, _numbers(5, 8)),
    "residual": Example(Residual, _numbers(4)),
}


# -- what most tests need -----------------------------------------------------------------------------------------


def loader(example: Example, rows: int = 12, **options: Any) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of random inputs and labels."""
    torch.manual_seed(2)
    data = TensorDataset(example.inputs(rows), torch.arange(rows) % CLASSES)
    return DataLoader(data, **{"batch_size": 4, "shuffle": True, **options})


def fit(posterior: Posterior, example: Example, **options: Any) -> bayesify.History:
    """Fit quickly; whether the tiny run is any good is not the question."""
    return bayesify.fit(posterior, loader(example), progress=False, accuracy_tolerance=1.0, **options)


def fitted(case: Case, example: Example) -> Posterior:
    """Return a posterior with noise, in evaluation mode; its network is `example.network()`."""
    return copy.deepcopy(_fitted(case.name, example))


@functools.cache
def _fitted(name: str, example: Example) -> Posterior:
    case = next(case for case in CASES if case.name == name)
    posterior = bayesify.convert(example.network(), case.noisy)
    fit(posterior, example)
    return posterior.eval()
