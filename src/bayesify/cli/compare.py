"""`bayesify compare`: several methods and posteriors in one table."""

from __future__ import annotations

import argparse

from bayesify.cli._common import (
    Commands,
    Output,
    UsageError,
    add_command,
    add_data,
    add_learning,
    add_model,
    add_predicting,
)

__all__ = ["add", "run"]

EPILOG = """\
examples:
  bayesify compare --model my_project.models:make_network --weights network.safetensors \\
      --data my_project.data:load --ood fashion-mnist --method mc-dropout --method swag \\
      --set swag.rank=10 --calibrate --report comparison.html
  bayesify compare --model nets:cnn --weights cnn.safetensors --data digits --posterior a --posterior b

The plain network is always the first row, 'map'. A method that fails does not stop the others: its
line says why, and the exit code is 1. --calibrate adds a calibrated row for each."""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands, "compare", run, help="fit several methods, and print one table with quality and cost", epilog=EPILOG
    )
    parser.add_argument(
        "--posterior", action="append", default=[], metavar="DIR", help="a saved posterior (repeatable)"
    )
    parser.add_argument("--report", metavar="FILE", help="write an HTML report too")
    add_model(parser)
    add_data(parser, split="test", ood=True)
    add_learning(parser, many=True, required=False)
    add_predicting(parser, score=True)


def run(args: argparse.Namespace) -> Output:
    """Compare methods."""
    from bayesify.cli._report import compare_and_report
    from bayesify.cli._settings import make_methods

    if not args.method and not args.posterior:
        raise UsageError(
            "there is nothing to compare: give --method NAME or --posterior DIR, each as often as you like"
        )
    return compare_and_report(args, make_methods(["map", *args.method], args.set))
