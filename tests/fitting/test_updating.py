"""New data for fitted posteriors: equal to a fit on all data where that is known in closed form."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import IVON, SGLD, BayesAdapter, Gaussian, Laplace, Posterior

NOISE, PRECISION, INPUTS = 0.5, 2.0, 3


def data(seed: int, rows: int = 30, *, orthogonal: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=generator, dtype=torch.float64)
    if orthogonal:  # so that weights are independent given the data
        x = torch.eye(INPUTS, dtype=torch.float64).repeat(rows // INPUTS, 1) * (1 + 0.1 * seed)
    truth = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return x, x @ truth + NOISE * torch.randn(len(x), 1, generator=generator, dtype=torch.float64)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and precision of the weights of a linear regression of known noise."""
    precision = x.T @ x / NOISE**2 + PRECISION * torch.eye(INPUTS, dtype=torch.float64)
    return torch.linalg.solve(precision, x.T @ y / NOISE**2)[:, 0], precision


def linear(method: Any, mean: Tensor) -> Posterior:
    network = nn.Linear(INPUTS, 1, bias=False).double()
    network.weight.data.copy_(mean)
    return bayesify.convert(network, method, likelihood=Gaussian(noise_std=NOISE))


# -- Laplace ------------------------------------------------------------------------------------------------------


def fitted(structure: str, first: tuple[Tensor, Tensor]) -> Posterior:
    posterior = linear(Laplace(structure=structure, prior_precision=PRECISION), exact(*first)[0])
    bayesify.fit(posterior, [first], num_data=len(first[0]), progress=False)
    return posterior


def precision_of(posterior: Posterior) -> Tensor:
    """Return the precision of the weights, one column after the other."""
    columns = torch.eye(INPUTS, dtype=torch.float64)[:, None, :]
    return torch.stack([posterior.law.times_precision({"weight": column})["weight"][0] for column in columns])


@pytest.mark.parametrize("structure", ["last-layer", "diagonal", "kronecker"])
def test_laplace_of_a_linear_regression_is_that_of_all_data(structure):
    """Of two updates, the second of which has data of another shape; for the diagonal with independent weights."""
    orthogonal = structure == "diagonal"
    parts = [data(seed, rows, orthogonal=orthogonal) for seed, rows in ((0, 30), (1, 21), (2, 6))]
    posterior, new = fitted(structure, parts[0]), torch.randn(4, INPUTS, dtype=torch.float64)
    bayesify.predict(posterior, new, how="streamlined")  # what is kept of it must not stay
    for part in parts[1:]:
        assert bayesify.update(posterior, [part], progress=False) is posterior
    x, y = (torch.cat([part[side] for part in parts]) for side in range(2))
    mean, precision = exact(x, y)
    torch.testing.assert_close(posterior.network.weight[0], mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(precision_of(posterior), precision, rtol=1e-8, atol=1e-8)
    whole = fitted(structure, (x, y))
    assert posterior.law.seen == len(x)
    assert posterior.law.log_marginal_likelihood() == pytest.approx(whole.law.log_marginal_likelihood(), abs=1e-7)
    one, other = (bayesify.predict(each, new, how="streamlined") for each in (posterior, whole))
    torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(one.epistemic, other.epistemic, rtol=1e-7, atol=1e-9)


def test_the_order_of_the_data_does_not_matter_to_kronecker_factors_of_fixed_weights():
    """Sums of factors are those of one pass over all data, as long as no weight moves."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randint(2, (20,))
    one, whole = (bayesify.convert(network, Laplace(structure="kronecker", prior_precision=1.0)) for _ in range(2))
    bayesify.fit(one, [(x[:13], y[:13])], num_data=13, progress=False)
    bayesify.update(one, [(x[13:], y[13:])], epochs=0, progress=False)
    bayesify.fit(whole, [(x, y)], num_data=20, progress=False)
    gradient = {name: torch.randn_like(one.law.tensor(name)) for name in one.law.names}
    for power in (1.0, -1.0):
        expected = whole.law.times_precision(gradient, power)
        for name, tensor in one.law.times_precision(gradient, power).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", ["last-layer", "diagonal", "kronecker"])
def test_powers_of_the_precision_undo_each_other(structure):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(8, 3)).double()
    posterior = bayesify.convert(network, Laplace(structure=structure, prior_precision=0.5))
    batch = torch.randn(9, 2, 3, dtype=torch.float64), torch.arange(9) % 3
    bayesify.fit(posterior, [batch], num_data=9, progress=False)
    given = {name: torch.randn_like(posterior.law.tensor(name)) for name in posterior.law.names}
    back = posterior.law.times_precision(posterior.law.times_precision(given), -1.0)
    for name, tensor in given.items():
        torch.testing.assert_close(back[name], tensor, rtol=1e-9, atol=1e-9)


def test_newton_steps_lead_to_the_mode_of_a_logistic_regression():
    """Of the new data with the old posterior as prior, where the gradient vanishes."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 3, dtype=torch.float64), torch.randint(2, (60,))
    network = nn.Linear(3, 2).double()
    posterior = bayesify.convert(network, Laplace(prior_precision=1.0))
    bayesify.fit(posterior, [(x[:30], y[:30])], num_data=30, progress=False)
    start = {name: posterior.law.tensor(name).detach().clone() for name in posterior.law.names}
    old = {name: posterior.law.times_precision(start)[name] for name in start}  # P w, for P (v - w) below
    before = posterior.law.matrix.as_dict()["weight"].clone(), posterior.law.values.as_dict()["weight"].clone()
    bayesify.update(posterior, [(x[30:], y[30:])], epochs=12, progress=False)
    weight, bias = (posterior.law.tensor(name) for name in ("weight", "bias"))
    loss = nn.functional.cross_entropy(nn.functional.linear(x[30:], weight, bias), y[30:], reduction="sum")
    gradients = torch.autograd.grad(loss, [weight, bias])
    vectors, values = before
    moved = torch.cat([weight, bias[:, None]], 1).flatten() @ vectors
    pull = (vectors @ (moved * (values + 1.0))).view(2, 4)
    for gradient, now, then in zip(gradients, (pull[:, :3], pull[:, 3]), old.values(), strict=True):
        torch.testing.assert_close(gradient + now - then, torch.zeros_like(gradient), rtol=0, atol=1e-9)


def test_an_update_that_fails_leaves_the_posterior_as_it_was():
    posterior = fitted("last-layer", data(0))
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}

    def broken() -> Any:
        yield data(1)
        raise KeyError("gone")

    class Broken:
        def __iter__(self) -> Any:
            return broken()

    with pytest.raises(KeyError, match="gone"):
        bayesify.update(posterior, Broken(), progress=False)
    for name, tensor in posterior.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_posterior_from_a_folder_is_updated_as_it_would_have_been(tmp_path: Path):
    for index, structure in enumerate(("last-layer", "diagonal", "kronecker")):
        network = nn.Linear(INPUTS, 1, bias=False).double()
        network.weight.data.copy_(exact(*data(0))[0])
        method = Laplace(structure=structure, prior_precision=PRECISION)
        posterior = bayesify.convert(network, method, likelihood=Gaussian(noise_std=NOISE))
        bayesify.fit(posterior, [data(0)], num_data=30, progress=False)
        bayesify.save(posterior, tmp_path / f"{index}")
        loaded = bayesify.load(tmp_path / f"{index}", network)
        for each in (posterior, loaded):
            bayesify.update(each, [data(1)], progress=False)
        bayesify.save(loaded, tmp_path / f"{index} again")
        again = bayesify.load(tmp_path / f"{index} again", network)
        for name, tensor in posterior.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
            assert torch.equal(again.state_dict()[name], tensor), name


