"""A probe: does a network compute from its weights what it did when the run began?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import call, map_tensors, slice_rows, split_batch, to_device
from bayesify.laws import Posterior

__all__ = ["make_probe", "probe_difference"]


def make_probe(posterior: Posterior, batch: Any) -> dict[str, Any] | None:
    """Return made-up inputs like those of a batch, and the outputs for them; None where that does not work.

    The inputs are random numbers in the range of the batch's, two rows: no example of the user's is kept.
    """
    random = torch.Generator().manual_seed(0)
    try:
        inputs = map_tensors(lambda tensor: _alike(tensor, random), slice_rows(split_batch(batch)[0], 0, 2))
        probe = {"inputs": inputs, "output": _outputs(posterior, inputs)}
        # A network that draws numbers of its own in evaluation mode cannot be recognised by its outputs.
        return probe if probe_difference(posterior, probe) is None else None
    except Exception:  # inputs that only look right: some network wants them sorted, or to be one of few
        return None


def probe_difference(posterior: Posterior, probe: dict[str, Any]) -> float | None:
    """Return by how much the outputs for a probe's inputs differ, if by more than rounding; else None."""
    expected, found = probe["output"], _outputs(posterior, probe["inputs"])
    if found.shape != expected.shape:
        return float("inf")
    share = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    found, expected = found.double(), expected.double()
    finite = expected[expected.isfinite()].abs()
    scale = share * float(finite.max()) if finite.numel() else 0.0
    if torch.allclose(found, expected, rtol=share, atol=scale + 1e-12, equal_nan=True):
        return None
    return float((found - expected).abs().nan_to_num(torch.inf).max())


@torch.no_grad()
def _outputs(posterior: Posterior, inputs: Any) -> Tensor:
    device = next(posterior.parameters()).device
    # Not through the posterior, which notes what inputs look like: those are to be real ones.
    with posterior.lock, evaluation_mode(posterior):
        return posterior.read(call(posterior.network, to_device(inputs, device))).detach().cpu()


def _alike(tensor: Tensor, random: torch.Generator) -> Tensor:
    """Return random numbers of a tensor's shape, type and range."""
    if tensor.numel() == 0:
        return tensor
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape, generator=random) < 0.5
    low, high = tensor.min().item(), tensor.max().item()
    if tensor.is_floating_point():
        return (low + (high - low) * torch.rand(tensor.shape, generator=random)).to(tensor.dtype)
    return torch.randint(int(low), int(high) + 1, tensor.shape, generator=random).to(tensor.dtype)
