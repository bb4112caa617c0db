"""How near the mutual information of predictions without draws is to that of draws, at several widths of the weights.

`BAYESIFY_DATA=... python -m benchmarks.information resnet20 resnet44 --widths .1 1 3` takes BayesAdapter, not fitted,
with its default standard deviations times each width, and prints: what accuracy one draw loses; of the draws' own
Gaussian (their covariance around the plain network's logits) and of each predictor the median over images of the
mutual information over that of the draws, of all images, of the surer half and of the other; the ratio of the
variances, summed; and Spearman's correlation of the images' variances with a 95 % interval. The draws' information is
in float64 and without its bias of 1/S. `--keep FOLDER` keeps the draws, which take nearly all of the time. What the
engines assume was chosen on the first 256 images; `--skip 2000` looks at others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import bayesify
from bayesify import Streamlined
from bayesify._core.maths import entropy, exact_top
from bayesify.evaluation.checking import _debiased, _interval, _rank_correlation
from bayesify.laws import Posterior
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained

HOW = {
    "one direction": Streamlined(engine="principal"),
    "two directions": Streamlined(directions=2),
    "margin": Streamlined(engine="margin"),
}
BATCH = 64


@torch.no_grad()
def draws(posterior: Posterior, inputs: Tensor, number: int) -> Tensor:
    """Return the logits of draws, (S, B, C)."""
    keys = posterior.keys(number, 0)
    return torch.stack(
        [torch.cat([posterior.evaluate(part, [key])[0] for part in torch.split(inputs, BATCH)]) for key in keys]
    )


def information(logits: Tensor) -> Tensor:
    """Return the mutual information of draws (S, B, C) in float64, without its bias."""

    def plain(some: Tensor) -> Tensor:
        log_probs = exact_top(some.log_softmax(-1))
        return entropy(exact_top(log_probs.exp().mean(0).log())) - entropy(log_probs).mean(0)

    half = len(logits) // 2
    return _debiased(plain(logits[: 2 * half]), plain(logits[:half]), plain(logits[half : 2 * half]))


def medians(found: Tensor, drawn: Tensor, sure: Tensor) -> str:
    """Return the medians of ratios: of all, of the sure ones, of the others."""
    ratio = torch.where(drawn > 0, found.double() / drawn, torch.inf)
    return " / ".join(f"{ratio[some].median():.2f}" for some in (sure | True, sure, ~sure))


def compare(name: str, width: float, arguments: argparse.Namespace) -> None:
    """Print the rows of a network at one width."""
    data = load("cifar10", "test")
    some = slice(arguments.skip, arguments.skip + arguments.examples)
    inputs, labels = cifar_inputs(data.inputs[some]), data.targets[some]
    narrow, wide = bayesify.BayesAdapter().start_std
    method = bayesify.BayesAdapter(start_std=(width * narrow, width * wide))
    posterior = bayesify.convert(pretrained(name), method).eval()
    which = f"{name}-{width:g}-{arguments.skip}-{arguments.examples}-{arguments.draws}.safetensors"
    kept = None if arguments.keep is None else arguments.keep / which
    if kept is not None and kept.exists():
        samples = load_file(kept)["logits"]
    else:
        samples = draws(posterior, inputs, arguments.draws)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            save_file({"logits": samples}, kept)
    with torch.no_grad():
        plain = torch.cat([posterior.network(part) for part in torch.split(inputs, BATCH)]).double()
    samples = samples.double()
    drawn, sure = information(samples), plain.softmax(-1).amax(-1)
    sure = sure > sure.median()
    right = [(one.argmax(-1) == labels).double().mean().item() for one in (plain, samples)]
    spread = samples - samples.mean(-1, keepdim=True)
    spread = spread - spread.mean(0)
    covariance = torch.einsum("sbc,sbd->bcd", spread, spread) / (len(samples) - 1)
    reference = covariance.diagonal(dim1=1, dim2=2).sum(-1)
    print(f"{name}, {width:g} of the default width, {len(plain)} images, {len(samples)} draws: one draw loses", end=" ")
    print(f"{100 * (right[0] - right[1]):.1f} points; median information {drawn.median():.1e} nats", flush=True)
    own = bayesify.Categorical().double().from_gaussian(plain, covariance=covariance).score("epistemic")
    print(f"  {'the draws own Gaussian':24} information {medians(own, drawn, sure)}")
    for title in arguments.how:
        parts = [bayesify.predict(posterior, part, how=HOW[title]) for part in torch.split(inputs, BATCH)]
        variance = torch.cat([part.output_variance for part in parts]).double()
        found = torch.cat([part.score("epistemic") for part in parts])
        rank, ratio = _rank_correlation(variance, reference), float(variance.sum() / reference.sum())
        low, high = _interval(variance, reference) or (rank, rank)
        print(f"  {title:24} information {medians(found, drawn, sure)}   variance {ratio:.2f}   ", end="")
        print(f"rank {rank:.3f} ({low:.3f} to {high:.3f})", flush=True)


def main() -> None:
    """Compare networks and widths."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("networks", nargs="+", choices=("resnet20", "resnet32", "resnet44"))
    parser.add_argument("--widths", nargs="+", type=float, default=[0.1, 1.0])
    parser.add_argument("--how", nargs="+", choices=list(HOW), default=["one direction", "two directions"])
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--skip", type=int, default=0, help="images before the examples")
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    for name in arguments.networks:
        for width in arguments.widths:
            compare(name, width, arguments)


if __name__ == "__main__":
    main()