# -- Gaussian weights ---------------------------------------------------------------------------------------------


def test_the_divergence_from_a_prior_with_a_width_for_each_weight():
    torch.manual_seed(0)
    posterior = linear(BayesAdapter(start_std=(0.1, 0.4)), torch.zeros(INPUTS, dtype=torch.float64))
    law = posterior.law
    prior = torch.distributions.Normal(torch.randn(1, 3).double(), torch.rand(1, 3).double() + 0.1)
    law.prior_mean, law.prior_log_std = (
        bayesify.laws.TensorTree({"weight": tensor}) for tensor in (prior.loc, prior.scale.log())
    )
    now = torch.distributions.Normal(law.tensor("weight"), law.log_std.as_dict()["weight"].double().exp())
    expected = torch.distributions.kl_divergence(now, prior).sum()
    torch.testing.assert_close(law.kl(123.0), expected, rtol=1e-9, atol=1e-9)


def test_the_built_in_gradient_of_such_a_prior_is_that_of_the_divergence():
    torch.manual_seed(0)
    posterior = linear(BayesAdapter(start_std=(0.1, 0.4)), torch.ones(INPUTS, dtype=torch.float64))
    law = posterior.law
    law.prior_mean = bayesify.laws.TensorTree({"weight": torch.randn(1, 3).double()})
    law.prior_log_std = bayesify.laws.TensorTree({"weight": torch.randn(1, 3).double()})
    (law.kl(1.0) / 7).backward()
    expected = [p.grad.clone() for p in posterior.parameters() if p.grad is not None]
    posterior.zero_grad()
    posterior.method.add_prior_gradient(posterior, 7)
    found = [p.grad for p in posterior.parameters() if p.grad is not None]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        BayesAdapter(
            prior_std=PRECISION**-0.5, start_std=(0.1, 0.1), optimizer="adam", lr=0.02, schedule="cosine",
            log_std_lr=0.02, log_std_schedule="cosine", epochs=20,
        ),
        IVON(
            start_std=0.1, lr=0.05, beta2=0.99, epochs=20, mc_samples=8, weight_decay=PRECISION / 30, schedule="cosine"
        ),
    ],
    ids=["bayes-adapter", "ivon"],
)  # fmt: skip
def test_gaussian_weights_of_a_conjugate_model_are_those_of_all_data(method):
    parts = [data(seed, orthogonal=True) for seed in range(2)]
    posterior = linear(method, torch.zeros(INPUTS, dtype=torch.float64))
    bayesify.fit(posterior, [parts[0]] * 20, num_data=30, progress=False)  # 20 steps in an epoch
    bayesify.update(posterior, [parts[1]] * 20, num_data=30, progress=False)
    mean, precision = exact(*(torch.cat([part[side] for part in parts]) for side in range(2)))
    std = precision.diagonal().rsqrt()
    component = posterior.components()[0]
    torch.testing.assert_close(component.variances["weight"][0].sqrt(), std, rtol=0.08, atol=0)
    assert ((component.means["weight"][0] - mean).abs() < 0.25 * std).all()
    first = exact(*parts[0])[1].diagonal().rsqrt()
    assert (std < 0.8 * first).all()  # else it could have learned nothing
    assert not posterior.law.prior_log_std.as_dict()  # which files would not know


