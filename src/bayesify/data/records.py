"""Records of a file, a stretch at a time: tables (CSV, TSV, Parquet), JSON lines, a folder of images.

A file is read once, from front to back, in constant memory. What is wrong with a row is a `Remark` with the row's
number, and the other rows go on; only a file of which nothing can be read is an error. CSV and JSON lines are read by
Python's own modules, which tell rows apart even where one is ragged or not UTF-8; Parquet by pyarrow
(``bayesify[files]``).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from bayesify._core.optional import require
from bayesify.data.folder import SUFFIXES

__all__ = ["Records", "Remark", "is_file", "read_records", "read_stream"]

SIZE = 1024  # rows at a time
DELIMITERS = ",;\t|"
BROKEN = (EOFError, OSError, zlib.error)  # what a truncated or damaged file ends in


@dataclass(frozen=True)
class Remark:
    """Say something about a row.

    Attributes:
        row: Its number; the first one after a header is 1.
        text: What there is to say.
    """

    row: int
    text: str


@dataclass(frozen=True, eq=False)
class Records:
    """Hold a stretch of a file, column by column.

    Attributes:
        rows: The numbers of the rows that could be read, n of them.
        columns: n values by the name of each column: text, numbers, or None.
        errors: What is wrong with the others.

    >>> records = Records.of([{"age": 31, "city": "Lyon"}, {"age": 40}])
    >>> records.rows, records.columns
    ([1, 2], {'age': [31, 40], 'city': ['Lyon', None]})
    """

    rows: list[int]
    columns: dict[str, list[Any]]
    errors: tuple[Remark, ...] = ()

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], *, first: int = 1) -> Records:
        """Take records that are mappings, the first of which is row `first`; what one lacks is None."""
        names = dict.fromkeys(name for record in records for name in record)
        rows = list(range(first, first + len(records)))
        return cls(rows, {name: [record.get(name) for record in records] for name in names})

    def __len__(self) -> int:
        """Return the number of rows that could be read."""
        return len(self.rows)

    def part(self, indices: Sequence[int]) -> Records:
        """Return some of the rows, and all errors."""
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        return Records([self.rows[i] for i in indices], columns, self.errors)


def read_records(path: str | Path, *, size: int = SIZE) -> Iterator[Records]:
    r"""Read a file or a folder of images, at most `size` rows at a time.

    Args:
        path: *.csv, *.tsv and *.jsonl (also with .gz), *.parquet; or a folder of images, which gives the columns 'file'
            and, where there are sub-folders, 'label'.
        size: How many rows are in memory at once.

    Raises:
        ValueError: Nothing of the file can be read; the message says why.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "table.csv"
    ...     _ = path.write_text("age,city\n31,Lyon\n40\n")
    ...     (records,) = read_records(path)
    >>> records.columns, records.errors
    ({'age': ['31'], 'city': ['Lyon']}, (Remark(row=2, text='it has 1 field(s) where the header has 2'),))
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path}.")
    if path.is_dir():
        return _read_folder(path, size)
    reader = READERS.get(_suffix(path))
    if reader is None:
        more = " Save the sheet as CSV." if path.suffix in (".xlsx", ".xls", ".ods") else ""
        more = " Write one JSON object per line, as *.jsonl." if path.suffix == ".json" else more
        raise ValueError(f"{path}: files that can be read are *{', *'.join(READERS)}, and folders of images.{more}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty.")
    return _some(reader(path, size), path)


def read_stream(file: IO[bytes], form: str = "jsonl", *, size: int = SIZE) -> Iterator[Records]:
    r"""Read records as they come, from standard input or any other stream of bytes, at most `size` rows at a time.

    Args:
        file: What is read, once; it is closed at its end.
        form: "jsonl" or "csv".
        size: How many rows are in memory at once.

    >>> (records,) = read_stream(io.BytesIO(b'{"text": "good"}\nwhat?\n'))
    >>> records.columns, records.errors[0].row
    ({'text': ['good']}, 2)
    """
    return READERS[f".{form}"](file, size)


