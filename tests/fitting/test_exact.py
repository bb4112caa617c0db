"""What `fit` computes, against loops written by hand."""

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import MAP, SWAG, DeepEnsemble, MCDropout
from tests.conformance.probe import require_bfloat16

CLASSES = 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def make_data(rows: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (rows,), generator=generator))


def make_network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(2)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double().eval()


def run(posterior: bayesify.Posterior, loader: Any, **options: Any) -> bayesify.History:
    return bayesify.fit(posterior, loader, **{"progress": False, "accuracy_tolerance": 1.0, **options})


def by_hand(network: nn.Module, batches: list[list[tuple[Tensor, Tensor]]], step: Any) -> list[float]:
    """Train on epochs of batches; return the mean loss of each epoch."""
    network.train()
    means = []
    for epoch in batches:
        losses = []
        for x, y in epoch:
            loss = functional.cross_entropy(network(x), y)
            step(loss)
            losses.append(loss.item())
        means.append(math.fsum(losses) / len(losses))
    return means


def assert_equal(posterior: bayesify.Posterior, network: nn.Module) -> None:
    for name, tensor in network.state_dict().items():
        assert torch.equal(posterior.network.state_dict()[name], tensor), name


def sgd_step(optimizer: torch.optim.Optimizer) -> Any:
    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def test_in_order_it_is_a_plain_loop_bit_for_bit():
    posterior = bayesify.convert(make_network(), MAP(lr=0.1, weight_decay=0.01))
    loader = DataLoader(make_data(), batch_size=5)
    history = run(posterior, loader, epochs=2)
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    means = by_hand(network, [list(loader)] * 2, sgd_step(optimizer))
    assert_equal(posterior, network)
    assert_close([record.terms["nll"] for record in history.epochs], means)
    assert [record.steps for record in history.epochs] == [5, 10]


def test_shuffled_and_with_dropout_it_is_a_plain_loop_bit_for_bit():
    order: list[Tensor] = []
    states: list[Tensor] = []

    class Watched(TensorDataset):
        def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, ...]]:
            order.append(torch.tensor(rows))
            states.append(torch.get_rng_state())
            return [self[row] for row in rows]

    data = make_data()
    loader = DataLoader(Watched(*data.tensors), batch_size=5, shuffle=True)
    posterior = bayesify.convert(make_network(0.5), MAP(lr=0.1))
    val_loader = DataLoader(make_data(6), batch_size=6)  # else the accuracy would look at the training data too
    run(posterior, loader, epochs=2, val_loader=val_loader)
    epochs = [torch.cat(order[:5]), torch.cat(order[5:])]
    for epoch in epochs:
        assert epoch.sort().values.tolist() == list(range(24))
    assert epochs[0].tolist() != epochs[1].tolist()
    network = make_network(0.5)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    step = sgd_step(optimizer)
    for rows, state in zip(order, states, strict=True):
        torch.set_rng_state(state)  # the state in which the batch was fetched gives the masks
        by_hand(network, [[data[rows]]], step)
    assert_equal(posterior, network)


def test_the_seed_decides():
    loader = DataLoader(make_data(), batch_size=5, shuffle=True)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs))  # the caller's generator does not
        posterior = bayesify.convert(make_network(0.5), MAP(lr=0.1))
        run(posterior, loader, epochs=1, seed=seed)
        runs.append(posterior.state_dict()["network.0.weight"])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("rows", [24, 20])
def test_accumulation_is_a_larger_batch(rows: int):
    """Also where the last group has fewer batches: 20 rows are 4 + 4 + 4 and 4 + 4."""
    data = make_data(rows)
    small = bayesify.convert(nn.Linear(4, CLASSES).double(), MAP(lr=0.1, schedule="cosine"))
    large = copy.deepcopy(small)
    one = run(small, DataLoader(data, batch_size=4), epochs=3, accumulate=3)
    other = run(large, DataLoader(data, batch_size=12), epochs=3)
    for name, tensor in large.state_dict().items():
        assert_close(small.state_dict()[name], tensor, **EXACT)
    assert [r.steps for r in one.epochs] == [r.steps for r in other.epochs] == [2, 4, 6]
    assert [r.lr for r in one.epochs] == [r.lr for r in other.epochs]


