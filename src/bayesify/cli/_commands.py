"""The commands, a dataclass each: its docstring is its help, its fields are its options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from torch import nn
from tyro.conf import OmitArgPrefixes, UseAppendAction, arg

from bayesify import storage
from bayesify.cli._choosing import Choose
from bayesify.cli._comparison import Made, compare, evaluate_posterior, fit_method
from bayesify.cli._data import class_names, images_of
from bayesify.cli._deciding import Decide
from bayesify.cli._guard import Guard
from bayesify.cli._options import Command, Job, LearningJob, OodOptions, ScoreOptions
from bayesify.cli._output import JobError, Output, UsageError, aligned
from bayesify.cli._predicting import Predict
from bayesify.cli._serving import Serve
from bayesify.conversion import convert
from bayesify.methods import MAP, Method, list_methods, source_of
from bayesify.prediction import as_views

__all__ = [
    "COMMANDS",
    "Choose",
    "Compare",
    "Decide",
    "Demo",
    "Evaluate",
    "Fit",
    "Guard",
    "Methods",
    "Predict",
    "Report",
    "Serve",
]


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train a small network on embedded digits, show its worst mistakes and what bayesify makes of them.

    Examples:
      bayesify demo                        the story and a table here, a report in bayesify-demo/report.html
      bayesify demo --all                  every method instead of five
      bayesify demo --out results --seed 1
      bayesify demo --json --quiet > demo.json

    Attributes:
        out: Folder of the report.
        seed: Of everything random.
        all: Compare every method, which takes longer.
        quick: Train for a moment only: a check that everything runs.
    """

    out: Annotated[Path, arg(metavar="DIR")] = Path("bayesify-demo")
    seed: int = 0
    all: bool = False
    quick: bool = False

    def run(self) -> Output:
        """Run the demo."""
        from bayesify.cli.demo import run_demo

        result = run_demo(self.out, seed=self.seed, everything=self.all, quick=self.quick, progress=not self.quiet)
        return Output(str(result), result.to_dict(), failed=bool(result.comparison.failures))


@dataclass(frozen=True, kw_only=True)
class Methods(Command):
    """List the methods, with one line each.

    Examples:
      bayesify methods
      bayesify methods --settings

    Attributes:
        settings: List each method's settings and their defaults too.
    """

    settings: bool = False

    def run(self) -> Output:
        """List the registered methods."""
        found = {
            name: {
                "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
                "settings": {field.name: field.default for field in dataclasses.fields(cls)},
            }
            for name, cls in list_methods().items()
        }
        width = max(map(len, found))
        lines = []
        for name, entry in found.items():
            lines.append(f"{name:<{width}}  {entry['summary']}")
            if self.settings:
                lines += [f"{'':<{width}}    {key}={value}" for key, value in entry["settings"].items()]  # type: ignore[attr-defined]
        return Output("\n".join(lines), {"methods": found})


