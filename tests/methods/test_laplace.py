"""Laplace as a method: what it refuses, how it is fitted and goes on, what it takes, and how it is kept."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Custom, Laplace, Streamlined
from bayesify.laws import GaussianLaw
from bayesify.layers import _gradients
from bayesify.methods.laplace_survey import LaplaceSurvey

STRUCTURES = ("last-layer", "diagonal", "kronecker")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data(rows: int = 24) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(rows, 3, dtype=torch.float64), torch.arange(rows) % 2)


def loader(**options) -> DataLoader:
    return DataLoader(data(), **{"batch_size": 5, "shuffle": True, **options})


def fitted(method: Laplace, plain: nn.Module | None = None, **options):
    posterior = bayesify.convert(plain or network(), method)
    bayesify.fit(posterior, loader(), progress=False, accuracy_tolerance=1, **options)
    return posterior


# -- fitting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_nothing_is_random_before_the_data_were_seen(structure):
    posterior = bayesify.convert(network(), Laplace(structure=structure, prior_precision=0.1))
    x = data()[:][0]
    with pytest.warns(UserWarning, match=r"no uncertainty yet: There is no curvature yet: bayesify.fit"):
        assert_close(bayesify.predict(posterior, x, seed=0).probs, network()(x).detach().softmax(-1))
    with pytest.raises(ValueError, match=r"no curvature yet: bayesify.fit"):
        posterior.law.log_marginal_likelihood()
    if structure == "last-layer":
        with pytest.raises(ValueError, match="no curvature yet"):
            bayesify.predict(posterior, x, how="streamlined")
    else:  # Gaussians without variance
        assert_close(bayesify.predict(posterior, x, how="streamlined").probs, network()(x).detach().softmax(-1))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_weights_stay_and_epochs_train_them_without_noise_first(structure):
    posterior = fitted(Laplace(structure=structure))
    for name, parameter in network().named_parameters():
        assert torch.equal(posterior.network.get_parameter(name), parameter)
    trained, plain = (
        bayesify.convert(network(), m) for m in (Laplace(structure=structure, lr=0.1), bayesify.MAP(lr=0.1))
    )
    for one in (trained, plain):
        bayesify.fit(one, loader(), epochs=3, progress=False, accuracy_tolerance=1)
    for name, parameter in plain.network.named_parameters():
        assert torch.equal(trained.network.get_parameter(name), parameter)
    assert bool(trained.law.complete)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_killed_pass_goes_on_to_the_same_end(structure, epochs, tmp_path: Path, monkeypatch):
    method = Laplace(structure=structure, mc_labels=None if structure == "last-layer" else 3)
    options = {"epochs": epochs, "checkpoint": tmp_path / "run", "checkpoint_steps": 2}
    whole = fitted(method, epochs=epochs)
    looks = []
    plain_look = LaplaceSurvey.look

    def look(self: LaplaceSurvey, batch: object) -> None:
        looks.append(1)
        if len(looks) == 4:
            raise KeyboardInterrupt
        plain_look(self, batch)

    monkeypatch.setattr(LaplaceSurvey, "look", look)
    with pytest.raises(KeyboardInterrupt):
        fitted(method, **options)
    posterior = bayesify.convert(network(), method)
    history = bayesify.fit(posterior, loader(), progress=False, accuracy_tolerance=1, **options)
    assert history.resumed_from == ("survey", 0)
    assert len(looks) == 4 + 3  # five batches, the first two of which were kept
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, posterior.state_dict()[name]), name


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch):
    first = fitted(Laplace(), checkpoint=tmp_path / "run")
    monkeypatch.setattr(LaplaceSurvey, "look", lambda *_: pytest.fail("the data were looked at again"))
    again = fitted(Laplace(), checkpoint=tmp_path / "run")
    assert torch.equal(first.law.covariance(), again.law.covariance())


@pytest.mark.parametrize("structure", ["last-layer", "diagonal", "kronecker"])
def test_sums_of_squares_keep_no_graph_of_a_learned_noise(structure):
    x = data().tensors[0]
    rows = DataLoader(TensorDataset(x, x[:, :1]), 8)
    plain = nn.Sequential(nn.Linear(x.shape[1], 5), nn.ReLU(), nn.Linear(5, 1)).to(x.dtype)
    posterior = bayesify.convert(plain, Laplace(structure=structure), likelihood="regression")
    bayesify.fit(posterior, rows, progress=False)
    assert all(tensor.is_leaf for tensor in posterior.buffers())
    x = x[:4]
    assert_close(bayesify.predict(copy.deepcopy(posterior), x).mean, bayesify.predict(posterior, x).mean)


def test_a_diagonal_is_a_gaussian_posterior_with_what_that_can_do():
    posterior = fitted(Laplace(structure="diagonal", prior_precision=2.0))
    assert isinstance(posterior.law, GaussianLaw)
    stds = {name: (h + 2.0).rsqrt() for name, h in posterior.law.curvature.as_dict().items()}
    for name, std in stds.items():
        assert_close(posterior.law.log_std.as_dict()[name].exp(), std)
    flat = torch.cat([std.flatten() for std in stds.values()])
    assert_close(posterior.law.entropy(), (flat.log() + 0.5 * (1 + torch.tensor(2 * torch.pi).double().log())).sum())


def test_means_and_variances_are_those_of_the_linearised_network():
    posterior = fitted(Laplace(structure="diagonal", prior_precision=0.1))
    x = torch.randn(4, 3, dtype=torch.float64)
    ways = (Streamlined(engine="moments"), "linearised")
    found = {how: bayesify.predict(posterior, x, how=how) for how in (*ways, "mean")}
    for how in ways:  # the mean of a linearised network is the network's own output
        assert_close(found[how].logits_mean, found["mean"].logits_mean)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_saved_and_loaded_with_another_prior(structure, tmp_path: Path):
    posterior = fitted(Laplace(structure=structure))
    posterior.law.set_prior_precision(7.0)
    bayesify.save(posterior, tmp_path / "saved")
    loaded = bayesify.load(tmp_path / "saved", network())
    assert loaded.law.prior_precision.tolist() == [7.0]
    x = data()[:][0]
    for options in ({"seed": 1}, *([{"how": "streamlined"}] if structure == "last-layer" else [])):
        one, other = (bayesify.predict(p, x, **options) for p in (posterior, loaded))
        assert torch.equal(one.probs, other.probs)
    assert loaded.law.log_marginal_likelihood() == posterior.law.log_marginal_likelihood()
    loaded.law.set_prior_precision(0.3)  # the curvature was kept: the prior can still be changed
    posterior.law.set_prior_precision(0.3)
    assert torch.equal(*(bayesify.predict(p, x, seed=2).probs for p in (posterior, loaded)))


class _Largest(TorchDispatchMode):
    """Note the size of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return found


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_memory_is_neither_outputs_nor_rows_times_parameters(structure, monkeypatch):
    monkeypatch.setattr(_gradients, "CHUNK", 2**12)
    classes, rows = 20, 16
    plain = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, classes))
    largest_layer = 8 * 16 * classes
    assert sum(p.numel() for p in plain.parameters()) > largest_layer
    posterior = bayesify.convert(plain, Laplace(structure=structure, prior_precision=1.0))
    survey = posterior.method.survey(posterior, rows)
    survey.reset()
    batch = torch.randn(rows, 1, 4, 4), torch.arange(rows) % classes
    with _Largest() as seen:
        survey.look(batch)
    # The curvature's own tensors, activations and patches; a Kronecker factor is (inputs + 1)^2.
    own = max(tensor.numel() for tensor in posterior.state_dict().values())
    assert seen.numbers <= max(own, rows * 9 * 16, rows * 8 * 16, 8 * 16 * 128)
    assert seen.numbers < classes * largest_layer / 2


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"structure": "full"},
            r"structure must be one of \['last-layer', 'diagonal', 'kronecker'\], but it is 'full'",
        ),
        ({"curvature": "hessian"}, "curvature must be one of"),
        ({"prior_per": "weight"}, "prior_per must be one of"),
        (
            {"prior_precision": "cv"},
            "prior_precision must be a positive number, 'auto', 'marginal-likelihood' or 'validation'",
        ),
        ({"prior_precision": 0.0}, "prior_precision must be positive and finite, but it is 0.0"),
        ({"prior_precision": float("inf")}, "prior_precision must be positive and finite"),
        ({"structure": "diagonal", "mc_labels": 0}, "mc_labels must be at least 1, or None"),
        ({"structure": "diagonal", "mc_labels": 1, "curvature": "fisher"}, "the empirical Fisher takes the true ones"),
        ({"mc_labels": 1}, "needs no backward pass: leave mc_labels=None"),
    ],
)
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Laplace(**settings)


