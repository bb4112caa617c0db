"""A bank of weight samples from any posterior that draws weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from bayesify.conversion import Selection, select_parameters
from bayesify.laws import BankPosterior, Posterior, require_posterior, statistics_names, warn_unless_learned
from bayesify.methods.method import Method, Stage, register

__all__ = ["DTYPES", "Bank", "Made", "Storage", "check_storage", "inherit", "join_banks", "sample_bank"]

Storage = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[Storage, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class Made(Method):
    """What a function makes of a posterior: files name it, and `fit` does not learn it.

    Attributes:
        names: The random parameters, where they are not all of the converted modules'.
        source: The method of the posterior that it was made from.
    """

    listed = False

    names: tuple[str, ...] = ()
    source: str = ""

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Raise: there is nothing to train."""
        raise ValueError(
            f"A posterior of {self.name!r} is made from another, not trained. Fit that one and make this anew: "
            "bayesify.sample_bank(posterior, n), bayesify.distill(bank)."
        )


@register
@dataclass(frozen=True, kw_only=True)
class Bank(Made):
    """A fixed set of weight samples, which `sample_bank` takes from a posterior.

    Attributes:
        num_samples: How many.
        chains: How many chains they come from, which have equal shares.
        storage: Type of the stored samples; None takes the parameters' own.
    """

    name = "bank"

    num_samples: int = 100
    chains: int = 1
    storage: Storage | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_storage(self.storage)

    def build(self, network: nn.Module, selection: Selection) -> BankPosterior:
        """Make room for the samples."""
        names, table = select_parameters(network, selection, how=f"{self.num_samples} samples")
        posterior = BankPosterior(
            network,
            self,
            names=list(self.names) or names,
            size=self.num_samples,
            groups=self.chains,
            dtype=DTYPES[self.storage] if self.storage else None,
        )
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

    Of a bank it takes samples at equal distances, which is thinning; of an ensemble, its members. Noise behind
    normalisation layers (ABNN) is a scale of theirs, in which a layer that is called several times has one noise for
    all of its calls.

    Args:
        posterior: Any posterior that draws weights: SGLD, SWAG, Laplace, BayesAdapter, IBNN, ABNN, an ensemble,
            another bank, a generator.
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
    require_posterior(posterior)
    warn_unless_learned(posterior)
    keys = posterior.keys(num_samples, seed)
    network = posterior.plain_network()
    first = posterior.drawn_tensors(keys[0])
    names = [name for name, _ in network.named_parameters() if name in first] if network is not None else []
    if network is None or not names or set(first) - set(names) - set(statistics_names(network)):
        raise ValueError(
            f"A bank holds weights, and the randomness of {posterior.method.name!r} is not in the network's weights "
            "alone. Predict with the posterior itself, or use SGLD, SWAG, Laplace, BayesAdapter, IBNN or DeepEnsemble."
        )
    method = Bank(num_samples=len(keys), storage=storage, source=posterior.method.name, names=tuple(names))
    bank = BankPosterior(network, method, names=names, size=len(keys), dtype=DTYPES[storage] if storage else None)
    statistics = bank.statistics.as_dict()
    for row, key in enumerate(keys):
        tensors = posterior.drawn_tensors(key)
        bank.append(bank.codec.join(tensors))
        for name, rows in statistics.items():
            rows[row + 1] = tensors[name] if name in tensors else network.get_buffer(name)
    bank.fresh_statistics[1] = True  # a mean of these samples has been nobody's yet
    inherit(bank, posterior)
    return bank.train(posterior.training)


@torch.no_grad()
def join_banks(banks: Sequence[BankPosterior]) -> BankPosterior:
    """Put the samples of several banks of one network together, each bank's as a chain, or chains, of its own.

    That is how chains that ran in processes of their own become one posterior.

    Args:
        banks: Of the same network and random parameters. Chains give as many samples as the shortest has, at equal
            distances.

    Returns:
        A bank with all chains, which shares no memory with them.

    Example:
        >>> from bayesify import ensemble
        >>> halves = [sample_bank(ensemble([nn.Linear(2, 3) for _ in range(4)]), 4) for _ in range(2)]
        >>> joined = join_banks(halves)
        >>> len(joined), joined.by_chain().shape
        (8, torch.Size([2, 4, 9]))
    """
    if not banks or not all(isinstance(bank, BankPosterior) for bank in banks):
        raise TypeError("join_banks takes a list of banks: SGLD posteriors after fit, or from sample_bank.")
    first = banks[0]
    if any(bank.codec.names != first.codec.names or bank.codec.shapes != first.codec.shapes for bank in banks):
        raise ValueError("The banks hold samples of different parameters. Join banks of one network.")
    if any(len(bank) == 0 for bank in banks):
        raise ValueError("A bank has no samples yet. Fit its posterior first.")
    chains = [rows for bank in banks for rows in bank.chain_rows()]
    sources = [bank for bank in banks for _ in bank.chain_rows()]
    each = min(map(len, chains))
    stored: list[Storage] = [name for name, dtype in DTYPES.items() if dtype == first.samples.dtype]
    names = tuple(first.codec.names)
    method = Bank(
        num_samples=each * len(chains), chains=len(chains), storage=stored[0] if stored else None, names=names,
        source=getattr(first.method, "source", "") or first.method.name,
    )  # fmt: skip
    joined = BankPosterior(
        copy.deepcopy(first.network), method, names=list(names), size=method.num_samples, groups=len(chains),
        dtype=first.samples.dtype,
    )  # fmt: skip
    for chain, (rows, bank) in enumerate(zip(chains, sources, strict=True)):
        for place in range(each):
            row = rows[(place + 1) * len(rows) // each - 1]
            joined.append(bank.samples[row], chain=chain)
            for name, kept in joined.statistics.as_dict().items():
                kept[chain * each + place + 1] = bank.statistics.as_dict()[name][row + 1]
    joined.noise_shares().copy_(torch.cat([bank.noise_shares() for bank in banks]))
    joined.fresh_statistics[1] = all(bool(bank.fresh_statistics[1]) for bank in banks)
    inherit(joined, first)
    return joined.train(first.training)


def inherit(made: Posterior, source: Posterior) -> None:
    """Give a posterior that was made from another what both have in common."""
    made.conversion, made.output_key = source.conversion, source.output_key
    made.origin, made.frozen = dict(source.origin), list(source.frozen)
    made.likelihood = copy.deepcopy(source.likelihood)
    made.inputs_seen = copy.deepcopy(source.inputs_seen)
