"""What methods with members share: a stage for each, and the mean of their losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bayesify.laws import LossTerms, MembersPosterior, Posterior
from bayesify.methods.method import Stage

__all__ = ["member_losses", "member_stages"]


def member_losses(posterior: Posterior, loss: Callable[[int], LossTerms]) -> LossTerms:
    """Return the present member's loss, or the mean over members, term by term, when none is chosen."""
    assert isinstance(posterior, MembersPosterior)
    if posterior.noise.member is not None:
        return loss(posterior.noise.member)
    losses = []
    for index in range(len(posterior.members)):
        with posterior.member(index):
            losses.append(loss(index))
    return LossTerms({name: torch.stack([terms[name] for terms in losses]).mean() for name in losses[0]})


def member_stages(posterior: Posterior) -> list[Stage]:
    """Return one stage for each member, over its own parameters and the likelihood's."""
    assert isinstance(posterior, MembersPosterior)
    shared = list(posterior.likelihood.parameters())
    return [
        Stage(
            f"member {index + 1}/{len(posterior.members)}",
            [{"params": [*tree.parameters(), *shared]}],
            partial(posterior.member, index),
        )
        for index, tree in enumerate(posterior.members)
    ]
