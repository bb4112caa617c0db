"""ABNN: what is trained, on which loss, what a member costs, and that nothing else changes."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, convert, predict
from bayesify.laws import Key, Pass
from bayesify.layers import NormLayer
from bayesify.methods.random_weights import draw_eta, eta_of_examples
from experiments.networks import CifarResNet

BOUND = 4.9


class Shortcut(nn.Module):
    """A block whose shortcut has a norm inside a Sequential, and one norm that is used twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.first = nn.BatchNorm2d(4, eps=1e-3)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        h = self.norm(self.first(self.conv(x)).relu() + self.shortcut(x)).relu()
        return self.head(self.norm(h).mean((2, 3)))


X = torch.randn(8, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
NORMS = {f"{name}.{key}" for name in ("first", "shortcut.1", "norm") for key in ("weight", "bias")}


def trained(network):
    """Return a network in float64, with statistics of data and parameters that are not ones and zeros."""
    torch.manual_seed(1)
    network = network.double()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
        network.train()(torch.randn(16, 3, 6, 6, dtype=torch.float64))
    return network.eval()


@pytest.fixture
def network():
    return trained(Shortcut())


# -- identity -----------------------------------------------------------------------------------------------------


def efficient():
    """Inverted bottlenecks with the eps of EfficientNets."""

    def block(width):
        return nn.Sequential(
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width, eps=1e-3, momentum=0.01), nn.SiLU(),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width, bias=False),
            nn.BatchNorm2d(4 * width, eps=1e-3), nn.SiLU(),
            nn.Conv2d(4 * width, width, 1, bias=False), nn.BatchNorm2d(width, eps=1e-3),
        )  # fmt: skip

    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8, eps=1e-3), nn.SiLU())
    return nn.Sequential(stem, block(8), block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=30, num_labels=3, max_position_embeddings=16, layer_norm_eps=1e-12, **sizes)
    return BertForSequenceClassification(config)


IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = {"input_ids": torch.arange(1, 15).reshape(2, 7), "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}


@pytest.mark.parametrize(
    ("make", "inputs", "norms"),
    [(lambda: CifarResNet(3), IMAGES, 19), (efficient, IMAGES, 7), (bert, TOKENS, 5)],
    ids=["resnet20", "efficient", "bert"],
)
@torch.no_grad()
def test_at_alpha_zero_networks_are_themselves_bit_for_bit(make, inputs, norms):
    torch.manual_seed(0)
    network = make().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # so that another eps would be seen
            module.running_var.uniform_(1e-3, 2e-2)
            module.running_mean.normal_()
    posterior = convert(network, ABNN(alpha=0.0))
    assert len(posterior.conversion.converted) == norms
    before = network.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.network.state_dict().items())
    assert posterior.network.state_dict().keys() == before.keys()  # so that pretrained weights can be loaded
    for mode in (False, True):
        posterior.train(mode)
        for module in posterior.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for function in (posterior, posterior.draw(1)):
            output = function(**inputs) if isinstance(inputs, dict) else function(inputs)
            expected = network(**inputs) if isinstance(inputs, dict) else network(inputs)
            assert torch.equal(posterior.read(output), posterior.read(expected))


# -- what is trained ----------------------------------------------------------------------------------------------


def test_members_own_the_normalisation_parameters_and_nothing_else(network):
    posterior = convert(network, ABNN(members=3))
    assert all(set(posterior.law.member_tensors(m)) == NORMS for m in range(3))
    names = {name for name, p in posterior.named_parameters() if p.requires_grad}
    assert names == {f"law.parts.{m}.own.{name}" for m in range(3) for name in NORMS}
    posterior.loss((X, Y), num_data=8).total.backward()
    assert {name for name, p in posterior.named_parameters() if p.grad is not None} == names
    everything = convert(network, ABNN(members=2, train="all"))
    assert set(everything.law.member_tensors(1)) == {name for name, _ in network.named_parameters()}
    assert not any(p.requires_grad for p in everything.network.parameters())


