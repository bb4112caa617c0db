"""Data by path: which encoding, which network, which rows; and what to say about rows that cannot be read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm

from bayesify.cli._data import IMAGENET_MEAN, IMAGENET_STD
from bayesify.cli._network import load_factory, load_weights, on_device, parse_arguments
from bayesify.cli._output import JobError, UsageError
from bayesify.conversion import convert
from bayesify.data import (
    Batch,
    Encoding,
    ImageEncoding,
    Labels,
    Parts,
    Records,
    Remark,
    TableEncoding,
    TextEncoding,
    load_records,
    read_records,
)
from bayesify.files.folders import Settings, encoding_of, network_of, read_settings, root_of, save, source_digest
from bayesify.files.networks import image_settings, is_named, kind_of, make_network, named_classes, tokenizer_of
from bayesify.laws import Posterior
from bayesify.prediction import predict

if TYPE_CHECKING:
    from bayesify.cli._options import DataOptions, NetworkOptions

__all__ = ["FileData", "Tally", "open_files"]

SHOWN = 10  # rows that are told one by one
IMAGE_COLUMNS = ("file", "image", "path", "filename")


@dataclass
class Tally:
    """Count remarks about rows, and keep those of the lowest numbers, in order: files are read in parts."""

    rows: set[int] = field(default_factory=set)
    first: list[Remark] = field(default_factory=list)

    def add(self, remarks: Iterable[Remark]) -> None:
        """Take remarks into account; one row counts once."""
        for remark in remarks:
            if remark.row not in self.rows:
                self.rows.add(remark.row)
                self.first = sorted([*self.first, remark], key=lambda one: one.row)[:SHOWN]

    def tell(self, what: str) -> None:
        """Say how many rows there are, and about the first ones why, on stderr."""
        if self.rows:
            lines = [f"{len(self.rows)} row(s) {what}:", *(f"  row {one.row}: {one.text}" for one in self.first)]
            more = len(self.rows) - len(self.first)
            print("\n".join(lines + [f"  and {more} more"] * bool(more)), file=sys.stderr)


@dataclass
class FileData:
    """A file with its encoding, the network that it is for, and its parts, each read when it is asked for.

    Attributes:
        path: The file or folder.
        encoding: How rows become inputs.
        settings: What is saved with a posterior.
        network: The network.
        stored: Whether the network's weights are saved with a posterior.
        again: Whether these are the data that a loaded posterior was fitted on; None where none was loaded.
        shown: Whether progress is shown.
    """

    path: Path
    encoding: Encoding
    settings: Settings
    network: nn.Module
    stored: bool
    again: bool | None = None
    shown: bool = False
    unread: Tally = field(default_factory=Tally)
    odd: Tally = field(default_factory=Tally)
    parts: dict[str, Dataset[Any]] = field(default_factory=dict)

    def find(self, split: str) -> Dataset[Any] | None:
        """Return a part as a data set; None where no row is in it."""
        if split not in self.parts:
            if not any(len(records) for records in self.records(split)):
                return None
            stretches = self.records(split, label=f"reading {split!r} of {self.path.name}")
            self.parts[split] = load_records(stretches, self.encoding, each=self.note)
        return self.parts[split]

    def records(self, split: str, *, size: int = 1024, label: str = "") -> Iterator[Records]:
        """Give the records of a part, or of all."""
        if split not in ("train", "val", "test", "all"):
            raise JobError(f"The parts of a file are train, val, test and all, not {split!r}.")
        stretches = counted(read_records(self.path, size=size), label, shown=self.shown and bool(label))
        return stretches if split == "all" else self._selected(stretches, split)

    def _selected(self, stretches: Iterator[Records], split: str) -> Iterator[Records]:
        parts = self.settings.parts
        for records in stretches:
            if parts.column is not None:
                self.unread.add(parts.remarks(records))
            yield from parts.select([records], split)

    def unlabelled(self, path: str) -> Dataset[Any]:
        """Return the inputs of another file, encoded as these."""
        encoding = self.encoding
        if isinstance(encoding, ImageEncoding):
            encoding = replace(encoding, root=root_of(path))
        return load_records(read_records(path), encoding, labels=False)

    def note(self, batch: Batch) -> None:
        """Remember what is wrong with rows."""
        self.unread.add(batch.errors)
        self.odd.add(batch.remarks)

    def tell(self) -> None:
        """Say what is wrong with rows, on stderr."""
        self.unread.tell("could not be used")
        self.odd.tell("are odd")

    def save(self, folder: Path, posterior: Posterior) -> None:
        """Save a posterior with all that its files need."""
        save(folder, posterior, self.network, self.encoding, self.settings, weights=self.stored)

    def default_split(self) -> str:
        """Return what is evaluated: the test part of data that were fitted on, or all of others."""
        return "all" if self.again is False else "test"


def counted(stretches: Iterator[Records], label: str, *, shown: bool) -> Iterator[Records]:
    """Show how many rows were read."""
    with tqdm(desc=label, unit=" rows", file=sys.stderr, leave=False, disable=not shown) as bar:
        for records in stretches:
            yield records
            bar.update(len(records) + len(records.errors))


def open_files(
    network: NetworkOptions,
    data: DataOptions,
    *,
    folders: Sequence[str | Path] = (),
    likelihood: str = "classification",
    seed: int = 0,
    shown: bool = False,
) -> FileData:
    """Open data by path, with the encoding and the network of saved posteriors, or new ones.

    Args:
        network: The options of the network.
        data: The options of the data.
        folders: Saved posteriors, whose encoding must be one.
        likelihood: What the outputs mean, where there is no posterior yet.
        seed: Of the parts.
        shown: Whether progress is shown.
    """
    path = Path(data.data)
    if folders:
        return _as_saved(network, path, folders, shown)
    parts = Parts(data.parsed_shares(), seed, data.split_column)
    model, kind, column = _kind(network.model, data, path)
    arguments = parse_arguments(network.model_arg)

    def training(label: str) -> Iterator[Records]:
        return parts.select(counted(read_records(path), label, shown=shown), "train")

    given = None if data.classes is None else [name.strip() for name in data.classes.split(",")]
    options: dict[str, Any] = {"likelihood": likelihood, "classes": given, "scaled": not data.raw}
    label = "label" if path.is_dir() else data.label
    if kind == "table":
        aside = (*data.ignore, *([] if data.split_column is None else [data.split_column]))
        encoding: Encoding = TableEncoding.fit(training(f"looking at {path.name}"), label, ignore=aside, **options)
    else:
        labels = Labels.fit(training(f"looking at {path.name}"), label, **options)
        own = named_classes(model) if kind == "text" else None
        if own and given is None and labels.classes is not None and set(labels.classes) <= set(own):
            labels = replace(labels, classes=own)  # in the order of the outputs that the model has
        encoding = _unfinished(kind, column, labels, data, model, path)
    made = _make(network, model, encoding, arguments)
    if isinstance(encoding, ImageEncoding):
        encoding = _for_images(encoding, made, data, model)
    elif isinstance(encoding, TextEncoding):
        longest = getattr(getattr(made, "config", None), "max_position_embeddings", encoding.max_tokens)
        encoding = replace(encoding, max_tokens=min(encoding.max_tokens, longest))
    settings = Settings(model, {}, arguments, likelihood, parts, source_digest(path))
    found = FileData(path, encoding, settings, made, is_named(model), shown=shown)
    if not is_named(model):
        _check_outputs(found)
    _say(found)
    return found


def _as_saved(network: NetworkOptions, path: Path, folders: Sequence[str | Path], shown: bool) -> FileData:
    first, *others = [read_settings(folder) for folder in folders]
    if any(other.encoding != first.encoding for other in others):
        raise JobError("The posteriors were fitted on different encodings of rows. Evaluate them one by one.")
    encoding = encoding_of(folders[0], first, root_of(path))
    given = None
    if not is_named(first.model):
        if network.model is None:
            raise UsageError(f"{folders[0]} was made with a network of your own: give it again, --model {first.model}")
        given = load_factory(network.model, network.model_arg)
        if network.weights is not None:
            load_weights(given, network.weights)
    made = on_device(network_of(folders[0], first, encoding, given), network.device)
    return FileData(path, encoding, first, made, True, again=first.source == source_digest(path), shown=shown)


def _kind(model: str | None, data: DataOptions, path: Path) -> tuple[str, str, str]:
    """Return the model, what kind of data these are, and the column of texts or images."""
    if data.text is not None and data.image is not None:
        raise UsageError("give --text or --image, not both")
    columns = next(read_records(path)).columns
    kind = kind_of(model) if model is not None and is_named(model) else None
    files = [name for name in IMAGE_COLUMNS if name in columns]
    found = "images" if path.is_dir() or data.image is not None else "text" if data.text is not None else kind
    if found is None:
        alone = set(columns) <= {*files, data.label, data.split_column}
        found = "images" if files and alone else "text" if data.tokenizer is not None else "table"
    if kind not in (None, found):
        raise UsageError(f"--model {model} is for {kind}, and {path} holds {found}")
    if found == "table":
        return model or "mlp", found, ""
    if model is None:
        raise UsageError(
            f"{path} holds {found}: name a network, --model {'timm:resnet18' if found == 'images' else 'hf:FOLDER'}"
        )
    column = data.image or next(iter(files), "file") if found == "images" else data.text or "text"
    if column not in columns:
        there = ", ".join(map(repr, columns))
        option = "--image" if found == "images" else "--text"
        raise UsageError(f"{path} has no column {column!r} with {found}; it has {there}: name it with {option}")
    return model, found, column


def _unfinished(kind: str, column: str, labels: Labels, data: DataOptions, model: str, path: Path) -> Encoding:
    """Return the encoding of texts; of images, one that does not know its size yet."""
    if kind == "images":
        return ImageEncoding(column, root_of(path), labels=labels)
    if data.tokenizer is None and not model.startswith("hf:"):
        raise UsageError("texts need a tokeniser: --tokenizer NAME|FOLDER")
    tokenizer = tokenizer_of(model if data.tokenizer is None else f"hf:{data.tokenizer}")
    return TextEncoding(column, tokenizer, min(data.max_tokens, tokenizer.model_max_length), labels)


def _make(network: NetworkOptions, model: str, encoding: Encoding, arguments: dict[str, Any]) -> nn.Module:
    if is_named(model):
        assert encoding.labels is not None
        inputs = encoding.width if isinstance(encoding, TableEncoding) else None
        more: dict[str, Any] = {"inputs": inputs, "arguments": arguments, "trained": network.weights is None}
        made = make_network(model, outputs=encoding.labels.outputs, **more)
    else:
        made = load_factory(model, network.model_arg)
    if network.weights is not None:
        load_weights(made, network.weights)
    return on_device(made, network.device)


def _for_images(encoding: ImageEncoding, network: nn.Module, data: DataOptions, model: str) -> ImageEncoding:
    """Return the encoding with the size and the scale that the network wants."""
    found: dict[str, Any] = image_settings(network)
    if not found:
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if data.normalise == "imagenet" else ((0.0,) * 3, (1.0,) * 3)
        found = {"mode": "RGB", "mean": mean, "std": std}
        if data.grey:
            found = {"mode": "L", "mean": mean[:1], "std": std[:1]}
    if data.image_size is not None:
        found["size"] = (data.image_size, data.image_size)
    if "size" not in found:
        raise UsageError(f"how large are the images that {model} takes? Say --image-size 224, or another number")
    return replace(encoding, **found)


def _check_outputs(data: FileData) -> None:
    """Refuse a network with another number of outputs than there are classes."""
    labels = data.encoding.labels
    batch = data.encoding.encode(next(read_records(data.path, size=2)))
    if labels is None or labels.classes is None or labels.single or not len(batch):
        return
    prediction: Any = predict(convert(data.network, "map"), batch.inputs)
    outputs = prediction.probs.shape[-1]
    if outputs != len(labels.classes):
        raise JobError(
            f"The network has {outputs} outputs, and the training part {len(labels.classes)} labels. Name the classes "
            "in the order of the outputs: --classes a,b,c."
        )


def _say(data: FileData) -> None:
    """Say what was found in the data, on stderr."""
    encoding, labels = data.encoding, data.encoding.labels
    if not data.shown or labels is None:
        return
    lines = [f"{data.path}: {encoding.kind}, network {data.settings.model}"]
    if isinstance(encoding, TableEncoding):
        lines += [f"  {note}" for note in encoding.notes]
    elif isinstance(encoding, ImageEncoding):
        lines.append(f"  images of {encoding.size[0]} x {encoding.size[1]} pixels, {encoding.mode}")
    elif isinstance(encoding, TextEncoding):
        lines.append(f"  texts of the column {encoding.column!r}, at most {encoding.max_tokens} tokens")
    if labels.classes is not None:
        lines.append(f"  the label {labels.column!r} is one of {len(labels.classes)}: {', '.join(labels.classes[:10])}")
    else:
        scaled = f", mean {labels.mean:.4g} and standard deviation {labels.std:.4g}" * (labels.std != 1)
        lines.append(f"  the label {labels.column!r} is a number{scaled}")
    print("\n".join(lines), file=sys.stderr)
