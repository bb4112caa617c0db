"""What decides a run: a checkpoint is gone on with only where all of it is the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from bayesify._core.files import digest, fingerprint
from bayesify._core.trees import map_tensors
from bayesify.fitting.random_state import generators
from bayesify.laws import Posterior
from bayesify.likelihoods import Likelihood

__all__ = [
    "describe_data",
    "describe_likelihood",
    "describe_optimizer",
    "describe_start",
    "differences",
    "length",
    "own_tensors",
    "state_tensors",
]

ROWS = 16  # of data that lie in memory, at equal distances
MOST = 4  # differences that a message names


def length(loader: Iterable[Any]) -> int:
    """Return the number of batches of a loader."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            "The loader has no length, so schedules and the progress cannot be known. Give a DataLoader over a data "
            "set with a length, or a list of batches."
        ) from error


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state; what else `get_extra_state` may give is the network's own."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def own_tensors(posterior: Posterior) -> dict[str, Tensor]:
    """Return the tensors of a posterior's state that it shares with no other network: all that a run can change."""
    shared = {f"network.{name}" for name in posterior.shared.names}
    return {name: tensor for name, tensor in state_tensors(posterior).items() if name not in shared}


def describe_start(posterior: Posterior) -> dict[str, Any]:
    """Return where a run begins: the tensors' fingerprints, the modules' types, the conversion and what is frozen.

    >>> from bayesify import MAP, convert
    >>> describe_start(convert(nn.Linear(1, 1, bias=False), MAP()))["modules"]
    {'(network)': 'Linear(in_features=1, out_features=1, bias=False)'}
    """
    rows = posterior.conversion.rows if posterior.conversion else ()
    return {
        "modules": {name or "(network)": _shown(module) for name, module in posterior.network.named_modules()},
        "conversion": {row.name or "(network)": row.reason for row in rows},
        "frozen": {name: True for name, p in posterior.named_parameters() if not p.requires_grad},
        "output_key": posterior.output_key,
        "default_samples": posterior.default_draws,
        "tensors": {
            name: [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}", fingerprint(tensor)]
            for name, tensor in state_tensors(posterior).items()
        },
    }


def _shown(module: nn.Module) -> str:
    # A function that is shown by its address has another one in another process.
    return f"{type(module).__name__}({re.sub(r'0x[0-9a-fA-F]+', '', module.extra_repr())})"


def describe_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """Return a likelihood's settings; of a function, which has none, its name."""
    try:
        return likelihood.to_dict()
    except ValueError:
        own = getattr(likelihood, "_log_prob", None)
        return {"kind": likelihood.kind, "function": getattr(own, "__qualname__", type(own).__name__)}


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the type and the settings of an optimiser.

    >>> import torch
    >>> describe_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5))["groups"][0]["lr"]
    0.5
    """
    groups = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {
        "type": type(optimizer).__name__,
        "groups": [{k: v for k, v in group.items() if v is not NotImplemented} for group in groups],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple) and all(isinstance(item, bool | int | float) for item in value):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float | str) else NotImplemented


def describe_data(loader: Iterable[Any] | None) -> dict[str, Any] | None:
    """Return a loader's size and order, and a digest of some examples where they lie in memory as they are.

    Only of a list and of a data set of tensors: to fetch examples of any other can be slow, and random where they are
    augmented. Nothing depends on the order of the examples, or on which part of them a `Subset` takes.

    >>> import torch
    >>> describe_data([torch.zeros(2)])["batches"]
    1
    """
    if loader is None:
        return None
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    return {
        "batches": length(loader),
        "batch_size": getattr(loader, "batch_size", None),
        "drop_last": getattr(loader, "drop_last", None),
        "sampler": None if sampler is None else type(sampler).__name__,
        "batch_sampler": None if batch_sampler is None else type(batch_sampler).__name__,
        "generators": len(generators(loader)),
        "examples": _examples(loader),
    }


def _examples(loader: Iterable[Any]) -> str | None:
    data: Any = getattr(loader, "dataset", loader)
    while type(data) is Subset:
        data = data.dataset
    marks: list[str] = []
    if type(data) in (list, tuple):
        for item in data[:: -(-len(data) // ROWS) or 1]:
            map_tensors(lambda tensor: marks.append(fingerprint(tensor[:ROWS] if tensor.ndim else tensor)), item)
    else:
        tensors = getattr(data, "tensors", None)
        if not isinstance(tensors, tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            return None
        marks = [fingerprint(tensor[:: -(-len(tensor) // ROWS) or 1]) for tensor in tensors]
    return digest(marks) if marks else None


# -- comparing ----------------------------------------------------------------------------------------------------


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in words how the settings of two runs differ; an empty text where they do not.

    >>> differences({"seed": 0, "method": {"lr": 0.1}}, {"seed": 0, "method": {"lr": 0.2}})
    'method.lr was 0.1 and is 0.2'
    """
    old, new = _flat(before), _flat(now)
    words = [
        f"{key} {f'was {old[key]!r}' if key in old else 'was not there'} and "
        f"{f'is {new[key]!r}' if key in new else 'is not there'}"
        for key in {**old, **new}
        if not key.startswith("start.tensors.") and (key not in old or key not in new or old[key] != new[key])
    ]
    words += _tensor_differences(_tensors(before), _tensors(now))
    more = [f"and {len(words) - MOST} more"] if len(words) > MOST else []
    return ", ".join(words[:MOST] + more)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, list) and any(isinstance(value, dict) for value in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        return {prefix: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _tensors(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = settings.get("start", {}).get("tensors", {})
    return {name.removeprefix("network."): mark for name, mark in found.items()}


def _tensor_differences(old: dict[str, list[str]], new: dict[str, list[str]]) -> list[str]:
    both = [name for name in old if name in new]
    words = [f"{name!r} was {old[name][0]} and is {new[name][0]}" for name in both if old[name][0] != new[name][0]]
    words += [f"{name!r} is not there" for name in old if name not in new]
    words += [f"{name!r} was not there" for name in new if name not in old]
    changed = [name for name in both if old[name] != new[name] and old[name][0] == new[name][0]]
    if changed:
        more = f" and {len(changed) - MOST} more" if len(changed) > MOST else ""
        have = "have" if len(changed) > 1 else "has"
        words.insert(0, f"{', '.join(map(repr, changed[:MOST]))}{more} {have} other values than it began with")
    return words
