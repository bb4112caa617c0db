"""predict(how="linearised") as users call it."""

import pytest
import torch
from torch import nn

from bayesify import ABNN, SWAG, DeepEnsemble, Gaussian, MCDropout, convert, predict
from bayesify.prediction.linearised import LinearisedPass
from bayesify.prediction.outputs import OutputMoments, independent_variances, prediction_of
from tests.laws.networks import mlp, spread
from tests.prediction.linearised.networks import NETWORKS, UNet, exact_covariance, gaussian, randn

EXACT = {"rtol": 1e-9, "atol": 1e-12}
X = randn(5, 4)


def centred(covariance):
    classes = covariance.shape[-1]
    projection = torch.eye(classes, dtype=covariance.dtype) - 1 / classes
    return (projection @ covariance @ projection).diagonal(dim1=-2, dim2=-1)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_centred_logits(chunk_size):
    torch.manual_seed(0)
    posterior = gaussian(NETWORKS["mlp"][0]())
    outputs, covariance = exact_covariance(posterior, X)
    prediction = predict(posterior, X, how="linearised", chunk_size=chunk_size)
    torch.testing.assert_close(prediction.logits_mean, outputs - outputs.mean(-1, keepdim=True), **EXACT)
    torch.testing.assert_close(prediction.logits_variance, centred(covariance), **EXACT)
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, **EXACT)
    assert prediction.predictor.startswith("linearised")
    half = predict(posterior, X, how="linearised", variance_scale=0.5)
    torch.testing.assert_close(half.logits_variance, centred(covariance) / 2, **EXACT)


def test_many_outputs_go_back_a_few_at_a_time(monkeypatch):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 23))
    posterior = gaussian(network)
    _, covariance = exact_covariance(posterior, X)
    asked, variances = [], LinearisedPass.variances
    monkeypatch.setattr(
        LinearisedPass, "variances", lambda self, c, **options: asked.append(len(c)) or variances(self, c, **options)
    )
    prediction = predict(posterior, X, how="linearised")
    torch.testing.assert_close(prediction.logits_variance, centred(covariance), **EXACT)
    assert asked == [8, 8, 7]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_independent_variances(classes):
    variance = torch.rand(6, classes, dtype=torch.float64) + 0.5
    u = centred(torch.diag_embed(variance))
    found = independent_variances(u)
    torch.testing.assert_close(centred(torch.diag_embed(found)), u, **EXACT)
    if classes > 2:
        torch.testing.assert_close(found, variance, **EXACT)
    lonely = torch.tensor([4.0, 0.01, 0.01, 0.01], dtype=torch.float64)  # of no independent logits
    kept = independent_variances(lonely)
    assert (kept >= 0).all()
    torch.testing.assert_close(centred(torch.diag_embed(kept)).sum(), lonely.sum(), **EXACT)


def test_regression():
    torch.manual_seed(0)
    posterior = gaussian(NETWORKS["mlp"][0](), likelihood=Gaussian(0.3))
    outputs, covariance = exact_covariance(posterior, X)
    prediction = predict(posterior, X, how="linearised")
    torch.testing.assert_close(prediction.mean, outputs, **EXACT)
    torch.testing.assert_close(prediction.epistemic, covariance.diagonal(dim1=-2, dim2=-1), **EXACT)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(outputs, 0.09), **EXACT)


def test_dense_outputs():
    torch.manual_seed(0)
    posterior = gaussian(UNet())
    x = randn(2, 1, 4, 4)
    _, covariance = exact_covariance(posterior, x)
    prediction = predict(posterior, x, how="linearised")
    variances = covariance.view(2, 3, 16, 3, 16).diagonal(dim1=2, dim2=4).movedim(-1, 1)  # (B, 16, 3, 3)
    torch.testing.assert_close(prediction.logits_variance.view(2, 16, 3), centred(variances), **EXACT)
    assert prediction.probs.shape == (2, 4, 4, 3)


