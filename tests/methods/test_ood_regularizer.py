"""The uncertainty regulariser: the mutual information, one pass or several, statistics, and fit."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import MAP, SWAG, BayesAdapter, DeepEnsemble, MCDropout, OODRegularizer
from bayesify.evaluation.measures import mutual_information as measured
from bayesify.laws import Pass
from bayesify.methods.ood_regularizer import mutual_information

EXACT = {"rtol": 1e-10, "atol": 1e-10}
NOISY = BayesAdapter(start_std=(0.3, 0.4), estimator="exemplar", epochs=2)
LOUDER = BayesAdapter(start_std=(0.05, 0.1), prior_std=0.3, lr=0.05, log_std_lr=0.2, epochs=30)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def _batches() -> tuple[tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(1)
    return (torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 3), 3 + 2 * torch.randn(5, 3, dtype=torch.float64)


# -- mutual information -----------------------------------------------------------------------------------------------


def test_it_is_the_mutual_information_that_is_measured():
    log_probs = torch.randn(4, 7, 5, dtype=torch.float64).mul(3).log_softmax(-1)
    assert_close(mutual_information(log_probs), measured(log_probs.exp()), **EXACT)
    same = log_probs[:1].expand(3, 7, 5)
    assert_close(mutual_information(same), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-14)


def test_it_is_finite_with_finite_gradients_for_one_hot_draws():
    logits = torch.zeros(2, 3, 4)
    logits[0, 0, 1] = logits[1, 0, 2] = 1e4  # two certain draws that disagree
    logits[:, 1, 1] = 1e4  # that agree
    logits[:, 2, 0] = -torch.inf  # a class that is ruled out
    logits.requires_grad_()
    found = mutual_information(logits.log_softmax(-1))
    assert_close(found, torch.tensor([math.log(2), 0, 0]))
    found.sum().backward()
    assert logits.grad.isfinite().all()


# -- the term -----------------------------------------------------------------------------------------------------


def test_the_term_is_the_mean_of_hinges():
    posterior = bayesify.convert(_network(), NOISY).eval()
    batch, ood = _batches()
    torch.manual_seed(2)
    terms = posterior.loss(batch, num_data=8, ood=ood, regularizer=OODRegularizer(weight=0.7))
    torch.manual_seed(2)
    outputs = posterior(torch.cat([batch[0], ood, ood]))
    probs = outputs[8:].view(2, 5, 3).softmax(-1).detach()
    hinges = [max(0.0, 0.5 - float(measured(probs[:, i : i + 1]))) for i in range(5)]
    assert_close(terms["uncertainty"].item(), 0.7 * sum(hinges) / 5, **EXACT)
    assert_close(terms["nll"], nn.functional.cross_entropy(outputs[:8], batch[1]), **EXACT)
    assert list(terms) == ["nll", "kl", "uncertainty"]
    terms.total.backward()
    assert all(p.grad.isfinite().all() for p in posterior.parameters())


@pytest.mark.parametrize("noise", ["exemplar", "auto", "flipout", "shared"])
def test_draws_of_one_ood_input_differ(noise: str):
    posterior = bayesify.convert(_network(), BayesAdapter(start_std=(0.3, 0.4), estimator=noise)).eval()
    batch, ood = _batches()
    term = posterior.loss(batch, num_data=8, ood=ood)["uncertainty"].item()
    assert 0 <= term < 0.499
    assert posterior.independent_rows(ood) == (noise != "shared")


def test_inputs_of_other_shapes_go_through_passes_of_their_own():
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean(1)

    posterior = bayesify.convert(Mean(), BayesAdapter(start_std=(0.3, 0.4)))
    batch = torch.randn(6, 4, 3, dtype=torch.float64), torch.arange(6) % 3
    ood = torch.randn(5, 7, 3, dtype=torch.float64)
    assert 0 < posterior.loss(batch, num_data=6, ood=ood)["uncertainty"] < 0.5


def test_dictionaries_and_pairs_are_ood_inputs_too():
    posterior = bayesify.convert(_network(), NOISY)
    (x, y), ood = _batches()
    for given in ({"input": ood}, {"input": ood, "labels": y[:5]}):
        assert "uncertainty" in posterior.loss({"input": x, "labels": y}, num_data=8, ood=given)
    assert "uncertainty" in posterior.loss((x, y), num_data=8, ood=[ood, y[:5]])


def test_other_methods_can_use_it_and_some_cannot():
    network = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    batch, ood = _batches()
    posterior = bayesify.convert(network, MCDropout())
    assert 0 < posterior.loss(batch, num_data=8, ood=ood)["uncertainty"] < 0.5
    for method in (MAP(), SWAG(), DeepEnsemble(members=2)):
        with pytest.raises(ValueError, match="trains no random pass"):
            bayesify.convert(network, method).loss(batch, num_data=8, ood=ood)
    regression = bayesify.convert(network, NOISY, likelihood="regression")
    with pytest.raises(ValueError, match="has no classes"):
        regression.loss((batch[0], batch[0]), num_data=8, ood=ood)


def test_a_threshold_without_effect_is_warned_of():
    posterior = bayesify.convert(_network(), NOISY)
    batch, ood = _batches()
    for threshold, samples, warned in ((0.75, 2, True), (math.log(2), 2, True), (0.69, 2, False), (1.1, 4, True)):
        regularizer = OODRegularizer(threshold=threshold, num_draws=samples)
        if warned:
            with pytest.warns(UserWarning, match="it has no effect"):
                posterior.loss(batch, num_data=8, ood=ood, regularizer=regularizer)
        else:
            posterior.loss(batch, num_data=8, ood=ood, regularizer=regularizer)
    for settings in ({"num_draws": 1}, {"weight": -1.0}, {"threshold": 0.0}):
        with pytest.raises(ValueError, match=r"must be|Draws disagree"):
            OODRegularizer(**settings)


# -- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [NOISY, BayesAdapter(estimator="shared"), MCDropout(p=0.3, insert_before="linear")])
@pytest.mark.parametrize("statistics", ["apart", "together"])
def test_ood_rows_and_batch_normalisation(method: bayesify.Method, statistics: str):
    posterior = bayesify.convert(_network(), method).train()
    batch, ood = _batches()
    alone = copy.deepcopy(posterior)
    regularizer = OODRegularizer(statistics=statistics)
    for _ in range(3):
        torch.manual_seed(4)
        # The first layer's output, whose statistics are taken, has the noise of these rows in either case.
        posterior.loss(batch, num_data=8, ood=ood, regularizer=regularizer).total.backward()
        torch.manual_seed(4)
        alone.loss(batch, num_data=8)
    norms = [p.network[1] for p in (posterior, alone)]
    one_pass = posterior.independent_rows(ood)
    batches = 3 if statistics == "apart" or one_pass else 9
    assert norms[0].num_batches_tracked == batches
    gap = (norms[0].running_mean - norms[1].running_mean).abs().max()
    # Exemplar noise of a batch of 18 is not that of one of 8; OOD inputs are about three standard deviations away.
    assert (gap < 0.3) == (statistics == "apart")


def test_ood_rows_are_normalised_by_the_statistics_of_the_others():
    posterior = bayesify.convert(_network(), BayesAdapter(start_std=(0.0, 0.0))).train()
    network = _network().train()
    (x, _), ood = _batches()
    for _ in range(2):  # twice, since running statistics move
        found = posterior.outputs(torch.cat([x, ood]), Pass(ood_rows=5))
        features = network[0](x).detach()
        by_hand = copy.deepcopy(network).eval()
        by_hand[1].running_mean, by_hand[1].running_var = features.mean(0), features.var(0, correction=0)
        assert_close(found, torch.cat([network(x), by_hand(ood)]), **EXACT)
        alone = posterior.outputs(ood, Pass(ood_rows=5))  # nothing else is there
        assert_close(alone, copy.deepcopy(network).eval()(ood), **EXACT)
    for name, buffer in network.named_buffers():
        assert_close(posterior.network.get_buffer(name), buffer, **EXACT)


# -- fit ------------------------------------------------------------------------------------------------------------


def _loaders() -> tuple[DataLoader, DataLoader]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(24, 3, dtype=torch.float64), torch.arange(24) % 3)
    ood = TensorDataset(4 + torch.randn(14, 3, dtype=torch.float64))
    return DataLoader(data, 4, shuffle=True), DataLoader(ood, 4, shuffle=True)


@pytest.mark.slow
def test_fit_raises_uncertainty_on_ood_inputs():
    found = {}
    for regularised in (False, True):
        posterior = bayesify.convert(_network(), LOUDER)
        loader, ood = _loaders()
        options = {"ood_loader": ood, "regularizer": OODRegularizer(weight=10.0)} if regularised else {}
        history = bayesify.fit(posterior, loader, progress=False, accuracy_tolerance=1, **options)
        assert ("uncertainty" in history.epochs[0].terms) == regularised
        found[regularised] = bayesify.predict(posterior, ood, seed=0).epistemic.mean()
    assert found[True] > 2 * found[False]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.slow
def test_a_broken_off_run_meets_the_same_ood_inputs(own_generator: bool, tmp_path: Path):
    def run(folder: Path, breaks: bool) -> dict[str, Tensor]:
        posterior = bayesify.convert(_network(), NOISY)
        loader, ood = _loaders()
        if own_generator:
            ood = DataLoader(ood.dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(9))
        steps = 0

        def count(*_) -> None:
            nonlocal steps
            steps += 1
            if breaks and steps == 11:
                raise KeyboardInterrupt

        def optimizer(groups):
            made = NOISY.make_optimizer(groups)
            made.register_step_post_hook(count)
            return made

        bayesify.fit(
            posterior, loader, ood_loader=ood, checkpoint=folder, checkpoint_steps=1, progress=False,
            accuracy_tolerance=1, optimizer=optimizer,
        )  # fmt: skip
        return posterior.state_dict()

    whole = run(tmp_path / "whole", False)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", True)
    resumed = run(tmp_path / "broken", False)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_fit_checks_its_ood_loader():
    posterior = bayesify.convert(_network(), NOISY)
    loader, ood = _loaders()
    with pytest.raises(ValueError, match="needs OOD inputs"):
        bayesify.fit(posterior, loader, regularizer=OODRegularizer(), progress=False)
    with pytest.raises(TypeError, match="iterator"):
        bayesify.fit(posterior, loader, ood_loader=iter(ood), progress=False)
    with pytest.raises(ValueError, match="empty"):
        bayesify.fit(posterior, loader, ood_loader=[], progress=False)
