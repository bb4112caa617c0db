"""Views: transformations of the inputs under which the answer should not change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._core.trees import map_tensors
from bayesify.laws import Key
from bayesify.likelihoods import Likelihood, Stream
from bayesify.likelihoods.prediction import Prediction

__all__ = ["ONE", "Seen", "View", "Views", "as_views", "dense_dims"]

Dims = tuple[int, int]
_SHIFT = re.compile(r"shift\(\s*(-?\d+)\s*,\s*(-?\d+)\s*\)")
_KNOWN = "'identity', 'mirror', 'flip', 'shift(down, right)' in pixels, or several of them joined by '+'"


@dataclass(frozen=True)
class View:
    """A transformation of a batch of inputs, and for maps of outputs what takes them back.

    Args:
        forward: Takes the inputs as `predict` does, and returns inputs of the same structure.
        inverse: Takes outputs of the network for transformed inputs, (..., B, *outputs), and returns those of the
            inputs as they are: for segmentation and other outputs that have places. None leaves outputs alone, and is
            refused where they are a map.

    Example:
        >>> view = View(lambda x: x.flip(-1), inverse=lambda outputs: outputs.flip(-1))
        >>> view.forward(torch.tensor([[1.0, 2.0]]))
        tensor([[2., 1.]])
    """

    forward: Callable[[Any], Any]
    inverse: Callable[[Tensor], Tensor] | None = None

    @property
    def name(self) -> str | None:
        """What files call it; a function is in no file."""
        return None

    def __call__(self, inputs: Any) -> Any:
        """Return what a network sees of the inputs."""
        return self.forward(inputs)

    def undo(self, outputs: Tensor, dims: Dims | None) -> Tensor:
        """Return outputs as they belong to the inputs as they are.

        Args:
            outputs: Of the network for the inputs that it saw.
            dims: Where height and width are in them, counted from the end; None where outputs have no places.
        """
        if self.inverse is not None:
            return self.inverse(outputs)
        if dims is not None:
            raise ValueError(
                f"The network's outputs, {tuple(outputs.shape)}, are a map, and a view of the inputs moves it: give the"
                " view its inverse, View(forward, inverse)."
            )
        return outputs


@dataclass(frozen=True)
class _Image(View):
    """Reflections and shifts of images (..., H, W), which know their inverse."""

    steps: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(self.steps) or "identity"

    def __call__(self, inputs: Any) -> Any:
        if not self.steps:
            return inputs
        found: list[Tensor] = []
        map_tensors(lambda t: found.append(t) if t.is_floating_point() and t.ndim >= 3 else None, inputs)
        if not found:
            raise ValueError(
                f"The view {self.name!r} is for images, and the inputs hold no tensor (B, ..., H, W) of floating-point "
                "numbers. For text and tables give a function: Views('identity', my_function)."
            )
        image = found[0]
        moved = image
        for step in self.steps:
            moved = _moved(moved, step, (-2, -1), 1)
        return map_tensors(lambda t: moved if t is image else t, inputs)

    def undo(self, outputs: Tensor, dims: Dims | None) -> Tensor:
        if dims is not None:
            for step in reversed(self.steps):
                outputs = _moved(outputs, step, dims, -1)
        return outputs


def _moved(x: Tensor, step: str, dims: Dims, sign: int) -> Tensor:
    """Return an image after one step, or after what takes the step back: pixels that a shift lacks are the border's."""
    if step in ("mirror", "flip"):
        return x.flip(dims[1] if step == "mirror" else dims[0])
    match = _SHIFT.fullmatch(step)
    assert match is not None
    for dim, by in zip(dims, match.groups(), strict=True):
        if int(by):
            places = torch.arange(x.shape[dim], device=x.device) - sign * int(by)
            x = x.index_select(dim, places.clamp(0, x.shape[dim] - 1))
    return x


def _parsed(name: str) -> View:
    steps = tuple(step.strip() for step in name.split("+"))
    if steps == ("identity",):
        return _Image(_same)
    for step in steps:
        if step not in ("mirror", "flip") and _SHIFT.fullmatch(step) is None:
            raise ValueError(f"There is no view {name!r}: a name is one of {_KNOWN}; else give a function.")
    return _Image(_same, steps=tuple(step.replace(" ", "") for step in steps))


def _same(inputs: Any) -> Any:
    return inputs


