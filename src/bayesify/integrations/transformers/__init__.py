"""transformers: a trainer, loaders of texts and data sets, and text that is generated with its uncertainty."""

from __future__ import annotations

from bayesify._core.optional import require

require("transformers", extra="transformers", purpose="bayesify.integrations.transformers")

from bayesify.integrations.transformers.generation import Generation, Uncertainty, generate  # noqa: E402
from bayesify.integrations.transformers.loading import loader  # noqa: E402
from bayesify.integrations.transformers.trainer import Trainer  # noqa: E402

__all__ = ["Generation", "Trainer", "Uncertainty", "generate", "loader"]
