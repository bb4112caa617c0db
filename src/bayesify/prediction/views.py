"""Views: transformations of the inputs under which the answer should not change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bayesify._core.trees import map_tensors
from bayesify.laws import Key
from bayesify.likelihoods import Likelihood, Stream
from bayesify.likelihoods.prediction import Prediction

__all__ = ["ONE", "Seen", "View", "Views", "as_views", "dense_dims", "taken_back"]

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

    def undo(self, outputs: Tensor, dims: Dims | None, size: Dims | None = None) -> Tensor:
        """Return outputs as they belong to the inputs as they are.

        Args:
            outputs: Of the network for the inputs that it saw.
            dims: Where height and width are in them, counted from the end; None where outputs have no places.
            size: Height and width of the image, of which the map may be coarser; None takes the map's.
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

    def undo(self, outputs: Tensor, dims: Dims | None, size: Dims | None = None) -> Tensor:
        if dims is not None:
            for step in reversed(self.steps):
                outputs = _moved(outputs, step, dims, -1, size)
        return outputs


def _moved(x: Tensor, step: str, dims: Dims, sign: int, size: Dims | None = None) -> Tensor:
    """Return an image after one step, or after what takes the step back: pixels that a shift lacks are the border's.

    Steps are in pixels of an image of the size given, of which x may be a coarser or finer map.
    """
    if step in ("mirror", "flip"):
        return x.flip(dims[1] if step == "mirror" else dims[0])
    match = _SHIFT.fullmatch(step)
    assert match is not None
    for index, dim in enumerate(dims):
        length = x.shape[dim]
        pixels = length if size is None else size[index]
        by, rest = divmod(int(match[index + 1]) * length, pixels)
        if rest:
            raise ValueError(
                f"The network's map has {length} places for {pixels} pixels, so that {step!r} is no whole number of "
                "them and cannot be taken back. Shift by whole places, or take 'mirror' and 'flip'."
            )
        if by:
            places = torch.arange(length, device=x.device) - sign * by
            x = x.index_select(dim, places.clamp(0, length - 1))
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
        turns: dict[tuple[int, ...], list[int]] = {}
        for key in keys:
            # Of the views that its part has seen least, the one that all have seen least: none is left out.
            own = turns.setdefault(key.path, [0] * number)
            view = min(range(number), key=lambda index: (own[index], len(found[index])))
            found[view].append(key)
            own[view] += 1
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

    A map has two dimensions or more beside batch and classes. Numbers have no dimension of classes, and are looked at
    for the images' size, or its proportions; (B, H, W) is a map only where it is the images' size.
    """
    own = output.shape[-1] // likelihood.side_by_side  # of means, without the log variances beside them
    shape = [*output.shape[:-1], own]
    classes = likelihood.softmax_dim(output.ndim)
    free = [dim for dim in range(1, output.ndim) if classes is None or dim != classes % output.ndim]
    pairs = list(pairwise(free))[::-1]
    if classes is None and pairs:
        size = _image_size(inputs)
        same = [pair for pair in pairs if size == (shape[pair[0]], shape[pair[1]])]
        if not same and output.ndim == 3:
            return None
        alike = [pair for pair in pairs if size is not None and _alike(shape[pair[0]], shape[pair[1]], size)]
        pairs = [*same, *alike, *(pairs[1:] if shape[-1] == 1 else pairs)]
    return (pairs[0][0] - output.ndim, pairs[0][1] - output.ndim) if pairs else None


def _alike(height: int, width: int, size: Dims) -> bool:
    """Return whether a map is a coarser or finer one of an image."""
    whole = height and width and (size[0] % height == 0 or height % size[0] == 0)
    return bool(whole) and height * size[1] == width * size[0]


def _image_size(inputs: Any) -> Dims | None:
    """Return height and width of the image among the inputs, which views move."""
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t) if t.is_floating_point() and t.ndim >= 3 else None, inputs)
    return (found[0].shape[-2], found[0].shape[-1]) if found else None


def taken_back(view: View, outputs: Tensor, likelihood: Likelihood, inputs: Any, *, dims: Dims | None) -> Tensor:
    """Return outputs (..., B, *outputs) for a view as they belong to the inputs as they are.

    Args:
        view: What the network saw.
        outputs: Of the network for it.
        likelihood: What they mean.
        inputs: As they are.
        dims: From `dense_dims`.
    """
    # Two maps side by side, of means and of log variances, are moved each on its own.
    number = likelihood.side_by_side if dims is not None and dims[1] == -1 else 1
    size = None if dims is None else _image_size(inputs)
    found = [view.undo(one, dims, size) for one in outputs.chunk(number, -1)]
    return found[0] if number == 1 else torch.cat(found, -1)


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
        self.keeps_parts = stream.keeps_parts

    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        """Add outputs (S, B, ...)."""
        del view
        dims = dense_dims(self.likelihood, outputs[0], self.inputs)
        outputs = taken_back(self.view, outputs, self.likelihood, self.inputs, dims=dims)
        self.stream.add(outputs, part=part, view=self.index)

    def result(self) -> Prediction:
        """Return what the other stream makes of all views."""
        return self.stream.result()