def test_excluded_and_frozen_layers(network):
    posterior = convert(network, ABNN(), exclude="shortcut")
    assert posterior.conversion.converted == ("first", "norm")
    assert set(posterior.law.member_tensors(0)) == {name for name in NORMS if not name.startswith("shortcut")}
    network.first.requires_grad_(False)
    posterior = convert(network, ABNN())
    assert posterior.conversion.converted == ("first", "shortcut.1", "norm")  # still noisy
    assert set(posterior.law.member_tensors(0)) == {name for name in NORMS if not name.startswith("first")}


@pytest.mark.parametrize("statistics", ["frozen", "updated"])
def test_training_a_member_changes_no_other_and_not_the_network(network, statistics):
    posterior = convert(network, ABNN(members=3, statistics=statistics)).train()
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items() if name != "learning.eta"}
    with posterior.member(1):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        posterior.loss((X, Y), num_data=8).total.backward()
        optimizer.step()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, posterior.state_dict()[name])}
    statistics_names = {
        f"law.parts.1.own.{name}.{key}"
        for name in ("first", "shortcut.1")
        for key in ("running_mean", "running_var", "num_batches_tracked")
    }
    expected = {f"law.parts.1.own.{name}" for name in NORMS}
    assert changed == (expected if statistics == "frozen" else expected | statistics_names)


def test_frozen_statistics_are_used_in_training(network):
    posterior = convert(network, ABNN(alpha=0.0)).train()
    assert torch.equal(posterior(X), network(X))
    assert posterior.network.first.training  # the mode itself is the user's
    updated = convert(network, ABNN(alpha=0.0, members=1, statistics="updated")).train()
    reference = copy.deepcopy(network).train()
    assert torch.equal(updated(X), reference(X))
    assert torch.equal(updated.law.member_tensors(0)["first.running_var"], reference.first.running_var)
    assert torch.equal(updated.network.first.running_var, network.first.running_var)


def test_fit_is_the_hand_written_loop(network):
    """With alpha = 0 a member's training is SGD on the normalisation parameters of a weighted loss."""
    method = ABNN(members=2, alpha=0.0, eta=2.0, lr=0.05, weight_decay=0.01, epochs=3)
    posterior = convert(network, method)
    bayesify.fit(posterior, [(X[:4], Y[:4]), (X[4:], Y[4:])], num_data=8, progress=False, accuracy_tolerance=1)
    for member in range(2):
        alone = copy.deepcopy(network)
        alone.requires_grad_(False)
        parameters = [p for name, p in alone.named_parameters() if name in NORMS]
        assert len(parameters) == 6
        for p in parameters:
            p.requires_grad_(True)
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
        for _ in range(3):
            for rows in (slice(0, 4), slice(4, 8)):
                optimizer.zero_grad()
                losses = F.cross_entropy(alone(X[rows]), Y[rows], reduction="none")
                ((1 + posterior.learning.eta[member][Y[rows]]) * losses).mean().backward()
                optimizer.step()
        for name, tensor in posterior.law.member_tensors(member).items():
            torch.testing.assert_close(tensor, alone.get_parameter(name), rtol=1e-12, atol=1e-12)


# -- eta ----------------------------------------------------------------------------------------------------------


def test_eta_is_of_distinct_classes_and_seeded():
    eta = draw_eta(ABNN(eta=6.0, seed=3), 50, 10)
    assert torch.equal((eta == 6).sum(1), torch.full((50,), 3))  # floor(sqrt(10)) distinct ones
    assert torch.equal((eta == 0).sum(1), torch.full((50,), 7))
    assert (eta.sum(0) > 0).all()  # the last class too; missing one: 10 (.7)^50 < 1e-6
    assert len({tuple(row.tolist()) for row in eta}) > 20
    assert torch.equal(eta[:5], draw_eta(ABNN(eta=6.0, seed=3), 5, 10))
    assert not torch.equal(eta, draw_eta(ABNN(eta=6.0, seed=4), 50, 10))
    assert torch.equal((draw_eta(ABNN(eta_classes=1), 9, 10) > 0).sum(1), torch.ones(9).long())
    with pytest.raises(ValueError, match="eta_classes=11, but there are 10 classes"):
        draw_eta(ABNN(eta_classes=11), 2, 10)


