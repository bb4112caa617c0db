"""Recurrent layers, unrolled in time into operations with rules; steps count as independent given the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.prediction.streamlined.moments import Moments, centre, moment_rule, variance_of
from bayesify.prediction.streamlined.products import joint_share

__all__: list[str] = []

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]


def _lstm_step(x: Tensor, h: Tensor, state: State) -> State:
    """Return h = o tanh(c), c = f c' + i g with gates (i, f, g, o) = x + h."""
    i, f, g, o = (x + h).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_step(x: Tensor, h: Tensor, state: State) -> State:
    """Return h = (1 - z) n + z h' with n = tanh(x_n + r h_n)."""
    of_x, of_h = x.chunk(3, -1), h.chunk(3, -1)
    reset, update = torch.sigmoid(of_x[0] + of_h[0]), torch.sigmoid(of_x[1] + of_h[1])
    return (_between(torch.tanh(of_x[2] + reset * of_h[2]), state[0], update),)


def _between(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """Return (1 - z) a + z b: Var = ((1 - z)^2 + var z) var a + (z^2 + var z) var b + (b - a)^2 var z, exactly."""
    a, b, z = centre(one), centre(other), centre(share)
    if not any(isinstance(x, Moments) for x in (one, other, share)):
        return torch.lerp(a, b, z)
    spread = variance_of(share)
    variance = ((1 - z).square() + spread) * variance_of(one) + (z.square() + spread) * variance_of(other)
    return Moments.make(torch.lerp(a, b, z), variance + (b - a).square() * spread, joint_share(one, other, share))


def _tanh_step(x: Tensor, h: Tensor, state: State) -> State:
    del state
    return (torch.tanh(x + h),)


def _relu_step(x: Tensor, h: Tensor, state: State) -> State:
    del state
    return (torch.relu(x + h),)


def _direction(step: Step, x: Tensor, state: State, weights: list[Any], biased: bool, backwards: bool) -> Any:
    """Run one layer in one direction; x is (B, T, D)."""
    (w_x, w_h), (b_x, b_h) = weights[:2], weights[2:4] if biased else (None, None)
    project = weights[-1] if len(weights) % 2 else None
    gates = functional.linear(x, w_x, b_x)
    times = range(gates.shape[1])
    outputs = []
    for time in reversed(times) if backwards else times:
        state = step(gates[:, time], functional.linear(state[0], w_h, b_h), state)
        if project is not None:
            state = (functional.linear(state[0], project), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), state


def _layers(step: Step) -> Callable[..., Any]:
    def rule(
        input: Tensor,
        hx: Any,
        weights: Any,
        biased: Any,
        num_layers: Any,
        dropout: Any = 0.0,
        training: Any = False,
        bidirectional: Any = False,
        batch_first: Any = False,
    ) -> Any:
        """Unroll all layers: linear maps are exact, the gates matched, and covariances between steps dropped."""
        if isinstance(weights, Tensor) or not isinstance(biased, bool):  # rows of different lengths, packed
            return NotImplemented
        if dropout and training and num_layers > 1:
            return NotImplemented
        x = input if batch_first else input.transpose(0, 1)
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        ways = 2 if bidirectional else 1
        each = len(weights) // (num_layers * ways)
        ends: list[State] = []
        for layer in range(num_layers):
            outputs = []
            for way in range(ways):
                index = layer * ways + way
                state = tuple(one[index] for one in states)
                own = list(weights[index * each : (index + 1) * each])
                made, end = _direction(step, x, state, own, biased, bool(way))
                outputs.append(made)
                ends.append(end)
            x = torch.cat(outputs, -1) if ways == 2 else outputs[0]
        return (x if batch_first else x.transpose(0, 1)), *(torch.stack(parts) for parts in zip(*ends, strict=True))

    return rule


def _cell(step: Step) -> Callable[..., Any]:
    def rule(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        """Make one step."""
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        made = step(functional.linear(input, w_ih, b_ih), functional.linear(state[0], w_hh, b_hh), state)
        return made if len(made) > 1 else made[0]

    return rule


_STEPS = {"lstm": _lstm_step, "gru": _gru_step, "rnn_tanh": _tanh_step, "rnn_relu": _relu_step}
for _name, _step in _STEPS.items():
    moment_rule(getattr(torch, _name), kind="matched")(_layers(_step))
    moment_rule(getattr(torch, f"{_name}_cell"), kind="matched")(_cell(_step))
