"""How near the mutual information of predictions without draws is to that of draws, at several widths of the weights.

`BAYESIFY_DATA=... python -m benchmarks.information resnet20 resnet44 --widths .1 1 3` takes BayesAdapter, not fitted,
with its default standard deviations times each width, and prints and keeps: what accuracy one draw loses; of the draws'
own Gaussian (their covariance around the plain network's logits) and of each predictor the median over inputs of the
mutual information over that of the draws, of all inputs, of the surer half and of the other; the ratio of the
variances, summed; and Spearman's correlation of the inputs' variances with a 95 % interval. The draws' information is
in float64 and without its bias of 1/S. `--folder FOLDER` keeps the draws, which take nearly all of the time. What the
engines assume was chosen on the first 256 images; `--skip 2000` looks at others.

Other outputs have small networks, trained on scikit-learn's data for a few seconds: `two` classes and `bernoulli`
(breast cancer), `thousand` (three digits side by side, of which the label is the number), and `regression` (diabetes),
for which the information is the variance itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bayesify
from bayesify import Streamlined
from bayesify._core.maths import entropy, exact_top
from bayesify.evaluation.checking import _debiased, _interval, _rank_correlation
from bayesify.laws import Posterior
from bayesify.likelihoods import Likelihood
from benchmarks.timing import keep
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained

HOW = {
    "streamlined": Streamlined(),
    "moments": Streamlined(engine="moments"),
    "one direction": Streamlined(engine="principal"),
    "whole sum": Streamlined(engine="principal", sketch=0),
    "two directions": Streamlined(directions=2),
    "margin": Streamlined(engine="margin"),
}
BATCH = 64
MOST_CLASSES = 64  # of which the draws' covariance is formed
Task = tuple[nn.Module, Likelihood, Tensor, Tensor]


def images(name: str, arguments: argparse.Namespace) -> Task:
    """Return a network of CIFAR-10 and test images."""
    data, some = load("cifar10", "test"), slice(arguments.skip, arguments.skip + arguments.examples)
    return pretrained(name), bayesify.Categorical(), cifar_inputs(data.inputs[some]), data.targets[some]


def trained(likelihood: Likelihood, outputs: int, x: Tensor, y: Tensor, arguments: argparse.Namespace) -> Task:
    """Train a small network on all but the last fourth, which is looked at."""
    torch.manual_seed(0)
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-3)
    network = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
    optimizer = torch.optim.Adam([*network.parameters(), *likelihood.parameters()], 3e-3)
    start = len(x) - len(x) // 4
    for _ in range(30):
        for rows in torch.split(torch.randperm(start), 32):
            optimizer.zero_grad()
            loss: Any = -likelihood.log_prob(network(x[rows]), y[rows]).mean()
            loss.backward()
            optimizer.step()
    return network.eval(), likelihood, x[start:][: arguments.examples], y[start:][: arguments.examples]


def cancer(likelihood: Likelihood, outputs: int, arguments: argparse.Namespace) -> Task:
    """Train on scikit-learn's breast cancers."""
    from sklearn.datasets import load_breast_cancer

    x, y = (torch.as_tensor(array) for array in load_breast_cancer(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return trained(likelihood, outputs, x[order].float(), y[order], arguments)


def diabetes(arguments: argparse.Namespace) -> Task:
    """Train on scikit-learn's diabetes."""
    from sklearn.datasets import load_diabetes

    x, y = (torch.as_tensor(array).float() for array in load_diabetes(return_X_y=True))
    return trained(bayesify.Gaussian(), 1, x, ((y - y.mean()) / y.std())[:, None], arguments)


def numbers(arguments: argparse.Namespace) -> Task:
    """Train on the numbers from 0 to 999, written with three of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    places = torch.randint(len(x), (4096, 3), generator=torch.Generator().manual_seed(0))
    return trained(
        bayesify.Categorical(),
        1000,
        x.float()[places].flatten(1),
        (y[places] * torch.tensor([100, 10, 1])).sum(1),
        arguments,
    )


TASKS: dict[str, Callable[[argparse.Namespace], Task]] = {
    **{name: partial(images, name) for name in ("resnet20", "resnet32", "resnet44")},
    "two": lambda arguments: cancer(bayesify.Categorical(), 2, arguments),
    "bernoulli": lambda arguments: cancer(bayesify.Bernoulli(), 1, arguments),
    "thousand": numbers,
    "regression": diabetes,
}


@torch.no_grad()
def draws(posterior: Posterior, inputs: Tensor, number: int, kept: Path | None) -> Tensor:
    """Return the outputs of draws, (S, B, C), as they were kept if they were."""
    if kept is not None and kept.exists():
        return load_file(kept)["logits"]
    keys = posterior.keys(number, 0)
    found = torch.stack(
        [torch.cat([posterior.evaluate(part, [key])[0] for part in torch.split(inputs, BATCH)]) for key in keys]
    )
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file({"logits": found}, kept)
    return found


def information(logits: Tensor) -> Tensor:
    """Return the mutual information of draws (S, B, C) in float64, without its bias."""

    def plain(some: Tensor) -> Tensor:
        log_probs = exact_top(some.log_softmax(-1))
        return entropy(exact_top(log_probs.exp().mean(0).log())) - entropy(log_probs).mean(0)

    half = len(logits) // 2
    return _debiased(plain(logits[: 2 * half]), plain(logits[:half]), plain(logits[half : 2 * half]))


def medians(found: Tensor, drawn: Tensor, sure: Tensor) -> dict[str, float]:
    """Return the medians of ratios: of all, of the sure ones, of the others."""
    ratio = torch.where(drawn > 0, found.double() / drawn, torch.inf)
    halves = {"information": sure | True, "surer half": sure, "other half": ~sure}
    return {name: round(float(ratio[some].median()), 3) for name, some in halves.items()}


def compare(name: str, width: float, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the title and the rows of a network at one width."""
    network, likelihood, inputs, labels = TASKS[name](arguments)
    narrow, wide = bayesify.BayesAdapter().start_std
    method = bayesify.BayesAdapter(start_std=(width * narrow, width * wide))
    posterior = bayesify.convert(network, method, likelihood=likelihood).eval()
    which = f"{name}-{width:g}-{arguments.skip}-{arguments.examples}-{arguments.draws}.safetensors"
    samples = draws(posterior, inputs, arguments.draws, arguments.folder and arguments.folder / which).double()
    with torch.no_grad():
        plain = torch.cat([posterior.network(part) for part in torch.split(inputs, BATCH)]).double()
    loss, rows = "", {}
    if isinstance(likelihood, bayesify.Gaussian):
        drawn = reference = samples.var(0)[..., 0]
        sure = drawn
    else:
        if isinstance(likelihood, bayesify.Bernoulli):  # a logit is the pair (0, l)
            samples, plain = (torch.cat([torch.zeros_like(one), one], -1) for one in (samples, plain))
        drawn, sure = information(samples), -plain.softmax(-1).amax(-1)
        right = [(one.argmax(-1) == labels).double().mean().item() for one in (plain, samples)]
        loss = f", one draw loses {100 * (right[0] - right[1]):.1f} points"
        reference = (samples - samples.mean(-1, keepdim=True)).var(0).sum(-1)
    sure = sure < sure.median()
    if not loss or 2 < plain.shape[-1] <= MOST_CLASSES:
        spread = samples - samples.mean(-1, keepdim=True) if loss else samples
        spread = spread - spread.mean(0)
        covariance = torch.einsum("sbc,sbd->bcd", spread, spread) / (len(samples) - 1)
        own = likelihood.double().from_gaussian(plain, covariance=covariance).score("epistemic")
        rows["the draws' own Gaussian"] = medians(own, drawn, sure)
        likelihood.to(inputs.dtype)
    for title in arguments.how:
        parts = [bayesify.predict(posterior, part, how=HOW[title]) for part in torch.split(inputs, BATCH)]
        variance = torch.cat([part.output_variance for part in parts]).double()
        found = torch.cat([part.score("epistemic") for part in parts])
        rank = _rank_correlation(variance, reference)
        low, high = _interval(variance, reference) or (rank, rank)
        numbers = {"variance": float(variance.sum() / reference.sum()), "rank": rank, "low": low, "high": high}
        rows[title] = medians(found, drawn, sure) | {key: round(value, 3) for key, value in numbers.items()}
    size = f"{len(plain)} inputs, {len(samples)} draws{loss}; median information {drawn.median():.1e}"
    return f"{name}, {width:g} of the default width, {size}", rows


def main() -> None:
    """Compare networks and widths, and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", choices=TASKS)
    parser.add_argument("--widths", nargs="+", type=float, default=[0.1, 1.0])
    parser.add_argument("--how", nargs="+", choices=list(HOW), default=["streamlined"])
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--skip", type=int, default=0, help="images before the examples")
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where draws are kept")
    arguments = parser.parse_args()
    for name in arguments.networks:
        for width in arguments.widths:
            title, rows = compare(name, width, arguments)
            settings = {"network": name, "width": width}
            settings |= {key: getattr(arguments, key) for key in ("examples", "skip", "draws", "how")}
            keep("information", {title: rows}, **settings)


if __name__ == "__main__":
    main()
