"""The story of the demo in words, and for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from bayesify.cli._story import MAX_RISK, Gain, Story
from bayesify.decide.verdicts import VERDICTS
from bayesify.evaluation.comparison import aligned, columns
from bayesify.evaluation.evaluation import Evaluation
from bayesify.evaluation.mistakes import SURE, Mistakes

__all__ = ["DONE", "answering", "decided_rows", "pairs_rows", "passes_sentence", "picture", "text", "worth"]

DONE = {"answer": "answered", "ask": "a person is asked", "ood": "called OOD"}
SHOWN = 4  # mistakes in the terminal
CELL = 18  # characters for each of them: two for a pixel of eight
SHADES, PLAIN_SHADES = " ░▒▓█", " .:*#"


def text(story: Story, images: Tensor) -> str:
    """Return the story for a terminal.

    Args:
        story: The story.
        images: Test images (N, 1, H, W), in the order of its mistakes' rows.
    """
    parts = ["Where is it wrong, and sure of it?", _mistaken(story)]
    if story.mistakes is not None:
        parts += ["", _worst(story.mistakes, story, images)]
    parts += ["", "Who answers?", *answering(story)]
    if story.decided:
        parts += ["", _decided_table(story)]
    if story.pairs:
        parts += ["", "One pass beside twenty draws", passes_sentence(story), "", _pairs_table(story)]
    return "\n".join([*parts, "", "Is it worth it?", *worth(story)])


def picture(image: Tensor, shades: str = SHADES) -> list[str]:
    """Return an image (1, H, W) with values in 0 to 1 as lines of text, two characters for a pixel.

    >>> import torch
    >>> picture(torch.tensor([[[0.0, 1.0], [0.5, 0.2]]]), " .:*#")
    ['  ##', '::..']
    """
    levels = (image[0].clamp(0, 1) * (len(shades) - 1)).round().long()
    return ["".join(2 * shades[level] for level in row) for row in levels.tolist()]


def _mistaken(story: Story) -> str:
    if story.mistakes is None:
        return f"The network gets all of {story.num_test:,} test digits right."
    before, after = story.mistakes.sure()
    return (
        f"The network gets {story.mistaken:,} of {story.num_test:,} test digits wrong, and is at least "
        f"{100 * SURE:.0f} % sure of {before:,} of these answers; {story.ours} is as sure of {after:,} of the same "
        "ones."
    )


def _worst(mistakes: Mistakes, story: Story, images: Tensor) -> str:
    number = min(SHOWN, len(mistakes))
    rows = mistakes.rows[:number]
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    shades = SHADES if _writes(SHADES, encoding) else PLAIN_SHADES
    drawn = [picture(images[row], shades) for row in rows.tolist()]
    lines = ["".join(f"{part:<{CELL}}" for part in ("", *row)) for row in zip(*drawn, strict=True)]
    said, prediction = mistakes.labels.tolist(), mistakes.prediction

    def line(name: str, values: Sequence[str]) -> str:
        return "".join(f"{part:<{CELL}}" for part in (name, *values))

    def believed(values: Tensor) -> list[str]:
        return [f"{label}: {100 * value:.2f} %" for label, value in zip(said, values[:number].tolist(), strict=False)]

    lines += ["", line("it is a", [str(label) for label in mistakes.targets[:number].tolist()])]
    lines += [line("the network says", believed(mistakes.before)), line(story.ours, believed(mistakes.after))]
    for name in ("total", "aleatoric", "epistemic"):
        lines.append(line(f"  {name}", [f"{value:.2f} nats" for value in getattr(prediction, name)[:number].tolist()]))
    if story.decided:
        codes = story.decided[-1].codes[rows].tolist()
        lines.append(line("so", [DONE[VERDICTS[code]] for code in codes]))
    return "\n".join(one.rstrip() for one in lines)


def _writes(characters: str, encoding: str) -> bool:
    try:
        characters.encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def answering(story: Story) -> list[str]:
    """Return what the posterior of the story answers and hands over, and what the network would."""
    if not story.decided:
        return [f"No guard could be fitted. {story.refusal}"]
    ours = story.decided[-1]
    caught = " and ".join(f"{100 * share:.0f} % of the {name}" for name, share in ours.caught.items())
    first = (
        f"With a guard that promises at most {100 * MAX_RISK:g} % of wrong answers, {ours.name} answers "
        f"{100 * ours.answered:.1f} % of the digits itself, {100 * ours.wrong:.1f} % of them wrongly. It hands over "
        f"{ours.handed} of the network's {story.mistaken} mistakes, and does not answer {caught}."
    )
    if len(story.decided) == 1:
        return [first]
    plain = story.decided[0]
    return [
        first,
        f"With a guard of its own {plain.name} answers {100 * plain.answered:.1f} %, {100 * plain.wrong:.1f} % of "
        f"them wrongly, and hands over {plain.handed}.",
    ]


def decided_rows(story: Story) -> list[list[str]]:
    """Return the table of who decides: a line of titles, the network alone, and a row for each guard."""
    sets = list(story.decided[0].caught)
    head = ["who decides", "digits answered", "of these wrong", "mistakes handed over"]
    share = (story.mistaken / story.num_test) if story.num_test else 0.0
    nobody = [
        "the network, alone",
        "100.0 %",
        f"{100 * share:.1f} %",
        f"0 of {story.mistaken}",
        *("0.0 %" for _ in sets),
    ]
    rows = [
        [
            f"{one.name}, guarded",
            f"{100 * one.answered:.1f} %",
            f"{100 * one.wrong:.1f} %",
            f"{one.handed} of {story.mistaken}",
            *(f"{100 * one.caught[name]:.1f} %" for name in sets),
        ]
        for one in story.decided
    ]
    return [[*head, *(f"{name} caught" for name in sets)], nobody, *rows]


def _decided_table(story: Story) -> str:
    head, *rows = decided_rows(story)
    return aligned([["", *head[1:]], *rows])


def pairs_rows(story: Story) -> list[list[str]]:
    """Return the table of draws and one pass: a line of titles, and two rows for each posterior."""
    rows: list[Evaluation] = [one for pair in story.pairs for one in pair]
    found = [column for column in columns(rows) if column.title not in ("Brier", "fit")]
    names = [f"{one.name}, draws" if index % 2 == 0 else one.name for index, one in enumerate(rows)]
    return [
        ["", *(column.title for column in found)],
        *([*row] for row in zip(names, *(c.texts for c in found), strict=True)),
    ]


def _pairs_table(story: Story) -> str:
    return aligned(pairs_rows(story))


def passes_sentence(story: Story) -> str:
    """Say what one pass costs beside draws, and what it changes."""
    parts = [
        f"{slow.name} {fast.cost.predict or 0:.1f} instead of {slow.cost.predict or 0:.1f} "
        f"({fast.metrics['nll'] - slow.metrics['nll']:+.3f})"
        for slow, fast in story.pairs
    ]
    return f"Without draws a prediction costs, in plain passes (and the NLL changes by): {', '.join(parts)}."


def worth(story: Story) -> list[str]:
    """Say what the posterior gains over a temperature, and whether views help."""
    lines = [_gained(gain) for gain in story.gains]
    if story.choice is not None:
        lines.append(f"'choose', with two passes and without training, took: {story.choice.chosen}.")
        mirrored = story.mirrored
        if mirrored is not None:
            gain, error = mirrored.gain, 2 * mirrored.gain_error
            verdict = "helps" if gain > error else "harms" if gain < -error else "makes no clear difference"
            lines.append(
                f"A mirrored view {verdict} on the validation digits (gain {gain:+.3f} +- {error:.3f} nats), which "
                "have no mirror symmetry; on photographs it often does help."
            )
    said = "One network, one seed and few digits: this shows what the library does, and proves no method better."
    return [*lines, said] if lines else []


def _gained(gain: Gain) -> str:
    both = f"NLL {gain.nll[0]:.3f} beside {gain.nll[1]:.3f}, a gain of {gain.value:+.3f} +- {2 * gain.error:.3f}"
    price = "" if gain.cost is None else f", for {gain.cost:.1f} plain passes"
    if gain.clear:
        return f"On the test digits {gain.name} is better than {gain.other}{price}: {both}."
    return (
        f"On the test digits {gain.other} is as good as {gain.name}{price}: {both}, which may be chance. Take the "
        "cheaper one."
    )
