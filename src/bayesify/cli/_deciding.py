"""`bayesify decide`: a verdict for each input, one JSON line each."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from torch.utils.data import DataLoader, Dataset, Subset
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from bayesify.cli._data import IMAGENET_MEAN, IMAGENET_STD, check_name, load_split
from bayesify.cli._files import IMAGE_COLUMNS, counted
from bayesify.cli._guard import SavedNetworkOptions
from bayesify.cli._options import Command
from bayesify.cli._output import JobError, Output, UsageError
from bayesify.cli._resuming import Lines
from bayesify.data import SPLITS, Batch, Encoding, ImageEncoding, Number, Records, TableEncoding, TextEncoding
from bayesify.data.records import is_file, read_records, read_stream
from bayesify.decide.lines import UNREADABLE, lines_of
from bayesify.files import Guarded, source_digest
from bayesify.files.folders import root_of
from bayesify.files.networks import tokenizer_of

__all__ = ["Decide", "InputOptions"]

STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """What is decided.

    Attributes:
        data: A path: *.csv, *.tsv, *.parquet, *.jsonl, or a folder of images; '-' is standard input; or a named set or
            package.module:function, as for 'fit'.
        form: Of standard input: JSON lines, or CSV with a header.
        split: Of a named set or a function: train, val or test. Of a file, all rows are decided.
        batch_size: How many rows are decided at once; 1 answers each line of standard input as it comes.
        skip: Leave out so many rows at the start.
        keep: A column of the file that stands in the lines too, such as an identifier.
        column: Of a guard that was not made from files: a column of numbers, in the order of the network's inputs.
        text: Likewise: the column with texts.
        image: Likewise: the column with the paths of images; a folder of images needs none.
        image_size: Likewise: height and width in pixels.
        grey: Likewise: read images as grey.
        normalise: Likewise: remove ImageNet's mean and standard deviation from pixels in [0, 1].
        tokenizer: Likewise: of transformers, a name or a folder.
        max_tokens: Likewise: where texts are cut.
    """

    data: Annotated[str, arg(metavar="PATH|-|NAME|MODULE:FUNCTION")]
    form: Literal["jsonl", "csv"] = "jsonl"
    split: Literal["train", "val", "test"] = "test"
    batch_size: int = 256
    skip: Annotated[int, arg(metavar="N")] = 0
    keep: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="COLUMN")] = ()
    column: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="COLUMN")] = ()
    text: Annotated[str | None, arg(metavar="COLUMN")] = None
    image: Annotated[str | None, arg(metavar="COLUMN")] = None
    image_size: Annotated[int | None, arg(metavar="PIXELS")] = None
    grey: bool = False
    normalise: Literal["none", "imagenet"] = "none"
    tokenizer: Annotated[str | None, arg(metavar="NAME|DIR")] = None
    max_tokens: Annotated[int, arg(metavar="N")] = 256

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.batch_size < 1 or self.skip < 0:
            raise ValueError(f"--batch-size is at least 1 and --skip at least 0, not {self.batch_size}, {self.skip}.")

    @property
    def by_rows(self) -> bool:
        """Whether the data are rows: a path, or standard input."""
        return self.data == STDIN or (self.data not in SPLITS and is_file(self.data))

    @property
    def mark(self) -> list[Any]:
        """What tells whether an interrupted run saw the same data in the same batches."""
        own: list[Any] = [self.data, self.split, self.batch_size, self.skip, *self.keep]
        path = Path(self.data)
        if self.data == STDIN or not self.by_rows:
            return own
        if path.is_dir():
            return [*own, source_digest(path)]
        found = path.stat()
        return [*own, found.st_size, found.st_mtime_ns]

    def records(self, *, shown: bool) -> Iterator[Records]:
        """Give the rows, some at a time."""
        if self.data == STDIN:
            return read_stream(sys.stdin.buffer, self.form, size=self.batch_size)
        stretches = read_records(self.data, size=self.batch_size)
        return counted(stretches, f"deciding {Path(self.data).name}", shown=shown)

    def encoding(self) -> Encoding:
        """Return how rows become inputs of a network, where the guard does not say it."""
        root = root_of(self.data) if self.data != STDIN else Path()
        if self.image is not None or (self.data != STDIN and Path(self.data).is_dir()):
            if self.image_size is None:
                raise UsageError("how large are the images that the network takes? Say --image-size 224, or another")
            mean, std = (IMAGENET_MEAN, IMAGENET_STD) if self.normalise == "imagenet" else ((0.0,) * 3, (1.0,) * 3)
            mode, channels = ("L", 1) if self.grey else ("RGB", 3)
            size = (self.image_size, self.image_size)
            return ImageEncoding(self.image or IMAGE_COLUMNS[0], root, size, mode, mean[:channels], std[:channels])
        if self.text is not None:
            if self.tokenizer is None:
                raise UsageError("texts need a tokeniser: --tokenizer NAME|FOLDER")
            return TextEncoding(self.text, tokenizer_of(f"hf:{self.tokenizer}"), self.max_tokens)
        if not self.column:
            raise UsageError(
                "this guard was not made from files, and does not say how rows become inputs: give --column NAME for "
                "each number that the network takes, --text COLUMN, or --image COLUMN"
            )
        return TableEncoding(tuple(Number(name, 0.0, 1.0) for name in self.column))


@dataclass(frozen=True, kw_only=True)
class Decide(Command):
    r"""Say of each input: answer it, ask a person, or OOD; one JSON line each, with the reason.

    Examples:
      bayesify decide guard --data new-customers.csv --keep customer_id --out verdicts.jsonl
      bayesify decide guard --data photos > verdicts.jsonl
      tail -f requests.jsonl | bayesify decide guard --data - --batch-size 1
      bayesify decide guard --model my_project.models:make_network --weights network.safetensors \
          --data my_project.data:load

    Lines come in the order of the data, in constant memory: row (the first is 1), verdict, label, confidence,
    prediction_set, total, aleatoric, epistemic, p_value, reason; for numbers mean, std, low and high in their units.
    A row that cannot be read has the verdict 'unreadable' and an 'error', and the others go on.
    Without --out the lines go to stdout. With it, they are in FILE.part until all are there; after an interruption,
    the same command with --resume goes on where it stopped, and ends in the same file, byte for byte.
    A guard's promises hold for inputs like those it was made with; an unreadable row is not answered.

    Attributes:
        guard: A folder that 'bayesify guard' or Guard.save wrote.
        out: A file *.jsonl.
        resume: Go on with an interrupted run that wrote to --out.
        strict: End with exit code 1 if a row could not be read.
    """

    guard: Positional[Annotated[Path, arg(metavar="GUARD")]]
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    resume: bool = False
    strict: bool = False
    network: OmitArgPrefixes[SavedNetworkOptions]
    inputs: OmitArgPrefixes[InputOptions]

    def run(self) -> Output:
        """Decide, and write lines."""
        if self.out is None and (self.json or self.resume):
            option = "--json" if self.json else "--resume"
            raise UsageError(f"{option} needs --out FILE: without it stdout has the lines; --skip N leaves rows out")
        if self.out is not None and self.out.suffix != ".jsonl":
            raise UsageError(f"--out {self.out}: the name must end in .jsonl")
        if not self.inputs.by_rows:
            check_name(self.inputs.data)
        guarded = self.network.open(self.guard)
        counts: Counter[str] = Counter()
        size, before = self.inputs.batch_size, self.inputs.skip if self.inputs.by_rows else 0
        with Lines(self.out, self._mark(), resume=self.resume, size=size, before=before) as lines:
            if lines.count:
                print(f"Going on after {lines.count:,} lines that are there.", file=sys.stderr)
                counts.update(lines.verdicts())
            for some in self._lines(guarded, self.inputs.skip + lines.count):
                lines.write(some)
                counts.update(line["verdict"] for line in some)
        total = sum(counts.values())
        said = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
        text = f"{total:,} rows: {said}" if total else "There were no rows."
        failed = self.strict and counts[UNREADABLE] > 0
        if self.out is None:
            if not self.quiet:
                print(text, file=sys.stderr)
            return Output("", {}, failed=failed)
        data = {"rows": total, "verdicts": dict(counts), "out": str(self.out)}
        return Output(f"{text}\nThe verdicts are in {self.out}.", data, failed=failed)

    def _lines(self, guarded: Guarded, skip: int) -> Iterator[list[dict[str, Any]]]:
        inputs = self.inputs
        if not inputs.by_rows:
            dataset = load_split(inputs.data, inputs.split, normalise=inputs.normalise)
            if dataset is None:
                raise JobError(f"{inputs.data} has no {inputs.split!r} split.")
            yield from _of_dataset(guarded, dataset, skip, inputs.batch_size)
            return
        if guarded.encoding is None:
            guarded = replace(guarded, encoding=inputs.encoding())
        elif isinstance(guarded.encoding, ImageEncoding):
            root = root_of(inputs.data) if inputs.data != STDIN else Path()
            guarded = replace(guarded, encoding=replace(guarded.encoding, root=root))
        records = inputs.records(shown=not self.quiet and sys.stderr.isatty())
        yield from guarded.lines(records, skip=skip, keep=inputs.keep)

    def _mark(self) -> list[Any]:
        """What an interrupted run must agree in: the guard, the data and the batches."""
        return [] if self.out is None else [source_digest(self.guard / "guard.json"), *self.inputs.mark]


def _of_dataset(guarded: Guarded, dataset: Dataset[Any], skip: int, size: int) -> Iterator[list[dict[str, Any]]]:
    """Decide the examples of a data set."""
    length = len(dataset)  # type: ignore[arg-type]
    if skip >= length:
        return
    first, collate = skip + 1, getattr(dataset, "collate", None)
    for verdicts in guarded.guard.stream(DataLoader(Subset(dataset, range(skip, length)), size, collate_fn=collate)):
        yield list(lines_of(Batch(list(range(first, first + len(verdicts))), None), verdicts))
        first += len(verdicts)
