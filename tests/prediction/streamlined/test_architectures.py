"""Whole networks with random weights and a little noise: streamlined prediction beside Monte Carlo.

With noise of 1 % of each weight's size networks are nearly linear in their weights. A variance of 100 draws is off by
sqrt(2 / 100) = 14 % of itself. Where one backward pass is made, it is exact to first order for the difference of the
top two, which is compared for each example; where variances are carried forward, the sum over examples and classes is.
The bound is a factor of 1.5, three deviations of the draws.
"""

import pytest
import torch
from torch import nn

from bayesify import Streamlined, predict
from bayesify.laws import GaussianLaw, Posterior
from experiments.networks import CifarResNet
from tests.test_architectures import UNet, timm
from tests.torchvision_stub import declare_torchvision_operators

DRAWS = 100
BOUND = 1.5


def from_timm(name, **options):
    declare_torchvision_operators()
    return timm(name, **options)()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(1), nn.Linear(96, 5))


NETWORKS = {
    "efficientnet-lite0": (lambda: from_timm("efficientnet_lite0"), (3, 3, 32, 32)),
    "cifar resnet": (lambda: CifarResNet(1), (3, 3, 16, 16)),
    "timm vit": (lambda: from_timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48), (3, 3, 32, 32)),
    "timm convnext": (lambda: from_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), (3, 3, 32, 32)),
    "transformer encoder": (encoder, (3, 6, 16)),
    "u-net": (UNet, (3, 3, 16, 16)),
}


def noisy(network):
    """Return a posterior with noise of 1 % on every matrix and kernel."""
    log_stds = {
        name: torch.full_like(p, 0.01 * float(p.detach().square().mean().sqrt())).log().detach()
        for name, p in network.named_parameters()
        if p.ndim > 1
    }
    return Posterior(network, GaussianLaw(network, log_stds=log_stds))


TWO = {"timm convnext"}  # one direction has 1.54 of the draws' variance there, two 1.10, exact first order 1.06


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_close_to_draws(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    posterior = noisy(make().eval())
    inputs = torch.randn(*shape)
    with torch.no_grad():
        how = Streamlined(directions=2) if name in TWO else "streamlined"
        prediction = predict(posterior, inputs, how=how)
        draws = torch.stack([posterior.evaluate(inputs, [key])[0] for key in posterior.keys(DRAWS, 0)])
    if "margin" in prediction.predictor:
        top = prediction.logits_mean.topk(2, -1).indices
        picked = draws.gather(-1, top.expand(DRAWS, -1, -1))
        ratio = (
            2 * prediction.logits_variance[:, 0] / (1 - 1 / draws.shape[-1]) / (picked[..., 0] - picked[..., 1]).var(0)
        )
    else:
        classes = 1 if draws.ndim == 5 else -1
        centred = draws.movedim(1 + classes, -1) if classes == 1 else draws
        centred = centred - centred.mean(-1, keepdim=True)
        ratio = prediction.logits_variance.sum() / centred.var(0).sum()
    assert (ratio > 1 / BOUND).all(), ratio
    assert (ratio < BOUND).all(), ratio
    with torch.inference_mode():
        again = predict(posterior, inputs, how=how)
    torch.testing.assert_close(again.logits_variance, prediction.logits_variance)


def test_an_operation_without_a_rule_is_named_by_its_module():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.cummax(x, -1).values

    encoder = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"odd": Odd()})["odd"], nn.Linear(4, 3))
    network = nn.Sequential()
    network.add_module("trunk", encoder)
    with pytest.raises(NotImplementedError, match=r"cummax in module 'trunk.1' .*@bayesify.moment_rule\("):
        predict(noisy(network.eval()), torch.randn(2, 4), how=Streamlined(engine="moments"))
    prediction = predict(noisy(network.eval()), torch.randn(2, 4), how="streamlined")
    assert "backward pass" in prediction.predictor
