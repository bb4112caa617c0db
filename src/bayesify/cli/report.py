"""`bayesify report`: saved posteriors as an HTML report."""

from __future__ import annotations

import argparse

from bayesify.cli._common import Commands, Output, add_command, add_data, add_model, add_predicting

__all__ = ["add", "run"]

EPILOG = """\
examples:
  bayesify report --posterior swag --posterior dropout --model my_project.models:make_network \\
      --weights network.safetensors --data my_project.data:load --ood fashion-mnist --out report.html

It predicts anew, and shows the plain network as 'map' beside the posteriors. 'bayesify compare
--report FILE' writes the same report for methods that it fits."""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands, "report", run, help="write an HTML report that compares saved posteriors", epilog=EPILOG
    )
    parser.add_argument(
        "--posterior", action="append", required=True, metavar="DIR", help="a saved posterior (repeatable)"
    )
    parser.add_argument(
        "--out", dest="report", default="report.html", metavar="FILE", help="the report (default: %(default)s)"
    )
    add_model(parser)
    add_data(parser, split="test", ood=True)
    add_predicting(parser, score=True)


def run(args: argparse.Namespace) -> Output:
    """Write the report."""
    from bayesify.cli._report import compare_and_report
    from bayesify.methods import MAP

    return compare_and_report(args, {"map": MAP()})