@dataclass(frozen=True, kw_only=True)
class Fit(LearningJob):
    r"""Make a network Bayesian, and save the posterior.

    Examples:
      bayesify fit --model my_project.models:make_network --weights network.safetensors \
          --data my_project.data:load --method swag --swag.rank 10 --calibrate --out posterior
      bayesify fit --model nets:cnn --weights cnn.safetensors --data mnist --method mc-dropout \
          --mc-dropout.p 0.1 --mc-dropout.insert-before linear --epochs 5 --out mnist-dropout
      bayesify fit --data customers.csv --label churned --method laplace --out posterior
      bayesify fit --data photos --model timm:resnet18 --train-epochs 5 --method mc-dropout --out posterior
      bayesify fit --data reviews.jsonl --model hf:distilbert-base-uncased --train-epochs 3 \
          --method laplace --calibrate --out posterior
      bayesify fit --method swag --help    the settings of a method

    From files, --out also gets the encoding and the network: 'evaluate' and 'predict' then need no --model.
    It writes what the method added to the network into the folder of --out; 'bayesify evaluate',
    'predict', 'compare' and 'report' take that folder as --posterior, with the same --model and --weights.
    The figures it prints are of the 'val' split, or of 'train' where there is none: 'test' is left for
    'bayesify evaluate'. With --widen or --calibrate, and for laplace, whose prior is chosen on 'val', they are of
    data that was looked at before.

    Attributes:
        out: Folder for the posterior.
    """

    out: Annotated[Path, arg(metavar="DIR")]

    def run(self) -> Output:
        """Convert, fit, calibrate, save, and compare with the plain network."""
        method, calibrates = self.one_method(), self.learning.calibrate
        opened = self.open_data()
        split = "train" if opened.find("val") is None else "val"
        if calibrates and split != "val":
            raise JobError(f"--calibrate needs a 'val' split, and {self.data.data} has none.")
        learning = dataclasses.replace(self.learning, calibrate=False)  # on the data of the figures, below
        task = self.task(opened, split, [method], learning)
        plain = convert(opened.network, MAP(), likelihood=opened.likelihood)
        before = evaluate_posterior(task, plain, "before")[0].metrics
        posterior, seconds = fit_method(task, method)
        if calibrates:
            task.calibrate(posterior, task.test)
        if self.prediction.views is not None:
            posterior.views = as_views(self.prediction.views)
        found = evaluate_posterior(task, posterior, "after")[0]
        after = found.metrics
        if opened.files is None:
            storage.save(posterior, self.out)
        else:
            opened.files.save(self.out, posterior)
        summary = {
            "method": method.name,
            "posterior": str(self.out),
            "split": split,
            "widened": None if posterior.widening is None else posterior.widening.factor,
            "calibrated": calibrates,
            "examples": len(found.prediction),
            "seconds": seconds,
            "before": before,
            "after": after,
        }
        shown = {"method": method.name, f"figures of {split!r}": "before -> after", **opened.unit()}
        shown |= {} if posterior.widening is None else {"noise": f"{posterior.widening.factor:.3g} times as wide"}
        shown |= {name: f"{before[name]:.4f} -> {after[name]:.4f}" for name in after}
        output = Output(aligned({**shown, "seconds": f"{seconds:.1f}", "posterior": self.out}), summary)
        return self.finish(opened, output)


@dataclass(frozen=True, kw_only=True)
class Evaluate(LearningJob):
    r"""Measure accuracy, NLL, Brier score, ECE and the detection of OOD inputs.

    Examples:
      bayesify evaluate --posterior posterior --model my_project.models:make_network \
          --weights network.safetensors --data my_project.data:load --ood my_project.data:other
      bayesify evaluate --method map --model nets:resnet20 --weights resnet20.safetensors \
          --data cifar10 --normalise imagenet --ood fashion-mnist

    With --calibrate the figures are those after calibration. fpr-at-95-ood-recall/SET is the share of the data
    that is suspected when 95 % of SET are. coverage-at-1-risk is the share that can be answered, most confident
    first, with at most 1 % of the answers wrong. --intervals 0.95 shows how far chance reaches.

    Attributes:
        posterior: A folder that 'bayesify fit' wrote; or give --method.
    """

    posterior: Annotated[Path | None, arg(metavar="DIR")] = None
    data: OmitArgPrefixes[OodOptions]
    prediction: OmitArgPrefixes[ScoreOptions]

    def run(self) -> Output:
        """Evaluate a saved posterior, or one made now."""
        opened, task, (posterior, _) = self.one_posterior(self.posterior, self.data.split)
        found = evaluate_posterior(task, posterior, source_of(posterior) or posterior.law.name)[-1]
        level = self.prediction.intervals
        metrics: dict[str, Any] = dict(found.metrics)
        if level is not None:
            known = found.intervals(level).items()
            metrics |= {name: f"{one.value:.4f}  [{one.low:.4f}, {one.high:.4f}]" for name, one in known}
        split = opened.split(self.data.split)
        count = len(found.prediction)
        shown = {"method": found.name, f"examples of {split!r}": count, **opened.unit(), **metrics}
        return self.finish(opened, Output(aligned(shown), {**found.to_dict(intervals=level), "split": split}))


