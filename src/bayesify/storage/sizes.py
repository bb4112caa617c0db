"""Whether a configuration asks for what its file holds, before room is made for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bayesify._core.files import FileError

__all__ = ["fitted_to"]

Shapes = Mapping[str, Sequence[int]]


def fitted_to(method: Any, shapes: Shapes, where: str) -> Any:
    """Return the method to build a saved posterior with; raise where it asks for more, or less, than the file holds.

    Args:
        method: As the configuration has it.
        shapes: Of all tensors of the posterior, by name.
        where: What the error calls the file.

    >>> from bayesify import DeepEnsemble
    >>> fitted_to(DeepEnsemble(members=10**9), {"members.0.weight": (2,), "members.1.weight": (2,)}, "It")
    Traceback (most recent call last):
    bayesify._core.files.FileError: It asks for members=1000000000, and there are 2. Copy or save the posterior again.
    """
    for setting, asked, held in _sizes(method, shapes):
        if asked != held:
            shown = str(asked) if len(str(asked)) < 80 else f"{str(asked)[:60]}..."
            raise FileError(
                f"{where} asks for {setting}={shown}, and there are {held}. Copy or save the posterior again."
            )
    if method.name == "apd":
        # What it was learned with is not in the file, and room for it would be made only to be left behind.
        return dataclasses.replace(method, samples_per_chain=1, chains=1)
    return method


def _sizes(method: Any, shapes: Shapes) -> Iterator[tuple[str, Any, Any]]:
    """Yield settings that decide how much is stored, what they are, and what is stored."""
    settings = getattr(method, "settings", None)
    if settings is None:
        settings = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    if method.name in ("deep-ensemble", "abnn"):
        yield "members", settings["members"], _count(shapes, "members")
    if method.name == "sgld":
        yield "chains", settings["chains"], _first(shapes, "counts")
        yield (
            "chains x samples_per_chain",
            settings["chains"] * settings["samples_per_chain"],
            _first(shapes, "samples"),
        )
    if method.name == "bank":
        yield "chains", settings["chains"], _first(shapes, "counts")
        yield "bank_size", settings["bank_size"], _first(shapes, "samples")
    if method.name in ("apd", "generator"):
        inputs = [shape[1] for name, shape in shapes.items() if name.startswith("generator.") and len(shape) == 2]
        yield "latent and hidden", sorted((settings["latent"], *settings["hidden"])), sorted(inputs)
    if method.name == "swag":
        yield "rank", settings["rank"], _first(shapes, "deviations")
    if method.name == "ibnn":
        yield "components", settings["components"], _first(shapes, "component_means")
    if method.name == "mixture":
        yield "components", settings["components"], _first(shapes, "shares")
    statistics = [shape[0] for name, shape in shapes.items() if name.startswith("statistics.") and shape]
    if "num_bn_draws" in settings and statistics:
        yield "num_bn_draws", settings["num_bn_draws"], statistics[0] - 1


def _first(shapes: Shapes, name: str) -> int | None:
    shape = shapes.get(name)
    return shape[0] if shape else None


def _count(shapes: Shapes, prefix: str) -> int:
    """Return how many members there are under a name, each with some tensors."""
    dots = prefix.count(".") + 1
    return len({name.split(".")[dots] for name in shapes if name.startswith(f"{prefix}.")})
