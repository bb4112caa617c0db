"""Run a comparison that the command line describes, and write its report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from bayesify import storage
from bayesify.cli._common import Output
from bayesify.cli._comparison import Comparison, Failure, Made, compare, first_line, fit_method
from bayesify.cli._data import class_names, images_of
from bayesify.cli._job import make_task, network_of, split_of
from bayesify.methods import MAP, Method

__all__ = ["compare_and_report", "with_report"]


def compare_and_report(args: argparse.Namespace, methods: Mapping[str, Method]) -> Output:
    """Compare methods and saved posteriors, and write the report that `args.report` names, if any."""
    network = network_of(args)
    # --epochs is for the methods: the plain network is compared as it was given.
    asked = getattr(args, "epochs", None)
    epochs = {name: m.epochs if asked is None or isinstance(m, MAP) else asked for name, m in methods.items()}
    task = make_task(args, network, [replace(method, epochs=epochs[name]) for name, method in methods.items()])
    makers: dict[str, Callable[[], Made]] = {
        name: partial(fit_method, replace(task, epochs=epochs[name]), method) for name, method in methods.items()
    }
    makers |= {folder: partial(_load, folder, network) for folder in args.posterior}
    comparison, report = compare(task, makers), None
    if args.report:
        images = images_of(split_of(args, args.split))
        content = {"title": f"{args.model} on {args.data}", "images": images, "class_names": class_names(args.data)}
        comparison, report = with_report(comparison, Path(args.report), **content)
    data = {**comparison.to_dict(), "report": None if report is None else str(report)}
    text = str(comparison) + (f"\n\nThe report is in {report}." if report else "")
    return Output(text, data, failed=bool(comparison.failures))


def with_report(comparison: Comparison, path: Path, **content: Any) -> tuple[Comparison, Path | None]:
    """Write the report of a comparison; a failure to do so joins the others, since the table is worth having."""
    if not comparison.evaluations:
        return comparison, None
    try:
        from bayesify.evaluation.report import write_report

        told = [f"{failure.name} failed: {failure.reason}" for failure in comparison.failures] + comparison.notes
        notes = [*content.pop("notes", []), *told]
        return comparison, write_report(comparison.evaluations, path, notes=notes, **content)
    except Exception as error:
        failure = Failure("report", first_line(error))
        return replace(comparison, failures=[*comparison.failures, failure]), None


def _load(folder: str, network: nn.Module) -> Made:
    return Made(storage.load(folder, network), None)