def test_eta_is_kept_with_the_member(network, tmp_path):
    posterior = convert(network, ABNN(members=3))
    assert posterior.learning.eta.shape == (3, 0)
    posterior.loss((X, Y), num_data=8)
    assert posterior.learning.eta.shape == (3, 5)
    assert posterior.learning.eta.dtype == torch.float64
    kept = posterior.learning.eta.clone()
    bayesify.save(posterior, tmp_path)
    loaded = bayesify.load(tmp_path, network)
    loaded.loss((X, Y), num_data=8)
    assert torch.equal(loaded.learning.eta, kept)  # a file has the seed, and not what only learning needs
    posterior.learning.eta[1] = torch.arange(5)
    other = convert(network, ABNN(members=3))
    other.load_state_dict(posterior.state_dict())
    assert torch.equal(other.learning.eta[1], torch.arange(5).double())
    other.loss((X, Y), num_data=8)
    assert torch.equal(other.learning.eta[[0, 2]], kept[[0, 2]])
    assert torch.equal(other.learning.eta[1], torch.arange(5).double())  # not drawn anew
    other.network.head = nn.Linear(4, 6).double()
    with pytest.raises(ValueError, match="weights are of 5 classes, and now there are 6"):
        other.loss((X, Y), num_data=8)


def per_member(posterior, batch):
    losses = []
    for member in range(len(posterior.law.parts)):
        with posterior.member(member):
            losses.append(posterior.loss(batch, num_data=8))
    return losses


@pytest.mark.parametrize("normalised", [False, True])
def test_the_loss_weighs_classes(network, normalised):
    posterior = convert(network, ABNN(alpha=0.0, eta=6.0, normalised=normalised))
    losses = per_member(posterior, (X, Y))
    assert len({terms.total.item() for terms in losses}) > 1
    for terms, eta in zip(losses, posterior.learning.eta, strict=True):
        each = F.cross_entropy(network(X), Y, reduction="none")
        expected = F.cross_entropy(network(X), Y, weight=1 + eta) if normalised else ((1 + eta[Y]) * each).mean()
        torch.testing.assert_close(terms.total, expected, rtol=1e-12, atol=1e-12)
    total = posterior.loss((X, Y), num_data=8).total
    torch.testing.assert_close(total, torch.stack([terms.total for terms in losses]).mean())


def test_dense_outputs_are_weighed_per_pixel():
    network = trained(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1)))
    labels = torch.randint(5, (8, 6, 6))
    labels[:, :2] = -100
    posterior = convert(network, ABNN(alpha=0.0, eta=2.0))
    logits = network(X)
    for terms, eta in zip(per_member(posterior, (X, labels)), posterior.learning.eta, strict=True):
        each = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        weights = (1 + eta[labels.clamp_min(0)])[labels >= 0]
        torch.testing.assert_close(terms.total, (weights * each[labels >= 0]).mean(), rtol=1e-12, atol=1e-12)


