"""What the sections of a report are made of; the page draws each part in one way, whoever made the section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Bar", "Cell", "Drawing", "Gallery", "Paragraph", "Section", "Table", "Tile"]


@dataclass(frozen=True)
class Paragraph:
    """A sentence or more, with a name in bold before it and an origin in small letters behind."""

    text: str
    lead: str = ""
    aside: str = ""


@dataclass(frozen=True)
class Cell:
    """A value as text, its interval, and how it is marked: "best", "better", "worse", "other" or not at all."""

    text: str
    span: str = ""
    mark: Literal["", "best", "better", "worse", "other"] = ""


@dataclass(frozen=True)
class Table:
    """A table that scrolls sideways where it is too wide.

    Attributes:
        label: What a screen reader calls it.
        titles: Headings of the columns; the first is that of the rows' names.
        rows: The name of each row, and its cells.
        legend: What the marks mean.
        texts: The columns, counted behind the names, that hold words and not numbers.
        folded: What stands for the table until the reader opens it, and an aside; None shows it at once.
    """

    label: str
    titles: list[str]
    rows: list[tuple[str, list[Cell]]]
    legend: str = ""
    texts: tuple[int, ...] = ()
    folded: tuple[str, str] | None = None


@dataclass(frozen=True)
class Drawing:
    """A figure as an `<svg>` element, with a heading."""

    title: str
    svg: str


@dataclass(frozen=True)
class Bar:
    """A bar under an image: what it says, and its parts, each a kind and a width in percent.

    The kinds are "plain", "posterior", "aleatoric" and "epistemic"; a kind is a colour.
    """

    text: str
    parts: list[tuple[str, float]]


@dataclass(frozen=True)
class Tile:
    """An image, with what it is and what was made of it.

    Attributes:
        source: A data URI.
        description: What a screen reader says.
        title: In bold.
        aside: In small letters behind it.
        bars: Numbers that can be seen.
        verdict: What is done about it, in a word or two.
        wrong: Whether it is marked as a mistake.
    """

    source: str
    description: str
    title: str
    aside: str = ""
    bars: list[Bar] = field(default_factory=list)
    verdict: str = ""
    wrong: bool = False


@dataclass(frozen=True)
class Gallery:
    """Rows of tiles with a heading; `large` ones are twice as wide."""

    title: str
    tiles: list[Tile]
    large: bool = False


@dataclass(frozen=True)
class Section:
    """A question, the answer, and what shows it.

    Attributes:
        key: Its anchor in the page.
        title: The question.
        findings: The answer.
        numbers: The numbers to remember, each with what it counts.
        reading: How to read what is shown, which stands at the page's end; empty where nothing is to be said.
        tables: Tables.
        legend: What the colours and lines of the drawings mean.
        rows: Rows of drawings, by heading.
        galleries: Images.
        colours: What the colours of the bars mean: kinds of `Bar`, and their names.
        wide: Whether it has one large drawing, and shares a line with a section like it.
        summary: Sentences in a box above all of it.
    """

    key: str
    title: str
    findings: list[Paragraph] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    reading: str = ""
    tables: list[Table] = field(default_factory=list)
    legend: list[Drawing] = field(default_factory=list)
    rows: dict[str, list[Drawing]] = field(default_factory=dict)
    galleries: list[Gallery] = field(default_factory=list)
    colours: dict[str, str] = field(default_factory=dict)
    wide: bool = False
    summary: list[str] = field(default_factory=list)
