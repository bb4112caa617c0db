"""Laplace posteriors against closed forms: linear regression, logistic regression, Kronecker products, evidence."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesify
from bayesify import Bernoulli, Categorical, Gaussian, Laplace, measure
from bayesify.laws import GaussianLaw
from bayesify.laws.laplace import Residuals, Spectrum, choose, last_features, log_evidence
from tests.curvature.naive import full_ggn, output_hessians

EXACT = {"rtol": 1e-9, "atol": 1e-11}
ROWS = 12
DRAWS = 2000


def _double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def fit(posterior, x, y, **options):
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    bayesify.fit(posterior, batches, num_data=len(x), progress=False, accuracy_tolerance=1, **options)
    return posterior


def regression(outputs: int = 1):
    """Return a linear network at the mode of its posterior, with the data, precision and noise that decide it."""
    x, y = _double(ROWS, 3), _double(ROWS, outputs)
    precision, std = 0.6, 0.4
    phi = torch.cat([x, torch.ones(ROWS, 1)], 1)
    covariance = torch.linalg.inv(phi.T @ phi / std**2 + precision * eye(4))
    mode = covariance @ phi.T @ y / std**2  # (D', C)
    network = nn.Linear(3, outputs).double()
    with torch.no_grad():
        network.weight.copy_(mode[:3].T)
        network.bias.copy_(mode[3])
    return network, x, y, phi, precision, std, covariance


# -- the last layer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
def test_linear_regression_is_exact(outputs):
    network, x, y, _, precision, std, covariance = regression(outputs)
    posterior = bayesify.convert(network, Laplace(prior_precision=precision), likelihood=Gaussian(std))
    fit(posterior, x, y)
    assert_close(posterior.law.covariance(), torch.kron(eye(outputs), covariance.contiguous()), **EXACT)
    new = _double(7, 3)
    features = torch.cat([new, torch.ones(7, 1)], 1)
    expected = torch.einsum("bi,ij,bj->b", features, covariance, features)
    prediction = bayesify.predict(posterior, new, how="streamlined")
    shape = (7,) if outputs == 1 else (7, outputs)
    assert_close(prediction.mean, network(new).detach().reshape(shape), **EXACT)
    assert_close(prediction.epistemic, expected[:, None].expand(7, outputs).reshape(shape), **EXACT)
    assert_close(prediction.aleatoric, torch.full(shape, std**2, dtype=torch.float64), **EXACT)


def analytic_evidence(phi: Tensor, y: Tensor, precision: float, variance: float) -> float:
    """Return ln N(y; 0, variance I + phi phi' / precision), each output on its own."""
    total = 0.0
    cover = variance * eye(len(phi)) + phi @ phi.T / precision
    law = torch.distributions.MultivariateNormal(torch.zeros(len(phi), dtype=torch.float64), cover)
    for column in y.T:
        total += law.log_prob(column).item()
    return total


@pytest.mark.parametrize("structure", ["last-layer", "kronecker"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_evidence_of_linear_regression_is_the_analytic_one(structure, outputs):
    network, x, y, phi, precision, std, _ = regression(outputs)
    method = Laplace(structure=structure, prior_precision=precision)
    posterior = fit(bayesify.convert(network, method, likelihood=Gaussian(std)), x, y)
    expected = analytic_evidence(phi, y, precision, std**2)
    assert posterior.law.log_marginal_likelihood() == pytest.approx(expected, rel=1e-10)


def classifier():
    """Return a fitted last layer, its extended features, and its covariance by definition."""
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, y = _double(ROWS, 3), torch.arange(ROWS) % 4
    posterior = fit(bayesify.convert(network, Laplace(prior_precision=0.3)), x, y)
    hessians = output_hessians(posterior.likelihood, network(x), y)
    extended = nn.Linear(6, 4, bias=False).double()  # (W, b) as one matrix, whose rows follow each other
    with torch.no_grad():
        extended.weight.copy_(torch.cat([network[2].weight, network[2].bias[:, None]], 1))
    features = torch.cat([network[:2](x).detach(), torch.ones(ROWS, 1)], 1)
    ggn = full_ggn(extended, features, [extended.weight], hessians)
    return posterior, features, torch.linalg.inv(ggn + 0.3 * eye(24))


def test_the_covariance_of_a_deep_classifier_is_that_of_its_last_layers_ggn():
    posterior, _, expected = classifier()
    assert_close(posterior.law.covariance(), expected, **EXACT)
    assert posterior.conversion.converted == ("2",)


def test_the_empirical_fisher_of_the_last_layer_adds_up_positions_first():
    network = nn.Linear(3, 2).double()
    x, y = _double(4, 5, 3), torch.randint(2, (4, 5))
    posterior = bayesify.convert(network, Laplace(curvature="fisher", prior_precision=1.0))
    bayesify.fit(posterior, [(x, y)], num_data=4, progress=False, accuracy_tolerance=1)
    total = torch.zeros(8, 8, dtype=torch.float64)
    for row in range(4):
        loss = nn.functional.cross_entropy(network(x[row]), y[row], reduction="sum")
        weight, bias = torch.autograd.grad(loss, [network.weight, network.bias])
        gradient = torch.cat([weight, bias[:, None]], 1).flatten()
        total += torch.outer(gradient, gradient)
    assert_close(posterior.law.covariance(), torch.linalg.inv(total + eye(8)), **EXACT)


def test_draws_have_the_covariance():
    posterior, _, expected = classifier()
    keys = posterior.keys(DRAWS, seed=1)
    draws = [posterior.weights(key) for key in keys]
    flat = torch.stack([torch.cat([d["2.weight"], d["2.bias"][:, None]], 1).flatten() for d in draws])
    own = torch.cat([posterior.network[2].weight, posterior.network[2].bias[:, None]], 1).flatten()
    away = flat - own.detach()
    sizes = expected.diagonal().sqrt()
    assert bool((away.mean(0).abs() < 5 * sizes / DRAWS**0.5).all())
    found = away.T @ away / len(away)
    # The standard error of an entry is at most sqrt(2 v_i v_j / S).
    assert bool(((found - expected).abs() < 6 * torch.outer(sizes, sizes) * (2 / DRAWS) ** 0.5).all())


def test_logits_in_closed_form():
    posterior, features, covariance = classifier()
    blocks = covariance.view(4, 6, 4, 6)
    logits = torch.einsum("bi,cidj,bj->bcd", features, blocks, features)
    centring = eye(4) - 0.25
    centred = centring @ logits @ centring
    assert_close(posterior.law.output_covariance(features[:, :5]), logits, **EXACT)
    assert_close(
        posterior.law.output_variance(features[:, :5], centred=False), logits.diagonal(dim1=1, dim2=2), **EXACT
    )
    variance = centred.diagonal(dim1=1, dim2=2)
    assert_close(posterior.law.output_variance(features[:, :5], centred=True), variance, **EXACT)
    inputs = _double(6, 3)
    prediction = bayesify.predict(posterior, inputs, how="streamlined")
    output, phi = last_features(posterior, posterior.law.layer, inputs)
    spread = posterior.law.output_variance(phi[:, 0], centred=True)
    whole = Categorical().from_gaussian(output.detach(), covariance=posterior.law.output_covariance(phi[:, 0]))
    assert_close(prediction.probs, whole.probs, **EXACT)
    assert_close(prediction.logits_variance, spread, **EXACT)
    assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, **EXACT)


@pytest.mark.slow
def test_draws_of_logits_and_draws_of_weights_are_one_law():
    posterior, _, _ = classifier()
    x = _double(6, 3)
    of_logits = bayesify.predict(posterior, x, how="streamlined", num_draws=DRAWS, seed=3)
    of_weights = bayesify.predict(posterior, x, how="sampling", num_draws=DRAWS, seed=4)
    # Probabilities differ between draws by less than one half: five standard errors of a difference of means.
    assert_close(of_logits.probs, of_weights.probs, rtol=0, atol=5 * 0.5 * (2 / DRAWS) ** 0.5)
    # A variance of S Gaussian draws has the relative standard error sqrt(2 / S).
    assert_close(of_logits.logits_variance, of_weights.logits_variance, rtol=5 * (4 / DRAWS) ** 0.5, atol=0)


@pytest.mark.parametrize("num_draws", [None, 7])
def test_a_closed_form_does_not_depend_on_the_chunk_size(num_draws):
    posterior, _, _ = classifier()
    x = _double(9, 3)
    options = {"how": "streamlined", "num_draws": num_draws, "seed": 2}
    whole, parts = (bayesify.predict(posterior, x, chunk_size=size, **options) for size in (None, 2))
    for name, tensor in whole._fields():
        assert_close(getattr(parts, name), tensor, **EXACT)


def test_a_closed_form_follows_the_prior():
    posterior, _, _ = classifier()
    x = _double(5, 3)
    before = bayesify.predict(posterior, x, how="streamlined").logits_variance
    posterior.law.set_prior_precision(100.0)
    after = bayesify.predict(posterior, x, how="streamlined").logits_variance
    assert bool((after < before / 2).all())
    _, phi = last_features(posterior, posterior.law.layer, x)
    centring = eye(4) - 0.25
    expected = (centring @ posterior.law.output_covariance(phi[:, 0]) @ centring).diagonal(dim1=1, dim2=2)
    assert_close(after, expected, **EXACT)


def test_logistic_regression():
    network = nn.Linear(2, 1).double()
    x, y = _double(ROWS, 2), (torch.arange(ROWS) % 2).double()
    posterior = fit(bayesify.convert(network, Laplace(prior_precision=2.0), likelihood=Bernoulli()), x, y)
    phi = torch.cat([x, torch.ones(ROWS, 1)], 1)
    p = network(x).detach()[:, 0].sigmoid()
    covariance = torch.linalg.inv((phi * (p * (1 - p))[:, None]).T @ phi + 2 * eye(3))
    assert_close(posterior.law.covariance(), covariance, **EXACT)
    variance = torch.einsum("bi,ij,bj->b", phi, covariance, phi)
    closed = bayesify.predict(posterior, x, how="streamlined")
    draws = bayesify.predict(posterior, x, how="streamlined", num_draws=DRAWS, seed=0)
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(80))
    logits = network(x).detach() + variance.sqrt()[:, None] * nodes
    average = (logits.sigmoid() * weights).sum(-1) / weights.sum()
    assert_close(closed.probs[:, 1], average, rtol=0, atol=1e-8)
    spread = ((logits.sigmoid() - average[:, None]) ** 2 * weights).sum(-1) / weights.sum()
    assert bool(((draws.probs[:, 1] - average).abs() < 5 * (spread / DRAWS).sqrt()).all())


def test_tokens_have_a_closed_form_each():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    x, y = _double(6, 5, 3), torch.randint(3, (6, 5))
    y[0, 0] = -100
    posterior = bayesify.convert(network, Laplace(prior_precision=1.0))
    bayesify.fit(posterior, [(x, y)], num_data=6, progress=False, accuracy_tolerance=1)
    rows = bayesify.convert(network, Laplace(prior_precision=1.0))
    counted = y.flatten() != -100
    bayesify.fit(rows, [(x.flatten(0, 1)[counted], y.flatten()[counted])], num_data=29, progress=False)
    assert_close(posterior.law.covariance(), rows.law.covariance(), **EXACT)
    whole = bayesify.predict(posterior, x, how="streamlined")
    flat = bayesify.predict(rows, x.flatten(0, 1), how="streamlined")
    assert_close(whole.probs.flatten(0, 1), flat.probs, **EXACT)
    drawn = [
        bayesify.predict(p, i, how="streamlined", num_draws=3, seed=1)
        for p, i in ((posterior, x), (rows, x.flatten(0, 1)))
    ]
    assert_close(drawn[0].probs.flatten(0, 1), drawn[1].probs, **EXACT)


# -- Kronecker products -----------------------------------------------------------------------------------------------


def test_one_example_of_one_layer_has_an_exact_product():
    network = nn.Linear(3, 4).double()
    x, y = _double(1, 3), torch.tensor([2])
    posterior = bayesify.convert(network, Laplace(structure="kronecker", prior_precision=0.5))
    bayesify.fit(posterior, [(x, y)], num_data=1, progress=False, accuracy_tolerance=1)
    extended = torch.cat([x, torch.ones(1, 1)], 1)
    product = torch.kron(output_hessians(posterior.likelihood, network(x), y)[0], extended.T @ extended)
    left, right = posterior.law.left.as_dict()["weight"][0], posterior.law.right.as_dict()["weight"][0]
    basis = torch.kron(left, right)
    found = basis @ posterior.law.eigenvalues("weight").flatten().diag() @ basis.T
    assert_close(found, product, **EXACT)


def naive_factors(network, layer, x, y, likelihood, patches):
    """Return sum a a' / T and sum g g' by loops over examples, positions and outputs."""
    inputs, outputs = [], []
    handle = network.get_submodule(layer).register_forward_hook(
        lambda m, a, o: (inputs.append(a[0]), outputs.append(o))[0]
    )
    left, right, count = 0, 0, 0
    for row in range(len(x)):
        inputs.clear(), outputs.clear()
        logits = network(x[row : row + 1])
        hessian = output_hessians(likelihood, logits, y[row : row + 1])[0]
        values, vectors = torch.linalg.eigh(hessian)
        root = vectors * values.clamp_min(0).sqrt()
        for a in patches(inputs[0]):
            a = torch.cat([a, torch.ones(1)])
            right = right + torch.outer(a, a)
            count += 1
        for column in root.T:
            (g,) = torch.autograd.grad(logits, outputs[0], column[None], retain_graph=True)
            for position in g.flatten(2)[0].T if g.ndim == 4 else g.reshape(-1, g.shape[-1]):
                left = left + torch.outer(position, position)
    handle.remove()
    return left, right / count


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_factors_against_loops(kind):
    if kind == "linear":
        network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)).double()
        x = _double(ROWS, 5, 3)
        patches = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    else:
        network = nn.Sequential(
            nn.Conv2d(2, 4, (2, 3), stride=(1, 2), padding=1, dilation=(2, 1)),
            nn.Tanh(),
            nn.Flatten(),
            nn.LazyLinear(3),
        ).double()
        x = _double(ROWS, 2, 5, 4)
        network(x)
        options = {"stride": (1, 2), "padding": 1, "dilation": (2, 1)}
        patches = lambda a: nn.functional.unfold(a, (2, 3), **options)[0].T  # noqa: E731
    y = torch.arange(ROWS) % 3
    posterior = fit(bayesify.convert(network, Laplace(structure="kronecker", prior_precision=0.5)), x, y)
    left, right = naive_factors(network, "0", x, y, posterior.likelihood, patches)
    for matrices, values, expected in (
        (posterior.law.left, posterior.law.left_values, left),
        (posterior.law.right, posterior.law.right_values, right),
    ):
        basis, spectrum = matrices.as_dict()["0.weight"][0], values.as_dict()["0.weight"][0]
        assert_close(basis @ spectrum.diag() @ basis.T, expected, **EXACT)


