"""Accuracy and anomaly detection on MNIST (APD, section 5.2, Tables 1 to 3 and 5, Figures 3, 5, 6, 7 and 9).

`BAYESIFY_DATA=... python -m experiments.apd_mnist` fits SGD, MC dropout and SGLD to fcNN1, distils SGLD's samples,
and makes a row for each of them and for the baselines of the distillation: accuracy, and AUROC, AUPR+ and AUPR- of
every score against five OOD sets multiplied by 5, every set on [-1, 1] before. `--network fcNN2` takes the larger
network. Other parts: `--part rates` (SGLD's rate, chosen without OOD sets), `--part chains` (one chain or four of equal
cost, on validation images), `--part agreements` (distillations against the bank), `--part study` (what decides the
AUROC: burn-in, prior, rate, chains, number and spread of samples), `--part samples`, `scales`, `components`, `games`
(the figures, of notMNIST). Rows go to `experiments/results/apd_mnist_*.json`, pictures beside them; what is there is
not made again, and posteriors are kept in `--work`. `--trial` takes a few images.

SGLD runs for 160 epochs, 80,000 steps, eight times the prior's relaxation time: the first half is burn-in, and of the
second half every 20th state is kept, as in the paper, whose runs have 200,000 steps, five times the relaxation time at
its rate, and a burn-in of 500. The paper's generators train for 100,000 steps; these stop when they agree no better
with the bank, after `--steps` at the latest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bayesify
from bayesify import measure
from bayesify.laws import BankLaw, VectorLaw
from bayesify.methods import inherit, require_bank, source_of
from bayesify.methods.distillation import agreement
from experiments.apd_common import BOUNDS, NETWORKS, Data, arguments_of, draw_curves, kept, mlp, mnist, rows_of
from experiments.protocols import anomaly_table
from experiments.records import Records, config_hash

FACTOR = 5.0
RATE = 0.2  # of SGLD, by `--part rates`; the paper's is .05
PAPER = {
    "accuracy, fcNN1": {"SGD": 0.981, "MC dropout": 0.973, "SGLD": 0.979, "APD": 0.978},
    "accuracy, fcNN2": {"SGD": 0.981, "MC dropout": 0.983, "SGLD": 0.980, "APD": 0.981},
    "AUROC, fcNN1, notMNIST, entropy": {"SGD": 57.7, "MC dropout": 83.3, "SGLD": 92.3, "APD": 92.2},
    "AUROC, fcNN1, notMNIST, BALD": {"SGLD": 97.8, "APD": 97.6},
    "AUROC, fcNN1, notMNIST, max probability": {"SGD": 58.5, "MC dropout": 86.5, "SGLD": 93.2, "APD": 92.7},
    "AUROC, fcNN2, notMNIST, entropy": {"SGD": 61.4, "MC dropout": 87.0, "SGLD": 98.7, "APD": 98.3},
    "AUROC, fcNN2, notMNIST, BALD": {"SGLD": 99.7, "APD": 99.6},
}


class Lab:
    """Posteriors of one network, made when they are asked for and kept.

    Args:
        data: What they learn from and are asked about.
        arguments: With `network`, `epochs` and `samples` of SGLD, `steps` of a generator, `draws` of a prediction.
    """

    def __init__(self, data: Data, arguments: argparse.Namespace) -> None:
        self.data, self.arguments = data, arguments
        self.sizes = NETWORKS[arguments.network]
        self.trial = arguments.trial
        if self.trial:
            arguments.epochs, arguments.samples, arguments.steps, arguments.draws = 4, 10, 10, 8
        self.held_out = data.val[0][:500]

    def folder(self, name: str) -> Path | None:
        """Return where a posterior is kept."""
        work = self.arguments.work
        return None if work is None else work / self.arguments.network / name.replace(" ", "-").replace(",", "")

    def plain(self, name: str) -> bayesify.Posterior:
        """Return SGD or MC dropout, at the epoch with the least validation loss."""
        # With momentum .9 this moves as far as the paper's rate, .05, without.
        settings: dict[str, Any] = {"epochs": 1 if self.trial else 40, "lr": 0.005, "weight_decay": 1e-3}
        torch.manual_seed(0)
        if name == "SGD":
            return kept(mlp(*self.sizes), bayesify.MAP(**settings), self.data, self.folder(name), best=True)
        dropped, method = mlp(*self.sizes, dropout=0.5), bayesify.MCDropout(**settings)
        return kept(dropped, method, self.data, self.folder(name), best=True)

    def sgld(self, name: str = "SGLD", **changes: Any) -> bayesify.Posterior:
        """Return SGLD with the paper's prior, and half of its steps as burn-in."""
        settings: dict[str, Any] = {
            "epochs": self.arguments.epochs, "lr": RATE, "weight_decay": 1e-3,
            "samples_per_chain": self.arguments.samples,
            "start": "reset",
        }  # fmt: skip
        settings |= changes
        if self.trial:
            settings |= {"epochs": 4, "samples_per_chain": 10, "weight_decay": 0.0}
        trained = changes.get("start") == "network"
        torch.manual_seed(0)
        network = self.plain("SGD").network if trained else mlp(*self.sizes)
        return kept(network, bayesify.SGLD(**settings), self.data, self.folder(name))

    def distilled(self, how: str, **options: Any) -> bayesify.Posterior:
        """Return a distillation of SGLD's samples, from its folder if it is there."""
        given = {option: getattr(self.arguments, option) for option in ("epochs", "samples", "steps")}
        folder = self.folder(f"{how}-{config_hash([options, given, RATE])}")
        if folder is not None and (folder / "config.json").exists():
            torch.manual_seed(0)
            return bayesify.load(folder, mlp(*self.sizes)).eval()
        game: dict[str, Any] = {"progress": False}
        if "hidden" in options:
            game |= {"steps": self.arguments.steps, "inputs": self.held_out, "hidden": (options.pop("hidden"),) * 3}
        made = bayesify.distill(self.sgld(), how, **game, **options)
        if folder is not None:
            bayesify.save(made, folder)
        return made

    def members(self) -> dict[str, Callable[[], bayesify.Posterior]]:
        """Return how each row of the tables is made."""
        wide, components, rank = (8, 4, 8) if self.trial else (100, 60, 32)
        return {
            "SGD": partial(self.plain, "SGD"),
            "MC dropout": partial(self.plain, "MC dropout"),
            "SGLD": self.sgld,
            "APD": partial(self.distilled, "wgan-gp", hidden=wide),
            "APD, hidden 20": partial(self.distilled, "wgan-gp", hidden=20),
            "APD, all coordinates, the paper's rate": partial(
                self.distilled, "wgan-gp", hidden=wide, rank=self.arguments.samples, lr=1e-4
            ),
            "APD, hidden 20, and residual noise": partial(self.distilled, "wgan-gp", hidden=20, residual=True),
            "APD and residual noise": partial(self.distilled, "wgan-gp", hidden=wide, residual=True),
            "PCA and residual noise": partial(self.distilled, "pca", latent=rank, residual=True),
            f"mixture of {components}": partial(self.distilled, "mixture", components=components),
            "SWAG of the bank": partial(self.distilled, "swag", latent=rank),
        }

    def drawn(self, posterior: bayesify.Posterior, draws: int | None = None) -> bayesify.Posterior:
        """Return so many draws of a posterior as a bank: weights are made once, however many sets are looked at."""
        own = isinstance(posterior.law, BankLaw) or not isinstance(posterior.law, VectorLaw)
        return posterior if own else bayesify.sample_bank(posterior, draws or self.arguments.draws)


