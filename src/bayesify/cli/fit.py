"""`bayesify fit`: from a network to a saved posterior."""

from __future__ import annotations

import argparse
from dataclasses import replace

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

__all__ = ["add", "run"]

EPILOG = """\
examples:
  bayesify fit --model my_project.models:make_network --weights network.safetensors \\
      --data my_project.data:load --method swag --set rank=10 --calibrate --out posterior
  bayesify fit --model nets:cnn --weights cnn.safetensors --data mnist --method mc-dropout \\
      --set p=0.1 --set insert_before=linear --epochs 5 --out mnist-dropout

It writes what the method added to the network into the folder of --out; 'bayesify evaluate',
'predict', 'compare' and 'report' take that folder as --posterior, with the same --model and --weights.
The figures it prints are of the 'val' split, or of 'train' where there is none: 'test' is left for
'bayesify evaluate'. With --calibrate, and for laplace, whose prior is chosen on 'val', they are of
data that was looked at before."""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "fit", run, help="make a network Bayesian, and save the posterior", epilog=EPILOG)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the posterior")
    add_model(parser)
    add_data(parser, split=None, ood=False)
    add_learning(parser, many=False, required=True)
    add_predicting(parser, score=False)


def run(args: argparse.Namespace) -> Output:
    """Convert, fit, calibrate, save, and compare with the plain network."""
    from bayesify import MAP, calibrate, convert, save
    from bayesify.cli._common import JobError
    from bayesify.cli._comparison import evaluate_posterior, fit_method
    from bayesify.cli._data import load_split
    from bayesify.cli._job import make_task, network_of
    from bayesify.cli._settings import make_method

    network = network_of(args)
    method = make_method(args.method, args.set)
    args.split = "val" if load_split(args.data, "val") is not None else "train"
    if args.calibrate and args.split != "val":
        raise JobError(f"--calibrate needs a 'val' split, and {args.data} has none.")
    calibrates, args.calibrate = args.calibrate, False
    task = make_task(args, network, [method if args.epochs is None else replace(method, epochs=args.epochs)])
    before = evaluate_posterior(task, convert(network, MAP(), likelihood=args.likelihood), "before")[0]
    made = fit_method(task, method)
    if calibrates:
        calibrate(made.posterior, task.test, num_draws=args.num_draws, seed=args.seed)
    after = evaluate_posterior(task, made.posterior, "after")[0]
    save(made.posterior, args.out)
    summary = {
        "method": method.name,
        "posterior": args.out,
        "split": args.split,
        "calibrated": calibrates,
        "examples": len(after.prediction),
        "seconds": made.seconds,
        "before": before.metrics,
        "after": after.metrics,
    }
    shown = {"method": method.name, f"figures of {args.split!r}": "before -> after"}
    for name in after.metrics:
        shown[name] = f"{before.metrics[name]:.4f} -> {after.metrics[name]:.4f}"
    shown |= {"seconds": f"{made.seconds:.1f}", "posterior": args.out}
    return Output(aligned(shown), summary)
