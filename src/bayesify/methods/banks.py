"""A bank of weight samples from any posterior that draws weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from bayesify._core.deprecation import renamed
from bayesify._core.sharing import Shared
from bayesify.laws import (
    STORAGE,
    BankLaw,
    Posterior,
    Refusal,
    require_posterior,
    statistics_names,
    warn_unless_learned,
)
from bayesify.laws.bank import Storage

__all__ = ["inherit", "join_banks", "require_bank", "sample_bank", "source_of"]


@renamed(num_samples="num_draws")
@torch.no_grad()
def sample_bank(posterior: Posterior, num_draws: int, *, seed: int = 0, storage: Storage | None = None) -> Posterior:
    """Take weight samples from a posterior, and store them once.

    Of a bank it takes samples at equal distances, which is thinning; of an ensemble, its members. Noise behind
    normalisation layers (ABNN) is a scale of theirs, in which a layer that is called several times has one noise for
    all of its calls.

    Args:
        posterior: Any posterior that draws weights: SGLD, SWAG, Laplace, BayesAdapter, IBNN, ABNN, an ensemble,
            another bank, a generator.
        num_draws: How many; a posterior with fewer functions gives them all.
        seed: Of the draws.
        storage: "float32", "bfloat16" or "float16"; None takes the parameters' own type.

    Returns:
        A posterior whose draws are these samples. It shares no memory with the first.

    Raises:
        ValueError: The randomness is in layers, not in weights.

    Example:
        >>> from torch import nn
        >>> from bayesify import ensemble, predict
        >>> bank = sample_bank(ensemble([nn.Linear(2, 3) for _ in range(4)]), 4)
        >>> bank.law.samples.shape, predict(bank, torch.ones(1, 2)).probs.shape
        (torch.Size([4, 9]), torch.Size([1, 3]))
    """
    require_posterior(posterior)
    warn_unless_learned(posterior)
    keys = posterior.keys(num_draws, seed)
    network = posterior.plain_network(share=True)
    first = posterior.weights(keys[0])
    names = [] if isinstance(first, Refusal) else [name for name, _ in network.named_parameters() if name in first]
    if isinstance(first, Refusal) or not names or set(first) - set(names) - set(statistics_names(network)):
        raise ValueError(
            f"A bank holds weights, and the randomness of {source_of(posterior)!r} is not in the network's weights "
            "alone. Predict with the posterior itself, or use SGLD, SWAG, Laplace, BayesAdapter, IBNN or DeepEnsemble."
        )
    dtype = STORAGE[storage] if storage else None
    law = BankLaw(network, names=names, size=len(keys), dtype=dtype, source=source_of(posterior))
    bank = Posterior(network, law)
    for row, key in enumerate(keys):
        tensors = posterior.weights(key)
        assert not isinstance(tensors, Refusal)
        law.append(law.codec.join(tensors))
        if bank.statistics is not None:
            for name, rows in bank.statistics.rows.as_dict().items():
                rows[row + 1] = tensors[name] if name in tensors else network.get_buffer(name)
    if bank.statistics is not None:
        bank.statistics.fresh[1] = True  # a mean of these samples has been nobody's yet
    inherit(bank, posterior)
    return bank.train(posterior.training)


@torch.no_grad()
def join_banks(banks: Sequence[Posterior]) -> Posterior:
    """Put the samples of several banks of one network together, each bank's as a chain, or chains, of its own.

    That is how chains that ran in processes of their own become one posterior.

    Args:
        banks: Of the same network and random parameters. Chains give as many samples as the shortest has, at equal
            distances.

    Returns:
        A bank with all chains, which shares no memory with them.

    Example:
        >>> from torch import nn
        >>> from bayesify import ensemble
        >>> halves = [sample_bank(ensemble([nn.Linear(2, 3) for _ in range(4)]), 4) for _ in range(2)]
        >>> joined = join_banks(halves)
        >>> len(joined.law), joined.law.by_chain().shape
        (8, torch.Size([2, 4, 9]))
    """
    laws = [require_bank(bank, "join_banks takes a list of banks") for bank in banks]
    if not laws:
        raise TypeError("join_banks takes a list of banks: SGLD posteriors after fit, or from sample_bank.")
    first = laws[0]
    if any(law.codec.names != first.codec.names or law.codec.shapes != first.codec.shapes for law in laws):
        raise ValueError("The banks hold samples of different parameters. Join banks of one network.")
    if any(len(law) == 0 for law in laws):
        raise ValueError("A bank has no samples yet. Fit its posterior first.")
    chains = [(bank, law, rows) for bank, law in zip(banks, laws, strict=True) for rows in law.chain_rows()]
    each = min(len(rows) for _, _, rows in chains)
    network = banks[0].plain_network(share=True)
    law = BankLaw(
        network, names=first.names, size=each * len(chains), groups=len(chains), dtype=first.samples.dtype,
        source=source_of(banks[0]),
    )  # fmt: skip
    joined = Posterior(network, law)
    for chain, (bank, own, rows) in enumerate(chains):
        for place in range(each):
            row = rows[(place + 1) * len(rows) // each - 1]
            law.append(own.samples[row], chain=chain)
            if joined.statistics is not None and bank.statistics is not None:
                known = bank.statistics.rows.as_dict()
                for name, kept in joined.statistics.rows.as_dict().items():
                    kept[chain * each + place + 1] = known[name][row + 1]
    law.noise_shares().copy_(torch.cat([own.noise_shares() for own in laws]))
    if joined.statistics is not None:
        joined.statistics.fresh[1] = all(
            bank.statistics is not None and bool(bank.statistics.fresh[1]) for bank in banks
        )
    inherit(joined, banks[0])
    return joined.train(banks[0].training)


def require_bank(posterior: object, what: str) -> BankLaw:
    """Return the law of a posterior that is a bank, or say what to do."""
    law = getattr(posterior, "law", None)
    if not isinstance(law, BankLaw):
        raise TypeError(
            f"{what}, but got a {type(posterior).__name__} that is none. SGLD posteriors are banks after fit; make one "
            "of others: sample_bank(posterior, 500)."
        )
    return law


def source_of(posterior: Posterior) -> str:
    """Return the method that a posterior was learned by, or that what it was made from was."""
    return posterior.method.name if posterior.method is not None else str(getattr(posterior.law, "source", ""))


def inherit(made: Posterior, source: Posterior) -> None:
    """Give a posterior that was made from another what both have in common."""
    made.conversion, made.output_key = source.conversion, source.output_key
    made.origin, made.frozen = dict(source.origin), list(source.frozen)
    made.shared = Shared(made.network, source.shared.names)
    made.likelihood = copy.deepcopy(source.likelihood)
    made.law.condition(made.likelihood)
    made.inputs_seen = copy.deepcopy(source.inputs_seen)
