"""BayesAdapter on the pretrained CIFAR-10 ResNets, without and with supervised uncertainty.

`BAYESIFY_DATA=... python -m experiments.adapter_cifar --network resnet20 --seed 0` fine-tunes both, and prints
accuracy, NLL, ECE and AURC beside the plain network's, with and without temperature scaling, and the average precision
of the mutual information (20 draws on both sides) against PGD (20 steps of .003 within .031), the same with an attacker
who knows the detector, other image sets, and images that were changed in other ways than in training. Hours on two
cores; runs go on from their checkpoints in `--work`. `--quick` takes a few images, to check that everything runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

import bayesify
from bayesify.data import ForeignImages, blur, load, noise_in_ball, shuffle_patches
from bayesify.decide import disagreement_avoided, pgd
from bayesify.evaluate import evaluate, table
from bayesify.measure import average_precision
from experiments.cifar import foreign_loaders, loaders
from experiments.networks import cifar_inputs, pretrained

RESULTS = Path(__file__).parent / "results"

# WRN-28-10 in the paper: accuracy, NLL, ECE, average precision against PGD.
PAPER = {
    "map": (96.92, 0.1312, 0.0198, 0.307),
    "bayes-adapter": (97.09, 0.0945, 0.0094, 0.307),
    "bayes-adapter, supervised": (96.82, 0.1004, 0.0057, 0.993),
}


def pixels(split: str, number: int | None = None) -> tuple[Tensor, Tensor]:
    """Return images from 0 to 1 and labels."""
    data = load("cifar10", split)
    images = data.inputs[:number].float()
    return (images / 255 if images.max() > 1 else images), data.targets[:number]


def detection(
    posterior: bayesify.Posterior, images: Tensor, labels: Tensor, *, draws: int, steps: int
) -> dict[str, float]:
    """Return the average precision of the mutual information against several kinds of foreign images."""

    def score(x: Tensor) -> Tensor:
        return bayesify.predict(posterior, cifar_inputs(x), num_samples=draws, seed=1).epistemic

    own = score(images)

    def against(x: Tensor) -> float:
        return average_precision(own, score(x))

    def attacked(weight: float | None) -> Tensor:
        made = []
        for x, y in zip(images.split(100), labels.split(100), strict=True):
            goal = y if weight is None else disagreement_avoided(posterior.likelihood, y, weight)
            made.append(pgd(posterior, x, goal, steps=steps, num_samples=draws, preprocess=cifar_inputs))
        return torch.cat(made)

    found = {"pgd": against(attacked(None)), "pgd that knows the detector": against(attacked(10.0))}
    found["noise in the ball"] = against(noise_in_ball(images, 0.031, generator=0))
    found["blurred"] = against(blur(images, 2.0))
    found["patches of 16 shuffled"] = against(shuffle_patches(images, 16, generator=0))
    return found


def main() -> None:
    """Fit, evaluate, attack, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet20", choices=("resnet20", "resnet32", "resnet44"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--start-std", type=float, nargs=2, default=(0.0025, 0.0067))
    parser.add_argument("--attacked", type=int, default=500, help="how many test images are attacked")
    parser.add_argument("--work", type=Path, default=Path("adapter-work"), help="folder for checkpoints")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    quick = arguments.quick
    train, val, test = loaders()
    images, _ = pixels("train")
    if quick:
        train = DataLoader(Subset(train.dataset, range(64)), 16, shuffle=True)
        val, test = (DataLoader(TensorDataset(*(t[:64] for t in data.dataset.tensors)), 32) for data in (val, test))
        arguments.epochs, arguments.attacked = 1, 8
    made = ForeignImages(images, transform=_normalised)
    ood = DataLoader(made, 8 if quick else 64, shuffle=True)
    method = bayesify.BayesAdapter(epochs=arguments.epochs, start_std=tuple(arguments.start_std), seed=arguments.seed)
    runs: dict[str, tuple[bayesify.Method, dict]] = {
        "map": (bayesify.MAP(), {}),
        "bayes-adapter": (method, {}),
        "bayes-adapter, supervised": (method, {"ood_loader": ood, "regulariser": bayesify.UncertaintyRegulariser()}),
    }
    foreign = foreign_loaders(64 if quick else 2000)
    clean, labels = pixels("test", arguments.attacked)
    evaluations, record = [], {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "paper": PAPER}
    for name, (chosen, options) in runs.items():
        posterior = bayesify.convert(pretrained(arguments.network), chosen)
        folder = arguments.work / f"{arguments.network}-{arguments.seed}-{name.replace(', ', '-')}"
        began = time.perf_counter()
        checkpoint = {} if quick else {"checkpoint": folder, "checkpoint_steps": 100}
        bayesify.fit(posterior, train, seed=arguments.seed, progress=False, **options, **checkpoint)
        seconds = time.perf_counter() - began
        evaluations.append(evaluate(posterior, test, foreign=foreign, name=name))
        draws, steps = (2, 2) if quick else (20, 20)
        found = detection(posterior, clean, labels, draws=draws, steps=steps) if chosen is method else {}
        bayesify.calibrate(posterior, val)
        evaluations.append(evaluate(posterior, test, foreign=foreign, name=f"{name} + temperature"))
        record[name] = {"fit_seconds": seconds, "detection": found}
        record[f"{name} metrics"] = [evaluation.metrics for evaluation in evaluations[-2:]]
        print(name, f"{seconds:.0f} s", found, "paper (WRN-28-10):", PAPER[name], flush=True)
    print(table(evaluations))
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        name = f"adapter-{arguments.network}-{arguments.seed}.json"
        (RESULTS / name).write_text(json.dumps(record, indent=1))


def _normalised(image: Tensor) -> Tensor:
    return cifar_inputs(image[None])[0]


if __name__ == "__main__":
    main()
