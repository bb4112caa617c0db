"""SWAG against numpy: the moments, the covariance of its draws, and the batch-normalisation statistics."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bayesify import SWAG, convert, predict
from bayesify.laws import Key
from tests.laws.networks import placed

X = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def path(network, steps, seed=0):
    """Return weights that a run of SGD might visit, flat, (T, P)."""
    size = sum(p.numel() for p in network.parameters())
    return np.random.default_rng(seed).normal(size=(steps, size)).cumsum(0)


def set_weights(network, flat):
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.as_tensor(flat), network.parameters())


def flatten(tensors, network):
    return torch.cat([tensors[name].flatten() for name, _ in network.named_parameters()])


def fitted(network, method, steps=6):
    posterior = convert(network, method)
    snapshots = path(network, steps)
    for flat in snapshots:
        set_weights(posterior.network, flat)
        posterior.law.collect()
    return posterior, snapshots


def linear():
    return nn.Linear(2, 1).double()


def deviations(snapshots, rank):
    """Return the last columns w_t - mean(w_1..w_t), t >= 2, (K, P)."""
    running = np.cumsum(snapshots, 0) / np.arange(1, len(snapshots) + 1)[:, None]
    return (snapshots - running)[1:][-rank:] if rank else np.zeros((0, snapshots.shape[1]))


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_moments(steps):
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    posterior, snapshots = fitted(network, SWAG(rank=4), steps)
    mean = posterior.law.average
    np.testing.assert_allclose(mean, snapshots.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(posterior.law.variance(), snapshots.var(0), rtol=1e-11, atol=1e-12)
    with posterior.mean():
        set_weights(network, snapshots.mean(0))
        torch.testing.assert_close(posterior(X), network(X), rtol=1e-12, atol=1e-12)


def covariance(snapshots, rank, scale):
    diagonal = np.diag(snapshots.var(0))
    if rank == 0:
        return scale**2 * diagonal
    columns = deviations(snapshots, rank)
    return scale**2 / 2 * (diagonal + columns.T @ columns / max(len(columns) - 1, 1))


@pytest.mark.parametrize(("rank", "scale", "steps"), [(0, 1.0, 6), (3, 1.0, 6), (3, 0.5, 9), (20, 1.0, 6)])
@pytest.mark.slow
def test_draws_have_the_covariance_of_the_paper(rank, scale, steps):
    """Whitened, 2,000 draws must have the identity as covariance.

    Each of 9 numbers stays within 4.9 standard errors: one false alarm in 100,000 runs.
    """
    number = 2000
    network = linear()
    posterior, snapshots = fitted(network, SWAG(rank=rank, scale=scale), steps)
    drawn = []
    for index in range(number):
        with posterior.drawn(Key(0, index)):
            drawn.append(flatten(placed(posterior), network))
    factor = np.linalg.cholesky(covariance(snapshots, rank, scale))
    white = np.linalg.solve(factor, (torch.stack(drawn).numpy() - snapshots.mean(0)).T)
    assert np.abs(white.mean(1)).max() < 4.9 / number**0.5
    second = white @ white.T / number
    bound = 4.9 * np.sqrt((1 + np.eye(3)) / number)
    assert (np.abs(second - np.eye(3)) < bound).all()


def test_the_low_rank_part_is_joint_over_layers():
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    posterior = convert(network, SWAG(rank=2))
    for value in (0.0, 1.0, 4.0):
        set_weights(posterior.network, [value, value])
        posterior.law.collect()
    pairs = []
    for index in range(1000):
        with posterior.drawn(Key(0, index)):
            pairs.append(flatten(placed(posterior), network))
    correlation = torch.corrcoef(torch.stack(pairs).T)[0, 1].item()
    snapshots = np.array([[0.0, 0], [1, 1], [4, 4]])
    exact = covariance(snapshots, 2, 1.0)
    rho = exact[0, 1] / exact[0, 0]
    assert abs(correlation - rho) < 4.9 * (1 - rho**2) / 1000**0.5


def bn_network():
    layers = [nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double().train()


def loader(batches=4):
    generator = torch.Generator().manual_seed(1)
    sizes = [6, 6, 6, 3][:batches]
    return [(torch.randn(size, 3, dtype=torch.float64, generator=generator) + 2, None) for size in sizes]


@torch.no_grad()
@pytest.mark.parametrize("batches", [None, 2])
def test_refreshed_statistics_are_those_of_a_naive_loop(batches):
    posterior, _ = fitted(bn_network(), SWAG(rank=3, num_bn_draws=3))
    modes = [module.training for module in posterior.network.modules()]
    own = copy.deepcopy(posterior.network.state_dict())
    posterior.refresh_statistics(loader(), max_batches=batches)

    for index in (None, 0, 1, 2):
        naive = copy.deepcopy(posterior.network).eval()
        weights = posterior.law.centre() if index is None else posterior.law.sample(Key(0, index))
        naive.load_state_dict(posterior.law.codec.split(weights), strict=False)
        means, variances = [], []
        for x, _ in loader()[:batches]:
            hidden = naive[0](x)
            means.append(hidden.mean(0))
            variances.append(hidden.var(0))
        naive[1].running_mean.copy_(torch.stack(means).mean(0))
        naive[1].running_var.copy_(torch.stack(variances).mean(0))

        posterior.eval()
        with posterior.mean() if index is None else posterior.drawn(Key(0, index)):
            torch.testing.assert_close(posterior(X), naive(X), rtol=1e-10, atol=1e-10)
            assert placed(posterior)["1.num_batches_tracked"] == len(means)
        posterior.train()
    assert modes == [module.training for module in posterior.network.modules()]
    assert posterior.network[1].momentum == 0.1
    for name, tensor in posterior.network.state_dict().items():
        assert torch.equal(tensor, own[name])


def test_more_draws_than_statistics_is_an_error():
    posterior, _ = fitted(bn_network(), SWAG(rank=3, num_bn_draws=3))
    with pytest.raises(ValueError, match=r"older than the weights. Call posterior.refresh_statistics"):
        posterior.draw(0)
    posterior.refresh_statistics(loader())
    with pytest.raises(
        ValueError, match=r"4 draws were asked for.*re-estimated for 3.*a method that has num_bn_draws=4"
    ):
        predict(posterior, X, num_draws=4, seed=0)
    assert len(posterior.keys(None, 0)) == 3
    assert {key.index for key in posterior.keys(3, 5)} == {0, 1, 2}  # without replacement
    assert len({posterior.keys(1, seed)[0].index for seed in range(40)}) == 3
    without, _ = fitted(linear(), SWAG(rank=3, num_bn_draws=3))
    assert len(without.keys(50, 0)) == 50


@pytest.mark.parametrize("whole", [True, False])
def test_draws_in_train_mode_leave_the_stored_statistics(whole):
    posterior, _ = fitted(bn_network(), SWAG(rank=3, num_bn_draws=3))
    posterior.refresh_statistics(loader())
    if whole:
        posterior.train()
    else:
        posterior.eval()
        posterior.network[1].train()
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    posterior(X)
    posterior.draw(1)(X)
    with posterior.mean():
        posterior(X)
    for name, tensor in posterior.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_empty_loader_and_a_rank_of_one_are_errors():
    posterior, _ = fitted(bn_network(), SWAG(rank=3, num_bn_draws=3))
    with pytest.raises(ValueError, match="The loader gave no batch"):
        posterior.refresh_statistics([])
    with pytest.raises(ValueError, match="rank=1 has no low-rank covariance"):
        SWAG(rank=1)


def test_only_what_is_averaged_is_trained():
    posterior = convert(bn_network(), SWAG(), include="4")
    (stage,) = SWAG().stages(posterior)
    (group,) = stage.groups
    assert {id(p) for p in group["params"]} == {id(p) for p in posterior.network[4].parameters()}


def test_the_same_seed_is_the_same_draw():
    posterior, _ = fitted(linear(), SWAG(rank=3))
    x = torch.randn(3, 2, dtype=torch.float64)
    assert torch.equal(posterior.draw(1)(x), posterior.draw(1)(x))
    assert torch.equal(posterior.draw(1)(x)[:1], posterior.draw(1)(x[:1]))
    assert (posterior.draw(1)(x) - posterior.draw(2)(x)).abs().max() > 1e-3
    assert not torch.equal(posterior(x), posterior(x))  # a fresh pass is a new draw
