"""What members and noise bring apart in ABNN's fit, and what networks that were trained apart would.

`BAYESIFY_DATA=... python -m experiments.abnn_study` takes the first fit of `python -m experiments.run
abnn_cifar_main_resnet20` from its checkpoint in `--work`. Rows go to
`experiments/results/abnn_cifar_study_resnet20.json`. `--part alpha` needs no fit: it prints the strength of noise for
each element at which the pretrained network's logits vary as much as under the default, noise for each example and
channel, which `abnn_cifar_claims_resnet20` takes. `--trial` takes a few images and keeps nothing.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bayesify
from bayesify.laws import Refusal
from experiments.abnn_gradients import spread
from experiments.config import Setting
from experiments.measures import Scored, calibrated, targets_of
from experiments.networks import pretrained
from experiments.records import RESULTS, Records
from experiments.run import fitted, found

# How strong the noise is, as a share of the fit's, and how many draws.
PARTS = {"nine draws": (1.0, 9), "thirty draws": (1.0, 30), "the three members without noise": (0.0, 3)}
APART = ("resnet20", "resnet32", "resnet44")


def part_of(
    posterior: bayesify.Posterior, setting: Setting, share: float, draws: int, *, trial: bool
) -> dict[str, Any]:
    """Measure with another strength of the noise."""
    rescale = posterior.law.rescaling()
    assert not isinstance(rescale, Refusal)
    try:
        rescale(share)
        return Scored(num_draws=draws, test=False)(posterior, setting, seed=0, trial=trial)
    finally:
        rescale(1.0)


def apart(setting: Setting) -> dict[str, Any]:
    """Measure the average of networks that were trained apart."""
    outputs = []
    for loader in (setting.val, setting.test):
        members = [bayesify.convert(pretrained(name), "map") for name in APART]
        predictions = [bayesify.predict(member, loader, num_draws=1) for member in members]
        outputs.append((torch.stack([p.log_probs for p in predictions]), targets_of(members[0], loader)))  # type: ignore[attr-defined]
    val, test = outputs
    return calibrated(val, test)


def equal_alpha(setting: Setting, *, trial: bool) -> dict[str, Any]:
    """Return the alpha of element noise, by bisection of its logarithm, on validation images."""
    images = next(iter(setting.val))[0][: 8 if trial else 64]

    def spread_of(**changes: Any) -> float:
        member = bayesify.ABNN(members=1, eta=0.0, epochs=0, **changes)
        return spread(bayesify.convert(setting.network, member).eval(), images, draws=2 if trial else 10)

    wanted = spread_of()
    low, high = 0.05, 1.0
    for _ in range(2 if trial else 8):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spread_of(alpha=middle, noise="element") < wanted else (low, middle)
    alpha = math.sqrt(low * high)
    return {
        "logits": round(wanted, 4),
        "alpha": round(alpha, 4),
        "reached": round(spread_of(alpha=alpha, noise="element"), 4),
    }


def main() -> None:
    """Make the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("fit", "alpha"), default="fit")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    config = found("abnn_cifar_main_resnet20", "abnn")
    if arguments.part == "alpha":
        setting = config.task.setting(0, trial=arguments.trial, work=arguments.work)
        print(equal_alpha(setting, trial=arguments.trial))
        return
    posterior, setting = fitted(config, trial=arguments.trial, work=arguments.work)
    records = Records(None if arguments.trial else RESULTS / "abnn_cifar_study_resnet20.json", config.described())
    for name, (share, draws) in PARTS.items():
        make = partial(part_of, posterior, setting, share, draws, trial=arguments.trial)
        records.row(name, make, config={"share": share, "draws": draws})
    records.row(
        "the average of the pretrained ResNets 20, 32 and 44", partial(apart, setting), config={"networks": APART}
    )


if __name__ == "__main__":
    main()
