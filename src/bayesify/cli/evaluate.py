"""`bayesify evaluate`: quality, calibration and detection of one posterior."""

from __future__ import annotations

import argparse

from bayesify.cli._common import (
    Commands,
    Output,
    add_command,
    add_data,
    add_learning,
    add_model,
    add_predicting,
    aligned,
)
from bayesify.methods import source_of

__all__ = ["add", "run"]

EPILOG = """\
examples:
  bayesify evaluate --posterior posterior --model my_project.models:make_network \\
      --weights network.safetensors --data my_project.data:load --ood my_project.data:other
  bayesify evaluate --method map --model nets:resnet20 --weights resnet20.safetensors \\
      --data cifar10 --normalise imagenet --ood fashion-mnist

With --calibrate the figures are those after calibration. fpr-at-95-ood-recall/SET is the share of the
data that is called OOD at the threshold that finds 95 % of SET."""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "evaluate",
        run,
        help="measure accuracy, NLL, Brier score, ECE and the detection of OOD inputs",
        epilog=EPILOG,
    )
    parser.add_argument("--posterior", metavar="DIR", help="a folder that 'bayesify fit' wrote; or give --method")
    add_model(parser)
    add_data(parser, split="test", ood=True)
    add_learning(parser, many=False, required=False)
    add_predicting(parser, score=True)


def run(args: argparse.Namespace) -> Output:
    """Evaluate a saved posterior, or one made now."""
    from bayesify.cli._comparison import evaluate_posterior
    from bayesify.cli._job import one_posterior

    task, made = one_posterior(args)
    found = evaluate_posterior(task, made.posterior, source_of(made.posterior))[-1]
    shown = {"method": found.name, f"examples of {args.split!r}": len(found.prediction), **found.metrics}
    return Output(aligned(shown), found.to_dict())
