"""predict(how="streamlined") as users call it: networks as they are written, posteriors, and errors."""

import pytest
import torch
from torch import nn

from bayesify import ABNN, MAP, Gaussian, MCDropout, Streamlined, convert, predict
from bayesify.laws import GaussianLaw, Posterior
from tests.laws.networks import mlp
from tests.marks import slow_but
from tests.prediction.linearised.networks import NETWORKS, UNet, gaussian, randn
from tests.test_architectures import TOKENS, timm, tiny_convnext, tiny_vit, torchvision
from tests.test_architectures import UNet as FullUNet
from tests.torchvision_stub import declare_torchvision_operators

EXACT = {"rtol": 1e-9, "atol": 1e-12}
X = randn(5, 4)


@torch.no_grad()
def monte_carlo(posterior, inputs, number=2000):
    return torch.stack([posterior.evaluate(inputs, [key])[0] for key in posterior.keys(number, 0)])


def centred(outputs):
    return outputs - outputs.mean(-1, keepdim=True)


@pytest.mark.parametrize("name", slow_but(["mlp"], ["mlp", "tokens", "conv1d", "conv3d", "time first", "transformer"]))
@pytest.mark.slow
def test_small_networks_against_draws(name):
    """Variances within a quarter of Monte Carlo's with 2000 draws, whose own error is 3 % of a variance."""
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    posterior = gaussian(make(), std=0.1)
    expected = centred(monte_carlo(posterior, inputs)).var(0)
    prediction = predict(posterior, inputs, how=Streamlined(engine="moments"))
    assert 0.75 < (prediction.logits_variance.sum() / expected.sum()).item() < 1.25
    assert prediction.predictor.startswith("streamlined: means and variances")


def test_one_linear_layer_is_exact():
    posterior = gaussian(nn.Linear(4, 3), likelihood=Gaussian(0.5))
    variances = {name: (2 * psi).exp() for name, psi in posterior.law.log_std.as_dict().items()}
    prediction = predict(posterior, X, how="streamlined")
    torch.testing.assert_close(prediction.epistemic, X**2 @ variances["weight"].T + variances["bias"], **EXACT)
    assert torch.equal(prediction.aleatoric, torch.full_like(prediction.mean, 0.25))
    with_inputs = predict(
        posterior, X, how=Streamlined(engine="moments"), input_variance=torch.tensor(0.1, dtype=torch.float64)
    )
    second = posterior.network.weight.detach() ** 2 + variances["weight"]
    torch.testing.assert_close(with_inputs.epistemic, prediction.epistemic + 0.1 * second.sum(1).expand(5, 3), **EXACT)


def test_dropout_and_norm_noise_are_moments():
    network = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3)).double()
    posterior = convert(network, MCDropout(), likelihood=Gaussian(0.5))
    expected = (X**2 * (0.3 / 0.7)) @ network[1].weight.detach().T ** 2
    torch.testing.assert_close(predict(posterior, X, how=Streamlined(engine="moments")).epistemic, expected, **EXACT)
    norm = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).double()
    nn.init.normal_(norm[0].bias)
    noisy = convert(norm, ABNN(alpha=0.2, members=1), likelihood=Gaussian(0.5))
    xhat = (norm[0](X) - norm[0].bias).detach()
    expected = 0.04 * xhat**2 @ norm[1].weight.detach().T ** 2
    torch.testing.assert_close(predict(noisy, X, how=Streamlined(engine="moments")).epistemic, expected, **EXACT)


def test_only_what_is_random_pays():
    """Before the first random layer nothing is a pair, and without variance there is none."""
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(type(x).__name__)
            return x

    network = nn.Sequential(nn.Linear(4, 4), Look(), nn.Linear(4, 4), Look(), nn.Linear(4, 3)).double()
    posterior = Posterior(network, GaussianLaw(network, log_stds={"2.weight": torch.zeros(4, 4).double()}))
    seen.clear()
    predict(posterior, X, how=Streamlined(engine="moments"))
    assert seen[-2:] == ["Tensor", "Moments"]
    plain = predict(convert(mlp(), MAP()), X, how=Streamlined(engine="moments"))
    assert (plain.epistemic == 0).all()


def test_the_engine_is_chosen_and_said():
    images = randn(2, 1, 4, 4)
    cnn = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(1), nn.Linear(8, 3))
    assert "backward pass" in predict(gaussian(cnn), images, how="streamlined").predictor
    assert "forward pass" in predict(gaussian(UNet()), images, how="streamlined").predictor
    assert "where the logits move most" in predict(gaussian(cnn), images, how="streamlined").predictor
    headless = nn.Sequential(cnn, nn.Softplus())
    assert "margin" in predict(gaussian(headless), images, how="streamlined").predictor
    assert "forward pass" in predict(gaussian(NETWORKS["mlp"][0]()), X, how="streamlined").predictor
    with pytest.raises(ValueError, match="one decision or one number"):
        predict(gaussian(UNet()), images, how=Streamlined(engine="margin"))


def test_margin_is_exact_for_the_top_two():
    torch.manual_seed(0)
    make, inputs = NETWORKS["residual"]
    posterior = gaussian(make())
    from tests.prediction.linearised.networks import exact_covariance

    outputs, covariance = exact_covariance(posterior, inputs)
    top = outputs.topk(2).indices
    margin = torch.zeros_like(outputs).scatter_(1, top[:, :1], 1.0).scatter_(1, top[:, 1:], -1.0)
    expected = torch.einsum("bi,bij,bj->b", margin, covariance, margin)
    prediction = predict(posterior, inputs, how=Streamlined(engine="margin", sketch=0))
    # independent logits of variance v have v (1 - 1/C) when centred, and a margin of 2 v
    torch.testing.assert_close(prediction.logits_variance * (2 / (1 - 1 / 3)), expected[:, None].expand(3, 3), **EXACT)


