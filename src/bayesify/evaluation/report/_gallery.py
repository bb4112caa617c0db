"""Thumbnails of the most and the least certain inputs."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.evaluation.evaluation import Evaluation
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["Gallery", "Tile", "check_images", "choose", "galleries"]

SHOWN = 8
LARGEST = 96  # pixels; larger thumbnails only make the file large


@dataclass(frozen=True)
class Tile:
    """One input and what was predicted; widths are percentages of the widest bar."""

    source: str
    predicted: str
    target: str | None
    wrong: bool
    aleatoric: float
    epistemic: float
    widths: tuple[float, float]


@dataclass(frozen=True)
class Gallery:
    """A row of tiles with a heading."""

    title: str
    tiles: list[Tile]


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


def choose(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation to show: the best that splits uncertainty and saw the first one's examples in order."""
    first = evaluations[0]
    aligned = [
        e
        for e in evaluations
        if not e.deterministic
        and torch.equal(e.targets, first.targets)
        and {name: len(p) for name, p in e.ood.items()} == {name: len(p) for name, p in first.ood.items()}
    ]
    return min(aligned, key=lambda e: e.metrics.get("nll", float("inf"))) if aligned else first


def galleries(
    evaluation: Evaluation,
    images: Tensor | None,
    ood_images: Mapping[str, Tensor],
    names: Sequence[str] | None,
) -> list[Gallery]:
    """Return the rows of thumbnails, ranked by the evaluation's score."""
    plan: list[tuple[str, Tensor, Prediction, Tensor | None, Tensor]] = []
    if images is not None:
        order = torch.argsort(evaluation.prediction.score(evaluation.score), stable=True)
        plan.append(("Test images, most certain", images, evaluation.prediction, evaluation.targets, order[:SHOWN]))
        plan.append(
            ("Test images, least certain", images, evaluation.prediction, evaluation.targets, order.flip(0)[:SHOWN])
        )
    for name, pictures in ood_images.items():
        prediction = evaluation.ood[name]
        order = torch.argsort(prediction.score(evaluation.score), stable=True)
        plan.append((f"OOD ({name}), most suspicious", pictures, prediction, None, order.flip(0)[:SHOWN]))
        plan.append((f"OOD ({name}), least suspicious", pictures, prediction, None, order[:SHOWN]))
    shown = [prediction.score("total")[rows].max() for _, _, prediction, _, rows in plan]
    widest = float(torch.stack(shown).max()) if shown else 0.0
    return [
        Gallery(title, [_tile(encode, prediction, targets, row, names, widest or 1.0) for row in rows.tolist()])
        for title, pictures, prediction, targets, rows in plan
        for encode in [_encoder(pictures)]
    ]


def _tile(
    encode: Callable[[int], str],
    prediction: Prediction,
    targets: Tensor | None,
    row: int,
    names: Sequence[str] | None,
    widest: float,
) -> Tile:
    aleatoric, epistemic = (float(prediction.score(name)[row]) for name in ("aleatoric", "epistemic"))
    target = None if targets is None else targets[row].item()
    if isinstance(prediction, RegressionPrediction):
        predicted, wrong = f"{float(prediction.mean[row]):.3g}", False
        shown = None if target is None else f"{target:.3g}"
    else:
        assert isinstance(prediction, ClassificationPrediction)
        label = int(prediction.label[row])
        predicted, wrong = _name(label, names), target is not None and target != label
        shown = None if target is None else _name(int(target), names)
    return Tile(
        source=encode(row),
        predicted=predicted,
        target=shown,
        wrong=wrong,
        aleatoric=aleatoric,
        epistemic=epistemic,
        widths=(100 * aleatoric / widest, 100 * epistemic / widest),
    )


def _name(label: int, names: Sequence[str] | None) -> str:
    return str(label) if names is None else str(names[label])


def _encoder(images: Tensor) -> Callable[[int], str]:
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
