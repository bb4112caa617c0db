"""A guard with all that its files need: from rows to verdicts, a stretch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from bayesify.data.encoding import Encoding
from bayesify.data.images import ImageEncoding
from bayesify.data.records import Records, read_records
from bayesify.decide import Guard
from bayesify.decide.lines import lines_of
from bayesify.files.folders import FILE, Settings, encoding_of, network_of, read_settings, root_of, whole

__all__ = ["Guarded", "load_guard", "save_guard"]


@dataclass(frozen=True, eq=False)
class Guarded:
    """Hold a guard, and how rows of files become its inputs.

    Attributes:
        guard: Ready to decide.
        network: The plain network.
        encoding: How rows become inputs; None where the guard was not made from files.
        settings: Where all came from; None likewise.
    """

    guard: Guard
    network: nn.Module
    encoding: Encoding | None = None
    settings: Settings | None = None

    def lines(
        self, source: str | Path | Iterable[Records], *, size: int = 256, skip: int = 0, keep: Sequence[str] = ()
    ) -> Iterator[list[dict[str, Any]]]:
        """Give a mapping for each row, some rows at a time, in constant memory: its verdict, or why there is none.

        Args:
            source: A path for `read_records`, or records.
            size: How many rows are decided at once.
            skip: How many rows at the start are left out.
            keep: Columns whose values stand in the lines, where they exist.

        Raises:
            ValueError: The guard was not made from files, or the file lacks a column that the network needs.
        """
        encoding = self.encoding
        if encoding is None:
            raise ValueError("This guard was not made from files: give `Guarded` an encoding of rows.")
        if isinstance(encoding, ImageEncoding):
            keep = (*keep, encoding.column)
            if isinstance(source, str | Path):
                encoding = replace(encoding, root=root_of(source))
        stretches = read_records(source, size=size) if isinstance(source, str | Path) else source
        for records in stretches:
            records = _after(records, skip)
            batch = encoding.encode(records)
            verdicts = self.guard(batch.inputs) if len(batch) else None
            found = list(lines_of(batch, verdicts, encoding.labels))
            _keep(found, records, keep)
            if found:
                yield found


def save_guard(
    folder: str | Path,
    guard: Guard,
    network: nn.Module,
    encoding: Encoding,
    settings: Settings,
    *,
    weights: bool = True,
) -> None:
    """Save a guard with its network and its encoding; the arguments are those of `save`."""
    with whole(folder, network, encoding, settings, weights=weights) as made:
        guard.save(made)


def load_guard(
    folder: str | Path, *, network: nn.Module | None = None, root: str | Path = ".", device: str = "cpu"
) -> Guarded:
    """Load a guard; no code is run that the folder names.

    Args:
        folder: What `bayesify guard --out FOLDER`, `save_guard` or `Guard.save` made.
        network: The network, where it was not one with a name (mlp, timm:..., hf:...).
        root: The folder that relative paths of images start from.
        device: Where to compute.

    Raises:
        FileError: The folder is not whole.
        ValueError: The network must be given, or is another one.
    """
    if not (Path(folder) / FILE).is_file():
        if network is None:
            raise ValueError(
                f"{folder} has no {FILE}: it is no guard, was not made from files, or its saving was interrupted. Give "
                "the network that it belongs to, or make it again."
            )
        network = network.to(device).eval()
        return Guarded(Guard.load(folder, network), network)
    settings = read_settings(folder)
    encoding = encoding_of(folder, settings, root)
    network = network_of(folder, settings, encoding, network).to(device).eval()
    return Guarded(Guard.load(folder, network), network, encoding, settings)


def _after(records: Records, skip: int) -> Records:
    """Return the rows after the first `skip` of the file."""
    if not skip or (records.rows and records.rows[0] > skip and all(one.row > skip for one in records.errors)):
        return records
    errors = tuple(one for one in records.errors if one.row > skip)
    return replace(records.part([i for i, row in enumerate(records.rows) if row > skip]), errors=errors)


def _keep(lines: list[dict[str, Any]], records: Records, names: Sequence[str]) -> None:
    """Put columns of the file into the lines, after the number of the row."""
    there = [name for name in dict.fromkeys(names) if name in records.columns]
    if not there:
        return
    place = {row: index for index, row in enumerate(records.rows)}
    for number, line in enumerate(lines):
        index = place.get(line["row"])
        own = {} if index is None else {name: records.columns[name][index] for name in there}
        lines[number] = {"row": line["row"], **own, **line}