@pytest.mark.parametrize("kind", ["regression", "binary", "two classes"])
def test_one_number_is_exact_to_first_order(kind):
    from tests.prediction.linearised.networks import exact_covariance

    torch.manual_seed(0)
    outputs = 2 if kind == "two classes" else 1
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs))
    likelihood = "classification" if kind == "two classes" else kind
    posterior = gaussian(network, likelihood=likelihood)
    covariance = exact_covariance(posterior, X)[1]
    prediction = predict(posterior, X, how="streamlined")
    assert "backward pass" in prediction.predictor
    if kind == "two classes":  # of logits whose mean is taken off
        expected = (covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1])[:, None].expand(-1, 2) / 4
        torch.testing.assert_close(prediction.logits_variance, expected, **EXACT)
    elif kind == "binary":  # of yes and no together, l / 2 and -l / 2
        torch.testing.assert_close(prediction.output_variance, covariance[:, 0, 0] / 2, **EXACT)
    else:
        torch.testing.assert_close(prediction.epistemic, covariance[:, 0, 0], **EXACT)
    # What is carried forward drops what units have in common, and is asked for where inputs have a variance.
    forward = predict(posterior, X, how=Streamlined(engine="moments"))
    assert not torch.allclose(forward.output_variance, prediction.output_variance, rtol=0.01)
    asked = predict(posterior, X, how="streamlined", input_variance=torch.tensor(0.0))
    torch.testing.assert_close(asked.output_variance, forward.output_variance, **EXACT)


def test_a_changed_posterior_is_seen():
    posterior = gaussian(NETWORKS["mlp"][0]())
    first = predict(posterior, X, how=Streamlined(engine="moments")).logits_variance
    assert torch.equal(predict(posterior, X, how=Streamlined(engine="moments")).logits_variance, first)
    with torch.no_grad():
        for log_std in posterior.law.log_std.parameters():
            log_std.sub_(1.0)
        for log_std in posterior.law.log_std.buffers():
            log_std.sub_(1.0)
    second = predict(posterior, X, how=Streamlined(engine="moments")).logits_variance
    assert (second < first).all()
    posterior.network[-1].weight.data.mul_(2.0)
    assert not torch.equal(predict(posterior, X, how=Streamlined(engine="moments")).logits_variance, second)
    single = predict(posterior.float(), X.float(), how=Streamlined(engine="moments")).logits_variance
    assert single.dtype == torch.float32


def test_an_operation_without_a_rule_is_named():
    class Inner(nn.Module):
        def forward(self, x):
            return torch.cumprod(x, -1)

    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Inner()), nn.Linear(4, 3))
    posterior = gaussian(network)
    with pytest.raises(NotImplementedError, match=r"cumprod in module '1.1' .*@bayesify.moment_rule"):
        predict(posterior, X, how=Streamlined(engine="moments"))
    assert all("forward" not in module.__dict__ and not module._forward_hooks for module in posterior.modules())
    assert predict(posterior, X, how="linearised").epistemic.min() > 0


def test_bad_input_variances():
    posterior = gaussian(NETWORKS["mlp"][0]())
    for value, message in [(torch.tensor(-1.0), "negative"), (torch.ones(3), "does not broadcast")]:
        with pytest.raises(ValueError, match=message):
            predict(posterior, X, how=Streamlined(engine="moments"), input_variance=value)
    with pytest.raises(ValueError, match=r"Use how=Streamlined\(engine='moments'\)"):
        predict(posterior, X, input_variance=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"Only Streamlined\(engine='moments'\)"):
        predict(posterior, X, how="linearised", input_variance=torch.tensor(1.0))


def bert():
    declare_torchvision_operators()
    from tests.test_architectures import bert

    return bert()


def timm_vit():
    declare_torchvision_operators()
    return timm("vit_tiny_patch16_224", img_size=32, depth=2)()


ARCHITECTURES = {
    "torchvision resnet18": (torchvision("resnet18"), (2, 3, 32, 32)),
    "torchvision mobilenet_v3_small": (torchvision("mobilenet_v3_small"), (2, 3, 32, 32)),
    "torchvision vit": (tiny_vit, (2, 3, 32, 32)),
    "torchvision convnext": (tiny_convnext, (2, 3, 32, 32)),
    "timm vit": (timm_vit, (2, 3, 32, 32)),
    "bert": (bert, None),
    "unet": (FullUNet, (2, 3, 32, 32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("how", [Streamlined(engine="moments"), "streamlined"])
def test_architectures(name, how):
    torch.manual_seed(0)
    make, shape = ARCHITECTURES[name]
    network = make().eval()
    inputs = TOKENS if shape is None else torch.randn(*shape)
    log_stds = {
        key: torch.full_like(p, -6.0).detach() for key, p in network.named_parameters() if p.ndim > 1 or "norm" in key
    }
    posterior = Posterior(network, GaussianLaw(network, log_stds=log_stds))
    prediction = predict(posterior, inputs, how=how)
    assert prediction.logits_variance.isfinite().all()
    assert (prediction.logits_variance > 0).all()
    with torch.inference_mode():
        again = predict(posterior, inputs, how=how)
    torch.testing.assert_close(again.logits_variance, prediction.logits_variance)
