"""Is the decomposition true? Every method on data whose noise is known, and beside HMC.

`python -m experiments.truth` makes the rows of three parts, which `--part` chooses:

- `classes`: two classes, a curved border, each label wrong with probability .2, so that the entropy of y given x is
  .5004 nats everywhere: total, aleatoric and epistemic uncertainty, in the mean over 1,000 new inputs, and NLL, for
  128, 1,024 and 8,192 training examples;
- `numbers`: y = sin(3 x) + .3 e, likewise, with the noise learned: variances, of which .09 are the data's;
- `hmc`: the predictive distribution of 60 examples with a prior N(0, 1) on every parameter of a small network, beside
  that of Hamiltonian Monte Carlo (`experiments/hmc.py`): how often the label is the same, and the mean total variation
  distance |p - q| / 2 (Izmailov et al. 2021), inside and outside of the data; epistemic uncertainty too.

Rows go to `experiments/results/truth_*.json` one by one; what is there is not made again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, APD, IBNN, MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Gaussian, Laplace, MCDropout, Method
from experiments.hmc import hmc
from experiments.records import RESULTS, Records

WRONG, NOISE_STD = 0.2, 0.3
ENTROPY = -WRONG * math.log(WRONG) - (1 - WRONG) * math.log(1 - WRONG)
SIZES = (128, 1024, 8192)
STEPS = 1000  # of every training, whatever the number of examples; twice as many beside HMC


def border(x: Tensor) -> Tensor:
    """Return the class of each input before labels are spoilt."""
    return (x[:, 1] > torch.sin(2 * x[:, 0])).long()


def classes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs on [-2, 2]^2 and labels, a fifth of them wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 2, generator=generator) - 2
    return x, border(x) ^ (torch.rand(n, generator=generator) < WRONG).long()


def numbers(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs on [-2, 2] and sin(3 x) with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 1, generator=generator) - 2
    return x, torch.sin(3 * x) + NOISE_STD * torch.randn(n, 1, generator=generator)


def network(inputs: int, outputs: int) -> nn.Module:
    """Return a network in which every method finds what it makes random."""
    torch.manual_seed(0)
    hidden = [nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(nn.Linear(inputs, 32), nn.LayerNorm(32), nn.ReLU(), *hidden, nn.Linear(32, outputs))


def methods_for(n: int, epochs: int, lr: float = 0.1) -> dict[str, Method]:
    """Return every method, with the prior N(0, 1) where it has one, for n examples, so many epochs and SGD's rate."""
    rates: dict[str, Any] = {"epochs": epochs, "lr": 0.003, "optimizer": "adam", "schedule": "cosine"}
    # By SGD: the weight decay of Adam is no prior.
    plain: dict[str, Any] = {
        "epochs": epochs,
        "lr": lr,
        "schedule": "cosine",
        "weight_decay": 1 / n,
    }
    chain: dict[str, Any] = {
        "chains": 2,
        "samples_per_chain": 50,
        "prior_std": 1.0,
        "epochs": 3 * epochs,
        "lr": min(0.2, 10 / n),
    }
    return {
        "map": MAP(**plain),
        "mc-dropout": MCDropout(**plain),
        "deep-ensemble": DeepEnsemble(members=10, **plain),
        "swag": SWAG(epochs=epochs, lr=lr / 2, snapshots_per_epoch=1, weight_decay=1 / n),
        "abnn": ABNN(members=3, **plain),
        "bayes-adapter": BayesAdapter(
            prior_std=1.0, start_std=(0.02, 0.05), **rates, log_std_lr=0.02, log_std_schedule="cosine"
        ),
        "ibnn": IBNN(components=4, weights="joint", **plain),
        "laplace, last layer": Laplace(prior_precision=1.0),
        "laplace, diagonal": Laplace(structure="diagonal", prior_precision=1.0),
        "laplace, kronecker": Laplace(structure="kronecker", prior_precision=1.0),
        "sgld": SGLD(**chain),
        "apd": APD(**chain, steps=1500),
    }


def method_for(part: str, name: str, n: int) -> Method:
    """Return a method for n examples of a part."""
    return methods_for(n, math.ceil(STEPS / math.ceil(n / 128)), 0.01 if part == "numbers" else 0.1)[name]