def test_groups_are_convolutions_of_their_own():
    whole = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(30, 2)).double()
    x, y = _double(ROWS, 4, 5), torch.arange(ROWS) % 2

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Conv1d(2, 3, 3, padding=1) for _ in range(2)).double()
            self.rest = whole[1:]
            with torch.no_grad():
                for index, part in enumerate(self.parts):
                    own = slice(3 * index, 3 * index + 3)
                    part.weight.copy_(whole[0].weight[own])
                    part.bias.copy_(whole[0].bias[own])

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(torch.cat([self.parts[0](x[:, :2]), self.parts[1](x[:, 2:])], 1))

    method = Laplace(structure="kronecker", prior_precision=0.5)
    one, other = (fit(bayesify.convert(network, method), x, y) for network in (whole, Parts()))
    for index in range(2):
        name = f"parts.{index}.weight"
        assert_close(one.law.eigenvalues("0.weight")[index], other.law.eigenvalues(name)[0], **EXACT)
    assert one.law.log_marginal_likelihood() == pytest.approx(other.law.log_marginal_likelihood(), rel=1e-10)


def test_draws_of_a_product_have_its_covariance():
    network = nn.Linear(2, 2).double()
    x, y = _double(ROWS, 2), torch.arange(ROWS) % 2
    posterior = fit(bayesify.convert(network, Laplace(structure="kronecker", prior_precision=0.5)), x, y)
    left, right = posterior.law.left.as_dict()["weight"][0], posterior.law.right.as_dict()["weight"][0]
    basis = torch.kron(left, right)
    expected = basis @ (1 / (posterior.law.eigenvalues("weight").flatten() + 0.5)).diag() @ basis.T
    draws = [posterior.weights(key) for key in posterior.keys(DRAWS, seed=1)]
    flat = torch.stack([torch.cat([d["weight"], d["bias"][:, None]], 1).flatten() for d in draws])
    away = flat - torch.cat([network.weight, network.bias[:, None]], 1).detach().flatten()
    found, sizes = away.T @ away / len(away), expected.diagonal().sqrt()
    assert bool(((found - expected).abs() < 6 * torch.outer(sizes, sizes) * (2 / DRAWS) ** 0.5).all())


