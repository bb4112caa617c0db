"""What one half of the validation data chooses for a guard."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bayesify._core.inputs import as_loader
from bayesify._core.trees import inputs_of
from bayesify.decide.examined import Examined, Settings, examine
from bayesify.decide.scores import Combination, Score, output_layer
from bayesify.evaluation.measures.detection import auroc
from bayesify.evaluation.measures.selective import aurc
from bayesify.laws import Posterior
from bayesify.likelihoods.pooling import Pooling, Temperatures
from bayesify.prediction import Predictor, Views, as_predictor, as_views
from bayesify.prediction.calibration import calibrate, draws_of

__all__ = ["Chosen", "chosen"]

LEAST_AUROC = 0.6  # below which a score is hardly better than chance


@dataclass(frozen=True, eq=False)
class Chosen:
    """What was chosen.

    Attributes:
        settings: How predictions are made.
        score: What finds OOD inputs.
        uncertainty: What decides whether to answer.
        examined: The examples that chose.
        numbers: What they showed, by name.
    """

    settings: Settings
    score: Score
    uncertainty: str
    examined: Examined
    numbers: dict[str, float]


def chosen(
    posterior: Posterior,
    half: Iterable[Any],
    ood_loader: Iterable[Any] | None,
    *,
    how: str | Predictor,
    views: Views | Sequence[Any] | str | None,
    num_draws: int | None,
    seed: int,
    pooling: Pooling | float | None,
    score: str | Sequence[str],
    combination: Combination,
    uncertainty: str,
    tolerance: float | None,
    max_width: float | None,
) -> Chosen:
    """Calibrate the posterior, unless pooling is None, and choose views, score and uncertainty; see `Guard.fit`."""
    settings = Settings(as_predictor(how, posterior), num_draws, seed)
    seen = _best_views(posterior, half, views, num_draws, seed)
    if pooling is not None:
        each: Temperatures = "auto" if pooling == "auto" else "one"
        calibrate(posterior, half, views=seen, pooling=pooling, temperatures=each, num_draws=num_draws, seed=seed)
    elif seen is not None:
        posterior.views = seen
    wanted = [score] if isinstance(score, str) else list(score)
    features = any(name in ("mahalanobis", "knn", "vim") for name in wanted)
    examined = examine(posterior, half, settings, features=features)
    if examined.prediction.classes is None and tolerance is None and max_width is None:
        raise ValueError(
            "A number is never quite right: say by how much an answer may be off, Guard.fit(..., tolerance=0.5), or "
            "how wide the interval of an answer may be, max_width=2.0."
        )
    if examined.prediction.classes is not None and (tolerance is not None or max_width is not None):
        raise ValueError("tolerance and max_width are for numbers, and the network predicts classes.")
    found = dict[str, float]()
    fitted = _score(posterior, examined, ood_loader, settings, wanted, combination, found)
    if max_width is not None:
        if uncertainty not in ("auto", "total"):
            raise ValueError(f"The width of an interval is the 'total' uncertainty's, and not {uncertainty!r}.")
        uncertainty = "total"
    elif uncertainty == "auto":
        uncertainty = _best_uncertainty(examined, tolerance, found)
    elif uncertainty not in examined.prediction.scores:
        raise ValueError(f"There is no uncertainty {uncertainty!r} here; there are {list(examined.prediction.scores)}.")
    return Chosen(settings, fitted, uncertainty, examined, found)


def _best_views(
    posterior: Posterior, half: Iterable[Any], views: Any, num_draws: int | None, seed: int
) -> Views | None:
    """Return the views that were given, or the candidate with the least held-out NLL."""
    candidates = list(views) if isinstance(views, list | tuple) else []
    if not candidates or not all(isinstance(one, Views) for one in candidates):
        found: Views | None = None if views is None else as_views(views, posterior.views)
        return found

    def nll(one: Views) -> float:
        seen = draws_of(posterior, half, one, num_draws=num_draws, seed=seed)
        return float(copy.deepcopy(posterior.likelihood).held_out_nll(seen.batches, parts=seen.parts).mean())

    best: Views = min(candidates, key=nll)
    return best


def _score(
    posterior: Posterior,
    examined: Examined,
    ood_loader: Iterable[Any] | None,
    settings: Settings,
    wanted: list[str],
    combination: Combination,
    numbers: dict[str, float],
) -> Score:
    """Return the score that was asked for, or the one that tells OOD inputs best."""
    prediction = examined.prediction
    if wanted != ["auto"]:
        layer = output_layer(posterior, examined.inputs) if "vim" in wanted else None
        labels = examined.targets.long() if prediction.classes is not None else None
        made = Score.fit(
            wanted, prediction, combination=combination, features=examined.features, labels=labels, layer=layer
        )
        if ood_loader is not None:
            others = _predicted(posterior, ood_loader, settings, features=made.needs_features)
            outside = torch.cat([made(*one) for one in others])
            numbers["OOD AUROC"] = auroc(examined.scores(made), outside)
        return made
    if ood_loader is None:
        return Score(("total",))
    others = _predicted(posterior, ood_loader, settings, features=False)
    found = {}
    for name in prediction.scores:
        made = Score((name,))
        inside, outside = examined.scores(made), torch.cat([made(*one) for one in others])
        if bool((inside != inside[0]).any()):  # one that is the same for all, as what one function has of the
            found[name] = auroc(inside, outside)  # epistemic part, has no threshold
    if not found:
        return Score(("total",))
    best = max(found, key=lambda name: found[name])  # the first of equals
    numbers["OOD AUROC"] = found[best]
    if found[best] < LEAST_AUROC:
        warnings.warn(
            f"No score of the prediction tells these OOD inputs from known ones: the best, {best}, has an AUROC of "
            f"{found[best]:.3f}. Try a distance of features, Guard.fit(..., score='mahalanobis') or score='knn'.",
            stacklevel=4,  # the call of Guard.fit
        )
    return Score((best,))


def _predicted(posterior: Posterior, loader: Iterable[Any], settings: Settings, *, features: bool) -> list[Any]:
    found = []
    for batch in as_loader(loader, "Guard.fit"):
        prediction, own = settings.predicted(posterior, inputs_of(batch), features=features)
        found.append((prediction.cpu(), None if own is None else own.cpu()))
    if not found:
        raise ValueError("The OOD loader gave no batch. Check its data set and sampler.")
    return found


def _best_uncertainty(examined: Examined, tolerance: float | None, numbers: dict[str, float]) -> str:
    """Return the uncertainty with the least area under the risk-coverage curve, the first of equals."""
    correct = examined.correct(tolerance)
    found = {name: float(aurc(examined.uncertainty(name), correct)) for name in examined.prediction.scores}
    best = min(found, key=lambda name: found[name])
    numbers["AURC"] = found[best]
    return best