def accuracy(lab: Lab, posterior: bayesify.Posterior) -> float:
    """Return the accuracy on all test images."""
    test = bayesify.predict(posterior, lab.data.loader("test", 1000), num_draws=lab.arguments.draws, seed=0)
    assert isinstance(test, bayesify.ClassificationPrediction)
    return round(measure.accuracy(test.probs, lab.data.test[1]), 4)


def figures(
    lab: Lab, posterior: bayesify.Posterior, *, factor: float = FACTOR, draws: int | None = None,
    sets: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return AUROC, AUPR+ and AUPR- by OOD set and score, in per cent."""
    ood = {name: x for name, x in lab.data.ood.items() if not sets or name in sets}
    table = anomaly_table(
        posterior, lab.data.test[0][: lab.arguments.rows], ood, factor=factor, bounds=BOUNDS,
        num_draws=draws or lab.arguments.draws,
    )  # fmt: skip
    return {
        name: {
            score: [round(100 * value, 1) for value in (found.auroc, found.aupr_ood, found.aupr_own)]
            for score, found in scores.items()
        }
        for name, scores in table.items()
    }


def tables(lab: Lab, rows: Records) -> None:
    """Make Tables 1, 2 and 5 for one network, with and without the factor."""
    for name, make in lab.members().items():

        def both(make: Callable[[], bayesify.Posterior] = make) -> dict[str, Any]:
            made = make()
            posterior = lab.drawn(made)
            found = {
                "accuracy": accuracy(lab, posterior),
                "times 5": figures(lab, posterior),
                "times 1": figures(lab, posterior, factor=1.0),
                "networks": storage(made),
            }
            if agreements := getattr(made, "agreements", {}):
                best = min(agreements, key=lambda step: agreements[step].total)
                found |= {"best step": best, "last step": max(agreements)}
            return found

        rows.row(name, both)


def storage(posterior: bayesify.Posterior) -> float:
    """Return how many networks a posterior costs."""
    own = {name for name, _ in posterior.named_parameters() if name.startswith("network.")}
    numbers = sum(
        t.numel() for name, t in posterior.state_dict().items() if not name.startswith(("network.", "learning."))
    )
    size = sum(p.numel() for name, p in posterior.named_parameters() if name in own)
    return round(float(numbers / size), 2)


def rates(lab: Lab, rows: Records) -> None:
    """Choose the rate of SGLD on validation images and by the chain's effective sample size."""
    for rate in (0.05, 0.2, 0.5):
        make = partial(lab.sgld, "SGLD" if rate == RATE else f"rate {rate}", lr=rate)
        rows.row(f"rate {rate}", partial(validated, lab, make))


def validated(lab: Lab, make: Callable[[], bayesify.Posterior]) -> dict[str, Any]:
    """Return what a bank has on validation images, and how well its chains mix."""
    bank = make()
    x, y = lab.data.val
    val = bayesify.predict(bank, x, num_draws=lab.arguments.draws, seed=0)
    assert isinstance(val, bayesify.ClassificationPrediction)
    measured = {"accuracy": measure.accuracy(val.probs, y), "nll": measure.nll(val.probs, y)}
    return {"validation": {k: round(v, 4) for k, v in measured.items()}, "diagnosis": diagnosis(lab, bank)}


def chains(lab: Lab, rows: Records) -> None:
    """Compare one chain with four of a quarter of its steps, from new weights and from the trained network."""
    epochs, samples = lab.arguments.epochs, lab.arguments.samples
    four = {"chains": 4, "samples_per_chain": samples // 4, "epochs": max(1, epochs // 4)}
    for words, start in (("the trained network", "network"), ("new weights", "reset")):
        for name, changes in (("four chains", four), ("one chain", {})):
            make = partial(lab.sgld, f"{name} from {words}", start=start, **changes)
            rows.row(f"{name} from {words}", partial(validated, lab, make), config={"changes": changes, "start": start})


def agreements(lab: Lab, rows: Records) -> None:
    """Compare distillations with the bank on held-out digits, and say how much variance the coordinates have."""
    bank, inputs = lab.sgld(), lab.held_out
    size = len(require_bank(bank, "What is distilled is a bank"))
    reference = bayesify.predict(bank, inputs, seed=0)
    ways: dict[str, Callable[[], bayesify.Posterior]] = {
        "50 samples of the bank": lambda: bank,
        "APD before its second step": lambda: bayesify.distill(bank, steps=1, progress=False),
        "APD": lab.members()["APD"],
        "PCA": partial(lab.distilled, "pca", latent=8 if lab.trial else 32),
        "PCA and residual noise": lab.members()["PCA and residual noise"],
    }

    def one(make: Callable[[], bayesify.Posterior]) -> dict[str, float]:
        found = agreement(make(), reference, inputs, num_draws=min(50, size))
        return {"divergence": round(found.divergence, 4), "total": round(found.total, 4)}

    for name, make in ways.items():
        rows.row(name, partial(one, make))
    rows.row("share of the variance in the first 100 coordinates", partial(variance_share, bank, 100))


def variance_share(bank: bayesify.Posterior, number: int) -> dict[str, float]:
    """Return the share of a bank's variance along its axes of largest variance."""
    samples = require_bank(bank, "The share of variance is of a bank").samples.float()
    variance = torch.linalg.svdvals(samples - samples.mean(0)).square()
    return {"share": round(float(variance[:number].sum() / variance.sum()), 4)}


def study(lab: Lab, rows: Records) -> None:
    """Change one thing at a time, to see what decides the AUROC."""
    epochs = lab.arguments.epochs
    variants: dict[str, dict[str, Any]] = {
        "the paper's rate": {"lr": 0.05},
        "the paper's rate and burn-in, 500 steps": {"lr": 0.05, "burn_in": 1 / epochs},
        "a tenth of the steps": {"epochs": max(1, epochs // 10)},
        "a prior ten times as wide in variance": {"weight_decay": 1e-4},
        "a prior a tenth as wide in variance": {"weight_decay": 1e-2},
        "four chains, a quarter of the steps each": {
            "chains": 4, "samples_per_chain": lab.arguments.samples // 4, "epochs": max(1, epochs // 4),
        },
        "from the trained network": {"start": "network"},
    }  # fmt: skip
    makers: dict[str, Callable[[], bayesify.Posterior]] = {"as in the tables": lab.sgld}
    makers["samples of the last tenth"] = lambda: last_samples(lab.sgld(), 0.2)
    makers |= {name: partial(lab.sgld, name, **changes) for name, changes in variants.items()}

    def both(make: Callable[[], bayesify.Posterior]) -> dict[str, Any]:
        bank = make()
        return {**figures(lab, bank), "diagnosis": diagnosis(lab, bank)}

    for name, make in makers.items():
        rows.row(name, partial(both, make), config={"changes": variants.get(name)})


def last_samples(bank: bayesify.Posterior, share: float) -> bayesify.Posterior:
    """Return a bank of the last samples of another."""
    law, network = require_bank(bank, "The last samples are a bank's"), bank.plain_network()
    number = max(2, int(share * len(law)))
    last = BankLaw(network, names=law.names, size=number, source=source_of(bank))
    for row in law.rows[-number:]:
        last.append(law.samples[row])
    made = bayesify.Posterior(network, last)
    inherit(made, bank)
    return made.eval()


def diagnosis(lab: Lab, bank: bayesify.Posterior) -> dict[str, float] | str:
    """Return medians of effective sample sizes and split-R-hat."""
    try:
        found = bayesify.diagnose(bank, lab.data.test[0][:20])
    except (ImportError, ValueError) as reason:
        return str(reason)
    figures = {"ess": found.ess, "r_hat": found.r_hat, "weight r_hat": found.weight_r_hat}
    return {name: round(float(values.median()), 3) for name, values in figures.items()}


def score_of(part: str) -> str:
    """Return the score that a figure shows: one that the plain network has too, where it is compared."""
    return "entropy" if part == "scales" else "BALD"


def sweep(lab: Lab, rows: Records, part: str) -> dict[str, dict[float, float]]:
    """Make the rows of a figure; return curves of the AUROC on notMNIST by `score_of` the part."""
    curves: dict[str, dict[float, float]] = {}

    def point(curve: str, at: float, make: Callable[[], bayesify.Posterior], **options: Any) -> None:
        def row() -> dict[str, Any]:
            return figures(lab, lab.drawn(make(), options.get("draws")), sets=("notMNIST",), **options)

        curves.setdefault(curve, {})[at] = rows.row(f"{curve}, {at:g}", row)["notMNIST"][score_of(part)][0]

    members = lab.members()
    if part == "samples":  # Figures 3 and 6
        for number in (4, 8) if lab.trial else (10, 20, 50, 100, 200, 500, 1000, 2000):
            for name in ("SGLD", "APD, hidden 20"):
                point(name, number, members[name], draws=number)
    elif part == "scales":  # Figure 9
        for name in ("SGD", "MC dropout", "SGLD", "APD"):
            for factor in (1.0, 2.0, 5.0, 10.0, 20.0):
                point(name, factor, members[name], factor=factor)
    elif part == "components":  # Figure 5
        for number in (2, 3) if lab.trial else (1, 5, 20, 60, 100):
            point("mixture", number, partial(lab.distilled, "mixture", components=number))
            point("SGLD", number, lab.sgld)
    else:  # Figure 7
        for how in ("wgan-gp", "wgan", "gan"):
            for hidden in (8,) if lab.trial else (20, 100):
                point(how, hidden, partial(lab.distilled, how, hidden=hidden))
    return curves


def main() -> None:
    """Make the rows of a part."""
    labels = {"samples": "samples", "scales": "factor", "components": "components", "games": "hidden units"}
    arguments = arguments_of(
        __doc__, "apd_mnist", part=("tables", "rates", "chains", "agreements", "study", *labels),
        network=("fcNN1", "fcNN2"), epochs=160, samples=2000, steps=4000, draws=200, rows=2000,
    )  # fmt: skip
    lab = Lab(mnist(trial=arguments.trial, number=arguments.rows), arguments)
    part = arguments.part
    name = f"apd_mnist_{part}_{arguments.network}"
    rows = rows_of(name, arguments, rate=RATE)
    if part == "tables":
        tables(lab, rows)
        for title, numbers in PAPER.items():
            print(f"paper, {title}: {numbers}")
    elif part == "rates":
        rates(lab, rows)
    elif part == "chains":
        chains(lab, rows)
    elif part == "agreements":
        agreements(lab, rows)
    elif part == "study":
        study(lab, rows)
    else:
        curves = sweep(lab, rows, part)
        draw_curves(curves, name, arguments, x=labels[part], y=f"AUROC by {score_of(part)}, notMNIST, %")


if __name__ == "__main__":
    main()
