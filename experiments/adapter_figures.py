"""BayesAdapter on CIFAR-10: attacks and who notices, rejection and the number of draws, the cost of a step.

`BAYESIFY_DATA=... python -m experiments.adapter_figures` takes the fits of `python -m experiments.run
adapter_cifar_main_resnet20` from their checkpoints in `--work`. Its parts:

- `attacks`: average precision of the mutual information (20 draws on both sides) on the first 500 test images that are
  not for validation, against PGD (20 steps of .003 within .031, 20 draws), the same by an attacker who knows the
  detector, the kinds of OOD images that were trained on, and kinds that were not;
- `figures`: accuracy by uncertainty, after rejection, and against the number of draws, with a picture;
- `cost`: training steps as multiples of plain ones, and what is saved against training from scratch.

Rows go to `experiments/results/adapter_cifar_*_resnet20.json`. `--trial` takes a few images and keeps nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesify
from bayesify import BayesAdapter, measure
from bayesify.data import mix, noise_in_ball, salt_and_pepper, shuffle_patches
from bayesify.decide import disagreement_avoided, pgd
from experiments.cifar import NUM_DATA
from experiments.config import Setting
from experiments.data import load
from experiments.draws import draws_curve
from experiments.measures import targets_of
from experiments.networks import cifar_inputs
from experiments.records import PICTURES, RESULTS, Records
from experiments.run import fitted, found

EXPERIMENT = "adapter_cifar_main_resnet20"
RUNS = ("bayes-adapter", "bayes-adapter, supervised")
ATTACKED, DRAWS = 500, 20


def scrambled(images: Tensor, seed: int = 0) -> Tensor:
    """Return images with the amplitudes of these and random phases."""
    torch.manual_seed(seed)
    phases = torch.fft.rfft2(torch.rand(len(images), 1, *images.shape[2:])).angle()
    shifted = torch.fft.irfft2(torch.fft.rfft2(images) * torch.polar(torch.ones_like(phases), phases))
    return shifted.clamp(0, 1)


def attacks(posterior: bayesify.Posterior, setting: Setting, *, adaptive: bool, trial: bool) -> dict[str, Any]:
    """Return the average precision of the mutual information against kinds of OOD images, which are printed."""
    number, draws, steps = (8, 2, 2) if trial else (ATTACKED, DRAWS, 20)
    data = load("cifar10", "test")
    images, labels = data.inputs[:number], data.targets[:number]

    def predicted(x: Tensor) -> bayesify.ClassificationPrediction:
        found = bayesify.predict(posterior, cifar_inputs(x), num_draws=draws, seed=1)
        assert isinstance(found, bayesify.ClassificationPrediction)
        return found

    def attacked(goal: Callable[[Tensor], Any]) -> Tensor:
        pairs = zip(images.split(100), labels.split(100), strict=True)
        options = {"steps": steps, "num_draws": draws, "preprocess": cifar_inputs}
        return torch.cat([pgd(posterior, x, goal(y), **options) for x, y in pairs])

    sets = {
        "pgd": lambda: attacked(lambda y: y),
        "pgd that knows the detector": lambda: attacked(partial(disagreement_avoided, posterior.likelihood)),
        "trained on: noise in the ball": lambda: noise_in_ball(images, 0.031, generator=0),
        "trained on: patches of 8 shuffled": lambda: shuffle_patches(images, 8, generator=0),
        "trained on: mixed": lambda: mix(images, images.flip(0)),
        "not seen: patches of 4 shuffled": lambda: shuffle_patches(images, 4, generator=0),
        "not seen: salt and pepper": lambda: salt_and_pepper(images, 0.1, generator=0),
        "not seen: random phases": lambda: scrambled(images),
    }
    own = predicted(images)
    row: dict[str, Any] = {"images": number, "draws": draws, "accuracy": measure.accuracy(own.probs, labels)}
    if not adaptive:
        del sets["pgd that knows the detector"]
    for kind, make in sets.items():
        ood = predicted(make())
        row[kind] = {**_precisions(own, ood), "accuracy": round(measure.accuracy(ood.probs, labels), 4)}
        print(kind, row[kind], flush=True)
    for kind, loader in setting.ood.items():
        inputs = torch.cat([batch[0] for batch in loader])[:number]
        row[f"not seen: {kind}"] = _precisions(own, bayesify.predict(posterior, inputs, num_draws=draws, seed=1))
    return row


def _precisions(own: bayesify.Prediction, ood: bayesify.Prediction) -> dict[str, float]:
    return {
        "average precision": round(measure.average_precision(own.epistemic, ood.epistemic), 4),
        "by total entropy": round(measure.average_precision(own.score("total"), ood.score("total")), 4),
    }


def figures(posterior: bayesify.Posterior, setting: Setting) -> dict[str, Any]:
    """Return accuracies by uncertainty and after rejection, and against the number of draws."""
    prediction = bayesify.predict(posterior, setting.test, num_draws=DRAWS, seed=0, keep_samples=True)
    assert isinstance(prediction, bayesify.ClassificationPrediction)
    labels = targets_of(posterior, setting.test)
    right = (prediction.label == labels).double()
    row: dict[str, Any] = {"draws": DRAWS}
    for score in ("epistemic", "total"):
        uncertainty = prediction.score(score)
        kept = measure.accuracy_after_rejection(uncertainty, right, fractions=[0.0, 0.05, 0.1, 0.2])
        row[f"accuracy after rejecting 0/5/10/20 % by {score}"] = [round(float(value), 5) for value in kept]
        buckets = measure.accuracy_by_bucket(uncertainty, right, num_buckets=10)
        row[f"accuracy by tenth of {score}"] = [round(float(value), 5) for value in buckets]
    row["aurc"] = round(measure.aurc(prediction.score("msp"), right), 6)
    curve = draws_curve(prediction.samples, labels)
    for field in ("accuracy", "nll", "single_accuracy", "single_nll"):
        row[field] = [round(float(value), 5) for value in getattr(curve, field)]
    return row


def draw_figures(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw accuracy and NLL against the number of draws."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, field, label in zip(figure.subplots(1, 2), ("accuracy", "nll"), ("accuracy", "NLL"), strict=True):
        for name, row in rows.items():
            draws = range(1, len(row[field]) + 1)
            (line,) = axes.plot(draws, row[field], label=name)
            axes.plot(draws, row[f"single_{field}"], ".", color=line.get_color(), alpha=0.4)
        axes.set(xlabel="draws (points: single ones)", ylabel=label, xticks=range(0, len(draws) + 1, 5))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path)


def cost(setting: Setting, batches: int) -> dict[str, Any]:
    """Time batches of plain training and of both fits in turn."""
    assert setting.supervision is not None
    kinds: dict[str, tuple[bayesify.Method, dict[str, Any]]] = {
        "plain": (bayesify.MAP(lr=1e-4, weight_decay=2e-4), {}),
        RUNS[0]: (BayesAdapter(prior_gradient="built-in"), {}),
        RUNS[1]: (BayesAdapter(prior_gradient="built-in"), setting.supervision()),
    }
    steps = {kind: _step(setting, *kinds[kind]) for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for index, batch in enumerate(islice(iter(setting.train), batches)):
        for kind, step in steps.items():
            began = clock()
            step(batch)
            if index:
                times[kind].append(clock() - began)
    row: dict[str, Any] = {"threads": torch.get_num_threads(), "batches": batches}
    for kind in RUNS:
        ratio = statistics.median(b / a for a, b in zip(times["plain"], times[kind], strict=True))
        # Training from scratch is 200 epochs of the paper's schedule, fine-tuning 40 of them after 200 plain ones.
        saved = 1 - (200 + 40 * ratio) / (200 * ratio)
        row[kind] = {"step": round(ratio, 3), "saved against 200 such epochs": round(saved, 3), "paper": [2.1, 0.4]}
    return row


def _step(setting: Setting, method: bayesify.Method, supervision: dict[str, Any]) -> Callable[[Any], None]:
    posterior = bayesify.convert(setting.network, method).train()
    optimizer = method.make_optimizer(method.stages(posterior)[0].groups)
    method.prepare_optimizer(posterior, optimizer, NUM_DATA)
    options: dict[str, Any] = {}
    if supervision:
        ood = next(iter(supervision["ood_loader"]))
        options = {"ood": ood, "regularizer": supervision["regularizer"]}

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        posterior.loss(batch, num_data=NUM_DATA, **options).total.backward()
        optimizer.step()

    return step


def main() -> None:
    """Make the rows of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", choices=("attacks", "figures", "cost"), nargs="*", default=["attacks", "figures", "cost"]
    )
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    trial = arguments.trial
    for part in arguments.part:
        settings = {"part": part, "draws": DRAWS, "attacked": ATTACKED}
        records = Records(None if trial else RESULTS / f"adapter_cifar_{part}_resnet20.json", settings)
        if part == "cost":
            setting = fitted(found(EXPERIMENT, "map"), trial=trial, work=arguments.work)[1]
            records.row("steps", partial(cost, setting, 3 if trial else 12))
            continue
        made = {}
        for name in RUNS:
            config = found(EXPERIMENT, name)

            def make(config: Any = config, part: str = part) -> dict[str, Any]:
                posterior, setting = fitted(config, trial=trial, work=arguments.work)
                if part == "figures":
                    return figures(posterior, setting)
                return attacks(posterior, setting, adaptive=config.supervised, trial=trial)

            made[name] = records.row(name, make, config=config.described())
        if part == "figures" and not trial:
            draw_figures(made, PICTURES / "adapter_draws_resnet20.svg")


if __name__ == "__main__":
    main()
