"""A probe: made-up inputs and what a posterior returns for them, by which another architecture is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bayesify._core.files import FileError
from bayesify._core.modes import evaluation_mode
from bayesify._core.seen import KINDS, FormError, make_inputs
from bayesify._core.trees import batch_rows
from bayesify._core.values import fits
from bayesify.laws import Pass, Posterior
from bayesify.prediction import posterior_device

__all__ = ["check_probe", "check_rates", "drop_rates", "make_probe"]

TOLERANCE = 1e-3
_NUMBERS = 64  # of the outputs are kept
_TYPES: dict[str, Any] = {"form": dict, "kind": str, "device": str, "mean": list[float], "draw": list[float]}


def make_probe(posterior: Posterior) -> dict[str, Any] | None:
    """Return a probe of a posterior; None where it saw no inputs, or its outputs for made-up ones say nothing."""
    form = posterior.inputs_seen.form
    for kind in KINDS if form is not None else ():
        try:
            first, again = (_outputs(posterior, form, kind, seed=seed) for seed in range(2))
        except Exception:  # made-up inputs need not be possible ones: the next kind, or no probe
            continue
        if first and all(_differ(first[mode], again[mode], TOLERANCE / 10) is None for mode in first):
            device = posterior_device(posterior).type
            numbers = {mode: _numbers(output) for mode, output in first.items()}
            return {"form": form, "kind": kind, "device": device, "mean": [], "draw": [], **numbers}
    return None


def check_probe(posterior: Posterior, probe: dict[str, Any], where: str) -> None:
    """Raise where a posterior does not return what the one that was saved returned.

    On another type of device draws are not compared, and a network that cannot be run there is not refused.
    """
    if not all(key in probe and fits(probe[key], kind) for key, kind in _TYPES.items()):
        raise FileError(f"{where} has a damaged probe. Copy or save the posterior again, or load it with probe=False.")
    here = posterior_device(posterior).type
    modes = [mode for mode in ("mean", "draw") if probe[mode] and (mode == "mean" or probe["device"] == here)]
    try:
        found = _outputs(posterior, probe["form"], probe["kind"], modes)
    except Exception as error:
        if probe["device"] != here and not isinstance(error, FormError):
            return  # an operation that there is on one device only
        raise ValueError(
            f"The network given cannot be run on the probe of {where} ({type(error).__name__}: {error}): it is another "
            "architecture, whose forward takes other inputs. If it is meant to be so, load with probe=False."
        ) from error
    for mode in modes:
        difference = _differ(torch.tensor(probe[mode], dtype=torch.float64), found[mode], _tolerance(posterior))
        if difference is not None:
            what = "its mean network" if mode == "mean" else "a draw of it"
            raise ValueError(
                f"The network given is not the one that {where} was made from: for the probe in the file, {what} "
                f"returns other numbers ({difference}). Its weights are right, so that it computes something else with "
                "them: another activation, order of modules, rate of dropout, or a setting that is no tensor. Build it "
                "as it was; if it is meant to differ, load with probe=False."
            )


def drop_rates(posterior: Posterior) -> dict[str, float]:
    """Return the rates of a posterior's dropout layers by name, which its mean does not show."""
    laws = [posterior.law, *getattr(posterior.law, "parts", ())]
    places = [place for law in laws for place in getattr(law, "places", ())]
    return {place.rate_name: float(place.p) for place in places if hasattr(place, "rate_name")}


def check_rates(posterior: Posterior, rates: dict[str, float], where: str) -> None:
    """Raise where a posterior drops with other rates than the one that was saved."""
    found = drop_rates(posterior)
    wrong = sorted(name for name in {*found, *rates} if found.get(name) != rates.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"The network given is not the one that {where} was made from: the dropout rate of {name!r} was "
            f"{rates.get(name)} and is {found.get(name)}. Build the network as it was, or convert it anew."
        )


# -- running it -----------------------------------------------------------------------------------------------------


def _outputs(
    posterior: Posterior, form: Any, kind: str, modes: list[str] | None = None, *, seed: int = 0
) -> dict[str, Tensor]:
    """Return some of the outputs for made-up inputs, by mode: of the mean network, or a draw, or both."""
    args, kwargs = make_inputs(form, kind, posterior_device(posterior))
    if modes is None:
        modes = ["mean"] * bool(posterior.has_mean())
        modes += ["draw"] * (not modes or bool(drop_rates(posterior)))
    found = {}
    with _undisturbed(posterior):
        torch.manual_seed(seed)
        for mode in modes:
            rows = batch_rows([list(args), dict(kwargs)])
            p = Pass("mean", rows=rows) if mode == "mean" else Pass("draw", (posterior.keys(1, 0)[0],), rows=rows)
            found[mode] = _some(posterior.read(posterior.run(p, tuple(args), kwargs)))
    return found


@contextlib.contextmanager
def _undisturbed(posterior: Posterior) -> Iterator[None]:
    """Leave nothing behind of the passes inside, and let nothing from outside change their numbers."""
    device = posterior_device(posterior)
    seen, traces = posterior.inputs_seen, posterior.runtime.traces.copy()
    posterior.inputs_seen = type(seen)()
    buffers = [(buffer, buffer.detach().clone()) for buffer in posterior.network.buffers()]
    cuda = [device] if device.type == "cuda" else []
    exact = torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices=cuda))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.enter_context(evaluation_mode(posterior))
            if cuda:
                stack.enter_context(exact)
            yield
    finally:
        posterior.inputs_seen, posterior.runtime.traces = seen, traces
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                with torch.no_grad():
                    buffer.copy_(before)


def _some(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output
    flat = real.detach().double().cpu().reshape(-1)
    return flat[:: max(1, flat.numel() // _NUMBERS)][:_NUMBERS]


def _numbers(output: Tensor) -> list[float]:
    return [float(f"{number:.7g}") for number in output.tolist()]


def _differ(one: Tensor, other: Tensor, tolerance: float) -> str | None:
    """Return how two outputs differ, if they do by more than rounding."""
    if one.shape != other.shape:
        return f"{len(other)} where there were {len(one)}"
    if not bool(one.isfinite().all() and other.isfinite().all()):
        return "not all finite"
    difference = (one - other).abs().max().item()
    scale = one.abs().max().item()
    return f"by {difference:.3g} where they are up to {scale:.3g}" if difference > tolerance * scale else None


def _tolerance(posterior: Posterior) -> float:
    types = {tensor.dtype for tensor in posterior.parameters() if tensor.is_floating_point()}
    return max([TOLERANCE, *(16 * torch.finfo(dtype).eps for dtype in types)])