def test_what_is_no_product_is_diagonal():
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    x, y = _double(ROWS, 3), torch.arange(ROWS) % 3
    posteriors = [
        fit(bayesify.convert(network, Laplace(structure=structure, prior_precision=0.5)), x, y)
        for structure in ("kronecker", "diagonal")
    ]
    assert sorted(posteriors[0].law.curvature.as_dict()) == ["1.bias", "1.weight"]
    for name, value in posteriors[0].law.curvature.as_dict().items():
        assert_close(value, posteriors[1].law.curvature.as_dict()[name], **EXACT)
    key = posteriors[0].keys(1, seed=3)[0]
    assert_close(posteriors[0].weights(key)["1.weight"], posteriors[1].weights(key)["1.weight"], **EXACT)


# -- the evidence, and what is chosen by it ---------------------------------------------------------------------------


def test_the_evidence_of_a_diagonal():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = _double(ROWS, 3), torch.arange(ROWS) % 3
    posterior = fit(bayesify.convert(network, Laplace(structure="diagonal", prior_precision=0.5)), x, y)
    assert isinstance(posterior.law, GaussianLaw)
    expected = -nn.functional.cross_entropy(network(x), y, reduction="sum").item()
    for name, h in posterior.law.curvature.as_dict().items():
        mode = network.get_parameter(name).detach()
        expected += -0.5 * (0.5 * mode**2 + (h + 0.5).log() - math.log(0.5)).sum().item()
    assert posterior.law.log_marginal_likelihood() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("structure", ["last-layer", "diagonal", "kronecker"])
