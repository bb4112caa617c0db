"""A number that multiplies noise whose size is a setting, and no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayesify.laws.law import Law, Rescaling
from bayesify.laws.passes import Refusal

__all__ = ["ScaledNoise"]


class ScaledNoise(Law):
    """A law whose noise is `noise_scale` times as wide as its settings say.

    Attributes:
        noise_scale: The number, once it was set; None is 1, and in no file.
    """

    noise_scale: Tensor | None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register_buffer("noise_scale", None)

    def rescaling(self) -> Rescaling | Refusal:
        """Return what multiplies the noise, as it is now, by a factor."""
        before = None if self.noise_scale is None else self.noise_scale.item()

        def rescale(factor: float) -> None:
            if before is None and factor == 1:
                self.noise_scale = None
                return
            self._make_scale()
            self.noise_scale.fill_(factor if before is None else before * factor)  # type: ignore[union-attr]

        return rescale

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Have a scale where the state that will be loaded has one."""
        super().make_room(tensors)
        if "noise_scale" in tensors:
            self._make_scale()
        else:
            self.noise_scale = None

    def _make_scale(self) -> None:
        if self.noise_scale is None:
            like = next(self.network.parameters())
            dtype = torch.promote_types(like.dtype, torch.float32)
            self.noise_scale = torch.ones((), dtype=dtype, device=like.device)
