"""Each kind of layer, in float64: factors at one are the network, folding is multiplying, examples have their own."""

import copy

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import IBNN
from bayesify.laws import ShapeError
from bayesify.layers import LinearLayer

EXACT = {"rtol": 1e-12, "atol": 1e-12}
CONVERTED = IBNN(components=3, means_std=0.3, start_std=(0.3, 0.1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def tokens(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(0))


class TokensFirst(nn.Module):
    """(B, T, D) outside, (T, B, D) inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(0, 1)).transpose(0, 1)


class Windows(nn.Module):
    """(B, 2 w, D) cut into windows, (B 2, w, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        cut = x.reshape(len(x) * 2, -1, x.shape[-1])
        return self.linear(cut).reshape(len(x), x.shape[1], -1)


class Positions(nn.Module):
    """Embeddings of tokens and of positions, the latter without a batch."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4, padding_idx=0)
        self.positions = nn.Embedding(9, 4)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(x.shape[1], device=x.device)
        return self.tokens(x) + self.positions(order if self.flat else order[None])


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Tied(nn.Module):
    """An embedding whose weight is the head's too, as a module or read by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        if by_hand:
            del self.head
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embedding(x))
        return nn.functional.linear(h, self.embedding.weight) if self.by_hand else self.head(h)


class SelfAttention(nn.Module):
    """Attention of a sequence to itself, to a shifted one, or to one of another width."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        options = {"kdim": 4, "vdim": 5} if kind == "other widths" else {}
        self.attention = nn.MultiheadAttention(6, 2, batch_first=kind != "tokens first", **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "tokens first":
            x = x.transpose(0, 1)
            return self.attention(x, x, x)[0].transpose(0, 1)
        if self.kind == "other widths":
            return self.attention(x, x[..., :4], x[..., :5])[0]
        return self.attention(x, x.roll(1, 1), x, need_weights=False)[0]


class HuggingFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.linear = Conv1D(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


LAYERS = {
    "Linear": (lambda: nn.Linear(6, 4), numbers(5, 6)),
    "Linear, no bias": (lambda: nn.Linear(6, 4, bias=False), numbers(5, 6)),
    "Linear, tokens": (lambda: nn.Linear(6, 4), numbers(5, 3, 6)),
    "Linear, more dimensions": (lambda: nn.Linear(6, 4), numbers(5, 3, 2, 6)),
    "Linear, tokens first": (TokensFirst, numbers(5, 3, 6)),
    "Linear, windows": (Windows, numbers(5, 4, 6)),
    "Linear, twice": (Twice, numbers(4, 5)),
    "Conv1d": (lambda: nn.Conv1d(6, 4, 3, padding=1), numbers(5, 6, 7)),
    "Conv2d": (lambda: nn.Conv2d(6, 4, 3, stride=2, dilation=2, padding=2), numbers(5, 6, 7, 8)),
    "Conv2d, reflected": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), numbers(5, 6, 7, 8)),
    "Conv2d, groups": (lambda: nn.Conv2d(6, 8, 3, groups=2), numbers(5, 6, 7, 8)),
    "Conv2d, depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6), numbers(5, 6, 7, 8)),
    "Conv2d, square batch": (lambda: nn.Conv2d(5, 4, 3), numbers(5, 5, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(3, 4, 2, bias=False), numbers(5, 3, 4, 3, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(6, 4, 3, stride=2), numbers(5, 6, 7)),
    "ConvTranspose2d, groups": (
        lambda: nn.ConvTranspose2d(6, 4, 3, groups=2, output_padding=1, stride=2), numbers(5, 6, 4, 4),
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(3, 4, 2), numbers(5, 3, 3, 3, 3)),
    "Embedding": (lambda: nn.Embedding(7, 5, padding_idx=1), tokens(5, 3)),
    "positions (1, T)": (lambda: Positions(flat=False), tokens(5, 3)),
    "attention": (lambda: SelfAttention("self"), numbers(5, 3, 6)),
    "attention, tokens first": (lambda: SelfAttention("tokens first"), numbers(5, 3, 6)),
    "attention, other widths": (lambda: SelfAttention("other widths"), numbers(5, 3, 6)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), numbers(5, 3, 6)),
    "transformers' Conv1D": (HuggingFace, numbers(5, 3, 6)),
    "tied modules": (lambda: Tied(by_hand=False), tokens(5, 3)),
}  # fmt: skip


def make(name: str, method: IBNN = CONVERTED) -> tuple[nn.Module, bayesify.Posterior, Tensor]:
    torch.manual_seed(1)
    factory, x = LAYERS[name]
    network = factory().double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for module in network.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0  # as torch keeps it
    return network, bayesify.convert(network, method), x


def naive(network: nn.Module, posterior: bayesify.Posterior, factors: Tensor) -> nn.Module:
    """Return the network with each weight multiplied column by column, by a loop over inputs."""
    copied = copy.deepcopy(network)
    done = set()
    start = 0
    for module in copied.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim < 2 or id(parameter) in done or isinstance(module, nn.LayerNorm):
                continue
            done.add(id(parameter))
            transposed = isinstance(module, nn.modules.conv._ConvTransposeNd) or type(module).__name__ == "Conv1D"
            with torch.no_grad():
                if key == "in_proj_weight":
                    width = parameter.shape[1]
                    for part in range(3):
                        for column in range(width):
                            parameter[part * width : (part + 1) * width, column] *= factors[start]
                            start += 1
                elif transposed:
                    for row in range(len(parameter)):
                        parameter[row] *= factors[start]
                        start += 1
                else:
                    groups = getattr(module, "groups", 1)
                    outputs = len(parameter) // groups
                    for group in range(groups):
                        for column in range(parameter.shape[1]):
                            parameter[group * outputs : (group + 1) * outputs, column] *= factors[start]
                            start += 1
    assert start == len(factors)
    return copied


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_draw_is_the_network_with_scaled_columns(name):
    network, posterior, x = make(name)
    for key in posterior.keys(3, seed=2):
        expected = naive(network, posterior, posterior.law.factors(key))(x)
        assert not torch.allclose(expected, network(x))
        torch.testing.assert_close(posterior.evaluate(x, [key])[0], expected, **EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_a_fresh_pass_is_a_loop_over_examples(name, monkeypatch):
    """Each example goes through the network of its own factors; gradients included."""
    network, posterior, x = make(name)
    factors = torch.randn(len(x), posterior.law.component_means.shape[1], dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(posterior.law, "_fresh", lambda assigned: factors)
    outputs = posterior(x)
    loop = torch.cat(
        [torch.func.functional_call(network, posterior.law.folded(factors[i]), (x[i : i + 1],)) for i in range(len(x))]
    )
    torch.testing.assert_close(outputs, loop, **EXACT)
    weights = numbers(*outputs.shape)
    parameters = [factors, *posterior.network.parameters()]
    gradients = torch.autograd.grad((outputs * weights).sum(), parameters, allow_unused=True)
    own = dict(zip([id(p) for p in network.parameters()], posterior.network.parameters(), strict=True))
    tied = {name: own[id(p)] for name, p in network.named_parameters()}
    loop = torch.cat(
        [
            torch.func.functional_call(network, {**tied, **posterior.law.folded(factors[i])}, (x[i : i + 1],))
            for i in range(len(x))
        ]
    )
    expected = torch.autograd.grad((loop * weights).sum(), parameters, allow_unused=True)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert (gradient is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_factors_of_one_are_the_network_bit_for_bit(name, monkeypatch):
    network, posterior, x = make(name)
    monkeypatch.setattr(
        posterior.law, "_fresh", lambda rows: torch.ones(len(rows), posterior.law.component_means.shape[1]).double()
    )
    assert torch.equal(posterior.reference(x), network(x))
    ones = torch.ones(posterior.law.component_means.shape[1], dtype=torch.float64)
    assert torch.equal(posterior.law.to_network(ones)(x), network(x))
    if "attention" in name or "encoder" in name:  # another order of sums
        torch.testing.assert_close(posterior(x), network(x), **EXACT)
    else:
        assert torch.equal(posterior(x), network(x))


@pytest.mark.parametrize("name", [name for name in LAYERS if "Embedding" not in name])
@torch.no_grad()
def test_a_bias_has_one_factor(name):
    network, posterior, x = make(name, IBNN(components=2, means_std=0.0, start_std=(0.0, 0.0), bias=True))
    biases = {latent.parameter for latent in posterior.law.latents if latent.parameter.endswith("bias")}
    owned = {n for n, p in network.named_parameters() if n.endswith("bias") and "norm" not in n and "in_proj" not in n}
    assert biases == owned
    if not biases:
        return
    scaled = copy.deepcopy(network)
    for latent in posterior.law.latents:
        if latent.parameter in biases:
            posterior.law.component_means[:, latent.span] = 1.7
            scaled.get_parameter(latent.parameter).mul_(1.7)
    for function in (posterior, posterior.draw(0)):
        torch.testing.assert_close(function(x), scaled(x), **EXACT)


@torch.no_grad()
def test_tokens_of_an_example_share_their_factors():
    _, posterior, x = make("Linear, tokens")
    same = x[:, :1].expand_as(x)
    y = posterior(same)
    torch.testing.assert_close(y, y[:, :1].expand_as(y), **EXACT)
    assert not torch.isclose(y[0, 0], posterior(same[:1].expand_as(x))[1, 0]).any()


@torch.no_grad()
def test_rows_are_independent_and_calls_are_not():
    _, posterior, _ = make("Linear")
    x = torch.ones(4, 6, dtype=torch.float64)
    assert len(posterior(x).unique(dim=0)) == 4
    _, twice, _ = make("Linear, twice")
    seen = []
    layer = twice.network.linear
    layer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    twice(numbers(4, 5))
    seen.clear()
    twice(numbers(4, 5))
    (x1, y1), (x2, y2) = seen
    ones = torch.ones(5, dtype=torch.float64)
    for row in range(4):  # one weight for both calls: solve it out of neither, compare through the exact pseudo-inverse
        z1 = torch.linalg.solve(layer.weight, y1[row] - layer.bias) / x1[row]
        z2 = torch.linalg.solve(layer.weight, y2[row] - layer.bias) / x2[row]
        torch.testing.assert_close(z1, z2, rtol=1e-8, atol=1e-8)
        assert not torch.allclose(z1, ones)


@torch.no_grad()
@pytest.mark.parametrize("factory", [lambda: Tied(by_hand=True), lambda: Positions(flat=True)])
def test_what_cannot_differ_between_examples_has_one_draw_for_the_pass(factory):
    torch.manual_seed(0)
    network = factory().double()
    posterior = bayesify.convert(network, CONVERTED)
    assert not posterior.independent_rows(tokens(4, 3))
    x = tokens(1, 3).expand(4, 3)
    y = posterior(x)
    if isinstance(network, Tied):
        torch.testing.assert_close(y, y[:1].expand_as(y), **EXACT)
        assert [latent.parameter for latent in posterior.law.plan(posterior.trace(x)).shared] == ["embedding.weight"]
    else:
        assert [latent.parameter for latent in posterior.law.plan(posterior.trace(x)).shared] == ["positions.weight"]
    assert not torch.isclose(y, posterior(x)).all()


def test_layers_that_share_a_weight_share_its_factors():
    _, posterior, _ = make("tied modules")
    assert len(posterior.law.latents) == 1
    assert posterior.law.component_means.shape[1] == 5
    with pytest.raises(ValueError, match="Convert both modules, or neither"):
        bayesify.convert(Tied(by_hand=False), CONVERTED, exclude="head")


def test_a_batch_that_cannot_be_found_is_named():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise RuntimeError("no silent pass")
            return self.linear(x.reshape(-1, 3)[:5])

    posterior = bayesify.convert(Odd().train(), CONVERTED)
    with pytest.raises(ShapeError, match=r"exclude='linear'"):
        posterior(torch.randn(4, 6))


def test_another_layer_can_be_registered():
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    network = nn.Sequential(Mine())
    with pytest.raises(ValueError, match="found nothing to convert"):
        bayesify.convert(network, CONVERTED)
    bayesify.register_type(Mine, LinearLayer(weight_dim=0))
    posterior = bayesify.convert(network, CONVERTED)
    x = numbers(2, 4)
    key = posterior.keys(1, 0)[0]
    expected = (x * posterior.law.factors(key)) @ network[0].weight
    torch.testing.assert_close(posterior.evaluate(x, [key])[0], expected, **EXACT)
    with pytest.raises(ValueError, match="weight_dim"):
        LinearLayer(weight_dim=2)
