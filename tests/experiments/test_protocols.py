"""Protocols of anomaly and attack detection against their steps by hand."""

import math

import pytest
import torch
from torch import nn

import bayesify
from bayesify import MAP, MCDropout, measure
from bayesify.decide import pgd
from experiments.protocols import SCORES, anomaly_table, attack_table, separation, shortest_fgsm, shortest_pgd


def posterior() -> bayesify.Posterior:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)).eval()
    return bayesify.convert(network, MCDropout())


OWN = torch.rand(40, 4, generator=torch.Generator().manual_seed(1))
OTHER = torch.rand(30, 4, generator=torch.Generator().manual_seed(2))


def test_scores_are_those_of_the_definitions():
    samples = torch.softmax(torch.randn(6, 40, 3, generator=torch.Generator().manual_seed(3)), -1).double()
    mean = samples.mean(0)
    made = posterior()
    made.likelihood = bayesify.Categorical()
    stream = made.likelihood.stream()
    stream.add(samples.log())
    prediction = stream.result()
    entropy = -(mean * mean.log()).sum(-1)
    expected = {
        "entropy": entropy,
        "BALD": entropy + (samples * samples.log()).sum(-1).mean(0),
        "variation ratio": 1
        - torch.stack([(samples.argmax(-1) == c).double().mean(0) for c in range(3)]).amax(0),
        "max probability": 1 - mean.amax(-1),
        "model variance": (samples.square().sum(-1).mean(0) - mean.square().sum(-1)),
    }  # fmt: skip
    for name, values in expected.items():
        found = prediction.score(SCORES[name]).double()
        # Up to a constant, which no ranking sees.
        torch.testing.assert_close(found - found[0], values - values[0], rtol=1e-6, atol=1e-7, msg=name)


def test_separation_is_the_measures():
    made = posterior()
    own, other = (bayesify.predict(made, x, num_draws=8, seed=0) for x in (OWN, 5 * OTHER))
    found = separation(own, other)
    assert list(found) == list(SCORES)
    pair = own.epistemic, other.epistemic
    assert found["BALD"].auroc == measure.auroc(*pair)
    assert found["BALD"].aupr_ood == measure.aupr(*pair)
    assert found["BALD"].aupr_own == measure.aupr(*pair, positive="id")


def test_only_ood_inputs_are_multiplied_and_repeats_are_averaged():
    made = posterior()
    found = anomaly_table(made, OWN, {"other": OTHER}, factor=5.0, num_draws=8, repeats=2, seed=3)
    aurocs = []
    for seed in (3, 4):
        own, other = (bayesify.predict(made, x, num_draws=8, seed=seed) for x in (OWN, 5 * OTHER))
        aurocs.append(measure.auroc(own.total, other.total))
    assert found["other"]["entropy"].auroc == pytest.approx(sum(aurocs) / 2, abs=1e-12)


@pytest.mark.parametrize("values", [255 * OTHER, OTHER - 128])
def test_a_set_on_another_scale_is_refused(values: torch.Tensor):
    with pytest.raises(ValueError, match="to_scale"):
        anomaly_table(posterior(), OWN, {"other": values})


def linear() -> tuple[bayesify.Posterior, torch.Tensor, torch.Tensor]:
    """A line between two classes at x0 = .5: the shortest way over it is known."""
    network = nn.Linear(2, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
        network.bias.copy_(torch.tensor([0.5, -0.5]))
    x = torch.tensor([[0.3, 0.4], [0.9, 0.4], [0.6, 0.5]])
    return bayesify.convert(network, MAP()), x, torch.tensor([0, 1, 0])  # the last is wrong as it is


def test_fgsm_goes_as_far_as_it_must():
    made, x, labels = linear()
    found = shortest_fgsm(made, x, labels, radius=1.0, levels=1000, bounds=(0.0, 1.0))
    # |x0 - .5| rounded up to a thousandth of the radius; the label at .5 itself is a tie.
    moved = (found - x)[:, 0].abs()
    for index, least in enumerate((0.2, 0.4)):
        assert least <= moved[index] <= least + 0.002
    assert torch.equal(found[2], x[2]), "what is wrong already is left alone"
    out_of_reach = shortest_fgsm(made, x[:1], labels[:1], radius=0.1, levels=10, bounds=(0.0, 1.0))
    assert math.isclose(float((out_of_reach - x[:1])[0, 0]), 0.1, rel_tol=1e-5), "else it goes to the border"


def test_nearest_pgd_stops_where_the_label_is_wrong():
    made, x, labels = linear()
    found = shortest_pgd(made, x, labels, radius=0.5, step=0.05, steps=20, bounds=(0.0, 1.0))
    moved = (found - x)[:, 0].abs()
    assert 0.2 - 1e-6 <= moved[0] <= 0.25 + 1e-6
    assert 0.4 - 1e-6 <= moved[1] <= 0.45 + 1e-6
    assert moved[2] == 0
    whole = pgd(made, x, labels, radius=0.5, step=0.05, steps=20, random_start=False)
    assert (whole - x)[:, 0].abs()[1] > 0.45


def test_shortest_pgd_is_pgd_until_the_label_is_wrong():
    """Labels that are never reached: all steps are those of `pgd`, with the same draws, fresh or not."""
    made = posterior()
    with torch.no_grad():
        made.network[-1].bias.copy_(torch.tensor([0.0, 0.0, 99.0]))
    options = {"radius": 0.2, "step": 0.05, "steps": 6, "bounds": (0.0, 1.0), "num_draws": 2, "seed": 4}
    labels = torch.full((40,), 2)
    for fresh in (True, False):
        found = shortest_pgd(made, OWN, labels, fresh_draws=fresh, **options)
        expected = pgd(made, OWN, labels, fresh_draws=fresh, random_start=False, **options)
        torch.testing.assert_close(found, expected)


def test_the_table_has_every_pair():
    made = posterior()
    plain = bayesify.convert(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), MAP())
    labels = torch.arange(40) % 3
    detectors = {"dropout": made, "plain": plain}
    found = attack_table(
        {"dropout": made}, detectors, OWN, labels, OTHER, attack_samples=3, num_draws=5, seed=1
    )  # fmt: skip
    assert set(found) == {("dropout", box, name) for box in ("grey", "white") for name in ("FGSM", "PGD")}
    moved = shortest_fgsm(made, OWN, labels, radius=1.0, levels=100, bounds=(0.0, 1.0), num_draws=1, seed=1)
    own, other = (bayesify.predict(made, x, num_draws=5, seed=1) for x in (OTHER, moved))
    assert found["dropout", "grey", "FGSM"]["dropout"] == separation(own, other)
    assert set(found["dropout", "white", "PGD"]) == {"dropout", "plain"}