def is_file(text: str) -> bool:
    """Return whether a text is the path of data, by its ending or because there is a folder of that name."""
    return _suffix(Path(text)) in READERS or Path(text).exists()


def _suffix(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _some(stretches: Iterator[Records], path: Path) -> Iterator[Records]:
    """Refuse a file without rows."""
    seen = False
    for records in stretches:
        seen = seen or bool(records.rows or records.errors)
        yield records
    if not seen:
        raise ValueError(f"{path} has a header, but no rows.")


# -- CSV and JSON lines ---------------------------------------------------------------------------------------------


class _Lines:
    """Give the lines of a file, and remember whether one of them was not UTF-8."""

    def __init__(self, file: Iterable[str]) -> None:
        self.file, self.wrong = file, False

    def __iter__(self) -> Iterator[str]:
        for line in self.file:
            self.wrong = self.wrong or not _is_text(line)
            yield line

    def taken(self) -> bool:
        """Return whether the lines since the last call were UTF-8."""
        wrong, self.wrong = self.wrong, False
        return not wrong


def _is_text(line: str) -> bool:
    try:
        return line.isascii() or bool(line.encode())
    except UnicodeEncodeError:  # a byte that could not be decoded
        return False


def _open(source: Path | IO[bytes]) -> IO[str]:
    path = source if isinstance(source, Path) else "The stream"
    if isinstance(source, Path):
        file: Any = (gzip.open if source.suffix.lower() == ".gz" else open)(source, "rb")
    else:
        file = source if hasattr(source, "peek") else io.BufferedReader(source)
    try:
        start = file.peek(4)[:4]
    except BROKEN as error:
        file.close()
        raise ValueError(f"{path} cannot be unpacked: it is damaged, or no gzip file ({error}).") from error
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or start[1::2] == b"\0\0":
        file.close()
        raise ValueError(f"{path} is UTF-16. Save it as UTF-8.")
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


NOT_TEXT = "it has bytes that are not UTF-8; save the file as UTF-8"


def _read_csv(path: Path | IO[bytes], size: int) -> Iterator[Records]:
    with _open(path) as file:
        first = file.readline()
        delimiter = max(DELIMITERS, key=first.count)  # a comma where there is none
        lines = _Lines(chain([first], file))
        reader = csv.reader(lines, delimiter=delimiter)
        names = [name.strip() for name in next(reader, [])]
        if not first and not isinstance(path, Path):  # a stream without rows
            return
        if not lines.taken() or not any(names):
            raise ValueError(f"The header of {path} is {'not UTF-8' if any(names) else 'empty'}.")
        _check_names(names, path)

        def rows() -> Iterator[list[str] | str]:
            last = reader.line_num
            for fields in reader:
                first, last, right = last + 1, reader.line_num, lines.taken()
                if not fields:  # an empty line
                    continue
                if len(fields) != len(names):
                    open_quote = f"; it spans lines {first} to {last}: is a quote not closed?" if first < last else ""
                    yield f"it has {len(fields)} field(s) where the header has {len(names)}{open_quote}"
                else:
                    yield fields if right else NOT_TEXT

        for numbers, values, errors in _stretches(rows(), size):
            columns = dict(zip(names, map(list, zip(*values, strict=True)), strict=True)) if values else {}
            yield Records(numbers, columns or {name: [] for name in names}, errors)


def _read_lines(path: Path | IO[bytes], size: int) -> Iterator[Records]:
    with _open(path) as file:

        def rows() -> Iterator[dict[str, Any] | str]:
            for line in file:
                if line.isspace():
                    continue
                if not _is_text(line):
                    yield NOT_TEXT
                    continue
                try:
                    found = json.loads(line)
                    yield found if isinstance(found, dict) else "it is no JSON object {...}"
                except (ValueError, RecursionError) as error:
                    yield f"it is no JSON: {error}"

        names: dict[str, None] = {}  # a key that came before is a column from then on
        for numbers, values, errors in _stretches(rows(), size):
            names |= dict.fromkeys(name for record in values for name in record)
            yield Records(numbers, {name: [record.get(name) for record in values] for name in names}, errors)


def _stretches(found: Iterator[Any], size: int) -> Iterator[tuple[list[int], list[Any], tuple[Remark, ...]]]:
    """Number rows, of which a text is an error, and give them `size` at a time."""
    numbers: list[int] = []
    values: list[Any] = []
    errors: list[Remark] = []
    row = 0
    while True:
        try:
            value = next(found, None)
        except (csv.Error, *BROKEN) as error:
            value = None
            errors.append(
                Remark(row + 1, f"the file cannot be read from here on ({error}): it is damaged or truncated")
            )
        if value is None:
            break
        row += 1
        if isinstance(value, str):
            errors.append(Remark(row, value))
        else:
            numbers.append(row)
            values.append(value)
        if row % size == 0:
            yield numbers, values, tuple(errors)
            numbers, values, errors = [], [], []
    if numbers or errors:
        yield numbers, values, tuple(errors)


def _check_names(names: Sequence[str], path: Path | IO[bytes]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path} has several columns of one name: {', '.join(map(repr, twice))}. Rename them.")


# -- Parquet and images ---------------------------------------------------------------------------------------------


def _read_parquet(path: Path, size: int) -> Iterator[Records]:
    parquet = require("pyarrow.parquet", extra="files", purpose="reading Parquet")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no whole Parquet file; it may be truncated ({error}).") from error
    with file:
        names = file.schema_arrow.names
        _check_names(names, path)
        row, batches = 0, file.iter_batches(batch_size=size)
        while True:
            try:
                batch = next(batches, None)
            except (OSError, ValueError) as error:
                yield Records(
                    [], {name: [] for name in names}, (Remark(row + 1, f"no row can be read from here on: {error}"),)
                )
                return
            if batch is None:
                return
            yield _of_batch(batch, row)
            row += batch.num_rows


def _of_batch(batch: Any, row: int) -> Records:
    rows = list(range(row + 1, row + 1 + batch.num_rows))
    try:
        return Records(rows, {name: batch.column(name).to_pylist() for name in batch.schema.names})
    except UnicodeDecodeError:
        kept = [i for i in range(batch.num_rows) if _is_readable(batch.slice(i, 1))]
        errors = tuple(Remark(rows[i], NOT_TEXT) for i in sorted(set(range(batch.num_rows)) - set(kept)))
        return Records([rows[i] for i in kept], batch.take(kept).to_pydict(), errors)


def _is_readable(batch: Any) -> bool:
    try:
        return bool(batch.to_pydict())
    except UnicodeDecodeError:
        return False


def _read_folder(root: Path, size: int) -> Iterator[Records]:
    """List the images of ``root/<class>/**``, or of the folder itself where it has no sub-folders with images."""
    found = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    if not found:
        raise ValueError(f"{root} has no image (*{', *'.join(SUFFIXES)}).")
    nested = [len(path.relative_to(root).parts) > 1 for path in found]
    if any(nested) and not all(nested):
        raise ValueError(
            f"{root} has images of its own, as {found[nested.index(False)].name}, beside those in sub-folders. Put "
            "each image into the folder of its class."
        )
    for start in range(0, len(found), size):
        paths = found[start : start + size]
        columns: dict[str, list[Any]] = {"file": [str(path.relative_to(root)) for path in paths]}
        if nested[0]:
            columns["label"] = [path.relative_to(root).parts[0] for path in paths]
        yield Records(list(range(start + 1, start + 1 + len(paths))), columns)


READERS: dict[str, Callable[[Any, int], Iterator[Records]]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl": _read_lines,
}