@pytest.mark.parametrize("per", ["network", "layer"])
def test_the_prior_of_most_evidence(structure, per):
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = _double(ROWS, 3), torch.arange(ROWS) % 3
    posterior = fit(bayesify.convert(network, Laplace(structure=structure, prior_per=per)), x, y)
    best, chosen = posterior.law.log_marginal_likelihood(), posterior.law.prior_precision.clone()
    assert len(chosen) == (2 if per == "layer" and structure != "last-layer" else 1)
    for index in range(len(chosen)):
        for factor in (1e-3, 0.1, 0.5, 0.99, 1.01, 2.0, 10.0, 1e3):
            other = chosen.clone()
            other[index] *= factor
            posterior.law.set_prior_precision(other)
            assert posterior.law.log_marginal_likelihood() < best


def test_noise_and_prior_of_most_evidence():
    # Data from the model, so that neither runs away.
    x = _double(200, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3 * _double(200, 1)
    phi = torch.cat([x, torch.ones(200, 1)], 1)
    network = nn.Linear(3, 1).double()
    precision, variance = 1.0, 1.0
    for _ in range(100):  # the analytic optimum, by turns of mode and evidence
        mode = torch.linalg.solve(phi.T @ phi / variance + precision * eye(4), phi.T @ y / variance)
        with torch.no_grad():
            network.weight.copy_(mode[:3].T)
            network.bias.copy_(mode[3])
        posterior = bayesify.convert(network, Laplace(), likelihood="regression")
        bayesify.fit(posterior, [(x, y)], num_data=200, progress=False)
        before = precision, variance
        precision, variance = posterior.law.prior_precision.item(), posterior.likelihood.single_variance()
        if max(abs(math.log(a / b)) for a, b in zip(before, (precision, variance), strict=True)) < 1e-9:
            break
    value = analytic_evidence(phi, y, precision, variance)
    assert posterior.law.log_marginal_likelihood() == pytest.approx(value, rel=1e-9)
    for factor in (0.97, 1.03):
        assert analytic_evidence(phi, y, precision * factor, variance) < value
        assert analytic_evidence(phi, y, precision, variance * factor) < value
    assert variance**0.5 == pytest.approx(0.3, rel=0.15)


def test_a_fixed_prior_still_learns_the_noise_by_evidence():
    network, x, y, _, precision, _, _ = regression()
    posterior = fit(bayesify.convert(network, Laplace(prior_precision=precision), likelihood="regression"), x, y)
    assert posterior.law.prior_precision.item() == precision
    best, chosen = posterior.law.log_marginal_likelihood(), posterior.likelihood.log_noise.item()
    for shift in (-0.5, -0.02, 0.02, 0.5):
        posterior.likelihood.log_noise.data.fill_(chosen + shift)
        assert posterior.law.log_marginal_likelihood() < best


def test_a_given_noise_is_kept_and_a_prior_chosen_for_it():
    network, x, y, phi, _, std, _ = regression()
    posterior = fit(bayesify.convert(network, Laplace(), likelihood=Gaussian(std)), x, y)
    assert posterior.likelihood.single_variance() == pytest.approx(std**2)
    values = torch.linalg.eigvalsh(phi.T @ phi) / std**2
    own = Spectrum(values, posterior.law.spectra()[0].square_norm)
    expected = choose([own], [1.0])[0][0]
    assert posterior.law.prior_precision.item() == pytest.approx(expected, rel=1e-5)
    # MacKay's condition: delta |w|^2 = sum lambda / (lambda + delta).
    effective = (values / (values + expected)).sum().item()
    assert expected * own.square_norm == pytest.approx(effective, rel=1e-5)


def test_the_evidence_of_the_empirical_fisher_falls_with_the_square_of_the_variance():
    residuals = Residuals(square_sum=4.0, count=9.0, power=2)
    spectrum = Spectrum(torch.tensor([2.0, 0.5], dtype=torch.float64), square_norm=1.5)
    _, variance = choose([spectrum], [0.7], residuals=residuals, fixed_precision=True)

    def evidence(v: float) -> float:
        return log_evidence(residuals.log_likelihood(v), [spectrum], [0.7], v**-2)

    assert all(evidence(variance) > evidence(variance * factor) for factor in (0.5, 0.98, 1.02, 2.0))


# -- validation -------------------------------------------------------------------------------------------------------


def _nll(posterior, x, y, closed):
    options = {"how": "streamlined"} if closed else {"num_draws": 20, "seed": 0}
    prediction = bayesify.predict(posterior, x, **options)
    if hasattr(prediction, "log_probs"):
        return measure.nll(None, y, log_probs=prediction.log_probs)
    return measure.gaussian_nll(prediction.mean, prediction.variance, y.flatten())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The (search for the )?prior precision")  # the labels are noise
@pytest.mark.parametrize("structure", ["last-layer", "diagonal", "kronecker"])
@pytest.mark.parametrize("per", ["network", "layer"])
def test_a_prior_chosen_on_validation_data_is_never_worse_there(structure, per):
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = _double(ROWS, 3), torch.arange(ROWS) % 3
    other = _double(30, 3), torch.randint(3, (30,))
    posteriors = [
        fit(
            bayesify.convert(network, Laplace(structure=structure, prior_per=per, prior_precision=how)),
            x,
            y,
            val_loader=[other],
        )
        for how in ("marginal-likelihood", "validation")
    ]
    before, after = (_nll(posterior, *other, structure == "last-layer") for posterior in posteriors)
    assert after <= before + 1e-12
    assert not torch.equal(posteriors[0].law.prior_precision, posteriors[1].law.prior_precision)


@pytest.mark.filterwarnings("ignore:The (search for the )?prior precision")  # the labels are noise
def test_a_search_by_draws_takes_ten_predictions_of_some_examples():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    posterior = fit(bayesify.convert(network, Laplace(structure="diagonal")), _double(ROWS, 3), torch.arange(ROWS) % 3)
    rows = []
    posterior.network[0].register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    val = [(_double(400, 3), torch.randint(3, (400,))) for _ in range(3)]
    posterior.law.choose_prior(posterior, val)
    assert 3 * 8 * 512 <= sum(rows) <= 10 * 8 * 512
    assert set(rows) == {400, 112}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The search for the prior precision")  # the labels are noise
def test_validation_finds_the_best_of_a_fine_grid():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        network[2].weight.mul_(6)  # overconfident
    x, y = _double(ROWS, 3), torch.arange(ROWS) % 3
    other = _double(40, 3), torch.randint(3, (40,))
    posterior = fit(bayesify.convert(network, Laplace(prior_precision="validation")), x, y, val_loader=[other])
    found = _nll(posterior, *other, True)
    grid = []
    for exponent in torch.linspace(-6, 6, 241).tolist():
        posterior.law.set_prior_precision(10**exponent)
        grid.append(_nll(posterior, *other, True))
    assert found <= min(grid) + 1e-5


@pytest.mark.filterwarnings("ignore:The (search for the prior precision|NLL of)")  # the labels are noise
def test_validation_for_regression_and_yes_or_no():
    x = _double(ROWS, 3)
    for likelihood, y, other in (
        ("regression", _double(ROWS, 1), _double(20, 1)),
        ("binary", (torch.arange(ROWS) % 2).double(), (torch.arange(20) % 2).double()),
    ):
        network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        val = _double(20, 3), other
        values = []
        for how in ("marginal-likelihood", "validation"):
            posterior = bayesify.convert(network, Laplace(prior_precision=how), likelihood=likelihood)
            fit(posterior, x, y, val_loader=[val])
            targets = other if likelihood == "regression" else other.long()
            values.append(_nll(posterior, val[0], targets, True))
        assert values[1] <= values[0] + 1e-12