def rate(y: Tensor) -> float:
    """Return a rate of SGD for labels, or for numbers, whose gradients are larger."""
    return 0.01 if y.is_floating_point() else 0.1


def loader_of(x: Tensor, y: Tensor) -> DataLoader:
    """Return minibatches."""
    return DataLoader(TensorDataset(x, y), min(128, len(x)), shuffle=True)


def trained(x: Tensor, y: Tensor, likelihood: Any) -> nn.Module:
    """Return a plain network, trained to a mode of the posterior."""
    epochs = math.ceil(STEPS / math.ceil(len(x) / 128))
    outputs = 1 if y.is_floating_point() else 2
    plain = methods_for(len(x), epochs, rate(y))["map"]
    posterior = bayesify.convert(network(x.shape[1], outputs), plain, likelihood=likelihood)
    bayesify.fit(posterior, loader_of(x, y), progress=False, seed=0)
    return posterior.network


def size_row(data: Callable[[int, int], tuple[Tensor, Tensor]], name: str, n: int) -> dict[str, Any]:
    """Fit a method to n examples and return its mean uncertainties on others."""
    x, y = data(n, 0)
    likelihood: Any = Gaussian() if y.is_floating_point() else "classification"
    method = method_for("numbers" if y.is_floating_point() else "classes", name, n)
    posterior = bayesify.convert(trained(x, y, likelihood), method, likelihood=likelihood)
    if name != "map":
        bayesify.fit(posterior, loader_of(x, y), progress=False, seed=0, accuracy_tolerance=1)
    new, answers = data(1000, 1)
    linear = name.startswith("laplace")
    prediction = bayesify.predict(
        posterior, new, num_draws=None if linear else 100, seed=0, how="linearised" if linear else "sampling"
    )
    return {"n": n, **summary(prediction, answers)}


def summary(prediction: Any, targets: Tensor) -> dict[str, float]:
    """Return mean uncertainties and the NLL."""
    found = {key: getattr(prediction, key).mean() for key in ("total", "aleatoric", "epistemic")}
    if targets.is_floating_point():
        law = torch.distributions.Normal(prediction.mean.flatten(), prediction.total.flatten().sqrt())
        found["nll"] = -law.log_prob(targets.flatten()).mean()
    else:
        found["nll"] = -prediction.log_probs.gather(1, targets[:, None]).mean()
    return {key: round(float(value), 5) for key, value in found.items()}


# -- beside HMC -------------------------------------------------------------------------------------------------------


def small_network() -> nn.Module:
    """Return 72 parameters, with a norm, for every method."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 2))


class Reference:
    """The data, the grid on which distributions are compared, and what HMC says there."""

    def __init__(self, trial: bool) -> None:
        """Sample."""
        self.x, self.y = classes(60, 3)
        grid = torch.linspace(-3, 3, 31)
        self.grid = torch.cartesian_prod(grid, grid)
        self.inside = self.grid.abs().amax(1) <= 2
        chains, samples, burn_in = (4, 10, 10) if trial else (64, 400, 600)
        self.probs, self.accepted = self._sampled(chains, samples, burn_in)

    def _sampled(self, chains: int, samples: int, burn_in: int) -> tuple[Tensor, Tensor]:
        plain = small_network().double()
        parameters = dict(plain.named_parameters())
        sizes = [p.numel() for p in parameters.values()]
        x, y = self.x.double(), self.y

        def run(w: Tensor, inputs: Tensor) -> Tensor:
            parts = zip(parameters.items(), w.split(sizes), strict=True)
            tensors = {name: part.view_as(parameter) for (name, parameter), part in parts}
            return torch.func.functional_call(plain, tensors, (inputs,))

        def potential(w: Tensor) -> Tensor:
            return nn.functional.cross_entropy(run(w, x), y, reduction="sum") + w.square().sum() / 2

        generator = torch.Generator().manual_seed(0)
        start = torch.randn(chains, sum(sizes), generator=generator, dtype=torch.float64)
        found, accepted = hmc(
            potential, start, num_samples=samples, burn_in=burn_in, leapfrogs=30, step=0.05, generator=generator
        )
        thinned = found[::10].transpose(0, 1)  # (chains, samples, parameters)
        grid = self.grid.double()
        with torch.no_grad():
            probs = torch.stack([torch.func.vmap(lambda w: run(w, grid))(own).softmax(-1) for own in thinned])
        return probs, accepted

    def compare(self, probs: Tensor, epistemic: Tensor) -> dict[str, float]:
        """Return agreement and total variation, inside and outside of the data."""
        ours, theirs = probs.double(), self.probs.mean((0, 1))
        same = (ours.argmax(1) == theirs.argmax(1)).double()
        apart = (ours - theirs).abs().sum(1) / 2
        found = {}
        for place, rows in (("inside", self.inside), ("outside", ~self.inside)):
            found[f"agreement {place}"] = same[rows].mean()
            found[f"total variation {place}"] = apart[rows].mean()
            found[f"epistemic {place}"] = epistemic[rows].double().mean()
        return {key: round(float(value), 4) for key, value in found.items()}

    def own_row(self) -> dict[str, Any]:
        """Compare one half of the chains with all: the floor, and HMC's own epistemic uncertainty."""
        half = self.probs[::2].flatten(0, 1)
        mean = half.mean(0)
        epistemic = entropy(mean) - entropy(half).mean(0)
        return {**self.compare(mean, epistemic), "accepted": round(float(self.accepted.mean()), 4)}


