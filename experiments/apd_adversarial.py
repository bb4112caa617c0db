"""Detecting adversarial images (APD, section 5.4, Table 3): source x detector.

`BAYESIFY_DATA=... python -m experiments.apd_adversarial` attacks one draw of each source (grey box) and its whole
predictive distribution (white box) with FGSM and PGD, and prints the AUROC of each detector's model variance between
attacked validation images and test images. `--quick` takes small settings.

FGSM is the smallest successful step along the gradient's sign, of a thousand up to the whole range; PGD has 40 steps of
.02 in a ball of .3, no random start, and keeps the first success: as the paper's attack library does. Images that are
wrong already count as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

import bayesify
from bayesify import measure
from experiments.mnist import NETWORKS, loader, posteriors

RESULTS = Path(__file__).parent / "results" / "apd_adversarial.json"
Function = Callable[[Tensor], Tensor]


def one_draw(posterior: bayesify.Posterior) -> Function:
    """Return log-probabilities of one draw."""
    draw = posterior.draw(0)
    return lambda x: draw(x).log_softmax(-1)


def whole(posterior: bayesify.Posterior, number: int = 20) -> Function:
    """Return log-probabilities of the predictive distribution, with gradients."""
    keys = posterior.keys(number, seed=0)

    def log_probs(x: Tensor) -> Tensor:
        found = torch.stack([posterior.evaluate(x, [key])[0].log_softmax(-1) for key in keys])
        return found.logsumexp(0) - torch.tensor(float(len(keys))).log()

    return log_probs


def _gradient(function: Function, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(nll_loss(function(x), y, reduction="sum"), x)[0]


def fgsm(function: Function, x: Tensor, y: Tensor, *, steps: int = 1000) -> Tensor:
    """Return the nearest images along the gradient's sign that are classified wrongly."""
    direction = _gradient(function, x, y).sign()
    found, left = x.clone(), _right(function, x, y)
    for step in range(1, steps + 1):
        if not left.any():
            break
        moved = (x[left] + 2 * step / steps * direction[left]).clamp(-1, 1)
        wrong = ~_right(function, moved, y[left])
        rows = left.nonzero()[:, 0][wrong]
        found[rows], left[rows] = moved[wrong], False
    return found


def pgd(function: Function, x: Tensor, y: Tensor, *, steps: int = 40, step: float = 0.02, ball: float = 0.3) -> Tensor:
    """Return the first images on the path of projected gradient ascent that are classified wrongly, else its end."""
    found, left, moved = x.clone(), _right(function, x, y), x.clone()
    for _ in range(steps):
        moved = moved + step * _gradient(function, moved, y).sign()
        moved = torch.minimum(torch.maximum(moved, x - ball), x + ball).clamp(-1, 1)
        found[left] = moved[left]
        left = left & _right(function, moved, y)
    return found


@torch.no_grad()
def _right(function: Function, x: Tensor, y: Tensor) -> Tensor:
    return function(x).argmax(-1) == y


def main() -> None:
    """Run, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--epochs", type=int, default=200)
    arguments = parser.parse_args()
    quick = arguments.quick
    number = 100 if quick else 6000
    val, test = loader("val", number=number), loader("test", number=number)
    sgld = bayesify.SGLD(
        epochs=2 if quick else arguments.epochs, lr=0.05, weight_decay=0.0 if quick else 1e-3, start="reset",
        num_samples=10 if quick else 1000,
    )  # fmt: skip
    made = posteriors(
        NETWORKS["fcNN1"], loader("train", number=2000 if quick else None), val, epochs=1 if quick else 40, sgld=sgld,
        steps=10 if quick else 5000, held_out=val.dataset.tensors[0][:500], num_samples=10 if quick else 1000,
    )  # fmt: skip
    names = ["MC dropout", "SGLD", "APD"]
    for name in names:
        made[name].eval()
    draws = 10 if quick else 1000
    inside = {n: bayesify.predict(made[n], test.dataset.tensors[0], num_samples=draws, seed=0) for n in names}
    rows = []
    for source in names:
        for box, function in (("grey", one_draw(made[source])), ("white", whole(made[source]))):
            for attack in (fgsm, pgd):
                x = torch.cat([attack(function, *batch) for batch in val])
                row: dict[str, object] = {"source": source, "box": box, "attack": attack.__name__}
                for detector in names:
                    found = bayesify.predict(made[detector], x, num_samples=draws, seed=0)
                    pair = inside[detector].model_variance, found.model_variance
                    row[detector] = round(100 * measure.auroc(*pair), 2)
                rows.append(row)
                print(row, flush=True)
    if not quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
