"""Kinds of noise by their moments: the law of outputs, the means of gradients, and their variances.

The seeds are fixed. Bounds on averages are 4.9 standard errors: one comparison of means would fail in 1 of 10^6 seeds.
"""

import pytest
import torch
from torch import Tensor, nn

from bayesify import MAP
from bayesify.laws import GaussianLaw, Posterior

BOUND = 4.9


def _posterior(network: nn.Module, noise: str, log_std: float = -1.0) -> Posterior:
    torch.manual_seed(1)
    stds = {name: nn.Parameter(log_std + torch.rand_like(p)) for name, p in network.named_parameters()}
    return Posterior(network, GaussianLaw(network, log_stds=stds, estimator=noise), method=MAP())


@pytest.mark.parametrize("noise", ["exemplar", "local", "flipout"])
@pytest.mark.slow
def test_outputs_of_a_linear_layer_are_gaussian_with_known_moments(noise: str):
    torch.manual_seed(0)
    network = nn.Linear(3, 2).double()
    posterior = _posterior(network, noise)
    x = torch.randn(3, dtype=torch.float64)
    rows = 40_000 if noise != "flipout" else 8_000
    with torch.no_grad():
        # Flipout's rows share the sizes of one noise, so its moments are those over passes.
        passes, size = (1, rows) if noise != "flipout" else (rows // 2, 2)
        batch = x.expand(size, 3)
        y = torch.cat([posterior(batch) for _ in range(passes)])
        weight, bias = (posterior.law.log_std.get_parameter(n).exp() for n in ("weight", "bias"))
        variance = x**2 @ weight.T**2 + bias**2
        scores = (y - network(x)) / variance.sqrt()
    count = scores.shape[0]
    assert (scores.mean(0).abs() < BOUND / count**0.5).all()
    assert ((scores.var(0) - 1).abs() < BOUND * (2 / count) ** 0.5).all()
    assert ((scores**4).mean(0) - 3).abs().max() < BOUND * (96 / count) ** 0.5
    across = (scores[:, 0] * scores[:, 1]).mean()
    assert across.abs() < BOUND / count**0.5


@pytest.mark.parametrize("noise", ["exemplar", "flipout", "auto", "local", "shared"])
def test_positions_of_a_map_share_a_weight(noise: str):
    # Two positions with equal surroundings have equal outputs under one weight, whatever the noise.
    posterior = _posterior(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular").double(), noise)
    x = torch.randn(4, 2, 1, 1, dtype=torch.float64).expand(4, 2, 5, 5)
    with torch.no_grad():
        y = posterior(x)
    assert torch.allclose(y, y[..., :1, :1].expand_as(y))
    assert not torch.isclose(y[0, :, 0, 0], posterior(x)[0, :, 0, 0]).any()


def _gradients(posterior: Posterior, x: Tensor, target: Tensor, repeats: int) -> Tensor:
    """Return gradients of a mean squared error with respect to all parameters, (repeats, P)."""
    torch.manual_seed(2)
    found = []
    parameters = list(posterior.parameters())
    for _ in range(repeats):
        loss = (posterior(x) - target).square().mean()
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    return torch.stack(found)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4), nn.LayerNorm(4),
        nn.Tanh(), nn.Linear(4, 2),
    ).double()  # fmt: skip


@pytest.mark.slow
def test_gradients_of_all_kinds_have_one_mean():
    x, target = torch.randn(8, 2, 4, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    kinds = ("exemplar", "local", "flipout", "auto")
    moments = {}
    for kind in kinds:
        gradients = _gradients(_posterior(_network(), kind, -2.5), x, target, 500)
        moments[kind] = gradients.mean(0), gradients.var(0) / len(gradients)
    reference, error = moments["exemplar"]
    for kind in kinds[1:]:
        mean, variance = moments[kind]
        scores = (mean - reference) / (variance + error + 1e-300).sqrt()
        assert scores.abs().max() < 5.5  # 4e-8 for each of about 550 numbers and three kinds
        assert scores.abs().max() > 0.5  # the kinds are not the same numbers


@pytest.mark.slow
def test_gradients_of_a_shared_draw_have_the_same_mean_without_batch_statistics():
    x, target = torch.randn(8, 2, 4, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    moments = []
    for kind in ("exemplar", "shared"):
        gradients = _gradients(_posterior(_network().eval(), kind, -2.5), x, target, 500)
        moments.append((gradients.mean(0), gradients.var(0) / len(gradients)))
    (one, error), (other, variance) = moments
    assert ((one - other) / (error + variance + 1e-300).sqrt()).abs().max() < 5.5


@pytest.mark.slow
def test_the_variance_of_gradients_in_the_papers_toy():
    """One convolution 3 -> 16, uniform inputs and targets: one draw for all has about B times the variance."""
    torch.manual_seed(0)
    rows = 32
    x, target = torch.rand(rows, 3, 10, 10), torch.rand(rows, 16, 10, 10)
    network = nn.Conv2d(3, 16, 3, padding=1)
    variances = {}
    for kind in ("shared", "exemplar", "flipout", "auto"):
        posterior = _posterior(network, kind, -6.0)
        gradients = _gradients(posterior, x, target, 400)
        variances[kind] = gradients.var(0).view(2, -1).sum(1)  # of the means, and of psi
    # 400 repeats know a sum of 448 variances to well within these bounds.
    assert ((variances["shared"] / variances["exemplar"] - rows).abs() < 0.3 * rows).all()
    for kind in ("flipout", "auto"):
        assert ((variances[kind] / variances["exemplar"] - 1).abs() < 0.1).all(), kind
