"""Diagnostics of components, against plain networks and the singular values of all weights."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import IBNN, MCDropout
from experiments.components import look_at_components, place_components, plot_components


def network() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, groups=2), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(36, 3)).double().eval()


def made(components: int = 4) -> bayesify.Posterior:
    return bayesify.convert(network(), IBNN(components=components, means_std=0.5))


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(30, 4, 4, 4, dtype=torch.float64), torch.arange(30) % 3)


@torch.no_grad()
def test_each_component_is_measured_as_a_plain_network():
    posterior = made()
    found = look_at_components(posterior, DataLoader(data(), 8))
    x, labels = data().tensors
    logits = torch.stack([posterior.law.component(k)(x) for k in range(4)])
    guesses = logits.argmax(-1)
    for k in range(4):
        assert found.accuracy[k] == pytest.approx(float((guesses[k] == labels).double().mean()))
        assert float(found.nll[k]) == pytest.approx(float(nn.functional.cross_entropy(logits[k], labels)))
        for other in range(4):
            share = float((guesses[k] != guesses[other]).double().mean())
            assert float(found.disagreement[k, other]) == pytest.approx(share)
    assert found.mean_disagreement == pytest.approx(float(found.disagreement.sum()) / 12)
    assert found.mean_disagreement > 0


@torch.no_grad()
def test_positions_are_the_principal_components_of_all_weights():
    posterior = made()
    names = [latent.parameter for latent in posterior.law.latents]

    def weights(plain: nn.Module) -> torch.Tensor:
        return torch.cat([plain.get_parameter(name).flatten() for name in names])

    rows = torch.stack([*(weights(posterior.law.component(k)) for k in range(4)), weights(network())])
    centred = rows - rows[:4].mean(0)
    _, sizes, axes = torch.linalg.svd(centred[:4], full_matrices=False)
    positions, explained = place_components(posterior)
    torch.testing.assert_close(positions.abs(), (centred @ axes[:2].T).abs(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(explained, sizes[:2] ** 2 / (sizes**2).sum(), rtol=1e-9, atol=1e-9)


def test_one_component_has_a_place_too():
    positions, explained = place_components(made(1))
    assert positions.shape == (2, 2)
    assert positions.isfinite().all()
    assert explained.isfinite().all()
    assert look_at_components(made(1), DataLoader(data(), 8)).mean_disagreement == 0


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = plot_components(look_at_components(made(), DataLoader(data(), 8)), tmp_path / "new" / "picture.svg")
    text = path.read_text(encoding="utf-8")
    assert "components" in text
    assert "of the variance" in text


def test_what_has_no_components_is_named():
    plain = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    with pytest.raises(TypeError, match="IBNN"):
        look_at_components(bayesify.convert(plain, MCDropout()), [])
    with pytest.raises(ValueError, match="no batch"):
        look_at_components(made(), [])
    regression = bayesify.convert(nn.Linear(2, 1), IBNN(), likelihood="regression")
    with pytest.raises(TypeError, match="classifiers"):
        look_at_components(regression, [(torch.randn(3, 2), torch.randn(3, 1))])