def test_clipping():
    posterior = bayesify.convert(make_network(), MAP(lr=0.5))
    loader = DataLoader(make_data(), batch_size=6)
    run(posterior, loader, epochs=2, clip_norm=0.1)
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    norms = []

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(network.parameters(), 0.1).item())
        optimizer.step()

    by_hand(network, [list(loader)] * 2, step)
    assert min(norms) > 0.1, "nothing was clipped"
    assert_equal(posterior, network)


def test_the_cosine_schedule_ends_at_zero():
    posterior = bayesify.convert(make_network(), MAP(lr=0.3, schedule="cosine"))
    rates: list[float] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    loader = DataLoader(make_data(), batch_size=6)
    history = run(posterior, loader, epochs=3, optimizer=lambda groups: Watching(groups, lr=0.3))
    expected = [0.15 * (1 + math.cos(math.pi * step / 12)) for step in range(13)]
    assert rates == pytest.approx(expected[:12], rel=1e-6)
    assert [record.lr for record in history.epochs] == pytest.approx([expected[4], expected[8], 0], abs=1e-7)


def test_the_constant_schedule():
    history = run(bayesify.convert(make_network(), MAP(lr=0.3)), DataLoader(make_data(), batch_size=6), epochs=2)
    assert [record.lr for record in history.epochs] == [0.3, 0.3]


def test_adam():
    posterior = bayesify.convert(make_network(), MAP(lr=0.01, optimizer="adam", weight_decay=0.1))
    loader = DataLoader(make_data(), batch_size=6)
    run(posterior, loader, epochs=2)
    network = make_network()
    step = sgd_step(torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1))
    by_hand(network, [list(loader)] * 2, step)
    assert_equal(posterior, network)


def test_a_custom_optimizer():
    posterior = bayesify.convert(make_network(), MAP())
    loader = DataLoader(make_data(), batch_size=6)
    run(posterior, loader, epochs=2, optimizer=lambda groups: torch.optim.RMSprop(groups, lr=0.02, momentum=0.5))
    network = make_network()
    by_hand(network, [list(loader)] * 2, sgd_step(torch.optim.RMSprop(network.parameters(), lr=0.02, momentum=0.5)))
    assert_equal(posterior, network)


def test_the_members_of_an_ensemble_are_trained_apart():
    loader = DataLoader(make_data(), batch_size=6)
    method = DeepEnsemble(members=2, start="perturbed", lr=0.1, weight_decay=0.0, schedule="constant")
    posterior = bayesify.convert(make_network(), method)
    starts = [copy.deepcopy(posterior.law.member_tensors(index)) for index in range(2)]
    run(posterior, loader, epochs=2)
    for index, start in enumerate(starts):
        network = make_network()
        network.load_state_dict(start)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        by_hand(network, [list(loader)] * 2, sgd_step(optimizer))
        for name, tensor in posterior.law.member_tensors(index).items():
            assert_close(tensor.detach(), network.state_dict()[name], **EXACT)


def test_swag_collects_the_path_of_the_plain_loop():
    loader = DataLoader(make_data(), batch_size=6)
    method = SWAG(rank=3, snapshots_per_epoch=2, num_bn_draws=2, lr=0.1, weight_decay=0.0)
    posterior = bayesify.convert(make_network(), method)
    run(posterior, loader, epochs=2)
    network = make_network()
    step = sgd_step(torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    path = []
    for index, batch in enumerate([*loader, *loader], start=1):
        by_hand(network, [[batch]], step)
        if index % 2 == 0:
            path.append(network[4].weight.detach().clone())
    snapshots = torch.stack(path)
    assert int(posterior.law.snapshots) == 4
    assert_close(posterior.law.codec.split(posterior.law.average)["4.weight"], snapshots.mean(0), **EXACT)
    assert_close(
        posterior.law.codec.split(posterior.law.variance())["4.weight"], snapshots.var(0, correction=0), **EXACT
    )


def test_the_validation_nll_is_that_of_a_plain_loop():
    posterior = bayesify.convert(make_network(), MAP(lr=0.1))
    held_out = make_data(11)
    history = run(posterior, DataLoader(make_data(), batch_size=6), epochs=1, val_loader=DataLoader(held_out, 4))
    with torch.no_grad():
        logits = posterior.eval().network(held_out.tensors[0])
    assert history.epochs[0].val_nll == pytest.approx(functional.cross_entropy(logits, held_out.tensors[1]).item())


def test_the_validation_nll_of_a_noisy_posterior_averages_probabilities():
    """With p = 1 the only thing random is gone: every pass is the last bias."""
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)).double()
    posterior = bayesify.convert(network, MCDropout(p=1.0, lr=0.1))
    held_out = make_data(11)
    history = run(posterior, DataLoader(make_data(), batch_size=6), epochs=1, val_loader=DataLoader(held_out, 4))
    logits = posterior.network[2].bias.detach().expand(11, -1)
    assert history.epochs[0].val_nll == pytest.approx(functional.cross_entropy(logits, held_out.tensors[1]).item())


