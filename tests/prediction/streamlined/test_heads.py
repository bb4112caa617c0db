"""Covariances within heads of attention: against dense covariances, formed head by head, and the whole Jacobian."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayesify import MAP, Gaussian, Streamlined, convert, export, predict
from tests.prediction.kronecker import dense, kronecker
from tests.prediction.linearised.networks import IDS, bert, gaussian, randn, transformer

EXACT = {"rtol": 1e-9, "atol": 1e-12}
HEADS, WIDTH, TOKENS = 2, 6, 4


class Attention(nn.Module):
    """Attention of an encoder, in one of several ways to write it."""

    def __init__(self, layout="batch first", heads=HEADS):
        super().__init__()
        self.layout, self.heads = layout, heads
        if layout in ("batch first", "time first"):
            self.mha = nn.MultiheadAttention(WIDTH, heads, batch_first=layout == "batch first")
            nn.init.normal_(self.mha.in_proj_bias)
        else:
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def projections(self):
        if hasattr(self, "mha"):
            return (*self.mha.in_proj_weight.chunk(3), *self.mha.in_proj_bias.chunk(3), self.mha.out_proj)
        layers = (self.query, self.key, self.value)
        return (*(layer.weight for layer in layers), *(layer.bias for layer in layers), self.out)

    def forward(self, x):
        if self.layout == "batch first":
            return self.mha(x, x, x, need_weights=False)[0]
        if self.layout == "time first":
            x = x.transpose(0, 1)
            return self.mha(x, x, x)[0].transpose(0, 1)
        split = (
            torch.unflatten(f(x), -1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2)
        if self.layout == "interleaved":  # the entries of a head no longer lie side by side
            return self.out(mixed.transpose(2, 3).flatten(2))
        return self.out(mixed.reshape(*x.shape) if self.layout == "reshaped" else mixed.flatten(2))


def mixing(network, x):
    """Return the weights of attention at the means, (B, H, T, T)."""
    wq, wk, _, bq, bk, _, _ = (p.detach() if isinstance(p, torch.Tensor) else p for p in network.projections())
    q, k = (
        torch.unflatten(functional.linear(x, w, b), -1, (network.heads, -1)).transpose(1, 2)
        for w, b in ((wq, bq), (wk, bk))
    )
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def by_heads(network, x, spread, of_values):
    """Return the output's variances for fixed output weights, from covariances of the values within each head.

    Args:
        network: The attention.
        x: (B, T, D).
        spread: The variance of x, whose entries are independent.
        of_values: The covariance of all values that the value weights add, from mean and variance of an input, (D, D).
    """
    attention = mixing(network, x)
    *_, out = network.projections()
    wv = network.projections()[2].detach()
    size = WIDTH // network.heads
    found = torch.zeros_like(x)
    for row in range(len(x)):
        for token in range(TOKENS):
            for head in range(network.heads):
                own = slice(head * size, (head + 1) * size)
                along = attention[row, head, token]
                mixed = along**2 @ spread[row]
                covariance = (wv @ mixed.diag() @ wv.T + of_values(along @ x[row], mixed))[own, own]
                projection = out.weight.detach()[:, own]
                found[row, token] += (projection @ covariance @ projection.T).diagonal()
    return found


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("layout", ["batch first", "time first", "reshaped", "flattened"])
def test_random_inputs(layout):
    posterior = convert(Attention(layout).double().eval(), MAP(), likelihood=Gaussian(1.0))
    x, spread = randn(2, TOKENS, WIDTH), randn(2, TOKENS, WIDTH).square()
    found = predict(posterior, x, how=Streamlined(covariance="per-head"), input_variance=spread).epistemic
    expected = by_heads(posterior.network, x, spread, lambda mean, variance: 0)
    torch.testing.assert_close(found, expected, **EXACT)
    apart = predict(posterior, x, how=Streamlined(engine="moments"), input_variance=spread).epistemic
    assert (apart - expected).abs().max() > 0.01 * expected.max()  # the covariances matter here


def test_random_weights():
    posterior = gaussian(Attention("batch first"), likelihood=Gaussian(1.0))
    variances = {name: (2 * value).exp().detach() for name, value in posterior.law.log_std.as_dict().items()}
    of_weight, of_bias = variances["mha.in_proj_weight"].chunk(3)[2], variances["mha.in_proj_bias"].chunk(3)[2]
    x, spread = randn(2, TOKENS, WIDTH), randn(2, TOKENS, WIDTH).square()
    found = predict(posterior, x, how=Streamlined(covariance="per-head"), input_variance=spread).epistemic

    def of_values(mean, variance):
        return (of_weight @ (mean**2 + variance) + of_bias).diag()

    expected = by_heads(posterior.network, x, spread, of_values)
    # The output weights are random too: they meet the values' means and variances.
    out = posterior.network.mha.out_proj
    kept = [p.detach().clone() for p in (out.weight, out.bias)]
    with torch.no_grad():
        out.weight.copy_(torch.eye(WIDTH)), out.bias.zero_()
        values = posterior.network(x)
        of_each = by_heads(posterior.network, x, spread, of_values)
        out.weight.copy_(kept[0]), out.bias.copy_(kept[1])
    expected = expected + (values.square() + of_each) @ variances["mha.out_proj.weight"].T
    torch.testing.assert_close(found, expected + variances["mha.out_proj.bias"], **EXACT)


def test_correlated_values():
    posterior = kronecker(Attention("reshaped"), Gaussian(1.0), include="value")
    whole = dense(posterior, "value.weight")[0].view(WIDTH, WIDTH + 1, WIDTH, WIDTH + 1)
    x, spread = randn(2, TOKENS, WIDTH), randn(2, TOKENS, WIDTH).square()
    found = predict(posterior, x, how=Streamlined(covariance="per-head"), input_variance=spread).epistemic

    def of_values(mean, variance):
        extended, more = torch.cat([mean, torch.ones(1).double()]), torch.cat([variance, torch.zeros(1).double()])
        return torch.einsum("aibj,ij->ab", whole, torch.outer(extended, extended) + more.diag())

    torch.testing.assert_close(found, by_heads(posterior.network, x, spread, of_values), **EXACT)


def test_correlated_output_weights():
    """One draw of (W, b) (y, 1) has Var_i = m' S_ii m + tr(S_ii C) + (W C W')_ii, C being block diagonal over heads."""
    posterior = kronecker(Attention("reshaped"), Gaussian(1.0), include="out")
    network = posterior.network
    x, spread = randn(1, TOKENS, WIDTH), randn(1, TOKENS, WIDTH).square()
    found = predict(posterior, x, how=Streamlined(covariance="per-head"), input_variance=spread).epistemic
    attention, wv, size = mixing(network, x), network.value.weight.detach(), WIDTH // HEADS
    whole = dense(posterior, "out.weight")[0].view(WIDTH, WIDTH + 1, WIDTH, WIDTH + 1)
    for token in range(TOKENS):
        covariance, mean = torch.zeros(WIDTH + 1, WIDTH + 1).double(), torch.ones(WIDTH + 1).double()
        for head in range(HEADS):
            own, along = slice(head * size, (head + 1) * size), attention[0, head, token]
            covariance[own, own] = (wv @ (along**2 @ spread[0]).diag() @ wv.T)[own, own]
            mean[own] = network.value(along @ x[0]).detach()[own]
        second = torch.outer(mean, mean) + covariance
        projected = network.out.weight.detach() @ covariance[:-1, :-1] @ network.out.weight.detach().T
        expected = torch.stack([(whole[i, :, i] * second).sum() for i in range(WIDTH)]) + projected.diagonal()
        torch.testing.assert_close(found[0, token], expected, **EXACT)


class Given(nn.Module):
    """Attention with one head, whose queries and keys are not random."""

    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.register_buffer("given", randn(1, TOKENS, WIDTH))

    def forward(self, x):
        given = self.given.expand(x.shape[0], -1, -1)
        return self.mha(given, given, x, need_weights=False)[0]


def test_one_head_is_exact_to_first_order():
    posterior = convert(Given().double().eval(), MAP(), likelihood=Gaussian(1.0))
    x, spread = randn(2, TOKENS, WIDTH), randn(2, TOKENS, WIDTH).square()
    jacobian = torch.autograd.functional.jacobian(lambda one: posterior.network(one).sum(0), x)  # (T, D, B, T, D)
    found = predict(posterior, x, how=Streamlined(covariance="per-head"), input_variance=spread).epistemic
    expected = (jacobian.square() * spread).sum((-2, -1)).movedim(-1, 0)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("make", [transformer, bert])
def test_encoders(make):
    posterior, inputs = gaussian(make(), std=0.05), IDS if make is bert else randn(3, 5, 8)
    found = predict(posterior, inputs, how=Streamlined(covariance="per-head"))
    apart = predict(posterior, inputs, how=Streamlined(engine="moments"))
    assert "within heads" in found.predictor
    assert bool((found.logits_variance > 0).all())
    assert not torch.equal(found.logits_variance, apart.logits_variance)


@pytest.mark.slow
def test_exported():
    posterior = gaussian(nn.Sequential(Attention("reshaped"), nn.Flatten(1), nn.Linear(TOKENS * WIDTH, 3)))
    x = randn(5, TOKENS, WIDTH)
    outputs = export(posterior, x, how=Streamlined(covariance="per-head")).module()(x)
    torch.testing.assert_close(
        outputs["epistemic"], predict(posterior, x, how=Streamlined(covariance="per-head")).epistemic, **EXACT
    )


class WrittenOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out((x @ x.mT).softmax(-1) @ self.value(x))


@pytest.mark.parametrize(
    ("network", "found"),
    [(nn.Linear(WIDTH, 3), "0 of 0"), (Attention("interleaved"), "0 of 1"), (WrittenOut(), "0 of 0")],
)
def test_what_carries_no_covariances_is_an_error(network, found):
    posterior = gaussian(network, likelihood=Gaussian(1.0))
    with pytest.raises(ValueError, match=rf"covariances of {found} attentions.*how='streamlined'"):
        predict(posterior, randn(2, TOKENS, WIDTH), how=Streamlined(covariance="per-head"))
