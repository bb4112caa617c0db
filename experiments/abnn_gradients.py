"""How noisy gradients are: of ABNN, of mean-field variational inference, and of the plain network.

`BAYESIFY_DATA=... python -m experiments.abnn_gradients` takes the pretrained ResNet-20 and the gradient of the mean
cross entropy by the normalisation parameters, which all of them learn, over batches of 128. "noise" is the trace of its
covariance over draws on one batch, "batch" over batches with one draw each; "relative" divides by the squared norm of
its mean. The weights' standard deviation is proportional to each tensor's root mean square, and is chosen so that the
logits of one input vary over draws as much as under ABNN with alpha = .1; the paper's start (e^-6 to e^-5) stands
beside it. The weights are drawn once for the batch (classical variational inference) and for each example.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import bayesify
from bayesify import ABNN, BayesAdapter, Posterior
from bayesify.laws import MemberLaw
from experiments.cifar import loaders
from experiments.networks import pretrained
from experiments.records import RESULTS, Records

Batch = tuple[Tensor, Tensor]


def spread(posterior: Posterior, x: Tensor, draws: int = 20) -> float:
    """Return the logits' standard deviation over draws, as a root mean square over inputs and classes."""
    with torch.no_grad():
        outputs = torch.stack([posterior.draw(seed)(x) for seed in range(draws)])
    return float(outputs.var(0).mean().sqrt())


def scaled(network: nn.Module, share: float, noise: str) -> Posterior:
    """Return Gaussian weights whose standard deviation is a share of each tensor's root mean square."""
    posterior = bayesify.convert(network, BayesAdapter(estimator=noise))  # type: ignore[arg-type]
    parameters = dict(posterior.network.named_parameters())
    for name, log_std in posterior.law.log_std.as_dict().items():
        log_std.data.fill_(math.log(share * float(parameters[name].detach().square().mean().sqrt()) + 1e-12))
    return posterior.eval()


def matched(network: nn.Module, wanted: float, x: Tensor) -> float:
    """Return the share at which the logits vary as much as wanted, by bisection of its logarithm."""
    low, high = 1e-3, 1.0
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spread(scaled(network, middle, "shared"), x) < wanted else (low, middle)
    return math.sqrt(low * high)


def variances(gradient: Callable[[Batch], Tensor], data: list[Batch]) -> dict[str, float]:
    """Return the trace of the gradient's covariance over draws and over batches."""
    found = {}
    for what, some in (("noise", data[:1] * len(data)), ("batch", data)):
        torch.manual_seed(0)
        rows = torch.stack([gradient(batch).double() for batch in some])
        variance = float(rows.var(0).sum())
        found[what] = float(f"{variance:.4g}")
        found[f"{what}, relative"] = float(f"{variance / float(rows.mean(0).square().sum()):.4g}")
    return found


def main() -> None:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    if arguments.trial:
        arguments.batches = 2
    network = pretrained("resnet20")
    torch.manual_seed(0)
    train = (loaders(8, images=64) if arguments.trial else loaders())[0]
    data = [batch for batch, _ in zip(train, range(arguments.batches), strict=False)]
    norms = {name for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)}
    names = [name for name, _ in network.named_parameters() if name.rpartition(".")[0] in norms]

    def of_weights(posterior: Posterior) -> Callable[[Batch], Tensor]:
        own = dict(posterior.network.named_parameters())
        return lambda batch: flat(posterior, batch, [own[name] for name in names])

    def of_member(alpha: float) -> tuple[Posterior, Callable[[Batch], Tensor]]:
        posterior = bayesify.convert(network, ABNN(members=1, eta=0.0, alpha=alpha)).eval()
        assert isinstance(posterior.law, MemberLaw)
        own = posterior.law.member_tensors(0)

        def gradient(batch: Batch) -> Tensor:
            with posterior.member(0):
                return flat(posterior, batch, [own[name] for name in names])

        return posterior, gradient

    ours, ours_gradient = of_member(0.1)
    wanted = spread(ours, data[0][0])
    share = matched(network, wanted, data[0][0])
    path = None if arguments.trial else RESULTS / "abnn_gradients.json"
    rows = Records(path, {"script": "abnn_gradients", "batches": arguments.batches})
    rows.row("settings", lambda: {"logits' spread": wanted, "matched share": share, "batches": len(data)})
    start = BayesAdapter().start_std
    kinds: dict[str, Callable[[Batch], Tensor]] = {
        "plain": of_member(0.0)[1],
        "ABNN, alpha=.1": ours_gradient,
        "ABNN, alpha=.01": of_member(0.01)[1],
        "mean-field VI, same spread, one draw for the batch": of_weights(scaled(network, share, "shared")),
        "mean-field VI, same spread, a draw for each example": of_weights(scaled(network, share, "exemplar")),
        f"mean-field VI, {start[0]:.4f} to {start[1]:.4f}, one draw for the batch": of_weights(
            bayesify.convert(network, BayesAdapter(estimator="shared")).eval()
        ),
    }
    for name, gradient in kinds.items():
        rows.row(name, lambda gradient=gradient: variances(gradient, data))


def flat(posterior: Posterior, batch: Batch, parameters: list[Tensor]) -> Tensor:
    """Return the gradient of the mean cross entropy as one vector."""
    loss = posterior.likelihood.nll(posterior.outputs(batch[0]), batch[1])
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])


if __name__ == "__main__":
    main()
