"""Weights of which each process has a part, `torch.distributed.fsdp.fully_shard`, and how they become whole again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bayesify._core.processes import others_expected, whole
from bayesify.laws import Law, Posterior

__all__ = ["check_divided", "is_divided", "make_whole"]

_FSDP = "torch.distributed.fsdp"


def is_divided(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a module, or on one inside of it.

    >>> is_divided(nn.Linear(1, 1))
    False
    """
    return any(hasattr(one, "unshard") for one in module.modules())


def check_divided(module: nn.Module, posterior: Posterior) -> None:
    """Refuse parts of a network that were divided apart, where members take the place of their weights.

    torch would divide the network's own weights after a layer's pass, and put them where the member's were.
    """
    apart = any(hasattr(one, "unshard") for one in module.modules() if one is not module)
    if apart and any(part.own.as_dict() for part in posterior.law.modules() if isinstance(part, Law)):
        raise ValueError(
            f"{type(posterior.method).__name__} has weights for each member, which take the place of the network's in "
            "a pass, and fully_shard of a module inside of the network does not know of them. Call "
            "fully_shard(objective) alone, or DistributedDataParallel(objective)."
        )


@torch.no_grad()
def make_whole(module: nn.Module) -> None:
    """Undo `fully_shard`: plain modules with all of the weights, in every process.

    torch has no call for that: `unshard` lasts until the next `state_dict` or backward pass. So parameters are
    gathered, and the hooks that would divide them again are taken away. Optimisers keep the parts and are of no use
    any more; gradients are dropped.
    """
    if not is_divided(module):
        return
    found: dict[int, nn.Parameter] = {}
    modules = list(module.modules())
    for one in modules:
        divide = getattr(one, "reshard", None)
        if callable(divide):
            divide()  # a pass leaves weights whole that a step after it has changed in parts
    for one in modules:
        for name, parameter in one._parameters.items():
            if parameter is not None and hasattr(parameter, "full_tensor"):
                if id(parameter) not in found:
                    with others_expected():
                        found[id(parameter)] = nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
                one._parameters[name] = found[id(parameter)]
    for one in modules:
        _forget(one)


def _forget(module: nn.Module) -> None:
    """Take away what `fully_shard` put onto a module."""
    for kind in ("forward_pre", "forward", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post"):
        hooks: dict[int, Any] = getattr(module, f"_{kind}_hooks")
        for number in [number for number, hook in hooks.items() if _is_of_fsdp(hook)]:
            del hooks[number]
    if hasattr(module, "unshard"):
        own = next(one for one in type(module).__mro__ if not hasattr(one, "unshard"))
        module.__class__ = own
        for name in [name for name in vars(module) if "composable_api" in str(name)]:
            delattr(module, name)


def _is_of_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # as torch wraps those of load_state_dict
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_FSDP)
