"""Scores of inputs by name, alone or several together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bayesify._core.maths import as_double
from bayesify.decide.distances import DISTANCES, KNN, Distance, Mahalanobis, ViM
from bayesify.laws import Posterior
from bayesify.likelihoods.prediction import Prediction

__all__ = ["Combination", "Score", "output_layer"]

Combination = Literal["rank", "fisher"]


@dataclass(frozen=True, eq=False)
class Score:
    """A number for each input, higher = more suspicious: one score, or several together.

    One is what the prediction calls so (`prediction.scores`: "total", "epistemic", "msp", "energy", "variation_ratio",
    "model_variance", ...), or a distance of the network's features ("mahalanobis", "knn", "vim"), which costs another
    pass. Several are put on one scale by known inputs: with n of them, of which the k-th score of m is at least s for
    g_k and less for l_k,

    - "rank": the mean of l_k / n over the scores;
    - "fisher": -2 sum_k ln p_k with p_k = (1 + g_k) / (n + 1), which is large if any is very suspicious (Fisher 1932).

    Neither is a probability any more: a `Detector` makes a p-value of the combined score, which then holds whatever the
    dependence of the scores.

    Build it with `Score.fit`.

    Attributes:
        names: Of the scores.
        combination: How they become one.
        known: The known inputs' scores, sorted, (m, n); empty for a single score.
        distances: The distances among them, by name.

    Example:
        >>> from bayesify import Categorical
        >>> known = Categorical().from_samples(torch.tensor([[[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]]]))
        >>> score = Score.fit(["total", "msp"], known)
        >>> score(known)
        tensor([0.0000, 0.3333, 0.6667], dtype=torch.float64)
    """

    names: tuple[str, ...]
    combination: Combination = "rank"
    known: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float64))
    distances: Mapping[str, Distance] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What texts call it."""
        return self.names[0] if len(self.names) == 1 else f"{self.combination} of {' and '.join(self.names)}"

    @property
    def needs_features(self) -> bool:
        """Whether features have to be predicted as well."""
        return bool(set(self.names) & set(DISTANCES))

    @classmethod
    def fit(
        cls,
        names: str | Sequence[str],
        prediction: Prediction,
        *,
        combination: Combination = "rank",
        features: Tensor | None = None,
        labels: Tensor | None = None,
        layer: tuple[Tensor, Tensor] | None = None,
    ) -> Score:
        """Learn what the scores need of known inputs.

        Args:
            names: One or several.
            prediction: Of known inputs, which were not trained on.
            combination: "rank" or "fisher".
            features: The known inputs' features (N, D), for distances.
            labels: Their labels (N,), for "mahalanobis"; None takes the predicted ones.
            layer: Weight and bias of the last layer, for "vim"; see `output_layer`.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if combination not in get_args(Combination):
            raise ValueError(f"combination must be one of {list(get_args(Combination))}, but it is {combination!r}.")
        if not wanted or len(set(wanted)) < len(wanted):
            raise ValueError(f"Give each score once, and at least one, not {list(wanted)}.")
        unknown = [name for name in wanted if name not in (*prediction.scores, *DISTANCES)]
        if unknown:
            raise ValueError(
                f"There is no score {unknown[0]!r} here; there are {list(prediction.scores)} of the prediction and "
                f"{list(DISTANCES)} of features."
            )
        made = cls(wanted, combination, distances=_fitted(wanted, prediction, features, labels, layer))
        if len(wanted) > 1:
            found = torch.stack([made._one(name, prediction, features) for name in wanted])
            object.__setattr__(made, "known", found.cpu().sort(dim=1).values)
        return made

    def __call__(self, prediction: Prediction, features: Tensor | None = None) -> Tensor:
        """Return the score of each input, (B,), in float64; NaN where the prediction is.

        Args:
            prediction: Of the inputs.
            features: Their features (B, D), for distances.
        """
        found = [self._one(name, prediction, features) for name in self.names]
        if len(found) == 1:
            return found[0]
        count = self.known.shape[1]
        parts = []
        for known, values in zip(self.known.to(found[0].device), found, strict=True):
            less = torch.searchsorted(known, values.contiguous()).double()
            part = less / count if self.combination == "rank" else -2 * ((1 + count - less) / (count + 1)).log()
            parts.append(part.where(~values.isnan(), math.nan))
        whole = torch.stack(parts).sum(0)
        return whole / len(parts) if self.combination == "rank" else whole

    def _one(self, name: str, prediction: Prediction, features: Tensor | None) -> Tensor:
        if name not in DISTANCES:
            return as_double(prediction.score(name).detach())
        if features is None:
            raise ValueError(f"The score {name!r} needs features: predict(posterior, inputs, output='features').")
        return as_double(self.distances[name](features.detach().flatten(1)))

    def to_dict(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the state as JSON-serialisable values; tensors are put into the dictionary that is given."""
        tensors["score.known"] = self.known
        for name, distance in self.distances.items():
            tensors |= {f"score.{name}.{key}": value for key, value in distance.tensors.items()}
        return {"names": list(self.names), "combination": self.combination}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Score:
        """Rebuild a score from `to_dict`."""
        names = tuple(state["names"])
        distances = {}
        for name in names:
            if name in DISTANCES:
                start = f"score.{name}."
                own = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
                distances[name] = DISTANCES[name](**own)
        return cls(names, state["combination"], tensors["score.known"], distances)


def _fitted(
    names: Sequence[str],
    prediction: Prediction,
    features: Tensor | None,
    labels: Tensor | None,
    layer: tuple[Tensor, Tensor] | None,
) -> dict[str, Distance]:
    wanted = [name for name in names if name in DISTANCES]
    if not wanted:
        return {}
    if features is None:
        raise ValueError(f"The score {wanted[0]!r} needs features: predict(posterior, inputs, output='features').")
    flat = features.detach().flatten(1)
    if labels is None and "mahalanobis" in wanted:
        if prediction.classes is None:
            raise ValueError("'mahalanobis' is of classes, and the prediction has none. Use 'knn'.")
        labels = prediction.label  # type: ignore[attr-defined]

    def vim() -> Distance:
        if layer is None:
            raise ValueError("'vim' needs the last layer: layer=output_layer(posterior, inputs).")
        return ViM.fit(flat, *layer)

    made: dict[str, Callable[[], Distance]] = {
        "mahalanobis": lambda: Mahalanobis.fit(flat, torch.as_tensor(labels).to(flat.device)),
        "knn": lambda: KNN.fit(flat, k=min(10, len(flat))),
        "vim": vim,
    }
    return {name: made[name]() for name in wanted}


def output_layer(posterior: Posterior, inputs: Any) -> tuple[Tensor, Tensor]:
    """Return weight (C, D) and bias (C,) of the network's last linear layer, as they are without noise."""
    name = posterior.trace(inputs).last_linear
    if name is None:
        raise ValueError("The network calls no linear layer last, so that 'vim' has no logits. Use 'knn'.")
    module = posterior.network.get_submodule(name)
    weight = torch.as_tensor(module.weight).detach()
    bias = module.bias
    return weight, weight.new_zeros(len(weight)) if bias is None else torch.as_tensor(bias).detach()