def test_a_network_without_a_linear_layer_has_no_last_one():
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    with pytest.raises(ValueError, match=r"needs a linear layer .* Laplace\(structure='diagonal'\)"):
        bayesify.convert(plain, Laplace())


def test_a_last_layer_that_is_too_large():
    with pytest.raises(ValueError, match=r"'1' has 10,010 parameters.*structure='kronecker'\), include='1'"):
        bayesify.convert(nn.Sequential(nn.Flatten(), nn.Linear(1000, 10)), Laplace())


def test_a_tied_last_layer():
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plain[1].weight = plain[0].weight
    with pytest.raises(ValueError, match="'1' is tied to another module's"):
        bayesify.convert(plain, Laplace())


@pytest.mark.parametrize("end", [nn.LogSoftmax(-1), nn.Dropout(0.5)])
def test_a_last_layer_whose_output_is_changed(end):
    posterior = bayesify.convert(nn.Sequential(network(), end).eval(), Laplace())
    if isinstance(end, nn.Dropout):  # does nothing in evaluation mode
        bayesify.fit(posterior, loader(), progress=False, accuracy_tolerance=1)
        return
    with pytest.raises(ValueError, match=r"'0.2' is not the network's: it is changed afterwards.*include="):
        bayesify.fit(posterior, loader(), progress=False)