def test_drawn_outputs():
    """Draws of Gaussian outputs: 4000 of them put the mean probability within five standard errors."""
    torch.manual_seed(0)
    posterior = gaussian(NETWORKS["mlp"][0]())
    closed = predict(posterior, X, how="linearised")
    drawn = predict(posterior, X, how="linearised", num_draws=4000, seed=0)
    again = predict(posterior, X, how="linearised", num_draws=4000, seed=0, chunk_size=2)
    torch.testing.assert_close(drawn.probs, again.probs, **EXACT)
    variances = independent_variances(closed.logits_variance)
    generator = torch.Generator().manual_seed(5)
    normals = torch.randn(200_000, 3, dtype=torch.float64, generator=generator)
    samples = (closed.logits_mean + variances.sqrt() * normals[:, None]).softmax(-1)
    error = samples.std(0) * (1 / 4000 + 1 / 200_000) ** 0.5
    assert ((drawn.probs - samples.mean(0)).abs() < 5 * error).all()
    assert drawn.epistemic.min() > 0


def test_members_are_a_mixture():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    posterior = convert(network, ABNN(members=2, alpha=0.2))
    for member in posterior.law.parts:
        for parameter in member.parameters():
            nn.init.normal_(parameter)
    prediction = predict(posterior, X, how="linearised")
    parts = []
    for member in range(2):
        one = convert(network, ABNN(members=1, alpha=0.2))
        one.law.parts[0].load_state_dict(posterior.law.parts[member].state_dict())
        parts.append(predict(one, X, how="linearised"))
    torch.testing.assert_close(prediction.probs, (parts[0].probs + parts[1].probs) / 2, **EXACT)
    means = torch.stack([part.logits_mean for part in parts])
    variance = (parts[0].logits_variance + parts[1].logits_variance) / 2 + means.var(0, correction=0)
    torch.testing.assert_close(prediction.logits_variance, variance, **EXACT)
    torch.testing.assert_close(prediction.aleatoric, (parts[0].aleatoric + parts[1].aleatoric) / 2, **EXACT)


def test_an_ensemble_is_what_sampling_says():
    posterior = convert(mlp(), DeepEnsemble(members=3, start="perturbed"))
    sampled, closed = predict(posterior, X, num_draws=3, seed=0), predict(posterior, X, how="linearised")
    for field in ("probs", "aleatoric", "epistemic", "model_variance", "variation_ratio", "logits_variance"):
        torch.testing.assert_close(getattr(closed, field), getattr(sampled, field), **EXACT)


def test_regression_mixture():
    def moments(mean, variance):
        return OutputMoments(torch.tensor([[mean]]), torch.tensor([[variance]]), "")

    found = prediction_of(Gaussian(1.0), [moments(0.0, 2.0), moments(4.0, 6.0)], num_draws=None, seed=0)
    assert (found.mean.item(), found.epistemic.item(), found.aleatoric.item()) == (2.0, 8.0, 1.0)


def test_swag_diagonal():
    torch.manual_seed(0)
    posterior = spread(convert(mlp(), SWAG(rank=0, scale=0.5)))
    prediction = predict(posterior, X, how="linearised")
    same = gaussian(mlp())
    with torch.no_grad():
        for name, mean in posterior.law.codec.split(posterior.law.average).items():
            same.network.get_parameter(name).copy_(mean)
        for name, variance in posterior.law.codec.split(posterior.law.variance() * 0.25).items():
            same.law.log_std.as_dict()[name].copy_(variance.log() / 2)
    expected = predict(same, X, how="linearised")
    torch.testing.assert_close(prediction.logits_variance, expected.logits_variance, **EXACT)


def test_refusals():
    posterior = convert(mlp(), MCDropout())
    for options, message in [
        ({"keep_samples": True}, "has no draws to keep"),
        ({"output": "features"}, "predicts outputs, not features"),
        ({"num_draws": 0}, "num_draws must be"),
        ({"variance_scale": -1.0}, "variance_scale must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            predict(posterior, X, how="linearised", **options)


def test_inside_inference_mode():
    posterior = convert(mlp(), MCDropout())
    expected = predict(posterior, X, how="linearised")
    with torch.inference_mode():
        inside = predict(posterior, X.clone(), how="linearised")
    torch.testing.assert_close(inside.logits_variance, expected.logits_variance, **EXACT)
    assert not inside.probs.requires_grad
