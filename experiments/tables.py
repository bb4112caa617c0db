"""Tables of the documentation, made from the results: `python -m experiments.tables` writes them anew.

A table stands in a page of docs/ between `<!-- table: NAME -->` and `<!-- /table -->`, and `experiments/documented.py`
says what it shows. `--check` writes nothing, and fails if a page differs from the results; `--show FILE ...` prints the
measures of results files, `--provenance` which rows of them nobody knows the commit of.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from experiments.records import RESULTS, ROOT, UNKNOWN

__all__ = ["Cell", "Line", "check", "pages", "renewed", "rows_of", "shown", "table"]

Columns = Mapping[str, "Cell | Sequence[Cell]"] | Sequence[tuple[str, "Cell | Sequence[Cell]"]]
MARKED = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n)(?P<old>.*?)(<!-- /table -->)", re.DOTALL)


@cache
def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def rows_of(file: str, name: str, *, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the measures of a row for all its seeds, of one configuration: that of the row that was made last."""
    named = [row for row in _read(folder / f"{file}.json") if row["name"] == name]
    if not named:
        raise KeyError(f"{file}.json has no row {name!r}: make it, or leave it out of the table.")
    return [row["measures"] for row in named if row["hash"] == named[-1]["hash"]]


def shown(value: float, digits: int) -> str:
    """Return a number with so many digits, without a zero before its point.

    >>> shown(0.24623, 4), shown(-0.5, 1), shown(12.346, 2), shown(0.0, 3)
    ('.2462', '−.5', '12.35', '.000')
    """
    text = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(text) else ""
    return sign + (text.removeprefix("0") or "0")


@dataclass(frozen=True)
class Cell:
    """What a column shows.

    Attributes:
        path: Keys of the measures; "part" stands for the line's part.
        scale: What the value is multiplied by: 100 for per cent.
        digits: After the point.
        spread: Whether the standard deviation over seeds follows the mean.
        offset: What is added then: 100, with a scale of -100, makes an error of an accuracy.
    """

    path: tuple[str | int, ...]
    scale: float = 1.0
    digits: int = 4
    spread: bool = True
    offset: float = 0.0

    def of(self, rows: Sequence[Mapping[str, Any]], part: str = "test") -> str:
        """Return the mean over seeds, and the standard deviation of several; nothing where there is no such measure.

        >>> Cell(("part", "accuracy"), 100, 2).of([{"test": {"accuracy": a}} for a in (0.5, 0.75, 0.25)])
        '50.00 ± 25.00'
        """
        try:
            found = [self.offset + self.scale * self._value(row, part) for row in rows]
        except (KeyError, IndexError):
            return ""
        mean = shown(statistics.mean(found), self.digits)
        if len(found) == 1 or not self.spread:
            return mean
        return f"{mean} ± {shown(statistics.stdev(found), self.digits)}"

    def _value(self, row: Any, part: str) -> float:
        for key in self.path:
            row = row[part if key == "part" else key]
        if row is None:  # what has no such number, as a prediction without draws has no passes to count
            raise KeyError(self.path[-1])
        return float(row)


@dataclass(frozen=True)
class Line:
    """A line: its label, and the row that it shows.

    Attributes:
        label: What the page calls it.
        row: The row's name; None is the label.
        part: "test", "validation", or one of them with ", calibrated" or ", scaled".
        file: The results file, if it is another than the table's.
        inside: Keys of the measures below which the cells look.
        hidden: Titles of columns in which the line has nothing to show, and what stands there.
    """

    label: str
    row: str | None = None
    part: str = "test"
    file: str | None = None
    inside: tuple[str, ...] = ()
    hidden: Mapping[str, str] = field(default_factory=dict)


def table(file: str, columns: Columns, lines: Iterable[Line], corner: str = "") -> str:
    """Return a table in Markdown; several cells of a column are divided by a stroke."""
    pairs = list(columns.items()) if isinstance(columns, Mapping) else list(columns)
    made = [[corner, *(title for title, _ in pairs)]]
    for line in lines:
        rows: list[Any] = rows_of(line.file or file, line.label if line.row is None else line.row)
        for key in line.inside:
            rows = [row[key] for row in rows]
        cells = []
        for title, cell in pairs:
            several = [cell] if isinstance(cell, Cell) else list(cell)
            texts = [one.of(rows, line.part) for one in several]
            cells.append(line.hidden.get(title, " / ".join(texts) if any(texts) else ""))
        made.append([line.label, *cells])
    return markdown(made)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table of cells, its titles first.

    >>> print(markdown([["", "x", "y"], ["a", "", "1"]]))
    | | x | y |
    |---|---|---|
    | a | | 1 |
    """
    made = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines]
    return "\n".join([made[0], "|---" * len(lines[0]) + "|", *made[1:]])


def renewed(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    r"""Return a page with its marked tables made anew.

    >>> renewed("<!-- table: a -->\nold\n<!-- /table -->", {"a": lambda: "new"})
    '<!-- table: a -->\nnew\n<!-- /table -->'
    """
    return MARKED.sub(lambda found: f"{found[1]}{tables[found['name']]()}\n{found[4]}", text)


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def check(paths: Iterable[Path], tables: Mapping[str, Callable[[], str]], *, write: bool = False) -> list[str]:
    """Return what differs in pages from the results, as lines of a diff, or write it."""
    found: list[str] = []
    for path in paths:
        old = path.read_text(encoding="utf-8")
        new = renewed(old, tables)
        if old != new and write:
            path.write_text(new, encoding="utf-8")
        name = path.name
        found += difflib.unified_diff(
            old.splitlines(), new.splitlines(), name, f"{name} by its results", lineterm="", n=0
        )
    return found


def _print_measures(path: Path) -> None:
    """Print each row's measures that are numbers, or numbers by name."""
    print(f"\n{path.stem}")
    for row in _read(path):
        print(f"  {row['name']}, seed {row['seed']}")
        for key, value in row["measures"].items():
            numbers = value if isinstance(value, dict) else {"": value}
            print(f"    {key}:", *(f"{name} {number}" for name, number in numbers.items()))


def main(words: Sequence[str] | None = None) -> int:
    """Write or check the tables; return whether something differs."""
    from experiments.documented import TABLES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a page differs, and write nothing")
    parser.add_argument("--show", type=Path, nargs="*", help="print the measures of results files")
    parser.add_argument("--provenance", action="store_true", help="count the rows of unknown provenance")
    arguments = parser.parse_args(words)
    if arguments.show is not None:
        for path in arguments.show or sorted(RESULTS.glob("*.json")):
            _print_measures(path)
        return 0
    if arguments.provenance:
        for path in sorted(RESULTS.glob("*.json")):
            rows = _read(path)
            unknown = sum(row["provenance"] == UNKNOWN for row in rows)
            print(f"{path.stem}: {len(rows)} rows, {unknown} of unknown provenance")
        return 0
    differing = check(pages(), TABLES, write=not arguments.check)
    print(*differing, sep="\n")
    if arguments.check and differing:
        print("Pages differ from the results: python -m experiments.tables writes their tables anew.")
    return int(arguments.check and bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