class Views:
    """Several views, whose predictions are averaged as draws are.

    Where a posterior has finitely many functions (the mean, members, a bank), each sees every view; elsewhere views
    take turns among the draws of each part, so that the number of passes is that of the draws.

    Args:
        *views: Names, functions of the inputs, or `View`s, which have an inverse for maps of outputs. Names are of
            images (..., H, W), the first tensor of floating-point numbers: "identity", "mirror" (left and right),
            "flip" (up and down), "shift(down, right)" in pixels, and several steps joined by "+".

    Example:
        >>> views = Views("identity", "mirror", "mirror+shift(0,2)")
        >>> [view(torch.tensor([[[1.0, 2.0, 3.0]]])).tolist() for view in views]
        [[[[1.0, 2.0, 3.0]]], [[[3.0, 2.0, 1.0]]], [[[3.0, 3.0, 3.0]]]]
    """

    def __init__(self, *views: str | View | Callable[[Any], Any]) -> None:
        if not views:
            raise ValueError("Give at least one view, for example Views('identity', 'mirror').")
        self._views = tuple(
            _parsed(view) if isinstance(view, str) else view if isinstance(view, View) else _function(view)
            for view in views
        )

    @property
    def names(self) -> list[str | None]:
        """The names of the views; None for functions."""
        return [view.name for view in self._views]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._views)

    def __getitem__(self, index: int) -> View:
        """Return one of them."""
        return self._views[index]

    def __iter__(self) -> Iterator[View]:
        """Go through them."""
        return iter(self._views)

    def __eq__(self, other: object) -> bool:
        """Return whether the other are the same views in the same order."""
        return isinstance(other, Views) and self._views == other._views

    def __hash__(self) -> int:
        """Return a hash of the views."""
        return hash(self._views)

    def __repr__(self) -> str:
        """Show the names."""
        return f"Views({', '.join(repr(view.name or view.forward) for view in self._views)})"

    def config(self) -> list[str]:
        """Return the names, for files; raise where there is a function."""
        found = [name for name in self.names if name is not None]
        if len(found) < len(self):
            raise ValueError(
                f"{self} has a function among its views, which cannot be saved. Set posterior.views = None before "
                "saving, and posterior.views = Views(...) after loading."
            )
        return found

    def streams(self, likelihood: Likelihood, inputs: Any, stream: Stream) -> Iterator[tuple[Any, Stream]]:
        """Go through the views: what each makes of the inputs, and a stream that takes outputs for it."""
        for index, view in enumerate(self._views):
            yield view(inputs), Seen(stream, view, index, likelihood, inputs)

    def plan(self, keys: Sequence[Key], *, finite: bool) -> list[tuple[int, list[Key]]]:
        """Return which draws see which view, as (view, draws).

        Args:
            keys: The draws.
            finite: Whether there are finitely many functions, each of which then sees every view.
        """
        number = len(self)
        if finite or number == 1:
            return [(index, list(keys)) for index in range(number)]
        if len(keys) < number:
            raise ValueError(
                f"{len(keys)} draws cannot see {number} views, which take turns. Give num_draws={number} or more."
            )
        found: list[list[Key]] = [[] for _ in range(number)]
        turns: dict[tuple[int, ...], int] = {}
        for key in keys:
            # Parts begin with different views, so that those of single draws are spread over the views too.
            turn = turns.setdefault(key.path, len(turns) % number)
            found[turn % number].append(key)
            turns[key.path] = turn + 1
        return list(enumerate(found))


def _function(view: Any) -> View:
    if not callable(view):
        raise TypeError(f"A view is a name, a function of the inputs, or a View, but this is a {type(view).__name__}.")
    return View(view)


ONE = Views("identity")


def as_views(views: Views | Sequence[Any] | str | None, own: Views | None = None) -> Views:
    """Return views from what users give: names in a text with commas, or in a list.

    Args:
        views: None takes `own`, and the inputs as they are where that is None too.
        own: The posterior's own views.

    >>> as_views("identity, mirror"), as_views(None)
    (Views('identity', 'mirror'), Views('identity'))
    """
    if views is None:
        return ONE if own is None else own
    if isinstance(views, Views):
        return views
    if isinstance(views, str):  # the comma of a shift is between brackets
        return Views(*(name.strip() for name in re.split(r",(?![^(]*\))", views)))
    return Views(*views) if isinstance(views, Sequence) else Views(views)


def dense_dims(likelihood: Likelihood, output: Tensor, inputs: Any) -> Dims | None:
    """Return where height and width are in outputs (B, ...), counted from the end; None where they are no map.

    A map has two dimensions or more beside batch and classes; numbers (B, H, W) are one where that is the images' size.
    """
    classes = likelihood.softmax_dim(output.ndim)
    free = [dim for dim in range(1, output.ndim) if classes is None or dim != classes % output.ndim]
    if len(free) < 2 or (classes is None and output.ndim == 3 and not _of_size(inputs, output.shape[1:])):
        return None
    return free[-2] - output.ndim, free[-1] - output.ndim


def _of_size(inputs: Any, size: Sequence[int]) -> bool:
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t) if t.is_floating_point() and t.ndim >= 3 else None, inputs)
    return bool(found) and found[0].shape[-2:] == torch.Size(size)


class Seen(Stream):
    """A stream of what draws say of one view: outputs go back to where the inputs are, and are added to another.

    Args:
        stream: Where they go.
        view: The view.
        index: Its number.
        likelihood: What outputs mean.
        inputs: The inputs.
    """

    def __init__(self, stream: Stream, view: View, index: int, likelihood: Likelihood, inputs: Any) -> None:
        self.stream, self.view, self.index, self.likelihood, self.inputs = stream, view, index, likelihood, inputs

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        """Add outputs (S, B, ...)."""
        del view
        outputs = self.view.undo(outputs, dense_dims(self.likelihood, outputs[0], self.inputs))
        self.stream.add(outputs, part=part, view=self.index)

    def result(self) -> Prediction:
        """Return what the other stream makes of all views."""
        return self.stream.result()