def test_include_names_the_last_layer():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)
            self.other = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    plain = Heads().double()
    with pytest.raises(ValueError, match="'other' is not the network's"):
        fitted(Laplace(), plain)
    posterior = bayesify.convert(plain, Laplace(), include="head")
    bayesify.fit(posterior, loader(), progress=False, accuracy_tolerance=1)
    assert posterior.conversion.converted == ("head",)
    assert posterior.law.layer == "head"


@pytest.mark.filterwarnings("ignore:The search for the prior precision")  # the labels are noise
def test_auto_takes_validation_data_where_there_are_any():
    other = DataLoader(TensorDataset(*data()[:7]), 7)
    for how, options in (("validation", {"val_loader": other}), ("marginal-likelihood", {})):
        found, expected = (fitted(Laplace(prior_precision=kind), **options) for kind in ("auto", how))
        assert found.law.prior_precision == expected.law.prior_precision
    assert fitted(Laplace(), val_loader=other).law.prior_precision != fitted(Laplace()).law.prior_precision


def test_validation_without_data_is_told_before_the_pass(monkeypatch):
    monkeypatch.setattr(LaplaceSurvey, "look", lambda *_: pytest.fail("the pass had begun"))
    with pytest.raises(ValueError, match=r"fit\(..., val_loader=loader\)"):
        fitted(Laplace(prior_precision="validation"))


def test_an_empty_validation_loader():
    with pytest.raises(ValueError, match="validation loader gave no batch"):
        fitted(Laplace(prior_precision="validation"), val_loader=[])


def test_a_custom_likelihood_without_a_second_derivative_needs_the_empirical_fisher():
    custom = Custom(lambda output, target: -(output[:, 0] - target).abs())
    for structure in STRUCTURES:
        posterior = bayesify.convert(network(), Laplace(structure=structure), likelihood=custom)
        with pytest.raises(ValueError, match=r"no second derivative .* Laplace\(curvature='fisher'\)"):
            bayesify.fit(posterior, loader(), progress=False)
        posterior = bayesify.convert(network(), Laplace(structure=structure, curvature="fisher"), likelihood=custom)
        bayesify.fit(posterior, loader(), progress=False)
        assert posterior.law.log_marginal_likelihood() < 0


def test_inputs_that_are_not_finite():
    x, y = data()[:]
    x[3, 1] = float("nan")
    for structure in ("diagonal", "kronecker"):
        posterior = bayesify.convert(network(), Laplace(structure=structure))
        with pytest.raises(ValueError, match="not finite, so there is no curvature"):
            bayesify.fit(posterior, [(x, y)], num_data=24, progress=False)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [([1.0, 2.0, 3.0], "one number, or 1, one for each"), (-1.0, "must be positive, but the least is -1.0")],
)
def test_a_bad_prior(value, sentence):
    posterior = fitted(Laplace(structure="diagonal"))
    with pytest.raises(ValueError, match=sentence):
        posterior.law.set_prior_precision(value)


def test_a_closed_form_has_no_samples():
    x = data()[:][0]
    with pytest.raises(ValueError, match="has no draws to keep"):
        bayesify.predict(fitted(Laplace()), x, how="streamlined", keep_samples=True)


def test_a_layer_of_kronecker_factors_that_is_read_elsewhere():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3, bias=False)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x @ self.inner.weight)

    with pytest.raises(ValueError, match=r"'inner' has no Kronecker factors.*exclude='inner'"):
        fitted(Laplace(structure="kronecker"), Reads().double())
    fitted(Laplace(structure="diagonal"), Reads().double())