def test_the_validation_nll_leaves_out_what_is_ignored():
    torch.manual_seed(0)
    network = nn.Linear(4, CLASSES).double()  # on (B, T, 4): a label per token
    x, labels = torch.randn(6, 5, 4, dtype=torch.float64), torch.randint(CLASSES, (6, 5))
    labels[0], labels[1, 3:] = -100, -100
    posterior = bayesify.convert(network, MAP())
    history = run(posterior, [(x, labels)], num_data=6, epochs=1, val_loader=[(x[:2], labels[:2]), (x[2:], labels[2:])])
    with torch.no_grad():
        expected = functional.cross_entropy(posterior.network(x).flatten(0, 1), labels.flatten())
    assert history.epochs[0].val_nll == pytest.approx(expected.item())


def test_early_stopping_takes_the_best_weights_and_stops():
    """Fitting noise with a high rate: the validation NLL soon rises."""
    data, held_out = make_data(12), DataLoader(make_data(40), batch_size=40)
    loader = DataLoader(data, batch_size=4)
    posterior = bayesify.convert(make_network(), MAP(lr=0.5))
    history = run(posterior, loader, epochs=40, val_loader=held_out, patience=3)
    values = [record.val_nll for record in history.epochs]
    best = values.index(min(values))
    assert len(values) == best + 1 + 3 < 40
    # As a run that was told to stop there.
    other = bayesify.convert(make_network(), MAP(lr=0.5))
    run(other, loader, epochs=best + 1)
    assert_equal(posterior, other.network)


def test_without_patience_the_last_weights_stay():
    held_out = DataLoader(make_data(40), batch_size=40)
    loader = DataLoader(make_data(12), batch_size=4)
    one, other = (bayesify.convert(make_network(), MAP(lr=0.5)) for _ in range(2))
    history = run(one, loader, epochs=8, val_loader=held_out)
    run(other, loader, epochs=8)
    assert len(history.epochs) == 8
    assert_equal(one, other.network)


@pytest.mark.slow
def test_bfloat16_is_a_loop_under_autocast():
    require_bfloat16()
    posterior = bayesify.convert(make_network().float(), MAP(lr=0.1))
    loader = DataLoader(TensorDataset(*(t.float() if t.is_floating_point() else t for t in make_data().tensors)), 6)
    run(posterior, loader, epochs=1, precision="bf16")
    network = make_network().float().train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    plain = make_network().float()
    by_hand(plain, [list(loader)], sgd_step(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, nesterov=True)))
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = network(x)
        functional.cross_entropy(output.float(), y).backward()
        optimizer.step()
    for name, tensor in network.state_dict().items():
        assert_close(posterior.network.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    assert not torch.equal(posterior.network[0].weight, plain[0].weight), "autocast changed nothing"


def test_frozen_parameters_stay():
    network = make_network()
    network[0].requires_grad_(False)
    posterior = bayesify.convert(network, MAP(lr=0.1))
    run(posterior, DataLoader(make_data(), batch_size=6), epochs=1)
    assert torch.equal(posterior.network[0].weight, network[0].weight)
    assert not torch.equal(posterior.network[4].weight, network[4].weight)


def test_global_generators_and_modes_are_as_before():
    posterior = bayesify.convert(make_network(0.5), MCDropout()).eval()
    posterior.network[1].train()
    modes = [module.training for module in posterior.modules()]
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    loader = DataLoader(make_data(), batch_size=6, shuffle=True)
    run(posterior, loader, epochs=1, val_loader=loader, patience=1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    assert modes == [module.training for module in posterior.modules()]


def test_no_epochs_change_nothing():
    posterior = bayesify.convert(make_network(0.5), MCDropout())
    before = copy.deepcopy(posterior.state_dict())
    history = run(posterior, DataLoader(make_data(), batch_size=6))
    assert history.epochs == []
    for name, tensor in before.items():
        assert torch.equal(posterior.state_dict()[name], tensor)
