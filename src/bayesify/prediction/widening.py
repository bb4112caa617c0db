"""The width of a posterior's noise, from validation data alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bayesify._core.inputs import as_loader
from bayesify.laws import Posterior, Refusal, require_posterior
from bayesify.prediction.trials import Trial, judge

__all__ = ["Trial", "Widening", "widen"]

LOWEST, HIGHEST = 1e-2, 1e2  # factors
HALVINGS, BISECTIONS = 2, 8
NEAR = 0.02  # decades: a parabola's minimum this near a factor that was tried is not tried


@dataclass(frozen=True)
class Widening:
    """What `widen` tried and chose.

    Attributes:
        factor: What the standard deviation of the noise was multiplied by.
        trials: All that was tried, by factor.
        calibrated: Whether the NLL is that after calibration.
        tolerance: How much larger the error may be than `reference`; None where the NLL decided.
        reference: The error without noise, where a tolerance decided; else None.

    Example:
        >>> print(Widening(3.0, (Trial(1.0, 0.41, 0.1), Trial(3.0, 0.37, 0.1))))
        factor     NLL   error
             1  0.4100  0.1000
             3  0.3700  0.1000  chosen
    """

    factor: float
    trials: tuple[Trial, ...]
    calibrated: bool = True
    tolerance: float | None = None
    reference: float | None = None

    def __str__(self) -> str:
        """Return a table of the trials."""
        lines = [f"{'factor':>6}  {'NLL':>6}  {'error':>6}"]
        for trial in self.trials:
            mark = "  chosen" if trial.factor == self.factor else ""
            lines.append(f"{trial.factor:6.3g}  {trial.nll:6.4f}  {trial.error:6.4f}{mark}")
        return "\n".join(lines)


@torch.inference_mode(False)
def widen(
    posterior: Posterior,
    val_loader: Iterable[Any],
    *,
    tolerance: float | None = None,
    calibrated: bool = True,
    precise: bool = True,
    num_draws: int | None = None,
    views: Any = None,
    seed: int = 0,
    progress: bool = False,
) -> Posterior:
    """Find how wide the noise should be, on validation data alone.

    The standard deviation of the noise is multiplied by one factor between 1e-2 and 1e2: that of Gaussian weights, of
    iBNN's factors of inputs, of ABNN's noise (alpha), of dropout's masks, sqrt(p / (1 - p)), of SWAG, and that of the
    prior of Laplace's approximation. Nothing is trained. The factor is that of least validation NLL, never worse on the
    data given than 1; with a `tolerance` it is the largest that leaves the error, which is 1 - accuracy or RMSE, within
    it of the error without noise (training-free Bayesianization, Shi et al. 2025). The same random numbers serve all
    factors.

    Costs at most ten predictions of the validation set, six without `precise`. With `calibrated`, memory is that of the
    draws' outputs on the validation data, S x N x C numbers, as of `calibrate`; else that of a batch.

    Args:
        posterior: A posterior with noise, fitted or not; it is changed in place.
        val_loader: Batches of (inputs, targets) that were not trained on; read once for each factor.
        tolerance: None takes the factor of least NLL.
        calibrated: Whether to judge by the NLL as `calibrate` would leave it: fitted on one half of the examples, and
            measured on the other, both ways, with draws pooled as they are now. Calibration itself is left alone: call
            `calibrate` afterwards.
        precise: Whether to go below half a decade of factors; the NLL of a few hundred examples tells no more. With a
            `tolerance` it has no part.
        num_draws: How many draws; None takes the posterior's own number.
        views: As in `predict`; `posterior.views` is left alone.
        seed: Of the draws.
        progress: Whether to show a progress bar for each factor.

    Returns:
        The same posterior. `posterior.widening` holds the factor and all that was tried, a `Widening`.

    Raises:
        ValueError: The posterior has no noise whose width is a number (a bank, a plain network), or has not learned
            yet; or no factor keeps the error within the tolerance. The posterior is as it was then, as after any
            exception.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bayesify import BayesAdapter, convert
        >>> network = nn.Linear(2, 2, bias=False)
        >>> _ = network.load_state_dict({"weight": 2 * torch.eye(2)})
        >>> inputs = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> targets = inputs.argmax(1)
        >>> posterior = convert(network, BayesAdapter(start_std=(0.5, 0.5)))
        >>> _ = widen(posterior, [(inputs, targets)], tolerance=0.05)
        >>> 1 < posterior.widening.factor < 10
        True
    """
    require_posterior(posterior)
    loader = as_loader(val_loader, "widen")
    if iter(loader) is loader:
        raise TypeError(
            "widen reads the validation data once for each factor, and an iterator can be read only once. Give a "
            "DataLoader, or a list of batches."
        )
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is by how much the error may grow, at least 0, but it is {tolerance}.")
    if (reason := posterior.learned) is not True:
        raise ValueError(f"This posterior has no uncertainty yet: {reason}")
    rescale = posterior.law.rescaling()
    if isinstance(rescale, Refusal):
        raise ValueError(str(rescale))
    options: dict[str, Any] = {"num_draws": num_draws, "seed": seed}
    options |= {} if views is None else {"views": views}
    trials: dict[float, Trial] = {}

    def look(factor: float, **more: Any) -> Trial:
        rescale(factor)
        asks = calibrated and tolerance is None
        return judge(posterior, loader, factor, calibrated=asks, progress=progress, options={**options, **more})

    def trial(exponent: float) -> Trial:
        if exponent not in trials:
            trials[exponent] = look(10**exponent)
        return trials[exponent]

    try:
        if tolerance is None:
            reference, chosen = None, _least_nll(trial, precise=precise)
        else:
            reference = (look(1.0, how="mean", num_draws=None) if posterior.has_mean() else trial(-2)).error
            chosen = _largest(trial, reference, tolerance)
        rescale(chosen.factor)
    except BaseException:
        rescale(1.0)
        raise
    kept = tuple(sorted(trials.values(), key=lambda one: one.factor))
    posterior.widening = Widening(chosen.factor, kept, calibrated and tolerance is None, tolerance, reference)
    _warn_at_an_end(chosen, tolerance)
    return posterior


def _least_nll(trial: Callable[[float], Trial], *, precise: bool = True) -> Trial:
    """Return the trial of least NLL: of decades downhill, of halves of one beside the best, of quarters and a parabola.

    The NLL is taken to have one minimum: where it falls from one decade to the next, those on the other side are left.
    """
    tried: dict[float, Trial] = {x: trial(x) for x in (0.0, -1.0)}

    def best() -> float:
        return min(tried, key=lambda x: tried[x].nll)

    step = 1.0
    for one, beyond in ((0.0, 1.0), (1.0, 2.0), (-1.0, -2.0)):
        if best() == one or not math.isfinite(tried[best()].nll):
            tried[beyond] = trial(beyond)
    for _ in range(HALVINGS if precise else 1):
        step, centre = step / 2, best()
        tried |= {x: trial(x) for x in (centre - step, centre + step) if abs(x) <= 2}
    centre = best()
    if not math.isfinite(tried[centre].nll):
        raise ValueError(
            "There is no finite NLL to judge by: predictions or targets are not finite, or the likelihood's "
            "predictions are without noise (Custom). tolerance=... goes by the error alone."
        )
    if precise and abs(centre) < 2:
        below, here, above = (tried[x].nll for x in (centre - step, centre, centre + step))
        bend = below - 2 * here + above
        offset = 0.5 * step * (below - above) / bend if 0 < bend < math.inf else 0.0
        if abs(offset) > NEAR:
            tried[centre + offset] = trial(centre + offset)
    return tried[best()]


def _largest(trial: Callable[[float], Trial], reference: float, tolerance: float) -> Trial:
    """Return the trial of the largest factor found whose error is within the tolerance, by bisection."""
    low, high, found = -2.0, 2.0, None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        one = trial(middle)
        if one.error <= reference + tolerance:
            low, found = middle, one
        else:
            high = middle
    if found is None:
        raise ValueError(
            f"No factor from {LOWEST} on keeps the error within {tolerance} of {reference:.4g}, the error without "
            f"noise: at {one.factor:.3g} it is {one.error:.4g}. Give a larger tolerance, more draws, or let the NLL "
            "decide: tolerance=None."
        )
    return found


def _warn_at_an_end(chosen: Trial, tolerance: float | None) -> None:
    if chosen.factor > HIGHEST / 1.05:
        warnings.warn(
            f"The noise was made {chosen.factor:.3g} times as wide, and {HIGHEST:g} is the most that is tried, so "
            "that a wider one may be better. Call widen again, which goes on from here, or convert with more noise.",
            stacklevel=3,
        )
    elif tolerance is None and chosen.factor < LOWEST * 1.05:
        warnings.warn(
            f"The least NLL is at the least noise that is tried, {LOWEST:g} of what there was: on these data this "
            "noise helps nothing. Take another method, or the network with a temperature: MAP() and calibrate.",
            stacklevel=3,
        )
