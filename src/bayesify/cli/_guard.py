"""Guards on the command line: one that is saved, with its network; and `bayesify guard`, which makes one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn
from tyro.conf import OmitArgPrefixes, UseAppendAction, arg

from bayesify.cli._data import class_names
from bayesify.cli._network import load_factory, load_weights
from bayesify.cli._options import LearningJob, OodOptions, Opened
from bayesify.cli._output import Output, UsageError
from bayesify.decide import Guard as Rule
from bayesify.files import Guarded, is_named, load_guard, save_guard
from bayesify.files.folders import FILE, read_settings

__all__ = ["Guard", "SavedNetworkOptions", "open_guard"]


@dataclass(frozen=True, kw_only=True)
class SavedNetworkOptions:
    """Which network a saved guard belongs to.

    Attributes:
        model: The function or class that made the network, as package.module:name. A guard that was made from files
            with a network by name (mlp, timm:NAME, hf:NAME) has it in its folder and needs none.
        model_arg: An argument of the factory, as a Python literal or text: --model-arg num_classes=10.
        weights: The trained weights: .safetensors, or a .pt/.pth state dict; not needed if the factory returns a
            trained network, or the guard's folder has them.
        device: Where to compute, as cpu or cuda:1.
    """

    model: Annotated[str | None, arg(metavar="MODULE:FACTORY")] = None
    model_arg: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE")] = ()
    weights: Annotated[Path | None, arg(metavar="FILE")] = None
    device: str = "cpu"

    def open(self, folder: str | Path) -> Guarded:
        """Load a guard onto its network."""
        return open_guard(folder, self)


def open_guard(folder: str | Path, options: SavedNetworkOptions) -> Guarded:
    """Load a guard, made from files or not, onto its network; nothing that the folder names is imported.

    Args:
        folder: What `bayesify guard` or `Guard.save` made.
        options: Where the network comes from.

    Raises:
        UsageError: The guard needs --model.
    """
    network: nn.Module | None = None
    named = (Path(folder) / FILE).is_file() and is_named(read_settings(folder).model)
    if options.model is not None and not is_named(options.model):
        network = load_factory(options.model, options.model_arg)
        if options.weights is not None:
            load_weights(network, options.weights)
    elif not named:
        if not (Path(folder) / "guard.json").is_file():
            raise UsageError(f"{folder} is no guard: it has no guard.json; 'bayesify guard' makes one")
        known = f" {read_settings(folder).model}" if (Path(folder) / FILE).is_file() else " package.module:factory"
        raise UsageError(f"{folder} belongs to a network of your own: give it again, --model{known}")
    return load_guard(folder, network=network, device=options.device)


@dataclass(frozen=True, kw_only=True)
class Guard(LearningJob):
    r"""Make a guard: what decides of each input whether to answer it, to ask a person, or that it is OOD.

    Examples:
      bayesify guard --posterior posterior --data customers.csv --max-risk 0.05 --out guard
      bayesify guard --posterior posterior --data held-out.jsonl --ood other-texts.jsonl --out guard
      bayesify guard --method map --model my_project.models:make_network --weights network.safetensors \
          --data my_project.data:load --split val --out guard

    One half of the examples chooses (temperature, scores, thresholds to test), the other half gives the promises: so
    they must be examples that neither training nor any choice before has looked at. By default these are the 'test'
    part of the data that a posterior was fitted on, and all rows of any other file. 'bayesify decide' then decides.

    Attributes:
        out: Folder for the guard.
        posterior: A folder that 'bayesify fit' or 'choose' wrote; or give --method.
        max_risk: The share of wrong answers allowed among answered inputs.
        confidence: The probability with which that must hold.
        id_acceptance: The share of known inputs that are not to be called OOD.
        coverage: The probability with which a prediction set or an interval holds the target.
        ood_score: What finds OOD inputs: total, epistemic, knn, ...; several are combined by rank. None chooses by
            --ood, and is total without.
        uncertainty: What decides whether to answer; auto chooses.
        sets: The kind of prediction sets.
        by_class: Promise the coverage of sets for each class.
        tolerance: For numbers: the largest error of an answer that is right, in the label's units.
        max_width: For numbers: the widest interval of an answer, in the label's units; no risk is promised then.
    """

    out: Annotated[Path, arg(metavar="DIR")]
    posterior: Annotated[Path | None, arg(metavar="DIR")] = None
    max_risk: float = 0.01
    confidence: float = 0.95
    id_acceptance: float = 0.95
    coverage: float = 0.95
    ood_score: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    uncertainty: str = "auto"
    sets: Literal["split", "aps", "raps"] = "split"
    by_class: bool = False
    tolerance: Annotated[float | None, arg(metavar="NUMBER")] = None
    max_width: Annotated[float | None, arg(metavar="NUMBER")] = None
    data: OmitArgPrefixes[OodOptions]

    def run(self) -> Output:
        """Fit a guard, and save it."""
        opened, task, (posterior, _) = self.one_posterior(self.posterior, self.data.split)
        if len(self.data.ood) > 1:
            raise UsageError("give --ood once: put all that should be called OOD into one set")
        if task.calibrates and task.val is not None:
            task.calibrate(posterior, task.val)
        labels = None if opened.files is None else opened.files.encoding.labels
        unit = 1.0 if labels is None else labels.std
        guard = Rule.fit(
            posterior,
            task.test,
            ood_loader=next(iter(task.ood.values()), None),
            max_risk=self.max_risk,
            confidence=self.confidence,
            id_acceptance=self.id_acceptance,
            coverage=self.coverage,
            how=self.prediction.how,
            views=self.prediction.views,
            num_draws=self.prediction.num_draws,
            score=self.ood_score or "auto",
            uncertainty=self.uncertainty,
            sets=self.sets,
            condition="class" if self.by_class else None,
            tolerance=None if self.tolerance is None else self.tolerance / unit,
            max_width=None if self.max_width is None else self.max_width / unit,
            calibrate=not task.calibrates,
            class_names=_names(opened, task.test.dataset),
            seed=self.prediction.seed,
        )
        if opened.files is None:
            guard.save(self.out)
        else:
            files = opened.files
            save_guard(self.out, guard, opened.network, files.encoding, files.settings, weights=files.stored)
        split = opened.split(self.data.split)
        noted = [f"  {name} {value}" for name, value in opened.unit().items()]
        text = "\n".join(
            [repr(guard), *noted, f"  examples: {split!r} of {opened.name}", f"The guard is in {self.out}."]
        )
        data = {"guard": str(self.out), "split": split, "threshold": guard.threshold, **guard.numbers}
        return self.finish(opened, Output(text, data))


def _names(opened: Opened, dataset: Any) -> list[str] | None:
    labels = None if opened.files is None else opened.files.encoding.labels
    if labels is not None and labels.classes is not None:
        return list(labels.classes)
    return class_names(dataset)
