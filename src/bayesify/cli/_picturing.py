"""The story of the demo as sections of the report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bayesify.cli import _telling as telling
from bayesify.cli._story import MAX_RISK, Decided, Story
from bayesify.decide.verdicts import VERDICTS
from bayesify.evaluation.report.content import Cell, Drawing, Paragraph, Section, Table
from bayesify.evaluation.report.drawing import new_figure, style, to_svg

__all__ = ["sections"]

COLOURS = {"answer": "#b5bcc4", "ask": "#56B4E9", "ood": "#D55E00"}


def sections(story: Story) -> list[Section]:
    """Return what the report says between the mistakes and the comparison."""
    found = []
    if story.decided:
        rows = telling.decided_rows(story)
        table = Table(
            "Who answers",
            rows[0],
            [(name, [Cell(_tight(cell)) for cell in cells]) for name, *cells in rows[1:]],
        )
        with style():
            drawings = [_bars(one, index) for index, one in enumerate(story.decided)]
        found.append(
            Section(
                key="answers",
                title="Who answers?",
                findings=_paragraphs(telling.answering(story)),
                numbers=_numbers(story),
                tables=[table],
                legend=_swatches(),
                rows={"": drawings},
                reading="A guard is fitted on the validation digits: one half chooses temperature and thresholds, the "
                f"other promises that at most {100 * MAX_RISK:g}% of the answers are wrong, with a confidence of 95%, "
                "and that at most 5% of digits are called OOD. It never saw an OOD image. 'Handed over' counts the "
                "digits that the network as it is gets wrong; caught are OOD images that are not answered.",
            )
        )
    if story.pairs:
        head, *body = telling.pairs_rows(story)
        table = Table("One pass beside draws", head, [(name, [Cell(cell) for cell in cells]) for name, *cells in body])
        found.append(
            Section(
                key="passes",
                title="Does it need twenty draws?",
                findings=[Paragraph(telling.passes_sentence(story))],
                tables=[table],
                reading="The same posteriors, predicted by the average of draws and by one pass that carries means and "
                "variances through the network. Predict is the time of a prediction in multiples of a plain pass.",
            )
        )
    worth = _paragraphs(telling.worth(story))
    return [*found, Section("worth", "Is it worth it?", worth)] if worth else found


def _paragraphs(lines: Sequence[str]) -> list[Paragraph]:
    return [Paragraph(_tight(line)) for line in lines]


def _tight(text: str) -> str:
    """Write percentages as the report does."""
    return text.replace(" %", "%").replace("+-", "±")


def _numbers(story: Story) -> list[tuple[str, str]]:
    ours = story.decided[-1]
    return [
        (f"{ours.handed} of {story.mistaken}", "mistakes of the network handed over"),
        (f"{100 * ours.answered:.1f}%", "of the digits answered"),
        (f"{100 * ours.wrong:.1f}%", "of these answers wrong"),
        *((f"{100 * share:.1f}%", f"of the {name} caught") for name, share in ours.caught.items()),
    ]


def _bars(decided: Decided, index: int) -> Drawing:
    figure = new_figure(3.0, 1.2)
    axes = figure.add_subplot()
    names = list(decided.verdicts)[::-1]
    left = torch.zeros(len(names))
    for verdict, colour in COLOURS.items():
        counts = torch.tensor([[decided.verdicts[name][key] for key in VERDICTS] for name in names]).float()
        share = counts[:, VERDICTS.index(verdict)] / counts.sum(1).clamp(min=1)
        axes.barh(names, share.tolist(), left=left.tolist(), color=colour, height=0.62)
        left = left + share
    axes.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0%", "50%", "100%"])
    axes.grid(False, axis="y")
    axes.tick_params(length=0)
    label = "; ".join(f"{name}: {counts}" for name, counts in decided.verdicts.items())
    return Drawing(f"{decided.name}, guarded", to_svg(figure, f"answers-{index}", f"{decided.name}: {label}"))


def _swatches() -> list[Drawing]:
    box = '<svg viewBox="0 0 20 8" aria-hidden="true"><rect width="20" height="8" rx="2" fill="{}"/></svg>'
    return [Drawing(telling.DONE[verdict], box.format(colour)) for verdict, colour in COLOURS.items()]
