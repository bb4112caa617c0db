"""Networks in float64 that use their weights in many ways, and the exact first-order variance of their outputs."""

import torch
from torch import nn
from torch.func import functional_call, jacrev

from bayesify._core.trees import call
from bayesify.laws import GaussianLaw, Posterior
from tests.torchvision_stub import declare_torchvision_operators

__all__ = ["NETWORKS", "UNet", "exact_covariance", "gaussian", "randn"]

G = torch.Generator().manual_seed(0)


seq = nn.Sequential


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=G)


class Residual(nn.Module):
    """Convolutions with strides, groups, biases and padding, batch normalisation, slicing, max pooling."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.same = nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular", dilation=2)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4, 3)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        nn.init.normal_(self.norm.running_mean, 0.0, 0.3)

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x)))
        h = h + self.up(torch.tanh(self.second(h)))
        h = self.pool(nn.functional.gelu(self.same(h)))
        return self.head(h.mean((2, 3)))


class Twice(nn.Module):
    """A layer that is called twice, a tied weight, and a parameter that meets activations entry by entry."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.mix = nn.Linear(5, 5)
        self.position = nn.Parameter(torch.randn(1, 4, 5))
        self.start = nn.Parameter(torch.randn(1, 1, 5))
        self.scale = nn.Parameter(torch.randn(5))
        self.norm = nn.LayerNorm(5)

    def forward(self, ids):
        h = self.embed(ids) + self.position
        h = torch.cat([self.start.expand(len(ids), -1, -1), h], 1)
        h = self.norm(self.mix(torch.tanh(self.mix(h))) * self.scale)
        return h.mean(1) @ self.embed.weight.T


class Odd(nn.Module):
    """A parameter in an operation without a formula, and one in two arrangements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.other = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        h = torch.tanh(x @ self.weight) @ torch.linalg.matrix_exp(0.1 * self.weight)
        return h @ self.other


class TimeFirst(nn.Module):
    """(B, T, D) outside, (T, B, D) inside, and windows (B r, w, D)."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.one(x.transpose(0, 1))).transpose(0, 1)
        h = torch.tanh(self.two(h.reshape(-1, 3, 4))).reshape(x.shape)
        return self.head(h.mean(1))


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(1), nn.RMSNorm(40), nn.Linear(40, 3)
    )


def bert():
    declare_torchvision_operators()
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=11, num_labels=3, max_position_embeddings=8, **sizes))


IDS = {
    "input_ids": torch.tensor([[1, 2, 2, 3, 5], [4, 1, 7, 7, 7], [9, 8, 1, 0, 0]]),
    "attention_mask": torch.tensor([[1] * 5, [1] * 5, [1, 1, 1, 0, 0]]),
}

NETWORKS = {
    "mlp": (lambda: seq(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)), randn(3, 4)),
    "tokens": (lambda: seq(nn.Linear(4, 6), nn.Tanh(), nn.Flatten(1), nn.Linear(30, 3)), randn(3, 5, 4)),
    "residual": (Residual, randn(3, 2, 6, 6)),
    "conv1d": (lambda: seq(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(1), nn.Linear(16, 3)), randn(3, 2, 6)),
    "conv3d": (lambda: seq(nn.Conv3d(1, 2, 2), nn.SiLU(), nn.Flatten(1), nn.Linear(16, 3)), randn(3, 1, 3, 3, 3)),
    "twice": (Twice, torch.tensor([[1, 2, 2, 3], [4, 1, 6, 6], [0, 0, 0, 0]])),
    "odd": (Odd, randn(3, 4)),
    "time first": (TimeFirst, randn(3, 6, 4)),
    "transformer": (transformer, randn(3, 5, 8)),
    "bert": (bert, IDS),
}


def gaussian(network, *, std=0.3, likelihood="classification", seed=1):
    """Return a posterior with standard deviations of every parameter, all different."""
    generator = torch.Generator().manual_seed(seed)
    network = network.double().eval()
    log_stds = {
        name: (std * (0.2 + torch.rand(p.shape, dtype=p.dtype, generator=generator))).log()
        for name, p in network.named_parameters()
    }
    posterior = Posterior(network, GaussianLaw(network, log_stds=log_stds))
    posterior.set_likelihood(likelihood)
    return posterior


def exact_covariance(posterior, inputs):
    """Return outputs (B, K) and their covariance J S J', (B, K, K), with the whole Jacobian."""
    names = posterior.law.names
    parameters = dict(posterior.network.named_parameters())
    variances = {name: (2 * value).exp() for name, value in posterior.law.log_std.as_dict().items()}

    def run(weights):
        output = call(lambda *a, **k: functional_call(posterior.network, weights, a, k), inputs)
        return posterior.read(output).flatten(1)

    weights = {name: parameters[name].detach() for name in names}
    jacobian = jacrev(run)(weights)
    with torch.no_grad():
        outputs = run(weights)
    shape = (*outputs.shape, -1)
    parts = [(jacobian[name].reshape(shape), variances[name].detach().reshape(-1)) for name in names]
    return outputs, sum(torch.einsum("bip,p,bjp->bij", j, v, j) for j, v in parts)


class UNet(nn.Module):
    """Two scales and a skip connection, with classes for every pixel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 3, 3, padding=1)
        self.bottom = nn.Conv2d(3, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        skip = torch.tanh(self.down(x))
        h = self.up(torch.relu(self.bottom(nn.functional.avg_pool2d(skip, 2))))
        return self.head(torch.cat([skip, h], 1))
