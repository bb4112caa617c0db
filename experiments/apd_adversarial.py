"""Adversarial detection on MNIST (APD, section 5.4, Table 4): who is attacked, and who notices.

`BAYESIFY_DATA=... python -m experiments.apd_adversarial` attacks validation images through one draw of MC dropout,
SGLD and APD (grey box, as in the paper) and through their averages (white box), by FGSM with the shortest step that
is enough and by PGD (40 steps, a ball of .3 on [-1, 1]), and prints how well the model variance of each tells
attacked from clean test images. The paper attacks 6,000 images and detects by 1,000 draws; `--rows` and `--draws` say
how many here. Posteriors are those of `experiments.apd_mnist`: run that first with the same `--work`. Rows go to
`experiments/results/apd_adversarial.json`. `--trial` takes seconds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import bayesify
from experiments.apd_common import BOUNDS, arguments_of, mnist, rows_of
from experiments.apd_mnist import Lab
from experiments.protocols import attack_table

NAMES = ("MC dropout", "SGLD", "APD")
PAPER = {
    "MC dropout, FGSM": (89.53, 94.01, 91.70), "MC dropout, PGD": (88.37, 93.95, 91.63),
    "SGLD, FGSM": (54.99, 83.76, 75.93), "SGLD, PGD": (56.91, 84.98, 82.80),
    "APD, FGSM": (54.51, 83.05, 86.02), "APD, PGD": (54.98, 88.01, 93.15),
}  # fmt: skip


def row(lab: Lab, made: dict[str, bayesify.Posterior], source: str, box: Any) -> dict[str, Any]:
    """Return the AUROC of every detector for the attacks through one source."""
    number, draws = lab.arguments.rows, lab.arguments.draws
    x, y = (part[:number] for part in lab.data.val)
    table = attack_table(
        {source: made[source]}, made, x, y, lab.data.test[0][:number], boxes=(box,), radius=0.3, bounds=BOUNDS,
        num_draws=draws,
    )  # fmt: skip
    return {
        attack: {
            detector: {score: round(100 * found.auroc, 2) for score, found in scores.items()}
            for detector, scores in detectors.items()
        }
        for (_, _, attack), detectors in table.items()
    }


def main() -> None:
    """Make the rows."""
    arguments = arguments_of(
        __doc__, "apd_mnist", network=("fcNN1",), epochs=160, samples=2000, steps=4000, draws=500, rows=2000
    )
    lab = Lab(mnist(trial=arguments.trial, number=50), arguments)
    members = lab.members()
    made = {name: lab.drawn(members[name]()) for name in NAMES}
    rows = rows_of("apd_adversarial", arguments)
    for box in ("grey", "white"):
        for source in NAMES:
            rows.row(f"{source}, {box}", partial(row, lab, made, source, box))
    for name, values in PAPER.items():
        print(f"paper, grey, {name}: {dict(zip(NAMES, values, strict=True))}")


if __name__ == "__main__":
    main()
