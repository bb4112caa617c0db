"""Small networks in float64, a configuration for each method, and what else these tests share."""

import torch
from torch import nn

from bayesify import ABNN, IBNN, MAP, SWAG, DeepEnsemble, Laplace, MCDropout
from bayesify.methods import list_methods

__all__ = ["METHODS", "Attention", "TimeFirst", "Windows", "captured", "configurations", "mlp", "placed", "spread"]

METHODS = {
    "map": MAP(),
    "mc-dropout": MCDropout(p=0.5, insert_before="all"),
    "swag": SWAG(rank=2, num_bn_draws=2),
    "deep-ensemble": DeepEnsemble(members=2, start="perturbed"),
    "abnn": ABNN(members=2, draws_per_member=2),
    "ibnn": IBNN(components=2, draws_per_component=2, start_std=(0.2, 0.1)),
    "laplace": Laplace(structure="diagonal"),
}


def configurations():
    """Return a configuration for each registered method, also for those that come later."""
    return {name: METHODS.get(name) or method.example() for name, method in list_methods().items()}


def spread(posterior):
    """Give a SWAG or Laplace posterior some spread, as fitting would; others stay as they are."""
    law = posterior.law
    if hasattr(law, "set_prior_precision"):
        law.complete.fill_(True)
        law.set_prior_precision(25.0)
    if hasattr(law, "collect"):
        for _ in range(4):
            with torch.no_grad():
                for parameter in posterior.network.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
            law.collect()
        if posterior.statistics is not None:
            posterior.statistics.fresh.fill_(True)
    return posterior


def placed(posterior):
    """Return the tensors that a pass in the present mode puts in the network's place."""
    return dict(posterior.patch(posterior.present(1)).tensors)


def mlp(p=0.5):
    network = nn.Sequential(
        nn.Linear(4, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 3)
    )
    return network.double().eval()


class TimeFirst(nn.Module):
    """(B, T, D) outside, (T, B, D) inside, as an encoder with batch_first=False sees it."""

    def __init__(self, p=0.5):
        super().__init__()
        self.dropout = nn.Dropout(p)
        self.mix = nn.Linear(6, 3)
        self.double().eval()

    def forward(self, x):
        h = self.dropout(x.transpose(0, 1))
        h = h + h.roll(1, 0).tanh()  # positions meet, examples do not
        return self.mix(h.mean(0))


class Windows(nn.Module):
    """(B, r w, D) cut into windows, (B r, w, D), as a Swin transformer does."""

    def __init__(self, windows=3, p=0.5):
        super().__init__()
        self.windows = windows
        self.dropout = nn.Dropout(p)
        self.mix = nn.Linear(6, 3)
        self.double().eval()

    def forward(self, x):
        batch, length, width = x.shape
        h = x.reshape(batch * self.windows, length // self.windows, width)
        h = self.dropout(h)
        h = h + h.mean(1, keepdim=True).tanh()
        return self.mix(h.reshape(-1, length, width).mean(1))


class Attention(nn.Module):
    """Dropout on attention weights, (B h, T, T)."""

    def __init__(self, heads=2, p=0.5):
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(p)
        self.mix = nn.Linear(6, 3)
        self.double().eval()

    def forward(self, x):
        length, width = x.shape[1:]
        h = (
            x.reshape(-1, length, self.heads, width // self.heads)
            .transpose(1, 2)
            .reshape(-1, length, width // self.heads)
        )
        h = self.dropout((h @ h.transpose(1, 2)).softmax(-1)) @ h
        h = h.reshape(-1, self.heads, length, width // self.heads).transpose(1, 2).reshape(-1, length, width)
        return self.mix(h.mean(1))


def captured(posterior, key, x):
    """Return the factors that a draw puts on the activations of its noisy layers, in the order of the calls."""
    with torch.no_grad(), posterior.drawn(key):
        posterior(x)  # the first draw looks at the network in passes of its own
    factors = []
    handles = [
        site.register_forward_hook(lambda _module, args, output: factors.append(output / args[0]))
        for site in posterior.network.modules()
        if site in posterior.law.sites()
    ]
    with torch.no_grad(), posterior.drawn(key):
        posterior(x)
    for handle in handles:
        handle.remove()
    return factors
