"""Images as thumbnails inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable

import torch
from torch import Tensor

from bayesify.likelihoods.prediction import Prediction

__all__ = ["check_images", "encoder"]

LARGEST = 96  # pixels; larger thumbnails only make the file large


def check_images(images: Tensor, prediction: Prediction, what: str) -> None:
    """Raise where images and predictions do not belong together."""
    if images.ndim != 4:
        raise ValueError(f"{what} must be images (N, C, H, W), but the shape is {tuple(images.shape)}.")
    if len(images) != len(prediction):
        raise ValueError(
            f"{what} holds {len(images)} images and the evaluation {len(prediction)} examples. Pass the images in the "
            "order of the loader, from a loader that does not shuffle."
        )
    if prediction.score("total").ndim > 1:
        raise ValueError(f"{what} can be shown for one prediction per image only; leave the argument out.")


def encoder(images: Tensor) -> Callable[[int], str]:
    """Return a function from a row to a PNG data URI; values outside 0 to 1 are put on the set's own range."""
    images = images.detach().cpu()
    low, high = 0.0, 255.0 if images.dtype == torch.uint8 else 1.0
    if images.is_floating_point() and not (float(images.min()) >= 0 and float(images.max()) <= 1):
        low, high = float(images.min()), float(images.max())

    def encode(row: int) -> str:
        from PIL import Image

        image = ((images[row].float() - low) / max(high - low, 1e-12)).clamp(0, 1)
        pixels = image.permute(1, 2, 0) if len(image) == 3 else image.mean(0)
        picture = Image.fromarray((255 * pixels).round().to(torch.uint8).numpy())
        picture.thumbnail((LARGEST, LARGEST))
        buffer = io.BytesIO()
        picture.save(buffer, "png", optimize=True)
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    return encode
