"""The baselines on the pretrained CIFAR-10 ResNet-20.

`BAYESIFY_DATA=... python -m experiments.baselines` converts, fits and evaluates each baseline, prints the table and
writes `experiments/results/baselines.json`. About a quarter of an hour on two cores; a run that was stopped goes on
from its checkpoints in `--work`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import bayesify
from bayesify.evaluation.evaluation import evaluate, table
from experiments.cifar import loaders, ood_loaders
from experiments.networks import pretrained

RESULTS = Path(__file__).parent / "results" / "baselines.json"

DRAWS = 5
METHODS = {
    "map": bayesify.MAP(),
    "mc-dropout, last layer, not fitted": bayesify.MCDropout(p=0.1, insert_before="linear"),
    "mc-dropout, convolutions": bayesify.MCDropout(p=0.05, insert_before="conv", epochs=1, lr=0.005, schedule="cosine"),
    "swag": bayesify.SWAG(epochs=2, lr=0.01, snapshots_per_epoch=10, rank=10, num_bn_draws=10, statistics_batches=20),
    "deep ensemble of perturbed copies": bayesify.DeepEnsemble(
        members=3, start="perturbed", perturb_std=0.3, epochs=1, lr=0.02
    ),
}


def main() -> None:
    """Run all baselines and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("baselines-work"), help="folder for checkpoints")
    parser.add_argument("--only", nargs="*", default=list(METHODS), help="names of baselines")
    parser.add_argument("--images", type=int, default=50_000, help="how many training images to fit on")
    arguments = parser.parse_args()
    work, only = arguments.work, arguments.only
    train, val, test = loaders(images=arguments.images)
    ood = ood_loaders(1000)
    evaluations, seconds = [], {}
    for name in only:
        torch.manual_seed(0)
        posterior = bayesify.convert(pretrained("resnet20"), METHODS[name])
        began = time.perf_counter()
        checkpoint = work / name.replace(" ", "-").replace(",", "")
        bayesify.fit(posterior, train, val_loader=val, checkpoint=checkpoint, checkpoint_steps=100, progress=False)
        seconds[name] = time.perf_counter() - began
        options = {"ood": ood, "num_draws": DRAWS}
        evaluations.append(evaluate(posterior, test, name=name, **options))
        bayesify.calibrate(posterior, val, num_draws=DRAWS)
        evaluations.append(evaluate(posterior, test, name=f"{name} + temperature", **options))
        temperature = float(posterior.likelihood.temperature)
        print(f"{name}: {seconds[name]:.0f} s to fit, temperature {temperature:.3f}", flush=True)
        for evaluation in evaluations[-2:]:
            print("   ", {key: round(value, 4) for key, value in evaluation.metrics.items()}, flush=True)
        names = " ".join(map(repr, only))
        record = {
            "command": f"python -m experiments.baselines --images {arguments.images} --only {names}",
            "seed": 0,
            "training_images": arguments.images,
            "draws": DRAWS,
            "fit_seconds": seconds,
            "evaluations": [{**e.to_dict(), "conversion": None} for e in evaluations],
        }
        RESULTS.write_text(json.dumps(record, indent=1))
    print(table(evaluations))


if __name__ == "__main__":
    main()
