"""Likelihoods by name, and from configuration files."""

from __future__ import annotations

from typing import Any

from bayesify._core.values import misfits
from bayesify.likelihoods.likelihood import KINDS, Likelihood

__all__ = ["as_likelihood", "is_called", "likelihood_from_dict"]

_NAMES: dict[str, dict[str, Any]] = {
    "classification": {"kind": "categorical"},
    "binary": {"kind": "bernoulli"},
    "multilabel": {"kind": "bernoulli"},
    "regression": {"kind": "gaussian"},
    "heteroscedastic": {"kind": "gaussian", "noise_std": "head"},
    "counts": {"kind": "poisson"},
}


def is_called(likelihood: Likelihood, name: str) -> bool:
    """Return whether a likelihood is of the kind that a name means, with the settings that the name says.

    >>> is_called(as_likelihood("regression"), "heteroscedastic"), is_called(as_likelihood("binary"), "multilabel")
    (False, True)
    """
    settings = dict(_NAMES.get(name, {"kind": name}))
    same = likelihood.kind == settings.pop("kind")
    return same and all(likelihood.config().get(key) == value for key, value in settings.items())


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return a likelihood for its name.

    Names are classification, binary, multilabel (binary for several outputs), regression, heteroscedastic (regression
    with a head for the noise), counts, or a kind's own name: poisson, negative-binomial, student-t.

    >>> as_likelihood("regression"), as_likelihood("student-t")
    (Gaussian(noise_std=learned), StudentT(dof=learned, scale=learned))
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    settings = dict(_NAMES.get(likelihood, {"kind": likelihood}))
    kind = settings.pop("kind")
    if kind not in KINDS or kind == "custom":
        known = sorted(_NAMES) + sorted(KINDS.keys() - {"custom"})
        raise ValueError(f"There is no likelihood {likelihood!r}. Give one of {known}, or a Likelihood object.")
    return KINDS[kind](**settings)


def likelihood_from_dict(values: dict[str, Any]) -> Likelihood:
    """Rebuild a likelihood from its configuration."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"The file names a likelihood {kind!r}, which is unknown here; known: {sorted(KINDS)}.")
    if kind == "custom":
        raise ValueError("The file's likelihood 'custom' has settings that do not fit it: functions are in no file.")
    settings = {key: value for key, value in values.items() if key != "kind"}
    if wrong := misfits(settings, KINDS[kind].__init__):
        raise ValueError(f"The file's likelihood {kind!r} has settings that cannot be: {', '.join(wrong)}.")
    try:
        return KINDS[kind](**settings)
    except TypeError as error:
        raise ValueError(f"The file's likelihood {kind!r} has settings that do not fit it: {error}.") from error
