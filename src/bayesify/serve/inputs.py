"""From the body of a request to inputs of a network: tensors as JSON, rows as JSON, or an image."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify._core.optional import require
from bayesify._core.trees import batch_rows
from bayesify.data import Batch, Encoding, ImageEncoding, Records
from bayesify.data.folder import FORMATS
from bayesify.laws import Posterior
from bayesify.serve.limits import Limits

__all__ = ["Reader", "RequestError", "Requested"]

LONGEST = 4096  # tokens of a text that is given as numbers


class RequestError(Exception):
    """A request cannot be answered, and it is the request's fault.

    Attributes:
        status: Of the HTTP response.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, eq=False)
class Requested:
    """Hold what a request asks to be decided.

    Attributes:
        batch: Inputs of the network, B examples; rows that could not be read are among its errors.
        probs: Whether the probabilities of all classes are wanted.
    """

    batch: Batch
    probs: bool = False

    def __len__(self) -> int:
        """Return how many examples the network sees."""
        return len(self.batch)


@dataclass(frozen=True)
class Reader:
    """Read bodies of requests.

    Attributes:
        limits: Of a request.
        encoding: How rows, or images, become inputs; None takes tensors alone.
        shape: Of one example, (...); None where any is taken.
        dtype: Of the inputs; None is what JSON has, float32 or int64.

    >>> Reader(Limits(), shape=(2,))(b'{"inputs": [[1, 2], [3, 4]]}', "application/json").batch.inputs
    tensor([[1., 2.],
            [3., 4.]])
    """

    limits: Limits
    encoding: Encoding | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = torch.float32

    @classmethod
    def of(cls, posterior: Posterior, limits: Limits, encoding: Encoding | None = None) -> Reader:
        """Return a reader of such inputs as a posterior saw last; of other structures than one tensor, any is taken."""
        form = posterior.inputs_seen.form
        if form is None or len(form["tensors"]) != 1:
            return cls(limits, encoding, dtype=None)
        seen = form["tensors"][0]
        dtype = getattr(torch, seen["type"])
        return cls(limits, encoding, tuple(seen["shape"][1:]) if dtype.is_floating_point else None, dtype)

    @property
    def takes_images(self) -> bool:
        """Whether an image can be sent."""
        return isinstance(self.encoding, ImageEncoding)

    def __call__(self, body: bytes, kind: str, *, probs: bool = False) -> Requested:
        """Read a body.

        Args:
            body: Its bytes.
            kind: Its content type.
            probs: Whether the probabilities of all classes are wanted.

        Raises:
            RequestError: It cannot be read; the sentence says why.
        """
        kind = kind.partition(";")[0].strip().lower()
        if kind.startswith("image/"):
            batch = self._image(body)
        elif kind in ("application/json", ""):
            batch = self._json(body)
        else:
            raise RequestError(415, f"The content type {kind!r} is not read: send application/json or image/png.")
        if len(batch) + len(batch.errors) > self.limits.max_rows:
            found = len(batch) + len(batch.errors)
            raise RequestError(413, f"There are {found} rows, and a request may have {self.limits.max_rows}.")
        return Requested(batch, probs)

    def _image(self, body: bytes) -> Batch:
        if not isinstance(self.encoding, ImageEncoding):
            raise RequestError(415, "This service does not know how images become inputs: send tensors as JSON.")
        image = require("PIL.Image", extra="serve", purpose="reading images")
        try:
            with image.open(io.BytesIO(body), formats=FORMATS) as file:  # the header alone
                pixels = file.width * file.height
        except image.DecompressionBombError:
            pixels = self.limits.max_pixels + 1
        except Exception as error:  # bytes that are no image fail in any way they like
            raise RequestError(422, "The body cannot be read as an image.") from error
        if pixels > self.limits.max_pixels:
            raise RequestError(413, f"The image has more than {self.limits.max_pixels:,} pixels: send a smaller one.")
        try:
            return Batch([1], self.encoding.read(io.BytesIO(body)))
        except Exception as error:
            raise RequestError(422, "The body cannot be read as an image: it is damaged or cut off.") from error

    def _json(self, body: bytes) -> Batch:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(422, f"The body is not JSON ({_short(error)}).") from error
        if not isinstance(value, dict) or len(value.keys() & {"inputs", "rows"}) != 1 or len(value) != 1:
            raise RequestError(422, 'The body must be {"inputs": [...]}, a list of examples, or {"rows": [{...}]}.')
        return self._rows(value["rows"]) if "rows" in value else self._tensors(value["inputs"])

    def _tensors(self, values: Any) -> Batch:
        if isinstance(values, Mapping):
            inputs: Any = {str(name): self._tensor(value, None, None) for name, value in values.items()}
            if not inputs:
                raise RequestError(422, "There are no inputs.")
            counts = {tensor.shape[0] for tensor in inputs.values()}
            if len(counts) != 1:
                raise RequestError(422, f"The inputs have different numbers of examples, {sorted(counts)}.")
        else:
            inputs = self._tensor(values, self.shape, self.dtype)
        return Batch(list(range(1, batch_rows(inputs) + 1)), inputs)

    def _tensor(self, values: Any, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Tensor:
        if not isinstance(values, list) or not values:
            raise RequestError(422, "Inputs must be a list with an entry for each example.")
        try:
            found = torch.tensor(values, dtype=dtype if dtype is not None and dtype.is_floating_point else None)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise RequestError(422, f"The inputs are no tensor of numbers ({_short(error)}).") from error
        if shape is not None and tuple(found.shape[1:]) != shape:
            raise RequestError(
                422, f"An example is {_shown(tuple(found.shape[1:]))}, and the network was given {_shown(shape)}."
            )
        if shape is None and not found.is_floating_point() and found[0].numel() > LONGEST:
            raise RequestError(413, f"An example has {found[0].numel()} numbers, and may have {LONGEST}.")
        if dtype is not None and not dtype.is_floating_point:
            if found.is_floating_point():
                raise RequestError(422, "The network takes whole numbers.")
            found = found.to(dtype)
        return found

    def _rows(self, rows: Any) -> Batch:
        if self.encoding is None or isinstance(self.encoding, ImageEncoding):  # which would read files by path
            raise RequestError(422, 'This service takes no rows: send tensors, {"inputs": [...]}, or an image.')
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise RequestError(422, 'Rows must be a list of objects, {"rows": [{"age": 31}]}.')
        if len(rows) > self.limits.max_rows:
            raise RequestError(413, f"There are {len(rows)} rows, and a request may have {self.limits.max_rows}.")
        try:
            return self.encoding.encode(Records.of(rows))
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(422, f"The rows cannot be read: {_short(error)}") from error


def _short(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _shown(shape: tuple[int, ...]) -> str:
    return "a number" if not shape else " x ".join(map(str, shape))