def test_what_is_not_random_stays_as_it_is():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    posterior = bayesify.convert(network, BayesAdapter(start_std=(0.1, 0.1), lr=0.1), include="2")
    before = {name: tensor.clone() for name, tensor in posterior.network.state_dict().items()}
    bayesify.update(posterior, [(torch.randn(8, 3), torch.arange(8) % 2)], num_data=8, epochs=2, progress=False)
    for name, tensor in posterior.network.state_dict().items():
        assert torch.equal(tensor, before[name]) == (not name.startswith("2.")), name
    assert all(parameter.requires_grad for parameter in posterior.network.parameters())


# -- chains -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The burn-in of")  # it is short for the prior, and the data determine all weights
def test_chains_go_on_to_the_posterior_of_all_data():
    """Means and variances within four standard errors of 64 chains.

    Steps of finite size make variances larger by lr h / 4, h the curvature of the mean loss: at most 5 % here.
    """
    parts = [TensorDataset(*data(seed)) for seed in range(2)]
    method = SGLD(
        chains=64, together=True, samples_per_chain=20, prior_std=PRECISION**-0.5, lr=0.02, weight_decay=0.0, epochs=200
    )
    posterior = linear(method, torch.zeros(INPUTS, dtype=torch.float64))
    loaders = [DataLoader(part, batch_size=60) for part in parts]
    bayesify.fit(posterior, loaders[0], progress=False, accuracy_tolerance=1)
    bayesify.update(posterior, loaders[1], old=loaders[0], progress=False)
    x, y = (torch.cat([part.tensors[side] for part in parts]) for side in range(2))
    mean, precision = exact(x, y)
    variance = torch.linalg.inv(precision).diagonal()
    assert 0.02 * torch.linalg.eigvalsh(precision).max() / len(x) / 4 < 0.05
    samples = posterior.law.samples.view(64, 20, INPUTS)
    for found, expected, more in ((samples, mean, 0.0), ((samples - mean) ** 2, variance, 0.05)):
        of_chains = found.mean(1)
        error = 4 * of_chains.std(0) / 64**0.5
        assert ((of_chains.mean(0) - expected).abs() < error + more * expected.abs()).all()
        assert (error < expected.abs()).all()  # else nothing could be told


# -- what cannot be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["map", "mc-dropout", "deep-ensemble", "abnn"])
def test_methods_without_a_posterior_to_go_on_from_say_so(name):
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.1), nn.Linear(4, 2))
    posterior = bayesify.convert(network, name)
    with pytest.raises(ValueError, match=r"Fit on old and new data together.*Laplace\(\)"):
        bayesify.update(posterior, [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))], progress=False)


def test_mistakes_get_a_sentence():
    posterior, batch = fitted("last-layer", data(0)), data(1)
    for loader, options, sentence in [
        (iter([batch]), {}, "reads the new data twice"),
        ([], {}, "gave no batch"),
        ([batch], {"seed": 1}, r"makes no training, and has no \['seed'\]"),
        ([batch], {"epochs": -1}, "number of Newton steps"),
        ([batch], {"old": [batch]}, "old= is for SGLD"),
    ]:
        with pytest.raises((TypeError, ValueError), match=sentence):
            bayesify.update(posterior, loader, progress=False, **options)
    with pytest.raises(ValueError, match="There is nothing to update"):
        bayesify.update(linear(Laplace(), torch.zeros(3).double()), [batch], progress=False)
    sgld = linear(SGLD(samples_per_chain=2, lr=0.01, prior_std=1.0, epochs=2), torch.zeros(3).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody's posterior, after two steps
        bayesify.fit(sgld, [batch], num_data=30, progress=False)
    with pytest.raises(ValueError, match="old=old_loader"):
        bayesify.update(sgld, [batch], progress=False)
