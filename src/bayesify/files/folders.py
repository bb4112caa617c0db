"""A posterior with all that its files need: the network's name and weights, the encoding of rows, and their parts."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from bayesify import storage
from bayesify._core.files import FileError, digest, read_json, read_tensors, write_atomically, write_tensors
from bayesify.data.encoding import Batch, Encoding, stream
from bayesify.data.images import ImageEncoding
from bayesify.data.parts import Parts
from bayesify.data.records import Records
from bayesify.data.tables import TableEncoding
from bayesify.data.text import TextEncoding
from bayesify.files.networks import is_named, make_network, quiet_transformers, tokenizer_of
from bayesify.laws import Posterior
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction import predict

__all__ = ["FILE", "Fitted", "Settings", "load", "read_settings", "save", "source_digest", "whole"]

FILE = "files.json"
FORMAT = 1
WEIGHTS = "network.safetensors"
NETWORK = "network"  # the folder of a model of transformers, with its tokeniser
TOKENIZER = "tokenizer"  # that of texts for a network of the user's own


@dataclass(frozen=True)
class Settings:
    """Remember how a posterior came from files.

    Attributes:
        model: The network's name, or package.module:factory, which is never imported by loading.
        arguments: Of the network.
        encoding: How rows are encoded, as plain values.
        likelihood: What the outputs mean.
        parts: Which rows were for what.
        source: A digest of the data, to know them again.
    """

    model: str
    encoding: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    likelihood: str = "classification"
    parts: Parts = field(default_factory=Parts)
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = {"format": FORMAT, "model": self.model, "arguments": self.arguments, "likelihood": self.likelihood}
        return {**values, "encoding": self.encoding, "parts": self.parts.to_dict(), "source": self.source}


@dataclass(frozen=True, eq=False)
class Fitted:
    """Hold a posterior that was fitted on files.

    Attributes:
        posterior: Ready to predict.
        encoding: How rows become inputs, and labels targets.
        network: The plain network.
        settings: Where all came from.
    """

    posterior: Posterior
    encoding: Encoding
    network: nn.Module
    settings: Settings

    def predict(
        self, source: str | Path | Iterator[Records], *, size: int = 256, **options: Any
    ) -> Iterator[tuple[Batch, Prediction | None]]:
        """Predict a file in constant memory; a stretch of which no row can be read has no prediction.

        Args:
            source: A path for `read_records`, or records.
            size: How many rows are read at once.
            **options: Of `bayesify.predict`.
        """
        encoding = self.encoding
        if isinstance(source, str | Path) and isinstance(encoding, ImageEncoding):
            encoding = replace(encoding, root=root_of(source))
        for batch in stream(source, encoding, size=size):
            yield batch, predict(self.posterior, batch.inputs, **options) if len(batch) else None


def save(
    folder: str | Path,
    posterior: Posterior,
    network: nn.Module,
    encoding: Encoding,
    settings: Settings,
    *,
    weights: bool = True,
) -> None:
    """Save a posterior with its network and its encoding.

    `files.json` is written last, so that a folder is whole or has none.

    Args:
        folder: Made if it does not exist.
        posterior: Any posterior.
        network: The plain network it was made from.
        encoding: How rows are encoded.
        settings: What `load` needs besides.
        weights: Whether the network's own weights are stored.
    """
    with whole(folder, network, encoding, settings, weights=weights) as made:
        storage.save(posterior, made)


@contextlib.contextmanager
def whole(
    folder: str | Path, network: nn.Module, encoding: Encoding, settings: Settings, *, weights: bool = True
) -> Iterator[Path]:
    """Let something be saved in a folder, and put what its files need beside it; `files.json` is written last.

    Args:
        folder: Made if it does not exist.
        network: The plain network.
        encoding: How rows are encoded.
        settings: What loading needs besides.
        weights: Whether the network's own weights are stored.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).unlink(missing_ok=True)
    yield folder
    if isinstance(encoding, TextEncoding) and settings.model.startswith("hf:"):
        with quiet_transformers():
            encoding.tokenizer.save_pretrained(folder / NETWORK)
            network.save_pretrained(folder / NETWORK)  # type: ignore[operator]
    else:
        if isinstance(encoding, TextEncoding) and hasattr(encoding.tokenizer, "save_pretrained"):
            encoding.tokenizer.save_pretrained(folder / TOKENIZER)
        if weights:
            write_tensors(folder / WEIGHTS, network.state_dict())
    values = {**settings.to_dict(), "encoding": encoding.to_dict()}
    write_atomically(folder / FILE, json.dumps({**values, "digest": digest(values)}, indent=2).encode())