@dataclass(frozen=True, kw_only=True)
class Compare(LearningJob):
    r"""Fit several methods, and print one table with quality and cost.

    Examples:
      bayesify compare --model my_project.models:make_network --weights network.safetensors \
          --data my_project.data:load --ood fashion-mnist --method mc-dropout --method swag \
          --swag.rank 10 --calibrate --report comparison.html
      bayesify compare --model nets:cnn --weights cnn.safetensors --data digits --posterior a --posterior b

    The plain network is always the first row, 'map', and --epochs is not for it. --method all is every one.
    A method that fails does not stop the others: its line says why, and the exit code is 1. --calibrate adds
    a calibrated row for each. --intervals 0.95 adds bootstrap intervals, and a table of paired differences
    to 'map', in which those that exclude zero are marked.

    Attributes:
        posterior: A saved posterior.
        report: Write an HTML report too.
    """

    always = (MAP.name,)

    posterior: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="DIR")] = ()
    report: Annotated[Path | None, arg(metavar="FILE")] = None
    data: OmitArgPrefixes[OodOptions]
    prediction: OmitArgPrefixes[ScoreOptions]

    def run(self) -> Output:
        """Compare methods and saved posteriors."""
        if not self.learning.method and not self.posterior:
            raise UsageError(
                "there is nothing to compare: give --method NAME or --posterior DIR, each as often as you like"
            )
        return _compare(self, self.data.split, self.methods, self.posterior, self.report)


@dataclass(frozen=True, kw_only=True)
class Report(Job):
    r"""Write an HTML report that compares saved posteriors.

    Examples:
      bayesify report --posterior swag --posterior dropout --model my_project.models:make_network \
          --weights network.safetensors --data my_project.data:load --ood fashion-mnist --out report.html

    It predicts anew, and shows the plain network as 'map' beside the posteriors. 'bayesify compare
    --report FILE' writes the same report for methods that it fits.

    Attributes:
        posterior: A saved posterior.
        out: The report.
    """

    posterior: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="DIR")] = ()
    out: Annotated[Path, arg(metavar="FILE")] = Path("report.html")
    data: OmitArgPrefixes[OodOptions]
    prediction: OmitArgPrefixes[ScoreOptions]

    def run(self) -> Output:
        """Write the report."""
        if not self.posterior:
            raise UsageError("give --posterior DIR, as often as you like")
        return _compare(self, self.data.split, {MAP.name: MAP()}, self.posterior, self.out)


COMMANDS: dict[str, type[Command]] = {
    cls.__name__.lower(): cls
    for cls in (Demo, Methods, Fit, Choose, Evaluate, Predict, Compare, Report, Guard, Decide, Serve)
}


def _compare(
    job: Job, asked: str | None, methods: Mapping[str, Method], folders: tuple[str, ...], report: Path | None
) -> Output:
    """Compare methods and saved posteriors, and write the report if there is to be one."""
    opened = job.open_data(folders) if isinstance(job, LearningJob) else job.open(folders)
    learning = job.learning if isinstance(job, LearningJob) else None
    task = job.task(opened, opened.split(asked), methods.values(), learning)
    makers = {name: partial(fit_method, task, method) for name, method in methods.items()}
    comparison = compare(task, {**makers, **{folder: partial(_load, folder, opened.network) for folder in folders}})
    level: float | None = getattr(job.prediction, "intervals", None)
    comparison = comparison.with_intervals(level)
    if report is not None:
        comparison, report = comparison.with_report(
            report,
            intervals=comparison.intervals,
            title=f"{job.network.model or 'mlp'} on {job.data.data}",
            images=images_of(task.test.dataset),
            class_names=class_names(task.test.dataset),
        )
    data = {**comparison.to_dict(), "report": None if report is None else str(report)}
    text = str(comparison) + (f"\n\nThe report is in {report}." if report else "")
    return job.finish(opened, Output(text, data, failed=bool(comparison.failures)))


def _load(folder: str, network: nn.Module) -> Made:
    return storage.load(folder, network), None
