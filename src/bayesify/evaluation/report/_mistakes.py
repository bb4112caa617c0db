"""The worst mistakes of a network without randomness, and what a posterior says of the same inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.mistakes import SURE, Mistakes, find_mistakes
from bayesify.evaluation.report._gallery import class_name
from bayesify.evaluation.report._pictures import encoder
from bayesify.evaluation.report.content import Bar, Cell, Gallery, Paragraph, Section, Table, Tile

__all__ = ["mistakes_section"]

SHOWN = 8


def mistakes_section(
    evaluations: Sequence[Evaluation],
    shown: Evaluation,
    images: Tensor | None,
    names: Sequence[str] | None,
    verdicts: Sequence[str] | None,
) -> list[Section]:
    """Return the mistakes that the first network without randomness is surest of; nothing where there is no pair.

    Args:
        evaluations: All of them.
        shown: The posterior's.
        images: Of the test examples; None shows a table.
        names: Of the classes.
        verdicts: What is done about each test example.
    """
    plain = next((e for e in evaluations if e.deterministic), None)
    found = None if plain is None or plain is shown or shown.deterministic else find_mistakes(plain, shown)
    if plain is None or found is None:
        return []
    before, after = found.sure()
    text = (
        f"Of {len(plain.prediction):,} test examples {plain.name} gets {len(found):,} wrong, and is at least "
        f"{100 * SURE:.0f}% sure of {before:,} of these answers; {shown.name} is as sure of {after:,} of the same ones."
    )
    number = min(SHOWN, len(found))
    galleries, tables = [], []
    if images is None:
        tables = [_table(found, number, names, verdicts)]
    else:
        encode = encoder(images)
        widest = float(found.prediction.total[:number].max()) or 1.0
        tiles = [
            _tile(found, index, encode(int(found.rows[index])), names, verdicts, widest) for index in range(number)
        ]
        galleries = [Gallery("The mistakes that it was surest of", tiles, large=True)]
    section = Section(
        key="mistakes",
        title="Where is it wrong, and sure of it?",
        findings=[Paragraph(text)],
        tables=tables,
        galleries=galleries,
        colours={
            "plain": f"probability of the answer by {plain.name}",
            "posterior": f"of the same answer by {shown.name}",
            "aleatoric": "its aleatoric",
            "epistemic": "and epistemic uncertainty",
        }
        if galleries
        else {},
        reading=f"The wrong answers to which {plain.name} gives the highest probability, and the probability that "
        f"{shown.name} gives to the same answers. Its uncertainty is total = aleatoric + epistemic, in nats: what the "
        "data leave open, and what the model does not know.",
    )
    return [section]


def _tile(
    found: Mistakes,
    index: int,
    source: str,
    names: Sequence[str] | None,
    verdicts: Sequence[str] | None,
    widest: float,
) -> Tile:
    truth, said, now = (class_name(label, names) for label in _labels(found, index))
    before, after = 100 * float(found.before[index]), 100 * float(found.after[index])
    aleatoric, epistemic = float(found.prediction.aleatoric[index]), float(found.prediction.epistemic[index])
    parts = [("aleatoric", 100 * aleatoric / widest), ("epistemic", 100 * epistemic / widest)]
    return Tile(
        source=source,
        description=f"label {truth}, predicted {said}",
        title=f"✗ {said}",
        aside=f"label {truth}",
        bars=[
            Bar(_percent(before), [("plain", before)]),
            Bar(_percent(after) + (f", says {now}" if now != said else ""), [("posterior", after)]),
            Bar(f"{aleatoric + epistemic:.2f} = {aleatoric:.2f} + {epistemic:.2f}", parts),
        ],
        verdict="" if verdicts is None else verdicts[int(found.rows[index])],
    )


def _table(found: Mistakes, number: int, names: Sequence[str] | None, verdicts: Sequence[str] | None) -> Table:
    rows = []
    for index in range(number):
        truth, said, now = (class_name(label, names) for label in _labels(found, index))
        values = [float(getattr(found.prediction, name)[index]) for name in ("total", "aleatoric", "epistemic")]
        shown = [_percent(100 * float(one[index])) for one in (found.before, found.after)]
        texts = [truth, said, shown[0], shown[1], now, *(f"{value:.2f}" for value in values)]
        row = int(found.rows[index])
        rows.append(
            (f"example {row}", [Cell(text) for text in [*texts, *([] if verdicts is None else [verdicts[row]])]])
        )
    titles = ["", "label", "answer", "its probability", "by the posterior", "whose answer is", "total", "aleatoric"]
    more = [] if verdicts is None else ["verdict"]
    return Table("The mistakes that it was surest of", [*titles, "epistemic", *more], rows, texts=(0, 1, 4, 8))


def _labels(found: Mistakes, index: int) -> tuple[int, int, int]:
    """Return what it is, what the network says, and what the posterior says."""
    return int(found.targets[index]), int(found.labels[index]), int(found.prediction.label[index])


def _percent(value: float) -> str:
    """Write a percentage so that what is not certain never reads as 100.

    >>> _percent(99.9996), _percent(99.95), _percent(41.24), _percent(0.02)
    ('>99.99%', '99.95%', '41%', '<1%')
    """
    if value > 99.99:
        return ">99.99%"
    if value >= 99:
        return f"{value:.2f}%"
    return "<1%" if value < 1 else f"{value:.0f}%"