def read_settings(folder: str | Path) -> Settings:
    """Read `files.json` of a folder.

    Raises:
        FileError: There is none, or it is damaged.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileError(
            f"{folder} has no {FILE}: it was not made from files, or its fit was interrupted. Fit on files again."
        )
    values = read_json(path)
    mark = values.pop("digest", None)
    try:
        if values["format"] != FORMAT:
            raise FileError(
                f"{path} is of format {values['format']}, and this version reads {FORMAT}. Upgrade bayesify."
            )
        if mark != digest(values):
            raise ValueError("its values were changed")
        parts = Parts.from_dict(values["parts"])
        settings = Settings(str(values["model"]), dict(values["encoding"]), dict(values["arguments"]), parts=parts)
        return replace(settings, likelihood=str(values["likelihood"]), source=str(values["source"]))
    except FileError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path} is damaged ({error!r}). Copy it again, or fit again.") from error


def load(
    folder: str | Path, *, network: nn.Module | None = None, root: str | Path = ".", device: str = "cpu"
) -> Fitted:
    """Load a posterior that was fitted on files; no code is run that the folder names.

    Args:
        folder: What `bayesify fit --data FILE --out FOLDER` or `save` made.
        network: The network, where it was not one with a name (mlp, timm:..., hf:...).
        root: The folder that relative paths of images start from.
        device: Where to compute.

    Raises:
        FileError: The folder is not whole.
        ValueError: The network must be given, or is another one.
    """
    settings = read_settings(folder)
    encoding = encoding_of(folder, settings, root)
    network = network_of(folder, settings, encoding, network).to(device).eval()
    return Fitted(storage.load(folder, network), encoding, network, settings)


def encoding_of(folder: str | Path, settings: Settings, root: str | Path = ".") -> Encoding:
    """Return the encoding of a folder."""
    values, kind = settings.encoding, settings.encoding.get("kind")
    try:
        if kind == "table":
            return TableEncoding.from_dict(values)
        if kind == "images":
            return ImageEncoding.from_dict(values, Path(root))
        if kind == "text":
            kept = [path for path in (Path(folder) / NETWORK, Path(folder) / TOKENIZER) if path.is_dir()]
            if not kept and not is_named(settings.model):
                raise FileError(f"{folder} has no tokeniser of its texts. Fit again, with this version of bayesify.")
            return TextEncoding.from_dict(values, tokenizer_of(f"hf:{kept[0]}" if kept else settings.model))
        raise ValueError(f"there is no encoding {kind!r}")
    except (KeyError, TypeError) as error:
        raise FileError(f"{folder}/{FILE} is damaged ({error!r}). Copy it again, or fit again.") from error


def network_of(
    folder: str | Path, settings: Settings, encoding: Encoding, network: nn.Module | None = None
) -> nn.Module:
    """Return the plain network of a folder, or the given one with the weights of the folder."""
    folder = Path(folder)
    if network is None:
        if not is_named(settings.model):
            raise ValueError(f"{folder} was made with a network of your own: give it again, --model {settings.model}.")
        own, labels = folder / NETWORK, encoding.labels
        network = make_network(
            f"hf:{own}" if own.is_dir() else settings.model,
            outputs=1 if labels is None else labels.outputs,
            inputs=encoding.width if isinstance(encoding, TableEncoding) else None,
            arguments={} if own.is_dir() else settings.arguments,
            trained=False,
        )
    if (folder / WEIGHTS).is_file():
        tensors, _ = read_tensors(folder / WEIGHTS)
        try:
            network.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"The weights in {folder / WEIGHTS} do not fit the network {settings.model}.") from error
    return network


def root_of(source: str | Path) -> Path:
    """Return the folder that relative paths of images start from: the folder itself, or that of the list."""
    path = Path(source)
    return path if path.is_dir() else path.parent


def source_digest(source: str | Path) -> str:
    """Return a digest of a file's bytes, or of the names and sizes of a folder's files.

    >>> source_digest(__file__) == source_digest(__file__)
    True
    """
    path, found = Path(source), hashlib.sha256()
    if path.is_dir():
        for one in sorted(path.rglob("*")):
            if one.is_file():
                found.update(f"{one.relative_to(path)}\0{one.stat().st_size}\0".encode())
        return found.hexdigest()[:32]
    with path.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()[:32]
