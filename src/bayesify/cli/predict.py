"""`bayesify predict`: a line for each input."""

from __future__ import annotations

import argparse
import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify.cli._common import (
    Commands,
    JobError,
    Output,
    UsageError,
    add_command,
    add_data,
    add_learning,
    add_model,
    add_predicting,
)

if TYPE_CHECKING:
    from bayesify.likelihoods.prediction import Prediction

__all__ = ["add", "run"]

EPILOG = """\
examples:
  bayesify predict --posterior posterior --model my_project.models:make_network \\
      --weights network.safetensors --data my_project.data:load --out predictions.csv
  bayesify predict --method map --model nets:cnn --weights cnn.safetensors --data digits --out predictions.jsonl

Classification: index, label, confidence, total, aleatoric, epistemic (uncertainties in nats).
Regression: index, mean, std, aleatoric, epistemic (variances). Lines are in the order of the data."""

CLASSIFICATION = ("label", "confidence", "total", "aleatoric", "epistemic")
REGRESSION = ("mean", "std", "aleatoric", "epistemic")


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands, "predict", run, help="write label, confidence and uncertainties of every input", epilog=EPILOG
    )
    parser.add_argument("--posterior", metavar="DIR", help="a folder that 'bayesify fit' wrote; or give --method")
    parser.add_argument("--out", metavar="FILE", help="*.csv or *.jsonl; without it, CSV (or --json) goes to stdout")
    add_model(parser)
    add_data(parser, split="test", ood=False)
    add_learning(parser, many=False, required=False)
    add_predicting(parser, score=False)


def run(args: argparse.Namespace) -> Output:
    """Predict a split, and write it."""
    from bayesify import calibrate, predict
    from bayesify._core.files import write_atomically
    from bayesify.cli._job import one_posterior

    out = None if args.out is None else Path(args.out)
    if out is not None and out.suffix not in (".csv", ".jsonl"):
        raise UsageError(f"--out {out}: the name must end in .csv or .jsonl")
    task, made = one_posterior(args)
    if task.val is not None:
        calibrate(made.posterior, task.val, num_draws=args.num_draws, seed=args.seed)
    found = predict(made.posterior, task.test, seed=args.seed, progress=task.progress, **task.predicting)
    rows = _rows(found)
    if out is None:
        return Output(_csv(rows).rstrip("\n"), {"predictions": rows})
    text = _csv(rows) if out.suffix == ".csv" else "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(out, text.encode())
    return Output(f"{len(rows)} predictions are in {out}.", {"examples": len(rows), "out": str(out)})


def _rows(prediction: Prediction) -> list[dict[str, Any]]:
    fields = REGRESSION if hasattr(prediction, "mean") else CLASSIFICATION
    columns = {name: getattr(prediction, name) for name in fields}
    wide = {name: column for name, column in columns.items() if column.ndim > 1}
    if any(column[0].numel() != 1 for column in wide.values()):
        raise JobError(
            "The network has several outputs per input (pixels, tokens, several targets), which do not fit one line "
            "each. Use bayesify.predict in Python."
        )
    values = {name: column.reshape(len(column)).tolist() for name, column in columns.items()}
    return [
        {"index": index, **dict(zip(values, row, strict=True))}
        for index, row in enumerate(zip(*values.values(), strict=True))
    ]


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
