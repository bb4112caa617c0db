"""The experiments by the name of their results files; a module for each method, with the settings that were chosen."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.config import Config
from experiments.configs import abnn, adapter, baselines, gain, ibnn, laplace, lora, scoreboard, streamlined

__all__ = ["experiments"]

MODULES = (abnn, adapter, baselines, gain, ibnn, laplace, lora, scoreboard, streamlined)


def experiments() -> dict[str, Sequence[Config]]:
    """Return all experiments.

    >>> experiments()["digits"][0].name
    'map'
    """
    return {name: configs for module in MODULES for name, configs in module.EXPERIMENTS.items()}
