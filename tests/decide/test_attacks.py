"""Attacks: gradients against autograd of the naive average, projection, and what they are for."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesify
from bayesify import BayesAdapter, DeepEnsemble, MCDropout
from bayesify.decide import PredictiveNetwork, disagreement_avoided, features_moved, fgsm, pgd, surprise
from bayesify.decide.attacks import _gradient
from bayesify.evaluation.measures import mutual_information


def _posterior(method: bayesify.Method | None = None) -> bayesify.Posterior:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3)).double()
    return bayesify.convert(network, method or BayesAdapter(start_std=(0.2, 0.3)))


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(7, 6, dtype=torch.float64), torch.arange(7) % 3


def _average(posterior: bayesify.Posterior, x: torch.Tensor, seed: int, samples: int) -> torch.Tensor:
    outputs = [posterior.evaluate(x, [key])[0] for key in posterior.keys(samples, seed)]
    return torch.stack([output.softmax(-1) for output in outputs])


@pytest.mark.parametrize("weight", [0.0, 4.0])
def test_the_gradient_is_that_of_the_average(weight: float):
    posterior = _posterior()
    x, labels = _inputs()
    goal = disagreement_avoided(posterior.likelihood, labels, weight)
    found = _gradient(posterior, x, goal, 5, lambda v: 2 * v - 1, seed=3)
    leaf = x.clone().requires_grad_()
    probs = _average(posterior.eval(), 2 * leaf - 1, 3, 5)
    mean = probs.mean(0)
    entropy = -(mean * mean.log()).sum(-1) + (probs * probs.log()).sum(-1).mean(0)
    value = -mean[torch.arange(7), labels].log() - weight * entropy
    assert_close(found, torch.autograd.grad(value.sum(), leaf)[0], rtol=1e-9, atol=1e-11)


def test_the_gradient_is_finite_where_all_draws_are_sure_of_another_class():
    posterior = _posterior()
    with torch.no_grad():
        posterior.network[3].weight.mul_(1e5)
    x, labels = _inputs()
    gradient = _gradient(posterior, x, surprise(posterior.likelihood, labels), 4, None, seed=0)
    assert gradient.isfinite().all()
    assert gradient.abs().sum(-1).gt(0).any()


@pytest.mark.parametrize("method", [None, MCDropout(p=0.3, insert_before="linear"), DeepEnsemble(members=3)])
def test_pgd_raises_the_loss_inside_the_ball(method: bayesify.Method | None):
    posterior = _posterior(method)
    x, labels = _inputs()
    modes = [module.training for module in posterior.modules()]
    state = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    adversarial = pgd(posterior, x, labels, radius=0.1, step=0.02, steps=10, num_draws=3)
    assert (adversarial - x).abs().max() <= 0.1 + 1e-12
    assert adversarial.min() >= 0
    assert adversarial.max() <= 1
    before, after = (
        -bayesify.predict(posterior, v, seed=9).probs[torch.arange(7), labels].log() for v in (x, adversarial)
    )
    assert (after > before).all()
    assert modes == [module.training for module in posterior.modules()]
    assert all(p.grad is None for p in posterior.parameters())
    for name, tensor in posterior.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_fgsm_is_one_step_to_the_border():
    posterior = _posterior()
    x, labels = _inputs()
    x = x.mul(0.8).add(0.1)
    gradient = _gradient(posterior, x, surprise(posterior.likelihood, labels), 4, None, seed=6)
    assert_close(fgsm(posterior, x, labels, radius=0.05, num_draws=4, seed=5), x + 0.05 * gradient.sign())


def test_seeds_decide_and_draws_are_new_in_each_step():
    posterior = _posterior()
    x, labels = _inputs()
    one, same, other = (pgd(posterior, x, labels, radius=0.1, num_draws=2, seed=s) for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    seen = []
    real = posterior.keys
    posterior.keys = lambda number, seed: seen.append(seed) or real(number, seed)
    pgd(posterior, x, labels, steps=4, num_draws=2)
    assert len(set(seen)) == 4


@pytest.mark.slow
def test_an_attack_that_knows_the_detector_is_less_noticed():
    posterior = _posterior(BayesAdapter(start_std=(0.4, 0.5)))
    x, labels = _inputs()
    plain = pgd(posterior, x, labels, radius=0.2, step=0.02, num_draws=8)
    goal = disagreement_avoided(posterior.likelihood, labels)
    adaptive = pgd(posterior, x, goal, radius=0.2, step=0.02, num_draws=8)
    with torch.no_grad():
        scores = [mutual_information(_average(posterior.eval(), v, 50, 200)).mean() for v in (plain, adaptive)]
    assert scores[1] < scores[0]


def test_features_are_moved_away():
    posterior = _posterior()
    x, _ = _inputs()
    with torch.no_grad(), posterior.mean():
        references = posterior.eval()(x)
    moved = pgd(posterior, x, features_moved(references), radius=0.2, step=0.05, num_draws=2)
    with torch.no_grad(), posterior.mean():
        cosines = [nn.functional.cosine_similarity(posterior(v), references).mean() for v in (x, moved)]
    assert cosines[1] < cosines[0]


@pytest.mark.slow
def test_a_posterior_as_a_network_for_attack_libraries():
    posterior = _posterior()
    x, labels = _inputs()
    network = PredictiveNetwork(posterior, 2000).eval()
    logits = network(x)
    assert_close(logits.exp().sum(-1), torch.ones(7, dtype=torch.float64))
    exact = bayesify.predict(posterior, x, num_draws=2000, seed=0).probs
    assert (logits.exp() - exact).abs().max() < 5 * (0.25 * 2 / 2000) ** 0.5
    nn.functional.cross_entropy(network(x.requires_grad_()), labels).backward()
    assert x.grad.any()


def test_bad_arguments_get_a_sentence():
    posterior = _posterior()
    x, labels = _inputs()
    with pytest.raises(ValueError, match="preprocess"):
        pgd(posterior, x * 3, labels)
    with pytest.raises(ValueError, match="step above 0"):
        pgd(posterior, x, labels, step=0.0)


def test_the_attack_on_features_moves_them_away():
    posterior = _posterior()
    x, _ = _inputs()
    references = bayesify.predict(posterior, x.flip(0), num_draws=8, seed=0, output="features").features
    goal = features_moved(references)
    changed = pgd(posterior, x, goal, radius=0.1, step=0.02, steps=10, num_draws=4, output="features")
    assert (changed - x).abs().max() <= 0.1 + 1e-12

    def distance(inputs: torch.Tensor) -> torch.Tensor:
        samples = bayesify.predict(posterior, inputs, num_draws=50, seed=9, output="features", keep_samples=True)
        return goal(samples.samples)

    assert (distance(changed) > distance(x)).all()


def test_the_gradient_of_features_is_that_of_the_cut_network():
    posterior = _posterior()
    x, _ = _inputs()
    references = torch.randn(7, 12, dtype=torch.float64)
    goal = features_moved(references)
    found = _gradient(posterior, x, goal, 3, None, 5, "features")
    leaf = x.clone().requires_grad_()
    draws = []
    for key in posterior.keys(3, 5):
        weights = posterior.weights(key)
        hidden = leaf @ weights["0.weight"].T + weights["0.bias"]
        norm = posterior.network[1]
        hidden = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
        draws.append(torch.tanh(hidden * weights["1.weight"] + weights["1.bias"]))
    assert_close(found, torch.autograd.grad(goal(torch.stack(draws)).sum(), leaf)[0], rtol=1e-9, atol=1e-12)


def test_one_draw_is_attacked_in_every_step():
    """A grey box against the same attack on the draw as a network by itself."""
    torch.manual_seed(0)
    made = bayesify.convert(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)), MCDropout())
    own = torch.rand(40, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(40) % 3
    options = {"radius": 0.2, "step": 0.05, "steps": 5, "random_start": False}
    found = pgd(made, own, labels, num_draws=1, fresh_draws=False, seed=7, **options)
    draw, x = made.draw(8), own
    for _ in range(5):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(draw(leaf), labels, reduction="sum"), leaf)
        x = (x + 0.05 * gradient.sign()).clamp(own - 0.2, own + 0.2).clamp(0, 1)
    torch.testing.assert_close(found, x)
    fresh = pgd(made, own, labels, num_draws=1, seed=7, **options)
    assert not torch.isclose(fresh, x).all()
