"""Inputs and outputs of any structure, and networks with unused parameters."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.utils import ModelOutput

import bayesify
from tests.conformance.cases import CASES, CLASSES, Case
from tests.conformance.pairs import pairwise
from tests.marks import slow_product

ROWS = 8


@dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (logits, {"hidden": logits + 1}),
    "dict": lambda logits: {"features": logits + 1, "logits": logits},
    "ModelOutput": lambda logits: Output(logits=logits),
}


class Two(nn.Module):
    """Takes one or two tensors, has a parameter that no output depends on, and wraps what it returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(4, 6)
        self.right = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.5)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, left: Tensor, right: Tensor | None = None) -> Any:
        hidden = self.left(left) + self.right(left if right is None else right)
        return OUTPUTS[self.kind](self.head(self.dropout(self.norm(hidden))))


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    left, right = torch.randn(2, ROWS, 4, dtype=torch.float64)
    return left, right, torch.arange(ROWS) % CLASSES


def _batches() -> dict[str, tuple[Any, Any]]:
    """Return, for each structure, inputs and a training batch."""
    left, right, labels = _tensors()
    named = {"left": left, "right": right}
    return {
        "tensor": (left, (left, labels)),
        "tuple": ((left, right), (left, right, labels)),
        "nested tuple": ((left, right), ((left, right), labels)),
        "dict": (named, {**named, "labels": labels}),
        "UserDict": (UserDict(named), UserDict({**named, "labels": labels})),
    }


def _network(kind: str) -> Two:
    torch.manual_seed(6)
    return Two(kind).double().eval()


@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")
@pytest.mark.parametrize(
    ("case", "structure", "kind"),
    pairwise(CASES, list(_batches()), list(OUTPUTS)),
    ids=str,
)
def test_structures_of_inputs_and_outputs(case: Case, structure: str, kind: str):
    inputs, batch = _batches()[structure]
    network = _network(kind)
    posterior = bayesify.convert(network, case.silent)
    left, right, labels = _tensors()
    expected = _network("tensor")(left, None if structure == "tensor" else right)
    assert_close(bayesify.predict(posterior, inputs, seed=0).logits_mean, expected - expected.mean(-1, keepdim=True))
    nll = nn.functional.cross_entropy(expected, labels)
    assert_close(posterior.loss(batch, num_data=ROWS).total, nll)


@pytest.mark.parametrize(("case", "structure"), slow_product(CASES, _batches()), ids=str)
def test_structures_in_a_loop_over_batches(case: Case, structure: str):
    kind = list(OUTPUTS)[CASES.index(case) % len(OUTPUTS)]
    _, batch = _batches()[structure]
    left, right, labels = _tensors()
    expected = _network("tensor")(left, None if structure == "tensor" else right)
    fitted = bayesify.convert(_network(kind), case.noisy)
    history = bayesify.fit(fitted, [batch, batch], num_data=ROWS, epochs=1, progress=False, accuracy_tolerance=1)
    assert history.accuracy_before == (expected.argmax(-1) == labels).double().mean()
    assert len(bayesify.predict(fitted, [batch, batch], seed=0)) == 2 * ROWS


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_pass_returns_what_the_network_returns(case: Case, kind: str):
    left, right, _ = _tensors()
    posterior = bayesify.convert(_network(kind), case.silent)
    for function in (posterior, posterior.draw(1)):
        for output in (function(left, right), function(left=left, right=right), function(left, right=right)):
            original = _network(kind)(left, right)
            assert type(output) is type(original)
            assert_close(posterior.read(output), posterior.read(original))


def test_a_parameter_without_gradient_trains_and_stays(case: Case):
    network = _network("tensor")
    posterior = bayesify.convert(network, case.noisy)
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    batch = _batches()["tensor"][1]
    reached = _reached(posterior, batch)
    bayesify.fit(posterior, [batch] * 4, num_data=ROWS, progress=False, accuracy_tolerance=1)
    after = posterior.state_dict()
    # The head and the layer before it: what every method trains, some of them one of the two only.
    # A generator of weights has them all in one.
    trained = [name for name in after if any(part in name for part in ("head", "norm", "generator"))]
    assert any(not torch.equal(before[name], after[name]) for name in trained)
    # Without data a Laplace posterior is as wide as its prior; its mean is the network's own.
    widths = tuple(f"law.{name}" for name in ("square", "deviations", "left", "right", "log_std"))
    for name in before.keys() & after.keys():
        if name.endswith("unused.weight") and (name in reached or not name.startswith(widths)):
            # Weight decay acts on gradients, so a parameter that never gets one stays where it is; a prior moves it.
            assert torch.equal(before[name], after[name]) != (name in reached), name


def _reached(posterior: bayesify.Posterior, batch: Any) -> set[str]:
    """Return the parameters that the loss depends on, if only by its prior."""
    named = dict(posterior.named_parameters())
    total = posterior.loss(batch, num_data=ROWS).total
    found = torch.autograd.grad(total, [p for p in named.values() if p.requires_grad], allow_unused=True)
    trained = [name for name, p in named.items() if p.requires_grad]
    return {name for name, gradient in zip(trained, found, strict=True) if gradient is not None and gradient.any()}
