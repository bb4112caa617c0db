"""Networks by name: a small MLP for tables, timm's for images, those of transformers for text."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import nn

from bayesify._core.optional import require

__all__ = [
    "MLP",
    "NAMES",
    "image_settings",
    "is_named",
    "make_network",
    "named_classes",
    "quiet_transformers",
    "tokenizer_of",
]

NAMES = ("mlp", "timm:", "hf:")
KINDS = {"mlp": "table", "timm": "images", "hf": "text"}
REFUSED = ("checkpoint", "pretrained_", "cache", "trust", "custom", "revision", "subfolder", "code", "quantization")


class MLP(nn.Sequential):
    """Map rows of a table to outputs: linear, layer norm, ReLU and dropout, then the last linear layer.

    Args:
        inputs: How many numbers a row has.
        outputs: How many numbers an answer has.
        hidden: The width of the layers between.
        layers: How many of them there are.
        dropout: The rate of dropout behind each.

    >>> len(MLP(4, 3, layers=1))
    5
    """

    def __init__(self, inputs: int, outputs: int, *, hidden: int = 64, layers: int = 2, dropout: float = 0.1) -> None:
        if hidden < 1 or layers < 0:
            raise ValueError(f"An MLP needs a width of at least 1 and no less than 0 layers, not {hidden}, {layers}.")
        widths = [inputs] + [hidden] * layers
        between = [
            module
            for narrow, wide in pairwise(widths)
            for module in (nn.Linear(narrow, wide), nn.LayerNorm(wide), nn.ReLU(), nn.Dropout(dropout))
        ]
        super().__init__(*between, nn.Linear(widths[-1], outputs))


def is_named(model: str) -> bool:
    """Return whether a model is one that needs no code of the user's.

    >>> is_named("timm:resnet18"), is_named("my_project.models:make")
    (True, False)
    """
    return model == "mlp" or model.startswith(NAMES[1:])


def kind_of(model: str) -> str:
    """Return what a named network is for: "table", "images" or "text"."""
    return KINDS[model.partition(":")[0]]


def make_network(
    model: str,
    *,
    outputs: int,
    inputs: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    trained: bool = True,
) -> nn.Module:
    """Make a network by its name.

    Args:
        model: "mlp"; "timm:NAME", a model of timm; "hf:NAME" or "hf:FOLDER", a classifier of transformers. Code of a
            model's repository is never run.
        outputs: How many outputs it needs.
        inputs: How many numbers a row has, for an MLP.
        arguments: More arguments of the MLP, of `timm.create_model`, or of the model's configuration.
        trained: Whether timm's published weights are loaded.

    Raises:
        ValueError: There is no such model, it cannot be fetched, or does not take the arguments.

    >>> make_network("mlp", inputs=4, outputs=3)[-1]
    Linear(in_features=64, out_features=3, bias=True)
    """
    more = dict(arguments or {})
    if refused := [name for name in more if name.startswith(REFUSED)]:
        raise ValueError(f"{model}: the argument(s) {', '.join(refused)} could name files or code, and are not taken.")
    kind, _, name = model.partition(":")
    try:
        if kind == "mlp":
            if inputs is None:
                raise ValueError("it is for tables; name a network for other data: timm:NAME or hf:NAME")
            return MLP(inputs, outputs, **more)
        if kind == "timm":
            return _of_timm(name, outputs, more, trained)
        found, new = _of_transformers(name, outputs, more)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{model} cannot be made: {type(error).__name__}: {_first_line(error)}") from error
    if new:
        some = ", ".join(new[:4]) + ", ..." * (len(new) > 4)
        warnings.warn(f"{model} has no weights for {some}: they are random, until they are trained.", stacklevel=2)
    return found


def _of_timm(name: str, outputs: int, more: dict[str, Any], trained: bool) -> nn.Module:
    timm = require("timm", extra="timm", purpose="a model of timm")
    if not timm.is_model(name.partition(".")[0]):
        near = ", ".join(timm.list_models(f"*{name[:6]}*")[:5])
        raise ValueError(f"timm has no model {name!r}" + (f"; it has {near}, ..." if near else ""))
    pretrained = bool(more.pop("pretrained", True)) and trained
    try:
        found: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=outputs, **more)
    except Exception as error:
        if not pretrained:
            raise
        raise ValueError(
            f"its published weights cannot be fetched ({_first_line(error)}). Without internet give --weights FILE, or "
            "--model-arg pretrained=False for random ones"
        ) from error
    return found


def _of_transformers(name: str, outputs: int, more: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """Return the model, and the names of weights that the folder does not have."""
    transformers = require("transformers", extra="transformers", purpose="a model of transformers")
    with quiet_transformers():
        found, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            name,
            num_labels=outputs,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            **more,
        )
    if found.config.pad_token_id is None:
        found.config.pad_token_id = _token_id(tokenizer_of(f"hf:{name}"))
    # Pairs or names, by the version of transformers.
    keys = [key for part in ("missing_keys", "mismatched_keys") for key in report[part]]
    return found, sorted({key if isinstance(key, str) else key[0] for key in keys})


def named_classes(model: str) -> tuple[str, ...] | None:
    """Return the names of classes that a model of transformers was trained on, in the order of its outputs, if any."""
    kind, _, name = model.partition(":")
    if kind != "hf":
        return None
    transformers = require("transformers", extra="transformers", purpose="a model of transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} cannot be read: {_first_line(error)}") from error
    names = [str(config.id2label[index]) for index in sorted(config.id2label)]
    return None if all(one == f"LABEL_{index}" for index, one in enumerate(names)) else tuple(names)


def tokenizer_of(model: str) -> Any:
    """Return the tokeniser of a model of transformers; one without padding pads with its end token."""
    transformers = require("transformers", extra="transformers", purpose="a model of transformers")
    name = model.partition(":")[2]
    try:
        found = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a folder without one fails in many ways
        raise ValueError(f"{model} has no tokeniser that can be loaded: {_first_line(error)}") from error
    if found.pad_token_id is None:
        found.pad_token_id = _token_id(found)
    return found


def _token_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
        if (found := getattr(tokenizer, name, None)) is not None:
            return int(found)
    return 0


def image_settings(network: nn.Module) -> dict[str, Any]:
    """Return size, mean and std of the images that a model of timm was trained on; nothing where it does not say.

    >>> image_settings(nn.Linear(1, 1))
    {}
    """
    config = getattr(network, "pretrained_cfg", None)
    if not isinstance(config, Mapping) or "input_size" not in config:
        return {}
    channels, height, width = config["input_size"]
    first = getattr(network, "in_chans", channels)
    return {
        "size": (int(height), int(width)),
        "mode": "L" if first == 1 else "RGB",
        "mean": tuple(config.get("mean", (0.0,) * channels))[:first],
        "std": tuple(config.get("std", (1.0,) * channels))[:first],
    }


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the bars and reports of transformers back: what matters is said here."""
    log = require("transformers", extra="transformers", purpose="a model of transformers").utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
