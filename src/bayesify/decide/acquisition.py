"""Decide which examples to label next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from bayesify._core.deprecation import renamed
from bayesify.evaluation.measures.uncertainty import entropy
from bayesify.laws import Posterior

__all__ = ["SCORES", "Acquisition", "acquire", "batch_bald", "check_acquisition", "refuse_nan"]

Acquisition = Literal["entropy", "bald", "variation-ratio", "max-probability", "model-variance", "batch-bald", "random"]
SCORES = {
    "entropy": "total",
    "bald": "epistemic",
    "variation-ratio": "variation_ratio",
    "max-probability": "msp",
    "model-variance": "model_variance",
}


@renamed(how="acquisition")
def acquire(
    prediction: Any,
    pool: Any = None,
    num: int | None = None,
    *,
    acquisition: Acquisition = "bald",
    indices: Sequence[int] | Tensor | None = None,
    seed: int = 0,
    predictor: Any = "sampling",
    num_draws: int | None = None,
    candidates: int | None = None,
) -> Tensor:
    """Choose the examples of a pool that are most worth a label.

    `acquire(posterior, loader, num)` goes through a pool of any size once, batch by batch, and keeps the best so far:
    memory is that of a batch and of `num` scores; for "batch-bald" of `candidates` examples' draws, S x candidates x C
    numbers, and as many again in float64 when these are compared. `acquire(prediction, num)` takes a prediction of the
    whole pool.

    Args:
        prediction: A posterior; or a prediction of the pool, from `predict`, with `keep_samples=True` for "batch-bald".
        pool: With a posterior a loader, in whose order rows are counted; targets are not looked at. With a prediction
            this is `num`.
        num: How many to choose; a smaller pool is chosen whole.
        acquisition: The highest "entropy", "bald" (mutual information), "variation-ratio", "max-probability" (least
            confidence) or "model-variance"; "batch-bald" looks at the chosen ones together; "random".
        indices: Each pool row's index in the data set; None takes the rows' own positions.
        seed: Of "random", of the order of equal scores, and of draws.
        predictor: With a posterior: `how=` of `predict`.
        num_draws: With a posterior: as in `predict`.
        candidates: With a posterior and "batch-bald": how many examples of the highest BALD are compared; None takes
            20 num, but at least 200.

    Returns:
        Indices into the data set, (num,), best first.

    Example:
        >>> from types import SimpleNamespace
        >>> pool = SimpleNamespace(epistemic=torch.tensor([0.1, 0.9, 0.5]))
        >>> acquire(pool, 2, indices=[10, 20, 30]).tolist()
        [20, 30]
        >>> from bayesify import convert
        >>> posterior = convert(torch.nn.Linear(1, 2), "map")
        >>> acquire(posterior, [torch.zeros(4, 1)], 9, acquisition="random").sort().values.tolist()
        [0, 1, 2, 3]
    """
    if isinstance(prediction, Posterior):
        from bayesify.decide.pool import acquire_streaming

        if num is None:
            raise TypeError("Say how many to choose: acquire(posterior, loader, num).")
        options: dict[str, Any] = {"predictor": predictor, "num_draws": num_draws, "candidates": candidates}
        chosen = acquire_streaming(prediction, pool, num, acquisition=acquisition, seed=seed, **options)
        return chosen if indices is None else torch.as_tensor(indices)[chosen]
    num = pool if num is None else num
    if num is None:
        raise TypeError("Say how many to choose: acquire(prediction, num).")
    check_acquisition(acquisition, num)
    generator = torch.Generator().manual_seed(seed)
    if acquisition == "batch-bald":
        if prediction.samples is None:
            raise ValueError("Batch-BALD needs the draws: predict(posterior, pool, keep_samples=True).")
        refuse_nan(prediction.samples.isnan().any(-1).any(0))
        chosen = batch_bald(prediction.samples, num, seed=seed)
        rows = prediction.samples.shape[1]
    else:
        if acquisition == "random":
            rows = len(prediction)
            scores = torch.zeros(rows)
        else:
            scores = torch.as_tensor(getattr(prediction, SCORES[acquisition])).cpu()
            rows = len(scores)
        if scores.ndim != 1:
            raise ValueError(f"Scores of shape {tuple(scores.shape)} are not one per example. Average dense ones.")
        refuse_nan(scores.isnan())
        # A stable sort of a random order breaks ties at random: half of a pool may have a variation ratio of zero.
        order = torch.randperm(rows, generator=generator)
        chosen = order[scores[order].argsort(descending=True, stable=True)][:num]
    if indices is None:
        return chosen
    table = torch.as_tensor(indices)
    if len(table) != rows:
        raise ValueError(f"There are {len(table)} indices for a pool of {rows} examples.")
    return table[chosen]


def check_acquisition(acquisition: str, num: int) -> None:
    """Refuse an unknown acquisition, and a number that can be none."""
    if acquisition not in (*SCORES, "batch-bald", "random"):
        raise ValueError(f"acquisition must be one of {[*SCORES, 'batch-bald', 'random']}, but it is {acquisition!r}.")
    if num < 1:
        raise ValueError(f"num must be at least 1, but it is {num}.")


def refuse_nan(rows: Tensor) -> None:
    """Raise where examples have no score: a sort would put them first."""
    if bool(rows.any()):
        raise ValueError(
            f"The scores of {int(rows.sum())} of {len(rows)} examples are NaN, the first at position "
            f"{int(rows.nonzero()[0])}. Find the inputs that produce it (torch.isnan) and repair or remove them first."
        )


def batch_bald(probs: Tensor, num: int, *, joint_samples: int = 10_000, seed: int = 0) -> Tensor:
    """Choose examples with the greatest mutual information of all their labels and the weights (Kirsch et al. 2019).

    I(y_1..y_b; w) = H(y_1..y_b) - sum_i E_w H(y_i | w), greedily. The joint entropy sums over all C^(b-1) labels of
    those chosen so far while these are few, and over `joint_samples` sampled ones afterwards. What an example adds can
    only fall as others are chosen, so those that added less before than the best adds now are not looked at again; with
    sampled labels that holds up to their sampling error.

    Args:
        probs: Draws' probabilities of the pool, (S, N, C).
        num: How many to choose.
        joint_samples: The largest number of joint labels kept.
        seed: Of the sampled ones.

    Returns:
        Positions in the pool, (num,), in the order they were chosen. Costs at most num times S N C K products, K joint
        labels; most often a small part of it.
    """
    if probs.ndim != 3:
        raise ValueError(f"probs must be (S, N, C), but it is {tuple(probs.shape)}.")
    probs = probs.double().cpu()
    draws, pool, classes = probs.shape
    conditional = entropy(probs).mean(0)
    joint = torch.ones(1, draws, dtype=torch.float64)  # probability of each joint label of the chosen, by draw
    weights = torch.ones(1, dtype=torch.float64)  # 1/proposal for sampled joint labels, 1 while all are there
    generator = torch.Generator().manual_seed(seed)
    chosen: list[int] = []
    gains = torch.full((pool,), torch.inf, dtype=torch.float64)  # as they were when last looked at: upper bounds
    exact = True
    for _ in range(min(num, pool)):
        known = _joint_entropy(joint.mean(1)[:, None], weights)
        order = gains.argsort(descending=True, stable=True)
        best, highest = -1, -torch.inf
        block = max(1, 2**22 // (joint.shape[0] * classes))
        for start in range(0, pool, block):
            some = order[start : start + block]
            if gains[some[0]] <= highest:
                break
            mean = torch.einsum("ks,snc->nkc", joint, probs[:, some]) / draws
            gains[some] = _joint_entropy(mean, weights) - known - conditional[some]
            gains[chosen] = -torch.inf
            if gains[some].max() > highest:
                best = int(some[gains[some].argmax()])
                highest = float(gains[best])
        chosen.append(best)
        gains[best] = -torch.inf
        if exact and joint.shape[0] * classes <= joint_samples:
            joint = (joint[:, None, :] * probs[:, best].T[None]).flatten(0, 1)
            weights = torch.ones(len(joint), dtype=torch.float64)
        else:
            joint, weights = _sample_joint(probs[:, chosen], joint_samples, generator)
            exact = False
    return torch.tensor(chosen)


def _joint_entropy(probs: Tensor, weights: Tensor) -> Tensor:
    """Return -sum_kc weights_k p_kc ln p_kc of joint labels' probabilities (..., K, C)."""
    terms: Tensor = torch.special.xlogy(probs, probs)
    return -(weights[:, None] * terms).sum((-2, -1))


def _sample_joint(probs: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample joint labels of (S, b, C): a draw, then labels from it; weights make sums over them expectations."""
    draws, size, _ = probs.shape
    which = torch.randint(draws, (count,), generator=generator)
    joint = torch.ones(count, draws, dtype=torch.float64)
    for position in range(size):
        labels = torch.multinomial(probs[which, position], 1, generator=generator)[:, 0]
        joint *= probs[:, position].T[labels]
    return joint, 1 / (joint.mean(1) * count)
