"""What the commands share: their arguments, their errors, and how they answer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from bayesify.prediction import PREDICTORS

__all__ = [
    "EXIT_CODES",
    "Commands",
    "JobError",
    "Output",
    "UsageError",
    "add_command",
    "add_data",
    "add_learning",
    "add_model",
    "add_predicting",
    "aligned",
    "finite",
]

# What add_subparsers returns; the class has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
EXIT_CODES = "exit codes: 0 fine, 1 the job failed, 2 wrong usage"


class UsageError(Exception):
    """The command line names something that does not exist, or does not fit together: exit code 2."""


class JobError(Exception):
    """The command line is right, and the job failed: exit code 1."""


@dataclass(frozen=True)
class Output:
    """What a command has to say.

    Attributes:
        text: For people.
        data: For `--json`.
        failed: Whether a part of the job failed, which the text tells.
    """

    text: str
    data: dict[str, Any]
    failed: bool = False


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], Output],
    *,
    help: str,
    epilog: str = "",
) -> argparse.ArgumentParser:
    """Add a command with the arguments that every command has."""
    parser = commands.add_parser(
        name,
        help=help,
        description=help,
        epilog=f"{epilog}\n\n{EXIT_CODES}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, parser=parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object to stdout, and nothing else there")
    group.add_argument("--quiet", action="store_true", help="show no progress bars (they go to stderr)")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add what says which network is meant."""
    group = parser.add_argument_group("network")
    group.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FACTORY",
        help="a function or class that returns the torch.nn.Module, as package.module:name; the present folder is "
        "looked into after the installed packages",
    )
    group.add_argument(
        "--model-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the factory, as a Python literal or text (repeatable): --model-arg num_classes=10",
    )
    group.add_argument(
        "--weights",
        metavar="FILE",
        help="the trained weights: .safetensors, or from torch 2.10 on a .pt/.pth state dict, which is read without "
        "running code; not needed if the factory returns a trained network",
    )
    group.add_argument("--device", default="cpu", help="where to compute, as cpu or cuda:1 (default: %(default)s)")


def add_data(parser: argparse.ArgumentParser, *, split: str | None, ood: bool) -> None:
    """Add what says which data are meant; `split` is the default of a command that looks at one split."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        required=True,
        metavar="NAME|MODULE:FUNCTION",
        help="a named set (digits, mnist, fashion-mnist, cifar10, uci/yacht, ...; read from the folder BAYESIFY_DATA), "
        "or a function that returns a torch Dataset of (input, target), called with split='train', 'val' or 'test'; "
        "it may return None for 'val'",
    )
    if ood:
        group.add_argument(
            "--ood",
            action="append",
            default=[],
            metavar="NAME|MODULE:FUNCTION",
            help="data that the network should find suspicious, for the AUROC; as --data, split 'test' (repeatable). "
            "Named images get the channels and the size of those of --data",
        )
    group.add_argument(
        "--normalise",
        choices=("none", "imagenet"),
        default="none",
        help="for named images, which are floats in [0, 1]: 'imagenet' then removes ImageNet's mean and standard "
        "deviation, as the public CIFAR-10 networks expect (default: %(default)s). Tables are not scaled",
    )
    if split is not None:
        group.add_argument("--split", default=split, help="which part of --data (default: %(default)s)")
    group.add_argument("--batch-size", type=_positive, default=128, metavar="N", help="default: %(default)s")


def add_learning(parser: argparse.ArgumentParser, *, many: bool, required: bool) -> None:
    """Add what says which method is meant and how it is fitted."""
    group = parser.add_argument_group("method")
    group.add_argument(
        "--method",
        required=required,
        action="append" if many else "store",
        default=[] if many else None,
        metavar="NAME",
        help="a method of 'bayesify methods'; the network is converted, and fitted on 'train' where the method learns"
        + ("; repeatable, 'all' for every one" if many else ""),
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[METHOD.]KEY=VALUE" if many else "KEY=VALUE",
        help="a setting of the method (repeatable): --set lr=0.01"
        + (", or of one of them: --set swag.rank=10" if many else ""),
    )
    group.add_argument(
        "--epochs",
        type=_count,
        metavar="N",
        help="default: the method's; with 0 there is no training, and laplace still makes its pass over the data",
    )
    group.add_argument(
        "--likelihood",
        choices=("classification", "binary", "regression"),
        default="classification",
        help="what the outputs mean (default: %(default)s)",
    )
    group.add_argument(
        "--calibrate",
        action="store_true",
        help="fit a temperature (regression: a scale of the variance) on the 'val' split afterwards",
    )
    group.add_argument(
        "--checkpoint", metavar="DIR", help="keep the state of the fit here; the same command then goes on from it"
    )


def add_predicting(parser: argparse.ArgumentParser, *, score: bool) -> None:
    """Add what says how predictions are made."""
    group = parser.add_argument_group("prediction")
    group.add_argument("--num-draws", type=_positive, metavar="N", help="how many draws; default: the posterior's")
    names = ", ".join(PREDICTORS)
    group.add_argument("--how", default="sampling", metavar="NAME", help=f"one of {names} (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    if score:
        group.add_argument(
            "--score",
            default="total",
            help="the uncertainty that detects OOD inputs: total, epistemic, ... (default: %(default)s)",
        )


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have (NaN, infinity) by None.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def aligned(pairs: Mapping[str, Any]) -> str:
    """Write names and values in two columns.

    >>> print(aligned({"nll": 0.12345, "seconds": 3}))
    nll      0.1235
    seconds  3
    """
    width = max(map(len, pairs))
    return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in pairs.items())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _count(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number
