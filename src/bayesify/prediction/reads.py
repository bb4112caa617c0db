"""Whether random tensors are read only by the modules that own them."""

from __future__ import annotations

from typing import Any

from torch.func import functional_call

from bayesify._core.trees import batch_rows, call
from bayesify.laws import Key, Posterior
from bayesify.laws.patching import Watch, patched_forward

__all__ = ["reads_outside"]


def reads_outside(posterior: Posterior, inputs: Any, key: Key) -> bool:
    """Return whether an operation outside the modules that own the random tensors takes one of them.

    A tied projection, `F.linear(h, self.embedding.weight)`, does, and so does a fused transformer layer. Where the
    randomness enters is then unknown. Costs a pass in which every operation is looked at.
    """
    noise = posterior.noise
    with noise.mode(keys=(key,)), noise.one_pass(batch_rows(inputs)):
        tensors = posterior.tensors()
        if not tensors:
            return False
        watch = Watch(tensors.values())
        sites = {module: watch.allowed(module.forward) for module in posterior.sites()}
        with patched_forward(sites), watch:
            call(lambda *args, **kwargs: functional_call(posterior.network, tensors, args, kwargs), inputs)
    return bool(watch.found)
