"""A bank of weight samples from any posterior that draws weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from bayesify.convert import Selection, select_parameters
from bayesify.methods._base import Method, register
from bayesify.posteriors import BankPosterior, Posterior, statistics_names

__all__ = ["DTYPES", "Bank", "Storage", "check_storage", "inherit", "sample_bank"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Storage = Literal["float32", "bfloat16", "float16"]


@register
@dataclass(frozen=True, kw_only=True)
class Bank(Method):
    """A fixed set of weight samples, which `sample_bank` takes from a posterior.

    Attributes:
        num_samples: How many.
        storage: Type of the stored samples; None takes the parameters' own.
        source: The method of the posterior they were taken from.
    """

    name = "bank"
    listed = False

    num_samples: int = 100
    storage: Storage | None = None
    source: str = ""

    def __post_init__(self) -> None:
        """Check the settings."""
        check_storage(self.storage)

    def build(self, network: nn.Module, selection: Selection) -> BankPosterior:
        """Make room for the samples."""
        names, table = select_parameters(network, selection, how=f"{self.num_samples} samples")
        dtype = DTYPES[self.storage] if self.storage else None
        posterior = BankPosterior(network, self, names=names, size=self.num_samples, dtype=dtype)
        posterior.conversion = table
        return posterior


def check_storage(storage: str | None) -> None:
    """Raise where a type of stored samples is unknown."""
    if storage is not None and storage not in DTYPES:
        raise ValueError(f"storage must be one of {sorted(DTYPES)} or None, but it is {storage!r}.")


@torch.no_grad()
def sample_bank(
    posterior: Posterior, num_samples: int, *, seed: int = 0, storage: Storage | None = None
) -> BankPosterior:
    """Take weight samples from a posterior, and store them once.

    Of a bank it takes samples at equal distances, which is thinning; of an ensemble, its members.

    Args:
        posterior: Any posterior that draws weights: SGLD, SWAG, an ensemble, another bank, a generator.
        num_samples: How many; a posterior with fewer functions gives them all.
        seed: Of the draws.
        storage: "float32", "bfloat16" or "float16"; None takes the parameters' own type.

    Returns:
        A posterior whose draws are these samples. It shares no memory with the first.

    Raises:
        ValueError: The randomness is in layers, not in weights.

    Example:
        >>> from bayesify import ensemble, predict
        >>> bank = sample_bank(ensemble([nn.Linear(2, 3) for _ in range(4)]), 4)
        >>> bank.samples.shape, predict(bank, torch.ones(1, 2)).probs.shape
        (torch.Size([4, 9]), torch.Size([1, 3]))
    """
    keys = posterior.keys(num_samples, seed)
    network = posterior.network
    with posterior.noise.mode(keys=(keys[0],)):
        first = posterior.tensors()
    names = [name for name, _ in network.named_parameters() if name in first]
    other = set(first) - set(names) - set(statistics_names(network))
    if not names or other or isinstance(network, Posterior):
        raise ValueError(
            f"A bank holds weights, and the randomness of {posterior.method.name!r} is not in the network's weights "
            "alone. Predict with the posterior itself, or use SGLD, SWAG or DeepEnsemble."
        )
    method = Bank(num_samples=len(keys), storage=storage, source=posterior.method.name)
    bank = BankPosterior(
        copy.deepcopy(network), method, names=names, size=len(keys), dtype=DTYPES[storage] if storage else None
    )
    statistics = bank.statistics.as_dict()
    for row, key in enumerate(keys):
        with posterior.noise.mode(keys=(key,)):
            tensors = posterior.tensors()
        bank.append(bank.codec.join(tensors))
        for name, rows in statistics.items():
            rows[row + 1] = tensors[name] if name in tensors else network.get_buffer(name)
    bank.fresh_statistics[1] = True  # a mean of these samples has been nobody's yet
    inherit(bank, posterior)
    return bank.train(posterior.training)


def inherit(made: Posterior, source: Posterior) -> None:
    """Give a posterior that was made from another what both have in common."""
    made.conversion, made.output_key = source.conversion, source.output_key
    made.origin, made.frozen = dict(source.origin), list(source.frozen)
    made.likelihood = copy.deepcopy(source.likelihood)
