"""The user's network, from a factory and a file of weights; and objects by their name in general."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from bayesify._core.files import read_tensors
from bayesify.cli._output import JobError, UsageError

__all__ = ["find_object", "load_factory", "load_network", "load_weights", "on_device", "parse_arguments"]


# Before it, files that torch.load(weights_only=True) read could still run code or write outside their memory
# (CVE-2025-32434, CVE-2026-24747).
SAFE_TORCH = "2.10"


def find_object(spec: str, option: str) -> Any:
    """Import `package.module:name`, from the present folder if no installed module has the name.

    The folder is looked into last: a file in it never takes the place of a package that is imported later.

    >>> find_object("math:sqrt", "--model")(4.0)
    2.0
    """
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise UsageError(
            f"{option} {spec!r} is not of the form package.module:name, as in my_project.models:make_network"
        )
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{option}: there is no module {error.name!r} in {folder} or among the installed packages; go to the "
                "folder that holds it, or install it"
            ) from error
        raise JobError(f"Importing {module_name} failed: {error}.") from error
    except Exception as error:
        raise JobError(f"Importing {module_name} failed: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            there = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
            where = getattr(sys.modules[module_name], "__file__", None) or "built into Python"
            raise UsageError(
                f"{option}: {module_name} ({where}) has no {path!r}; it has {', '.join(there[:20]) or 'no functions'}"
            )
        found = getattr(found, part)
    return found


def load_network(model: str, arguments: Sequence[str], weights: Path | None, device: str) -> nn.Module:
    """Make the network, give it its weights, and put it in evaluation mode."""
    network = load_factory(model, arguments)
    if weights is not None:
        load_weights(network, weights)
    return on_device(network, device)


def load_factory(model: str, arguments: Sequence[str]) -> nn.Module:
    """Make the network of a user's function or class."""
    factory = find_object(model, "--model")
    if not callable(factory):
        raise UsageError(
            f"--model: {model} is a {type(factory).__name__}; give a function or class that makes the network"
        )
    values = parse_arguments(arguments)
    try:
        network = factory(**values)
    except Exception as error:
        raise JobError(
            f"{model} failed: {type(error).__name__}: {error}. Arguments are given with --model-arg KEY=VALUE."
        ) from error
    if not isinstance(network, nn.Module):
        raise JobError(f"{model} returned a {type(network).__name__} where a torch.nn.Module is needed.")
    return network


def on_device(network: nn.Module, device: str) -> nn.Module:
    """Move a network, and put it in evaluation mode."""
    try:
        return network.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise JobError(f"The network cannot go to the device {device!r}: {error}") from error


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Read the KEY=VALUE pairs of `--model-arg`, whose values are Python literals, or else text.

    >>> parse_arguments(["n=3", "name=resnet"])
    {'n': 3, 'name': 'resnet'}
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"--model-arg {pair!r} is not of the form KEY=VALUE")
        try:
            values[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[key] = text
    return values


def load_weights(network: nn.Module, path: Path) -> None:
    """Put the weights of a file into a network; no code of the file is run."""
    if path.suffix == ".safetensors":
        state, _ = read_tensors(path)
    elif path.suffix in (".pt", ".pth"):
        state = _read_torch(path)
    else:
        raise UsageError(f"--weights {path}: the name must end in .safetensors, .pt or .pth")
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise JobError(f"{path} does not fit the network of --model: {_mismatch(network, state)}") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise JobError(f"There is no file {path}.")
    if TorchVersion(torch.__version__) < SAFE_TORCH:
        raise JobError(
            f"{path} is a pickle, and reading one can run code before torch {SAFE_TORCH}; here is torch "
            f"{torch.__version__}. Upgrade torch, or, where you trust the file, save its weights as safetensors: "
            "safetensors.torch.save_file(network.state_dict(), 'weights.safetensors')."
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise JobError(
            f"{path} holds more than tensors, and reading it could run code. Where you trust it, save the weights "
            "alone: safetensors.torch.save_file(network.state_dict(), 'weights.safetensors')."
        ) from error
    except Exception as error:  # bytes that are no pickle fail in any way they like
        raise JobError(f"{path} is damaged or not a file of weights ({type(error).__name__}: {error}).") from error
    inner = content.get("state_dict") if isinstance(content, dict) else None
    state = inner if isinstance(inner, dict) else content
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise JobError(f"{path} holds no state dict. Save network.state_dict() alone.")
    return state


def _mismatch(network: nn.Module, state: dict[str, Tensor]) -> str:
    needed = network.state_dict()
    missing = [name for name in needed if name not in state]
    extra = [name for name in state if name not in needed]
    shapes = [
        f"{name} is {tuple(state[name].shape)} instead of {tuple(needed[name].shape)}"
        for name in needed
        if name in state and state[name].shape != needed[name].shape
    ]
    parts = [f"it lacks {_few(missing)}"] * bool(missing) + [f"it has unknown {_few(extra)}"] * bool(extra)
    parts += [_few(shapes)] * bool(shapes)
    return "; ".join(parts) + "."


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
