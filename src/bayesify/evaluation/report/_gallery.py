"""Thumbnails of the most and the least certain inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.report._pictures import check_images, encoder
from bayesify.evaluation.report.content import Bar, Gallery, Paragraph, Section, Tile
from bayesify.likelihoods.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["aligned", "class_name", "gallery_section"]

SHOWN = 8


def aligned(evaluations: Sequence[Evaluation], name: str | None) -> Evaluation:
    """Return the evaluation to show: one by name, or the best that splits uncertainty and saw the first one's examples.

    Args:
        evaluations: All of them.
        name: The one to take, which must have seen the first one's examples in their order; None takes the best by NLL.
    """
    first = evaluations[0]
    same = [
        e
        for e in evaluations
        if torch.equal(e.targets, first.targets)
        and {key: len(p) for key, p in e.ood.items()} == {key: len(p) for key, p in first.ood.items()}
    ]
    if name is not None:
        found = [e for e in same if e.name == name]
        if not found:
            raise ValueError(f"shown={name!r} must be one of {[e.name for e in same]}: of the first one's examples.")
        return found[0]
    random = [e for e in same if not e.deterministic]
    return min(random, key=lambda e: e.metrics.get("nll", float("inf"))) if random else first


def gallery_section(
    evaluation: Evaluation,
    images: Tensor | None,
    ood_images: Mapping[str, Tensor],
    names: Sequence[str] | None,
) -> list[Section]:
    """Return the rows of thumbnails, ranked by the evaluation's score; nothing without images."""
    plan: list[tuple[str, Tensor, Prediction, Tensor | None, Tensor]] = []
    if images is not None:
        check_images(images, evaluation.prediction, "images")
        order = torch.argsort(evaluation.prediction.score(evaluation.score), stable=True)
        own = (images, evaluation.prediction, evaluation.targets)
        plan.append(("Test images, most certain", *own, order[:SHOWN]))
        plan.append(("Test images, least certain", *own, order.flip(0)[:SHOWN]))
    for name, pictures in ood_images.items():
        if name not in evaluation.ood:
            raise ValueError(f"ood_images has {name!r}, but the evaluations' OOD sets are {list(evaluation.ood)}.")
        prediction = evaluation.ood[name]
        check_images(pictures, prediction, f"ood_images[{name!r}]")
        order = torch.argsort(prediction.score(evaluation.score), stable=True)
        plan.append((f"OOD ({name}), most suspicious", pictures, prediction, None, order.flip(0)[:SHOWN]))
        plan.append((f"OOD ({name}), least suspicious", pictures, prediction, None, order[:SHOWN]))
    if not plan:
        return []
    widest = float(torch.stack([prediction.score("total")[rows].max() for _, _, prediction, _, rows in plan]).max())
    galleries = [
        Gallery(title, [_tile(encode, prediction, targets, row, names, widest or 1.0) for row in rows.tolist()])
        for title, pictures, prediction, targets, rows in plan
        for encode in [encoder(pictures)]
    ]
    unit = "in nats" if evaluation.prediction.classes else "in variances"
    section = Section(
        key="images",
        title="What is it sure about?",
        findings=[
            Paragraph(f"As {evaluation.name} sees them, ranked by {evaluation.score.replace('_', ' ')} uncertainty.")
        ],
        galleries=galleries,
        colours={"aleatoric": "aleatoric", "epistemic": "epistemic"},
        reading="Under each image: the prediction, with ✗ and the true label where it is wrong, then uncertainty as "
        f"aleatoric + epistemic, {unit}. Aleatoric is what the data leave open, epistemic what the model does not "
        "know. All bars have one scale.",
    )
    return [section]


def _tile(
    encode: Callable[[int], str],
    prediction: Prediction,
    targets: Tensor | None,
    row: int,
    names: Sequence[str] | None,
    widest: float,
) -> Tile:
    aleatoric, epistemic = (float(prediction.score(name)[row]) for name in ("aleatoric", "epistemic"))
    target = None if targets is None or not bool(prediction.counted(targets)[row]) else targets[row].item()
    if isinstance(prediction, RegressionPrediction):
        predicted, wrong = f"{float(prediction.mean[row]):.3g}", False
        shown = None if target is None else f"{target:.3g}"
    else:
        assert isinstance(prediction, ClassificationPrediction)
        label = int(prediction.label[row])
        predicted, wrong = class_name(label, names), target is not None and target != label
        shown = None if target is None else class_name(int(target), names)
    parts = [("aleatoric", 100 * aleatoric / widest), ("epistemic", 100 * epistemic / widest)]
    return Tile(
        source=encode(row),
        description=f"{'' if shown is None else f'label {shown}, '}predicted {predicted}",
        title=f"✗ {predicted}" if wrong else predicted,
        aside=f"{'label' if wrong else 'target'} {shown}" if shown not in (None, predicted) else "",
        bars=[Bar(f"{aleatoric:.2f} + {epistemic:.2f}", parts)],
        wrong=wrong,
    )


def class_name(label: int, names: Sequence[str] | None) -> str:
    """Return what a class is called."""
    return str(label) if names is None else str(names[label])
