"""ABNN on the pretrained CIFAR-10 ResNets, beside the baselines, with ablations.

`BAYESIFY_DATA=... python -m experiments.abnn_cifar` fine-tunes three members for each of three seeds, evaluates them
on the last 8,000 test images and on clothes and letters, and prints the table; about an hour on two cores for
ResNet-20. `--part ablations` varies one setting at a time, for one seed, and also prints the validation NLL, which is
what settings are to be chosen by. `--part gradients` prints the variance of gradients. Results go to
`experiments/results/abnn_cifar_*.json`. Runs that were stopped go on from their checkpoints in `--work`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

import bayesify
from bayesify import ABNN, measure
from bayesify.evaluate import Evaluation, evaluate
from experiments.cifar import foreign_loaders, loaders
from experiments.networks import pretrained

RESULTS = Path(__file__).parent / "results"

BASELINES: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout": bayesify.MCDropout(p=0.05, insert_before="conv", epochs=2, lr=0.005, schedule="cosine"),
    "deep ensemble of perturbed copies": bayesify.DeepEnsemble(
        members=5, start="perturbed", perturb_std=0.3, epochs=2, lr=0.02
    ),
}
ABLATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "the default": ({}, None),
    **{f"alpha={alpha}": ({"alpha": alpha}, None) for alpha in (0.0, 0.01, 0.02, 0.05, 0.2)},
    "noise per element": ({"noise": "element"}, None),
    "noise per element, alpha=0.3": ({"noise": "element", "alpha": 0.3}, None),
    "noise per channel": ({"noise": "channel"}, None),
    **{f"eta={eta}": ({"eta": eta}, None) for eta in (0.0, 3.0, 6.0)},
    "normalised loss, eta=6": ({"eta": 6.0, "normalised": True}, None),
    "all parameters trained": ({"train": "all"}, None),
    "statistics updated": ({"statistics": "updated"}, None),
    "not fitted": ({"epochs": 0}, None),
    # The paper's open question 1: how many layers.
    "the first layer": ({}, ["bn1"]),
    "the last block": ({}, ["layer3.2"]),
    "the last stage": ({}, ["layer3"]),
    "the last two stages": ({}, ["layer2", "layer3"]),
    "second norm of each block": ({}, ["*.bn2"]),
}
KEYS = ("accuracy", "nll", "ece", "aurc")


def shorter(loader: DataLoader, examples: int | None) -> DataLoader:
    """Return a loader of the first examples, for a trial."""
    if examples is None:
        return loader
    return DataLoader(Subset(loader.dataset, range(examples)), loader.batch_size)


class Run:
    """The data and where results are kept."""

    def __init__(self, network: str, work: Path, examples: int | None) -> None:
        """Read everything once; `examples` cuts each set for a trial."""
        self.name = network
        self.work = work
        self.train, self.val, self.test = (shorter(loader, examples) for loader in loaders())
        self.foreign = {name: shorter(loader, examples) for name, loader in foreign_loaders().items()}

    def fitted(self, label: str, method: bayesify.Method, seed: int, include: Any = None) -> dict[str, Any]:
        """Convert, fit and evaluate, before and after calibration."""
        posterior = bayesify.convert(pretrained(self.name), method, include=include)
        folder = self.work / f"{self.name}-{label}-{seed}".replace(" ", "-").replace(",", "").replace("=", "-")
        began = time.perf_counter()
        bayesify.fit(
            posterior, self.train, checkpoint=folder, checkpoint_steps=100, seed=seed, progress=False,
            accuracy_tolerance=1.0,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        row: dict[str, Any] = {"name": label, "seed": seed, "fit seconds": round(seconds, 1)}
        row["parameters learned"] = sum(p.numel() for p in posterior.parameters() if p.requires_grad)
        row["validation nll"] = evaluate(posterior, self.val, seed=seed).metrics["nll"]
        row["test"] = _metrics(evaluate(posterior, self.test, foreign=self.foreign, seed=seed))
        bayesify.calibrate(posterior, self.val)
        row["test, calibrated"] = _metrics(evaluate(posterior, self.test, foreign=self.foreign, seed=seed))
        return row


def _metrics(found: Evaluation) -> dict[str, float]:
    metrics = dict(found.metrics)
    for name, other in found.foreign.items():
        scores = found.prediction.score("total"), other.score("total")
        metrics[f"aupr/{name}"] = measure.aupr(*scores)
    return {name: round(value, 5) for name, value in metrics.items()}


def show(row: dict[str, Any]) -> None:
    """Print a line for each of the two evaluations."""
    for kind in ("test", "test, calibrated"):
        values = row[kind]
        foreign = {k: round(v, 3) for k, v in values.items() if k.startswith(("auroc/", "aupr/", "fpr95/"))}
        main = " ".join(f"{key} {values[key]:.4f}" for key in KEYS)
        print(
            f"{row['name']:34} seed {row['seed']} {kind:17} {main} val {row['validation nll']:.4f} {foreign}",
            flush=True,
        )


def gradients(run: Run, batches: int) -> dict[str, dict[str, float]]:
    """Return the variance of minibatch gradients: the covariance's trace, and that over the squared norm of the mean.

    The gradient is that of the normalisation parameters, which all three share. "batch" has one draw for each of
    several batches; "noise" several draws for one batch. Mean-field VI draws every weight w (1 + .05 eps) once for the
    batch, as weight-space methods do; ABNN has noise of the same size.
    """
    network = pretrained(run.name)
    data = [batch for batch, _ in zip(run.train, range(batches), strict=False)]
    norms = {n for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    names = [n for n, _ in network.named_parameters() if n.rpartition(".")[0] in norms]
    posterior = bayesify.convert(network, ABNN(members=1, eta=0.0, alpha=0.05))
    tensors = posterior.member_tensors(0)

    def plain(x: torch.Tensor, scale: float = 0.0) -> tuple[torch.Tensor, list[torch.Tensor]]:
        wanted = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
        drawn = {n: p * (1 + scale * torch.randn_like(p)) for n, p in wanted.items()}
        return functional_call(network, drawn, (x,)), [wanted[n] for n in names]

    def abnn(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with posterior.member(0):
            return posterior(x), [tensors[n] for n in names]

    kinds = {"plain": plain, "ABNN": abnn, "mean-field VI": lambda x: plain(x, 0.05)}
    found: dict[str, dict[str, float]] = {}
    for name, function in kinds.items():
        found[name] = {}
        for what, some in (("batch", data), ("noise", data[:1] * batches)):
            torch.manual_seed(0)
            rows = []
            for x, y in some:
                output, parameters = function(x)
                grads = torch.autograd.grad(cross_entropy(output, y), parameters)
                rows.append(torch.cat([g.flatten() for g in grads]))
            stacked = torch.stack(rows).double()
            variance = stacked.var(0).sum().item()
            found[name][what] = variance
            found[name][f"{what}, relative"] = variance / stacked.mean(0).square().sum().item()
    return found


def main() -> None:
    """Run a part and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("main", "ablations", "gradients"), default="main")
    parser.add_argument("--network", choices=("resnet20", "resnet44"), default="resnet20")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("abnn-work"), help="folder for checkpoints")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--examples", type=int, help="of each set, for a trial whose results are not kept")
    arguments = parser.parse_args()
    run = Run(arguments.network, arguments.work, arguments.examples)
    rows: Any = []
    if arguments.part == "gradients":
        rows = gradients(run, 4 if arguments.examples else 40)
        print(json.dumps(rows, indent=1))
    elif arguments.part == "ablations":
        for label, (changes, include) in ABLATIONS.items():
            if arguments.only is None or label in arguments.only:
                method = dataclasses.replace(ABNN(), **changes)
                rows.append(run.fitted(label, method, arguments.seeds[0], include))
                show(rows[-1])
    else:
        for label, method in {**BASELINES, "abnn": ABNN()}.items():
            for seed in arguments.seeds if label != "map" else arguments.seeds[:1]:
                if arguments.only is None or label in arguments.only:
                    seeded = dataclasses.replace(method, seed=seed) if hasattr(method, "seed") else method
                    rows.append(run.fitted(label, seeded, seed))
                    show(rows[-1])
    if arguments.examples is None:
        RESULTS.mkdir(exist_ok=True)
        record = {
            "command": f"python -m experiments.abnn_cifar --part {arguments.part} --network {arguments.network}",
            "seeds": arguments.seeds,
            "rows": rows,
        }
        path = RESULTS / f"abnn_cifar_{arguments.part}_{arguments.network}.json"
        path.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
