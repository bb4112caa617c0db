"""Labelled text: CSV and TSV tables, SST-2, CLINC150."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.data._io import PathLike, read_text

__all__ = ["CLINC150_PARTS", "TextSplit", "read_clinc150", "read_sst2", "read_table"]

CLINC150_PARTS = ("train", "val", "test", "oos_train", "oos_val", "oos_test")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, eq=False)
class TextSplit:
    """Hold the texts and labels of one part of a data set.

    Attributes:
        texts: N strings.
        labels: ``(N,)`` int64, indices into ``label_names``; -1 is a text of no known class.
        label_names: the classes, in the order of their indices.

    >>> split = TextSplit(("good", "bad"), torch.tensor([1, 0]), ("negative", "positive"))
    >>> [(text, split.label_names[label]) for text, label in split]
    [('good', 'positive'), ('bad', 'negative')]
    """

    texts: tuple[str, ...]
    labels: Tensor
    label_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse texts and labels of different lengths, and labels without a name."""
        if len(self.texts) != len(self.labels):
            raise ValueError(f"{len(self.texts)} texts but {len(self.labels)} labels")
        if len(self.labels) and not -1 <= self.labels.min() <= self.labels.max() < len(self.label_names):
            raise ValueError(
                f"labels go from {int(self.labels.min())} to {int(self.labels.max())} but there "
                f"are {len(self.label_names)} label names"
            )

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[str, int]:
        """Return one ``(text, label)`` pair."""
        return self.texts[index], int(self.labels[index])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Go through the ``(text, label)`` pairs."""
        return iter(zip(self.texts, self.labels.tolist(), strict=True))


def read_table(
    path: PathLike,
    *,
    text: str | int,
    label: str | int,
    header: bool = True,
    delimiter: str | None = None,
    label_names: Sequence[str] | None = None,
) -> TextSplit:
    """Read a text column and a label column of a CSV or TSV file, plain or gzip-compressed.

    Args:
        path: a UTF-8 file. In tab-separated files a quotation mark is an ordinary character; in
            others it quotes a field.
        text: name (needs a header) or index of the text column.
        label: name or index of the label column.
        header: whether the first row names the columns.
        delimiter: by default that of the suffix, ``.csv`` or ``.tsv`` (then maybe ``.gz``).
        label_names: the classes in order, so that several files agree; by default the labels that
            occur, sorted (as numbers if all are whole numbers).
    """
    rows = _rows(path, delimiter or _delimiter(path))
    names = next(rows, (0, []))[1] if header else None
    columns = _column(text, names, path), _column(label, names, path)
    pairs = []
    for line, row in rows:
        if max(columns) >= len(row):
            raise ValueError(
                f"{path}, line {line}: {len(row)} columns, but column {max(columns)} is asked for "
                "(columns count from 0); is the delimiter right?"
            )
        pairs.append((row[columns[0]], row[columns[1]]))
    if not pairs:
        raise ValueError(f"{path} has no rows" + (" below its header" if header else ""))
    return _split(pairs, label_names or _sorted({name for _, name in pairs}), path)


def read_sst2(path: PathLike) -> TextSplit:
    """Read one part of SST-2: lines ``sentence<TAB>0|1``, no header."""
    split = read_table(path, text=0, label=1, header=False, delimiter="\t", label_names=("0", "1"))
    return TextSplit(split.texts, split.labels, ("negative", "positive"))


def read_clinc150(path: PathLike, part: str) -> TextSplit:
    """Read one part of CLINC150: ``data_full.json``, pairs ``[text, intent]`` by part.

    Args:
        path: the JSON file, plain or gzip-compressed.
        part: one of `CLINC150_PARTS`; the out-of-scope parts have the label -1 throughout.

    Returns:
        The texts; ``label_names`` are the sorted intents of the training part, for every part.
    """
    if part not in CLINC150_PARTS:
        raise ValueError(f"CLINC150 has the parts {list(CLINC150_PARTS)}, not {part!r}")
    try:
        parts = json.loads(read_text(path))
        pairs = [(str(words), str(intent)) for words, intent in parts[part]]
        names = sorted({str(intent) for _, intent in parts["train"]})
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not CLINC150's data_full.json (pairs [text, intent] under {list(CLINC150_PARTS)}): {error!r}"
        ) from error
    if part.startswith("oos_"):
        texts = tuple(words for words, _ in pairs)
        return TextSplit(texts, torch.full((len(texts),), -1), tuple(names))
    return _split(pairs, names, path)


def _rows(path: PathLike, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    if len(delimiter) != 1:
        raise ValueError(f"the delimiter is one character, not {delimiter!r}")
    content = io.StringIO(read_text(path), newline="")
    if delimiter == "\t":
        reader = csv.reader(content, delimiter=delimiter, quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(content, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _delimiter(path: PathLike) -> str:
    name = Path(str(path).removesuffix(".gz"))
    if name.suffix.lower() not in DELIMITERS:
        raise ValueError(f"{path} is neither *.csv nor *.tsv: give the delimiter")
    return DELIMITERS[name.suffix.lower()]


def _column(column: str | int, names: list[str] | None, path: PathLike) -> int:
    if isinstance(column, int):
        if column < 0:
            raise ValueError(f"columns count from 0, not {column}")
        return column
    if names is None:
        raise ValueError(f"the column {column!r} is a name, but header=False: give its index")
    if names.count(column) != 1:
        raise ValueError(f"{path} has {names.count(column)} columns called {column!r}; its columns are {names}")
    return names.index(column)


def _sorted(names: set[str]) -> list[str]:
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)


def _split(pairs: Sequence[tuple[str, str]], label_names: Sequence[str], path: PathLike) -> TextSplit:
    index = {name: i for i, name in enumerate(label_names)}
    unknown = sorted({name for _, name in pairs} - index.keys())
    if unknown:
        raise ValueError(f"{path} has the label {unknown[0]!r}, which is none of {list(index)}")
    labels = torch.tensor([index[name] for _, name in pairs], dtype=torch.int64)
    return TextSplit(tuple(words for words, _ in pairs), labels, tuple(label_names))