def test_yes_or_no_has_two_classes():
    network = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 1)))
    posterior = convert(network, ABNN(alpha=0.0, eta=2.0, members=8), likelihood="binary")
    targets = (Y > 1).double()
    each = F.binary_cross_entropy_with_logits(network(X)[:, 0], targets, reduction="none")
    for terms, eta in zip(per_member(posterior, (X, targets)), posterior.learning.eta, strict=True):
        assert sorted(eta.tolist()) == [0, 2]
        torch.testing.assert_close(terms.total, ((1 + eta[targets.long()]) * each).mean(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weights_from", ["examples", "targets"])
def test_numbers_have_a_random_weight_for_each_example(weights_from):
    network = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)))
    posterior = convert(network, ABNN(alpha=0.0, weights_from=weights_from), likelihood=bayesify.Gaussian(0.5))
    targets = torch.randn(8, 2, dtype=torch.float64)
    order = torch.randperm(8)
    for member, terms in enumerate(per_member(posterior, (X, targets))):
        weights = 1 + eta_of_examples((X, targets) if weights_from == "examples" else targets, 8, 0, member)
        nll = -torch.distributions.Normal(network(X), 0.5).log_prob(targets)
        torch.testing.assert_close(terms.total, (weights[:, None] * nll).mean(), rtol=1e-12, atol=1e-12)
        # an example keeps its weight in another batch
        if weights_from == "examples":
            torch.testing.assert_close(1 + eta_of_examples((X[order], targets[order]), 8, 0, member), weights[order])
    off = convert(network, ABNN(alpha=0.0, eta=0.0), likelihood=bayesify.Gaussian(0.5))
    torch.testing.assert_close(off.loss((X, targets), num_data=8).total, nll.mean())


def test_weights_of_examples_are_exponential():
    targets = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    members = [1 + eta_of_examples(targets, 100_000, 5, member) for member in range(3)]
    for weights in members:
        assert weights.min() >= 0
        ordered = weights.sort().values
        grid = torch.arange(1, 100_001) / 100_000
        # Kolmogorov-Smirnov: P(sqrt(n) D > 2.7) < 1e-6
        assert (1 - (-ordered).exp() - grid).abs().max() * 100_000**0.5 < 2.7
    for one, other in ((members[0], members[1]), (members[0][1:], members[0][:-1])):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < BOUND / 100_000**0.5
    close = eta_of_examples(torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [1.0, 2.0000002]]), 4, 0, 0)
    assert close[0] == close[1]
    assert len(close.unique()) == 3
    assert eta_of_examples(torch.tensor([-0.0]), 1, 0, 0) == eta_of_examples(torch.tensor([0.0]), 1, 0, 0)


