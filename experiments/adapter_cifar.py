"""BayesAdapter on the pretrained CIFAR-10 ResNets, without and with supervised uncertainty.

`BAYESIFY_DATA=... python -m experiments.adapter_cifar --part main` fine-tunes both for each seed and measures accuracy,
NLL, ECE and AURC beside the plain network's, with and without temperature scaling. The other parts take the fits of
`main` from their checkpoints in `--work`:

- `attacks`: average precision of the mutual information (20 draws on both sides) on the first `--attacked` test images
  that are not for validation, against PGD (20 steps of .003 within .031, 20 draws), the same by an attacker who knows
  the detector, the kinds of OOD images that were trained on, and kinds that were not;
- `figures`: accuracy by uncertainty, after rejection, and against the number of draws, with a picture;
- `cost`: training steps as multiples of plain ones, and what is saved against training from scratch;
- `tuning`: settings of the first compared on the validation images (the first 2,000 test images) alone.

The arguments are those of the fit without supervision; the supervised one's are `SUPERVISED` below.

Rows go to `experiments/results/adapter_cifar_*.json` one by one; what is there is not made again. `--trial` takes a
few images and keeps nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset

import bayesify
from bayesify import BayesAdapter, OODRegularizer, measure
from bayesify.data import OODImages, load, mix, noise_in_ball, salt_and_pepper, shuffle_patches
from bayesify.decide import disagreement_avoided, pgd
from bayesify.evaluation.evaluation import right_or_wrong
from experiments.cifar import loaders, ood_loaders
from experiments.networks import cifar_inputs, pretrained
from experiments.rows import Rows
from experiments.scoring import scored

RESULTS = Path(__file__).parent / "results"
NUM_DATA = 50_000
RUNS = ("bayes-adapter", "bayes-adapter, supervised")
# The supervised run: chosen on 200 validation images, since asking for uncertainty takes more and other steps. Draws
# have to disagree a little from the start, or there is no gradient to go by, and noise, which is the proxy of attacks,
# has to be most of the OOD images: with as many fakes the posterior learns the fakes alone.
SUPERVISED: dict[str, Any] = {
    "epochs": 2, "lr": 1e-3, "start_std": 0.015, "optimizer": "adam", "schedule": "cosine", "log_std_lr": 0.01,
    "log_std_schedule": "cosine", "statistics": "frozen",
}  # fmt: skip
REGULARIZER = OODRegularizer(weight=5.0, threshold=0.45)
SUPERVISED_IMAGES, SUPERVISED_BATCH, OOD_BATCH, FAKES = 32_000, 32, 40, 0.2

# WRN-28-10 in the paper: accuracy, NLL, ECE, average precision against PGD.
PAPER = {
    "map": (96.92, 0.1312, 0.0198, 0.307),
    "bayes-adapter": (97.09, 0.0945, 0.0094, 0.307),
    "bayes-adapter, supervised": (96.82, 0.1004, 0.0057, 0.993),
}


class Run:
    """The data, and posteriors that were fitted on them."""

    def __init__(self, arguments: argparse.Namespace, *, layout: torch.memory_format = torch.contiguous_format) -> None:
        """Read everything once."""
        self.arguments, self.layout = arguments, layout
        train, val, test = loaders()
        ood = ood_loaders(1000)
        if arguments.trial:
            val, test = (DataLoader(Subset(loader.dataset, range(64)), 32) for loader in (val, test))
            ood = {name: DataLoader(Subset(data.dataset, range(32)), 32) for name, data in ood.items()}
        self.data, self.val, self.test, self.ood = train.dataset, val, test, ood

    def train(self, *, supervised: bool = False) -> DataLoader:
        """Return batches of so many training images, others in each epoch."""
        images, batch = (SUPERVISED_IMAGES, SUPERVISED_BATCH) if supervised else (self.arguments.images, 128)
        if self.arguments.trial:
            images, batch = self.arguments.images, 16
        sampler = RandomSampler(self.data, num_draws=images)  # type: ignore[arg-type]
        return DataLoader(self.data, batch, sampler=sampler, drop_last=True)

    def supervision(self) -> dict[str, Any]:
        """Return what `fit` needs to ask for uncertainty on OOD images."""
        images = load("cifar10", "train").inputs.float()
        images = images / 255 if images.max() > 1 else images
        made = OODImages(images, share=FAKES, transform=lambda image: cifar_inputs(image[None])[0])
        loader = DataLoader(made, 8 if self.arguments.trial else OOD_BATCH, shuffle=True)
        return {"ood_loader": loader, "regularizer": REGULARIZER}

    def method(self, seed: int, *, supervised: bool = False, **changes: Any) -> BayesAdapter:
        """Return the configuration, as the arguments have it but for some changes, or that of the supervised run."""
        given = self.arguments
        settings = {
            "epochs": given.epochs[0], "lr": given.lr[0], "start_std": given.start_std[0],
            "optimizer": given.optimizer, "schedule": given.schedule, "log_std_lr": given.log_std_lr,
            "log_std_schedule": "cosine" if given.optimizer == "adam" else "steps",
            **(SUPERVISED if supervised else {}), **changes,
        }  # fmt: skip
        if given.trial:
            settings["epochs"] = 1
        low, high = (settings["start_std"] * math.exp(by) for by in (-0.5, 0.5))
        return BayesAdapter(**{**settings, "start_std": (low, high)}, seed=seed)

    def posterior(self, name: str, method: bayesify.Method, seed: int) -> tuple[bayesify.Posterior, dict[str, Any]]:
        """Convert and fit, from a checkpoint if there is one; return how long it took too."""
        posterior = bayesify.convert(pretrained(self.arguments.network).to(memory_format=self.layout), method)
        row: dict[str, Any] = {"seed": seed}
        if method.epochs:
            label = "".join(c if c.isalnum() or c == "." else "-" for c in f"{self.arguments.network}-{name}-{seed}")
            checkpoint = {"checkpoint": self.arguments.work / label, "checkpoint_steps": 100}
            supervised = "supervised" in name
            history = bayesify.fit(
                posterior, self.train(supervised=supervised), num_data=NUM_DATA, seed=seed, progress=False,
                accuracy_tolerance=1.0,
                **({} if self.arguments.trial else checkpoint),
                **(self.supervision() if supervised else {}),
            )  # fmt: skip
            row["seconds of an epoch"] = [round(epoch.seconds, 1) for epoch in history.epochs]
        return posterior, row


def main_row(run: Run, name: str, seed: int) -> dict[str, Any]:
    """Fit and measure."""
    method = bayesify.MAP() if name == "map" else run.method(seed, supervised=name == RUNS[1])
    posterior, row = run.posterior(name, method, seed)
    draws = None if name == "map" else run.arguments.draws
    measured = scored(posterior, run.val, run.test, run.ood, num_draws=draws, seed=seed)
    return {**row, **measured, "paper (WRN-28-10): accuracy, nll, ece, AP of PGD": PAPER[name]}


def tuning_row(run: Run, changes: dict[str, Any], label: str) -> dict[str, Any]:
    """Fit and measure on the validation images."""
    posterior, row = run.posterior(f"tuning-{label}", run.method(0, **changes), 0)
    return row | scored(posterior, run.val, None, num_draws=run.arguments.draws)


def scrambled(images: Tensor, seed: int = 0) -> Tensor:
    """Return images with the amplitudes of these and random phases."""
    torch.manual_seed(seed)
    phases = torch.fft.rfft2(torch.rand(len(images), 1, *images.shape[2:])).angle()
    shifted = torch.fft.irfft2(torch.fft.rfft2(images) * torch.polar(torch.ones_like(phases), phases))
    return shifted.clamp(0, 1)


def detected(run: Run, posterior: bayesify.Posterior, data: Any, number: int, *, adaptive: bool) -> dict[str, Any]:
    """Return the average precision of the mutual information against kinds of OOD images, which are printed."""
    draws, steps = (2, 2) if run.arguments.trial else (run.arguments.draws, 20)
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
    for kind, loader in run.ood.items():
        inputs = torch.cat([batch[0] for batch in loader])[:number]
        row[f"not seen: {kind}"] = _precisions(own, bayesify.predict(posterior, inputs, num_draws=draws, seed=1))
    return row


def _precisions(own: bayesify.Prediction, ood: bayesify.Prediction) -> dict[str, float]:
    return {
        "average precision": round(measure.average_precision(own.epistemic, ood.epistemic), 4),
        "by total entropy": round(measure.average_precision(own.score("total"), ood.score("total")), 4),
    }


def attack_row(run: Run, name: str, seed: int) -> dict[str, Any]:
    """Detect OOD images among the first test images; the adaptive attack is made where there is a detector."""
    posterior, _ = run.posterior(name, run.method(seed, supervised=name == RUNS[1]), seed)
    number = 8 if run.arguments.trial else run.arguments.attacked
    return {"seed": seed, **detected(run, posterior, load("cifar10", "test"), number, adaptive=name == RUNS[1])}


def figure_row(run: Run, name: str, seed: int) -> dict[str, Any]:
    """Return accuracies by uncertainty and after rejection, and against the number of draws."""
    posterior, _ = run.posterior(name, run.method(seed, supervised=name == RUNS[1]), seed)
    found = bayesify.predict(posterior, run.test, num_draws=run.arguments.draws, seed=seed, keep_samples=True)
    assert isinstance(found, bayesify.ClassificationPrediction)
    labels = torch.cat([batch[1] for batch in run.test])
    right = (found.label == labels).double()
    row: dict[str, Any] = {"seed": seed, "draws": run.arguments.draws}
    fractions = [0.0, 0.05, 0.1, 0.2]
    for score in ("epistemic", "total"):
        uncertainty = found.score(score)
        kept = measure.accuracy_after_rejection(uncertainty, right, fractions=fractions)
        row[f"accuracy after rejecting 0/5/10/20 % by {score}"] = [round(float(value), 5) for value in kept]
        buckets = measure.accuracy_by_bucket(uncertainty, right, num_buckets=10)
        row[f"accuracy by tenth of {score}"] = [round(float(value), 5) for value in buckets]
    row["aurc"] = round(measure.aurc(*right_or_wrong(found, labels)), 6)
    curve = measure.draws_curve(found.samples, labels)
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
            (line,) = axes.plot(draws, row[field], label=name.partition(", seed")[0])
            axes.plot(draws, row[f"single_{field}"], ".", color=line.get_color(), alpha=0.4)
        axes.set(xlabel="draws (points: single ones)", ylabel=label, xticks=range(0, len(draws) + 1, 5))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path)


def cost_row(run: Run, batches: int) -> dict[str, Any]:
    """Time batches of plain training and of both fits in turn."""
    kinds: dict[str, tuple[bayesify.Method, dict[str, Any]]] = {
        "plain": (bayesify.MAP(lr=1e-4, weight_decay=2e-4), {}),
        RUNS[0]: (BayesAdapter(prior_gradient="built-in"), {}),
        RUNS[1]: (BayesAdapter(prior_gradient="built-in"), run.supervision()),
    }
    steps = {kind: _step(run, *kinds[kind]) for kind in kinds}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for index, batch in enumerate(islice(iter(run.train()), batches)):
        for kind, step in steps.items():
            began = clock()
            step(batch)
            if index:
                found[kind].append(clock() - began)
    plain = found["plain"]
    row: dict[str, Any] = {"threads": torch.get_num_threads(), "batches": batches}
    for kind in RUNS:
        ratio = statistics.median(b / a for a, b in zip(plain, found[kind], strict=True))
        # Training from scratch is 200 epochs of the paper's schedule, fine-tuning 40 of them after 200 plain ones.
        saved = 1 - (200 + 40 * ratio) / (200 * ratio)
        row[kind] = {"step": round(ratio, 3), "saved against 200 such epochs": round(saved, 3), "paper": [2.1, 0.4]}
    return row


def _step(run: Run, method: bayesify.Method, supervision: dict[str, Any]) -> Callable[[Any], None]:
    posterior = bayesify.convert(pretrained(run.arguments.network), method).train()
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
    """Make the rows of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("main", "attacks", "figures", "cost", "tuning"), default="main")
    parser.add_argument("--network", default="resnet20", choices=("resnet20", "resnet32", "resnet44"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=10_000, help="training images in an epoch")
    parser.add_argument("--epochs", type=int, nargs="*", default=[4], help="tuning tries all")
    parser.add_argument("--lr", type=float, nargs="*", default=[8e-4], help="of the means; tuning tries all")
    parser.add_argument("--start-std", type=float, nargs="*", default=[0.0041], help="middle; tuning tries all")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant", help="of the means")
    parser.add_argument("--log-std-lr", type=float, default=0.1)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--attacked", type=int, default=500, help="how many test images are attacked")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--work", type=Path, default=Path("adapter-work"), help="folder for checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    if arguments.trial:
        arguments.images, arguments.epochs, arguments.draws = 64, [1], 3
    run = Run(arguments)
    path = RESULTS / f"adapter_cifar_{arguments.part}_{arguments.network}.json"
    chosen = f"--part {arguments.part} --network {arguments.network} --images {arguments.images}"
    if arguments.part != "tuning":
        chosen += f" --epochs {arguments.epochs[0]} --lr {arguments.lr[0]} --start-std {arguments.start_std[0]}"
        chosen += f" --optimiser {arguments.optimizer} --schedule {arguments.schedule}"
        chosen += f" --log-std-lr {arguments.log_std_lr}"
    rows = Rows(None if arguments.trial else path, f"python -m experiments.adapter_cifar {chosen}")

    def make(name: str, function: Callable[[], dict[str, Any]]) -> None:
        if arguments.only is None or name in arguments.only:
            made[name] = rows.row(name, function)

    made: dict[str, dict[str, Any]] = {}
    first = arguments.seeds[0]
    if arguments.part == "tuning":
        for epochs, lr, std in product(arguments.epochs, arguments.lr, arguments.start_std):
            label = f"epochs={epochs}, {arguments.optimizer}, lr={lr:g}, {arguments.schedule}, start_std={std:g}"
            label += f", log_std_lr={arguments.log_std_lr:g}"
            make(label, partial(tuning_row, run, {"epochs": epochs, "lr": lr, "start_std": std}, label))
    elif arguments.part == "main":
        make(f"map, seed {first}", partial(main_row, run, "map", first))
        for seed, name in product(arguments.seeds, RUNS):
            make(f"{name}, seed {seed}", partial(main_row, run, name, seed))
    elif arguments.part == "attacks":
        for name in RUNS:
            make(f"{name}, seed {first}", partial(attack_row, run, name, first))
    elif arguments.part == "figures":
        for name in RUNS:
            make(f"{name}, seed {first}", partial(figure_row, run, name, first))
        if not arguments.trial:
            draw_figures(made, RESULTS / f"adapter_draws_{arguments.network}.svg")
    else:
        make("steps", partial(cost_row, run, 3 if arguments.trial else 12))


if __name__ == "__main__":
    main()