def entropy(probs: Tensor) -> Tensor:
    """Return the entropy over the last dimension."""
    return torch.special.entr(probs).sum(-1)


def hmc_row(reference: Reference, name: str) -> dict[str, Any]:
    """Fit a method to the same examples and compare."""
    x, y = reference.x, reference.y
    plain = bayesify.convert(small_network(), methods_for(len(x), 2 * STEPS)["map"])
    bayesify.fit(plain, loader_of(x, y), progress=False, seed=0)
    method = beside_hmc(name)
    posterior = bayesify.convert(plain.network, method)
    if name != "map":
        bayesify.fit(posterior, loader_of(x, y), progress=False, seed=0, accuracy_tolerance=1)
    how = "linearised" if name.startswith("laplace") else "sampling"
    prediction = bayesify.predict(
        posterior, reference.grid, num_draws=None if how == "linearised" else 500, seed=0, how=how
    )
    return reference.compare(prediction.probs, prediction.epistemic)


def beside_hmc(name: str) -> Method:
    """Return a method for sixty examples, in one batch."""
    found = methods_for(60, 2 * STEPS)[name]
    if name == "mc-dropout":
        return MCDropout(**{**vars(found), "p": 0.1, "insert_before": "linear"})
    if isinstance(found, SGLD):  # full batches: only the step is an approximation
        return type(found)(
            **{
                **vars(found),
                "chains": 8,
                "together": True,
                "samples_per_chain": 100,
                "epochs": 20_000,
                "lr": 0.05,
                "start": "reset",
            }
        )
    return found


def main() -> None:
    """Make the rows of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", choices=("classes", "numbers", "hmc"), nargs="*", default=["classes", "numbers", "hmc"]
    )
    parser.add_argument("--only", nargs="*", help="names of methods")
    parser.add_argument("--trial", action="store_true", help="short chains, two methods, and nothing is kept")
    arguments = parser.parse_args()
    if arguments.trial and arguments.only is None:
        arguments.only = ["map", "laplace, last layer"]
    names = [name for name in methods_for(128, 1) if arguments.only is None or name in arguments.only]
    for part in arguments.part:
        path = None if arguments.trial else RESULTS / f"truth_{part}.json"
        rows = Records(path, {"script": "truth", "part": part, "steps": STEPS})
        if part == "hmc":
            reference = Reference(arguments.trial)
            rows.row("hmc, half of the chains", reference.own_row)
            for name in names:
                rows.row(name, partial(hmc_row, reference, name), config={"method": beside_hmc(name)})
            continue
        data = classes if part == "classes" else numbers
        for name in names:
            for n in SIZES[:1] if arguments.trial else SIZES:
                method = method_for(part, name, n)
                rows.row(f"{name}, {n}", partial(size_row, data, name, n), config={"method": method})


if __name__ == "__main__":
    main()
