"""Decide requests together, and let none of them harm another."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesify._core.seen import make_inputs
from bayesify._core.trees import map_tensors
from bayesify.data import Labels
from bayesify.decide import Guard, Verdicts
from bayesify.decide.lines import lines_of
from bayesify.serve.inputs import Requested, RequestError

__all__ = ["Decided", "Engine"]


@dataclass(frozen=True, eq=False)
class Decided:
    """Hold the answer to a request.

    Attributes:
        lines: A mapping for each row, as `bayesify decide` writes them.
        codes: 0 answer, 1 ask a person, 2 OOD, of the rows that could be read.
        p_values: Of the same rows.
    """

    lines: list[dict[str, Any]]
    codes: tuple[int, ...]
    p_values: tuple[float, ...]


class Engine:
    """Decide requests by a guard.

    Requests of one signature (names, types and shapes of their tensors, but for the number of examples) are one batch.
    If the network raises, each is decided alone, so that only the one to blame fails.

    Args:
        guard: What decides.
        labels: Gives numbers their units; None where there are none.

    >>> from bayesify import convert
    >>> from bayesify.data import Batch
    >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    >>> network = torch.nn.Linear(2, 2, bias=False)
    >>> _ = network.weight.data.copy_(20 * torch.eye(2))
    >>> engine = Engine(Guard.fit(convert(network, "map"), [(x, x.argmax(1))], max_risk=0.05))
    >>> requests = [Requested(Batch([1], row[None])) for row in torch.tensor([[3.0, -3.0], [0.1, 0.1001]])]
    >>> [answer.lines[0]["verdict"] for answer in engine(requests)]
    ['answer', 'ood']
    """

    def __init__(self, guard: Guard, labels: Labels | None = None) -> None:
        self.guard, self.labels = guard, labels
        self._lock = threading.Lock()

    def __call__(self, requests: Sequence[Requested]) -> list[Decided | Exception]:
        """Return the answer to each request, or what went wrong with it."""
        groups: dict[Any, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(_signature(request.batch.inputs) if len(request) else None, []).append(index)
        found: dict[int, Decided | Exception] = {}
        with self._lock:
            for signature, indices in groups.items():
                some = [requests[index] for index in indices]
                answers = [self._unread(one) for one in some] if signature is None else self._together(some)
                found.update(zip(indices, answers, strict=True))
        return [found[index] for index in range(len(requests))]

    def warm_up(self, rows: int) -> float | None:
        """Decide made-up inputs twice, so that the first request finds all ready; return the seconds of a batch.

        Returns:
            None where it is not known what inputs look like.
        """
        form = self.guard.posterior.inputs_seen.form
        if form is None:
            return None
        device = next((tensor.device for tensor in self.guard.posterior.parameters()), torch.device("cpu"))
        args, kwargs = make_inputs(form, "spread", device)
        inputs = kwargs or (args[0] if len(args) == 1 else tuple(args))
        rows = max(rows, 1)
        many = map_tensors(lambda t: t[:1].expand(rows, *t.shape[1:]).contiguous(), inputs)
        seconds = 0.0
        with self._lock:
            for batch in (map_tensors(lambda t: t[:1], inputs), many, many):
                began = time.perf_counter()
                self.guard(batch)
                seconds = time.perf_counter() - began
        return seconds

    def _together(self, requests: list[Requested]) -> Sequence[Decided | Exception]:
        try:
            return self._decided(requests)
        except Exception as error:
            if len(requests) > 1:
                return [answer for request in requests for answer in self._together([request])]
            text = str(error).strip().partition("\n")[0][:300]
            return [RequestError(422, f"The network cannot take these inputs: {type(error).__name__}: {text}")]

    def _decided(self, requests: list[Requested]) -> list[Decided]:
        verdicts = self.guard(_joined([request.batch.inputs for request in requests]))
        if len(verdicts) != sum(len(request) for request in requests):
            raise ValueError("the network does not give an output for each example")
        answers, start = [], 0
        for request in requests:
            own = verdicts[start : start + len(request)]
            start += len(request)
            answers.append(Decided(self._lines(request, own), tuple(own.codes.tolist()), tuple(own.p_value.tolist())))
        return answers

    def _unread(self, request: Requested) -> Decided:
        """Answer a request of which no row could be read."""
        return Decided(list(lines_of(request.batch, None, self.labels)), (), ())

    def _lines(self, request: Requested, verdicts: Verdicts) -> list[dict[str, Any]]:
        batch = request.batch if request.batch.errors else replace(request.batch, inputs=None)
        lines = list(lines_of(batch, verdicts, self.labels))
        if request.probs and verdicts.in_set is not None:
            names = verdicts.rules.classes
            probs = iter(verdicts.prediction.log_probs.exp().tolist())  # type: ignore[attr-defined]
            for line in lines:
                if "error" not in line:
                    line["probs"] = dict(zip(names, next(probs), strict=True))
        return lines


def _signature(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return tuple((name, _signature(value)) for name, value in sorted(inputs.items()))
    if isinstance(inputs, Tensor):
        return inputs.dtype, inputs.shape[1:]
    return tuple(_signature(value) for value in inputs)


def _joined(parts: list[Any]) -> Any:
    """Put batches of one signature together."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, Tensor):
        return torch.cat(parts)
    return tuple(_joined([part[index] for part in parts]) for index in range(len(first)))
