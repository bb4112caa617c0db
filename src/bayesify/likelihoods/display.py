"""Predictions for people and for other libraries: arrays, tables, plain values, text, HTML and a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bayesify._core.maths import at_least_float32

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

__all__ = ["ROWS", "Displayed", "require_pandas"]

ROWS = 5  # that are shown of a prediction


class Displayed:
    """What predictions look like outside of torch.

    Attributes:
        columns: The names of what a table shows of an example and position, in their order; those with one dimension
            more than `epistemic` are a column for each of its entries.
        discrete: Whether the numbers that are predicted are counts.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    discrete: ClassVar[bool] = False

    if TYPE_CHECKING:  # what every prediction has, or those with a column "std"
        scores: Any
        classes: Any
        interval: Any
        _fields: Any

    def __repr__(self) -> str:
        """Show what it is, its mean uncertainties and its first rows; of tensors without values the shapes."""
        if any(type(tensor) is not Tensor or tensor.is_meta for _, tensor in self._fields()):
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self._fields())
            return f"{type(self).__name__}({shapes})"
        heads, rows = self._first_rows()
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)
        ]
        more = ["..."] if self._number_of_rows() > len(rows) else []
        return "\n".join([*self._summary(), *(lines if rows else []), *more])

    def _repr_html_(self) -> str:
        """Show the same in a notebook, as a table."""
        heads, rows = self._first_rows()
        summary = "<br>".join(escape(line) for line in self._summary())
        head = "".join(f"<th>{escape(name)}</th>" for name in heads)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        more = "<p>&hellip;</p>" if self._number_of_rows() > len(rows) else ""
        return f"<p>{summary}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"

    # -- other libraries ----------------------------------------------------------------------------------------------

    def to_numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Return arrays by name: the columns of a table, every score, and every field that there is.

        Example:
            >>> from bayesify import Gaussian
            >>> found = Gaussian(1.0).from_samples(torch.zeros(4, 2, 1)).to_numpy()
            >>> sorted(found)
            ['aleatoric', 'epistemic', 'mean', 'std', 'total']
            >>> found["std"]
            array([1., 1.], dtype=float32)
        """
        names = dict.fromkeys([*self.columns, *self.scores, *(name for name, _ in self._fields())])
        return {name: self._array(name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON has: the kind, the predictor, and lists by name; None where one is not finite.

        There is what a table shows, and every score; not the draws, nor logarithms and logits.

        Example:
            >>> import json
            >>> from bayesify import Bernoulli
            >>> found = Bernoulli().from_samples(torch.zeros(1, 1)).to_dict()
            >>> found["kind"], found["label"], json.dumps(found["probs"])
            ('ClassificationPrediction', [0], '[[0.5, 0.5]]')
        """
        names = dict.fromkeys([*self.columns, *self.scores])
        values = {name: _plain(self._array(name)) for name in names}
        return {"kind": type(self).__name__, "predictor": getattr(self, "predictor", None), **values}

    def to_pandas(self, *, class_names: Sequence[str] | None = None, level: float = 0.95) -> DataFrame:
        """Return a table with one row for each example; needs pandas.

        Classes: label, confidence, total, aleatoric, epistemic, and `probs_0`, ... for each class. Numbers: mean, std,
        the ends `low` and `high` of the interval, aleatoric, epistemic. Where an example has several positions (tokens,
        pixels, labels or outputs), each has a row, and the index is (example, position).

        Args:
            class_names: What the classes are called, in `label` and in the names of their columns.
            level: Of the interval.

        Example:
            >>> from bayesify import Categorical
            >>> prediction = Categorical().from_samples(torch.zeros(1, 2, 2))
            >>> table = prediction.to_pandas(class_names=["cat", "dog"])
            >>> list(table.columns), table["label"].tolist()
            (['label', 'confidence', 'total', 'aleatoric', 'epistemic', 'probs_cat', 'probs_dog'], ['cat', 'cat'])
        """
        pandas = require_pandas()
        names = self._class_names(class_names)
        shape = self._shape()
        columns: dict[str, Any] = {}
        for name in self.columns:
            array = self._array(name)
            values = array.reshape(math.prod(shape), math.prod(array.shape[len(shape) :]))
            if name == "label":
                columns[name] = [names[index] for index in values[:, 0]] if class_names else values[:, 0]
            elif array.shape == shape:
                columns[name] = values[:, 0]
            else:
                ends = names if len(names) == values.shape[1] else range(values.shape[1])
                columns |= {f"{name}_{end}": values[:, index] for index, end in enumerate(ends)}
            if name == "std":
                low, high = self.interval(level)
                columns |= {"low": _flat(low), "high": _flat(high)}
        if len(shape) == 1:
            index = pandas.RangeIndex(shape[0], name="example")
        else:
            places = ["position"] if len(shape) == 2 else [f"position_{dim}" for dim in range(1, len(shape))]
            index = pandas.MultiIndex.from_product([range(size) for size in shape], names=["example", *places])
        table: DataFrame = pandas.DataFrame(columns, index=index)
        return table

    def plot(
        self,
        index: int | tuple[int, ...] = 0,
        *,
        ax: Axes | None = None,
        class_names: Sequence[str] | None = None,
        top: int = 10,
        level: float = 0.95,
    ) -> Figure:
        """Draw one prediction; needs matplotlib, `bayesify[report]`.

        Classes: bars of the most probable ones, and, where draws were kept (`keep_samples=True`), each draw as a dot.
        Numbers: the predictive density, mean and interval, and kept draws' means as ticks. Maps, (B, H, W), such as
        segmentations: the answer, aleatoric and epistemic uncertainty of every place, as pictures.

        Args:
            index: Which example; (example, position, ...) for one of several positions or outputs.
            ax: Where to draw; None makes a figure. Maps are three pictures, and always make one.
            class_names: What the classes are called.
            top: How many classes to show at most.
            level: Of the interval.

        Returns:
            The figure, which notebooks show, and which has `savefig`.

        Example:
            >>> from bayesify import Gaussian
            >>> figure = Gaussian(1.0).from_samples(torch.zeros(4, 2, 1)).plot(1)
            >>> figure.axes[0].get_title()
            'mean 0.000, 95 % from -1.960 to 1.960'
        """
        from bayesify.likelihoods.figures import draw_classes, draw_density, draw_maps, new_axes

        if isinstance(index, int) and len(self._shape()) == 3 and ax is None:
            return draw_maps(self, range(self._shape()[0])[index])
        place = self._place(index)
        axes = new_axes() if ax is None else ax
        if "probs" in self.columns:
            draw_classes(axes, self, place, self._class_names(class_names), top)
        elif "std" in self.columns:
            draw_density(axes, self, place, level)
        else:
            raise ValueError(f"There is no figure of a {type(self).__name__}. Use to_numpy() and draw what you need.")
        found: Any = axes.figure
        return found  # type: ignore[no-any-return]

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _array(self, name: str) -> np.ndarray[Any, Any]:
        value = torch.as_tensor(getattr(self, name)).detach().cpu()
        found: np.ndarray[Any, Any] = (at_least_float32(value) if value.is_floating_point() else value).numpy()
        return found

    def _shape(self) -> tuple[int, ...]:
        """Return the number of examples, and of positions in each dimension."""
        return tuple(torch.as_tensor(self.epistemic).shape)  # type: ignore[attr-defined]

    def _number_of_rows(self) -> int:
        return math.prod(self._shape())

    def _narrow(self) -> list[str]:
        """Return the columns with one number for each example and position."""
        return [name for name in self.columns if self._array(name).shape == self._shape()]

    def _summary(self) -> list[str]:
        shape, classes = self._shape(), self.classes
        text = f"{type(self).__name__} of {shape[0]:,} example{'' if shape[0] == 1 else 's'}"
        text += f" of {' x '.join(map(str, shape[1:]))} positions" if len(shape) > 1 else ""
        text += f", {classes:,} classes" if classes else ""
        predictor = getattr(self, "predictor", None)
        lines = [text + (f", {predictor}" if predictor else "")]
        if self._number_of_rows():
            means = [(name, self._array(name).mean()) for name in self._narrow() if name != "label"]
            lines.append("on average " + ", ".join(f"{name} {_shown(value)}" for name, value in means))
        return lines

    def _first_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads of a small table and its rows, as text."""
        names, shape = self._narrow(), self._shape()
        heads = ["example", *(["position"] if len(shape) > 1 else []), *names]
        arrays = [self._array(name).reshape(-1) for name in names]
        rows = []
        for row, place in zip(range(ROWS), _places(shape), strict=False):
            where = [str(place[0]), *([", ".join(map(str, place[1:]))] if len(shape) > 1 else [])]
            rows.append([*where, *(_shown(array[row]) for array in arrays)])
        return heads, rows

    def _class_names(self, class_names: Sequence[str] | None) -> list[str]:
        number = self.classes or 0
        if class_names is None:
            return [str(index) for index in range(number)]
        if len(class_names) != number:
            raise ValueError(f"There are {len(class_names)} class_names for {number} classes.")
        if len(set(map(str, class_names))) < number:
            raise ValueError(f"Classes need names of their own, but some of class_names are alike: {[*class_names]}.")
        return [str(name) for name in class_names]

    def _place(self, index: int | tuple[int, ...]) -> tuple[int, ...]:
        place, shape = index if isinstance(index, tuple) else (index,), self._shape()
        if len(place) != len(shape):
            raise ValueError(
                f"index={index} does not name one prediction: there are {shape[0]} examples of {shape[1:]} positions, "
                f"so that it takes {len(shape)} whole numbers."
            )
        for at, size in zip(place, shape, strict=True):
            if not -size <= at < size:
                raise IndexError(f"There is no prediction at {index}: the sizes are {shape}.")
        return tuple(at % size for at, size in zip(place, shape, strict=True))


def require_pandas() -> Any:
    """Return the module, or say what needs it."""
    try:
        return import_module("pandas")
    except ImportError as error:
        raise ImportError(
            "A table needs the module 'pandas': pip install pandas. to_numpy() and to_dict() need none."
        ) from error


def _flat(x: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = at_least_float32(x.detach().cpu()).reshape(-1).numpy()
    return found


def _places(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return product(*(range(size) for size in shape))


def _shown(value: Any) -> str:
    number = value.item()
    if isinstance(number, float):
        return f"{number:.3f}" if number == 0 or 1e-3 <= abs(number) < 1e6 else f"{number:.2e}"
    return str(number)


def _plain(values: np.ndarray[Any, Any]) -> Any:
    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(one) for one in value]
        return value if math.isfinite(value) else None

    found = values.tolist()
    return found if torch.from_numpy(values).isfinite().all() else finite(found)