@pytest.mark.parametrize("inputs", ["numbers", "small integers", "tokens", "images", "two inputs, one in common"])
def test_weights_of_examples_whose_targets_repeat_are_those_of_a_bootstrap(inputs):
    """As functions of the target alone they tilted the law of the targets: a member's mean was off by a constant."""
    rows = 20_000
    generator = torch.Generator().manual_seed(0)
    quality = torch.randint(3, 9, (rows,), generator=generator).float()  # six values, as wine has
    unique = torch.randperm(rows, generator=generator)
    made = {
        "numbers": torch.randn(rows, 4, generator=generator),
        "small integers": torch.stack([unique // 200, unique % 200], 1).double(),
        "tokens": {"ids": torch.stack([unique // 200, unique % 200], 1), "mask": torch.ones(rows, 2)},
        "images": (unique[:, None, None, None] == torch.arange(3).view(3, 1, 1)).float() + unique.view(-1, 1, 1, 1),
        "two inputs, one in common": (torch.ones(7, 3), unique.float()),
    }[inputs]
    for member in range(3):
        weights = 1 + eta_of_examples((made, quality), rows, 0, member)
        assert len(weights.unique()) == rows
        # Var(sum w (y - c)) = sum (y - c)^2 for independent w ~ Exp(1)
        centred = quality - quality.mean()
        assert abs((weights * centred).sum()) < BOUND * centred.square().sum().sqrt()
        assert abs(weights.mean() - 1) < BOUND / rows**0.5
        assert abs(weights.var() - 1) < BOUND * (8 / rows) ** 0.5


def test_an_example_keeps_its_weight_where_a_batch_is_padded_or_of_another_precision():
    ids, targets = torch.randint(1, 9, (5, 4)), torch.randn(5)
    weights = eta_of_examples(({"ids": ids, "mask": torch.ones(5, 4)}, targets), 5, 0, 0)
    padded = {"ids": F.pad(ids, (0, 3)), "mask": F.pad(torch.ones(5, 4), (0, 3))}
    assert torch.equal(eta_of_examples((padded, targets.double()), 5, 0, 0), weights)


def test_augmented_examples_keep_the_weight_of_their_target():
    network = trained(nn.Sequential(nn.Flatten(), nn.LayerNorm(108), nn.Linear(108, 1)))
    targets = torch.randn(8, 1, dtype=torch.float64)
    found = {}
    for weights_from in ("examples", "targets"):
        posterior = convert(network, ABNN(alpha=0.0, weights_from=weights_from), likelihood=bayesify.Gaussian(0.5))
        nll = -torch.distributions.Normal(network(X.flip(-1)), 0.5).log_prob(targets)
        own = 1 + eta_of_examples((X, targets) if weights_from == "examples" else targets, 8, 0, 0)
        with posterior.member(0):
            total = posterior.loss((X.flip(-1), targets), num_data=8).total
        found[weights_from] = torch.allclose(total, (own[:, None] * nll).mean())
    assert found == {"examples": False, "targets": True}


# -- prediction and storage ---------------------------------------------------------------------------------------


def fitted(network, method):
    posterior = convert(network, method)
    loader = DataLoader(TensorDataset(X, Y), 4)
    bayesify.fit(posterior, loader, epochs=1, progress=False, accuracy_tolerance=1)
    return posterior


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_a_prediction_averages_members_and_draws(network, chunk_size):
    posterior = fitted(network, ABNN(members=3, draws_per_member=3, alpha=0.3, lr=0.5))
    prediction = predict(posterior, X, seed=2, chunk_size=chunk_size, keep_samples=True)
    keys = posterior.keys(None, 2)
    assert Counter(key.path for key in keys) == {(0,): 3, (1,): 3, (2,): 3}
    naive = []
    for key in keys:
        # a network of its own for each draw: the member's parameters, with the draw's noise in its scales
        alone = copy.deepcopy(network)
        part = posterior.law.part(key.path[0])
        alone.load_state_dict(part.own.as_dict(), strict=False)
        first, second = {}, {}
        for site in part.places:
            name = site.name
            for calls, factors in enumerate((first, second)):
                factors[name] = 1 + 0.3 * drawn(key, site, calls + 1, alone.get_submodule(name).weight)
        handles = [alone.get_submodule(n).register_forward_hook(scaler(first[n], second[n])) for n in first]
        naive.append(alone(X).softmax(-1).detach())
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(prediction.samples, torch.stack(naive), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(prediction.probs, torch.stack(naive).mean(0), rtol=1e-11, atol=1e-11)


def drawn(key, site, calls, weight):
    ones = torch.ones(1, len(weight), 1, 1, dtype=torch.float64)
    p = Pass("draw", (key,), rows=1)
    for _ in range(calls):
        found = site.act(p, ones, None)
    return (found[0, :, 0, 0] - 1) / site.alpha


def scaler(*factors):
    calls = iter(factors)

    def hook(module, args, output):
        beta = module.bias[:, None, None]
        return beta + (output - beta) * next(calls)[:, None, None]

    return hook


def test_a_file_holds_the_members_parameters_only(tmp_path):
    torch.manual_seed(0)
    network = CifarResNet(3).eval()
    posterior = convert(network, ABNN(members=3))
    for tensor in posterior.law.parts.parameters():
        tensor.data.add_(torch.rand_like(tensor))
    bayesify.save(posterior, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    norms = sum(p.numel() for m in network.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    assert sum(p.numel() for p in posterior.law.parts.parameters()) == 3 * norms
    weights = 4 * sum(p.numel() for p in network.parameters())
    assert 4 * 3 * norms < file.stat().st_size < 0.05 * weights
    loaded = bayesify.load(tmp_path, network)
    kept = {name: t for name, t in posterior.state_dict().items() if not name.startswith("learning.")}
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in kept.items())


def test_members_trained_apart_are_joined(network, tmp_path):
    parts = [fitted(network, ABNN(members=1, draws_per_member=2, seed=seed, alpha=0.3, lr=0.5)) for seed in range(3)]
    joined = ABNN.join(parts)
    assert len(joined.law.parts) == 3
    assert joined.default_draws == 6
    for member, part in enumerate(parts):
        assert torch.equal(joined.learning.eta[member], part.learning.eta[0])
        with joined.drawn(Key(0, 4, (member,))), part.drawn(Key(0, 4, (0,))):
            assert torch.equal(joined(X), part(X))
    assert len(parts[0].law.parts) == 1
    bayesify.save(joined, tmp_path)
    loaded = bayesify.load(tmp_path, network)
    assert torch.equal(predict(loaded, X, seed=0).probs, predict(joined, X, seed=0).probs)
    other = convert(trained(Shortcut()), ABNN(members=1, draws_per_member=2, alpha=0.2))
    with pytest.raises(ValueError, match="not of one network"):
        ABNN.join([parts[0], other])
    with pytest.raises(ValueError, match="that ABNN made"):
        ABNN.join([])


# -- sentences ----------------------------------------------------------------------------------------------------


def test_a_network_without_norms_is_told_what_works():
    with pytest.raises(ValueError, match=r"needs normalisation layers.*BayesAdapter, MCDropout.*SWAG or DeepEnsemble"):
        convert(nn.Sequential(nn.Linear(4, 3)), ABNN())


class OtherNorm(nn.Module):
    """Normalises its last dimension but one."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x):
        return nn.functional.normalize(x, dim=1) + self.bias[:, None]


@torch.no_grad()
def test_other_types_are_named_and_can_be_registered():
    network = nn.Sequential(OtherNorm(), nn.LayerNorm(5))
    reasons = {row.name: row.reason for row in convert(network, ABNN()).conversion.rows}
    assert reasons["0"] == "OtherNorm is not registered; if it normalises, add it with bayesify.register_type"
    assert reasons["1"] == "noise with alpha=0.05 per sample-channel"

    class Mine(OtherNorm):
        pass

    bayesify.register_type(Mine, NormLayer(channel_dim=1))
    network = nn.Sequential(Mine()).double()
    posterior = convert(network, ABNN(members=1))
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    factor = (posterior.draw(0)(x) - 3) / (network(x) - 3)
    torch.testing.assert_close(factor, factor[:1, :, :1].expand_as(factor))
    assert len(factor[0, :, 0].unique()) == 4


def test_affine_free_norms_have_noise_and_nothing_to_train():
    network = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)).double()
    posterior = convert(network, ABNN())
    x = torch.randn(5, 4, dtype=torch.float64)
    assert (predict(posterior, x, seed=0).epistemic > 0).all()
    with pytest.raises(ValueError, match=r"no parameters to train.*ABNN\(train='all'\)"):
        bayesify.fit(posterior, [(x, torch.zeros(5).long())], num_data=5, progress=False)
    everything = convert(network, ABNN(train="all"))
    bayesify.fit(everything, [(x, torch.zeros(5).long())], num_data=5, progress=False)
    assert not torch.equal(everything.law.member_tensors(0)["0.weight"], network[0].weight)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"members": 0}, "members=0"),
        ({"alpha": -1.0}, "alpha is the standard deviation of the noise, but it is -1.0"),
        ({"eta": -1.0}, "cannot be negative"),
        ({"noise": "pixel"}, r"noise must be one of \['sample-channel', 'element', 'channel'\], but it is 'pixel'"),
        ({"train": "bn"}, "train must be one of"),
        ({"statistics": "fixed"}, "statistics must be one of"),
    ],
)
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        ABNN(**settings)
