"""One call that chooses: by validation data alone, within its budget, and what it returns is ready."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Views, choose
from bayesify.choosing.judging import Found, crossed_nll, first_of, half_of
from bayesify.prediction.trials import halves


class Sided(nn.Module):
    """Says class 1 for bright pixels on the left, and is confused by noise; mirrored images have other noise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Flatten()
        self.head = nn.Linear(16, 2)
        with torch.no_grad():
            weight = torch.ones(4, 4)
            weight[:, 2:] = 0.2  # it ought to be even
            self.head.weight.copy_(torch.stack([-weight.flatten(), weight.flatten()]))
            self.head.bias.zero_()

    def forward(self, x):
        return self.head(self.features(x))


def symmetric(number, seed=0):
    """The sum of all pixels decides, so that the mirrored image has the same answer."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 1, 4, 4, generator=generator)
    labels = torch.bernoulli(x.sum((1, 2, 3)).sigmoid(), generator=generator).long()
    return [(x[i : i + 100], labels[i : i + 100]) for i in range(0, number, 100)]


def nll(posterior, batches):
    found = [bayesify.predict(posterior, x).log_prob(y) for x, y in batches]
    return -torch.cat(found).mean().item()


def test_it_finds_the_mirror_by_itself(capsys):
    network, val, test = Sided(), symmetric(600), symmetric(3000, seed=1)
    posterior = choose(network, val, passes=2)
    assert posterior.views == Views("identity", "mirror")
    printed = capsys.readouterr().out
    assert "plain, identity, mirror" in printed
    assert printed.count("<- chosen") == 1
    plain = choose(network, val, passes=1, verbose=False)
    assert plain.views == Views("identity")
    assert nll(posterior, test) < nll(plain, test) - 0.01
    by_hand = bayesify.calibrate(bayesify.convert(network, "map"), val, views=Views("identity", "mirror"))
    torch.testing.assert_close(
        bayesify.predict(posterior, test[0][0]).probs, bayesify.predict(by_hand, test[0][0]).probs
    )


@pytest.mark.slow
def test_nothing_costs_more_than_its_budget():
    for passes in (1, 3, 6):
        choice = choose(Sided(), symmetric(200), passes=passes, verbose=False).choice
        assert max(one.passes for one in choice.candidates if one.reason is None) <= passes
        assert [one for one in choice.candidates if one.name == choice.chosen]


@pytest.mark.slow
def test_the_gain_is_paired_and_held_out():
    """The plain network's own line has no gain, and its NLL is what the temperature of the other half gives."""
    choice = choose(Sided(), symmetric(400), passes=2, verbose=False).choice
    plain = choice.candidates[0]
    assert plain.gain == 0
    x, y = (torch.cat(parts) for parts in zip(*symmetric(400), strict=True))
    with torch.no_grad():
        logits = Sided()(x).double()
    whole = bayesify.Categorical().double()
    _, after = whole.calibrate([(logits[None], y)])
    assert after <= plain.nll < after + 0.01
    each = -(logits / whole.temperature).log_softmax(-1)[range(400), y]
    assert plain.nll_error == pytest.approx(each.std().item() / math.sqrt(400), rel=0.05)


@pytest.mark.slow
def test_a_cheaper_one_is_taken_where_it_is_as_good():
    """An even network says the same of the mirrored image: the second pass is not paid for."""
    network = Sided()
    with torch.no_grad():
        network.head.weight.copy_(torch.stack([-torch.ones(16), torch.ones(16)]))
    assert choose(network, symmetric(400), passes=2, verbose=False).views == Views("identity")


def test_what_cannot_be_tried_says_why():
    network = nn.Sequential(nn.Conv2d(1, 2, 4), nn.Flatten())  # no linear layer
    choice = choose(network, symmetric(200), passes=1, verbose=False).choice
    failed = [one for one in choice.candidates if one.reason is not None]
    assert [one.name for one in failed] == ["noise before the last layer, widened"]
    assert "not tried: The network calls no linear layer." in str(choice)


def test_tables_and_functions():
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    y = 2 * x[:, 0] + torch.randn(400)
    network = nn.Linear(3, 1)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[2.0, 0.5, 0.0]]))
        network.bias.zero_()
    signs = Views("identity", lambda x: x * torch.tensor([1.0, -1.0, 1.0]))
    posterior = choose(network, [(x, y)], passes=2, likelihood=bayesify.Gaussian(1.0), views=[signs], verbose=False)
    assert posterior.views is signs  # it takes the wrong weight out
    found = bayesify.predict(posterior, x)
    torch.testing.assert_close(found.mean, 2 * x[:, 0])


@pytest.mark.slow
def test_training_data_are_used():
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*symmetric(600, seed=3), strict=True)))
    train, val = DataLoader(data, batch_size=50, shuffle=True), symmetric(400)
    posterior = choose(Sided(), val, passes=2, loader=train, epochs=2, verbose=False)
    names = {one.name: one for one in posterior.choice.candidates}
    for name, epochs in (
        ("last-layer Laplace", 1),
        ("the network and others trained on from it", 2),
        ("BayesAdapter", 2),
    ):
        assert names[name].reason is None, names[name].reason
        assert names[name].epochs == epochs
    # The network is wrong in a way that training mends, and its own line stays in the ensemble.
    trained = names["the network and others trained on from it"]
    assert trained.gain > 0


@pytest.mark.slow
def test_it_is_kept(tmp_path):
    network, val = Sided(), symmetric(400)
    posterior = choose(network, val, passes=2, verbose=False)
    bayesify.save(posterior, tmp_path / "chosen")
    loaded = bayesify.load(tmp_path / "chosen", network)
    x = val[0][0]
    assert torch.equal(bayesify.predict(loaded, x).probs, bayesify.predict(posterior, x).probs)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"passes": 0}, ValueError, "passes must be at least 1"),
        ({"epochs": 3}, ValueError, "needs training data"),
        ({"val": []}, ValueError, "gave no batch"),
        ({"val": iter(symmetric(100))}, TypeError, "several times"),
        ({"val": [(torch.randn(5, 1, 4, 4), torch.zeros(5).long())]}, ValueError, "5 validation examples are too few"),
        ({"val": [(torch.randn(1, 1, 4, 4), torch.zeros(1).long())]}, ValueError, "1 validation examples are too few"),
        ({"val": [(torch.full((30, 1, 4, 4), torch.nan), torch.zeros(30).long())]}, ValueError, "NLL is not finite"),
    ],
    ids=["passes", "epochs", "empty", "iterator", "few", "one", "nan"],
)
def test_bad_input_gets_a_sentence(options, error, words):
    val = options.pop("val", symmetric(100))
    with pytest.raises(error, match=words):
        choose(Sided(), val, **options)


@pytest.mark.slow
def test_views_may_be_given_as_texts_and_too_many_are_said():
    found = choose(Sided(), symmetric(100), views=["identity,mirror", "identity,mirror,flip"], verbose=False).choice
    tried = {one.views: one.reason for one in found.candidates if one.name.startswith("plain, ")}
    assert tried[Views("identity", "mirror")] is None
    assert tried[Views("identity", "mirror", "flip")] == "3 views cost more than passes=2"
    alone = choose(Sided(), symmetric(100), views=Views("identity", "flip"), verbose=False).choice
    assert [one.views for one in alone.candidates][1] == Views("identity", "flip")


@pytest.mark.slow
def test_it_can_be_called_in_inference_mode():
    network = Sided().train()
    with torch.inference_mode():
        posterior = choose(network, symmetric(100), verbose=False)
    assert network.training
    assert not any(tensor.is_inference() for tensor in [*posterior.parameters(), *posterior.buffers()])
    expected = choose(network, symmetric(100), verbose=False)
    assert posterior.choice == expected.choice


def test_coarser_maps_have_reflections_and_no_shifts():
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.AvgPool2d(4))
    generator = torch.Generator().manual_seed(0)
    val = [(torch.randn(30, 1, 8, 8, generator=generator), torch.randint(2, (30, 2, 2), generator=generator))]
    names = [one.name for one in choose(network, val, passes=4, verbose=False).choice.candidates]
    assert names[1:3] == ["plain, identity, mirror", "plain, identity, flip"]
    assert not any("shift" in name for name in names)


def test_images_of_bytes_are_taken_as_they_are():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Sided()

        def forward(self, x):
            return self.head(x.float() / 255)

    val = [(torch.randint(256, (30, 1, 4, 4), dtype=torch.uint8), torch.arange(30) % 2)]
    assert choose(Scaled(), val, passes=2, verbose=False).views == Views("identity")


# -- what is found on some examples is judged on others ---------------------------------------------------------------


def test_the_temperature_of_one_half_is_judged_on_the_other():
    """Against a search over a grid, both ways; the second batch starts with the second half."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 65, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (65,), generator=generator)
    found = Found([(logits[:, :33], labels[:33]), (logits[:, 33:], labels[33:])], [0])
    expected = []
    for learned, judged in ((0, 1), (1, 0)):
        temperatures = torch.linspace(-4, 4, 4001, dtype=torch.float64).exp()
        each = -(logits[0, None] / temperatures[:, None, None]).log_softmax(-1)[:, range(65), labels]
        best = each[:, learned::2].mean(1).argmin()
        expected.append(each[best, judged::2])
    likelihood = bayesify.Categorical().double()
    torch.testing.assert_close(crossed_nll(likelihood, (found, found)), torch.cat(expected), rtol=1e-2, atol=1e-3)
    assert likelihood.temperature == 1


def test_what_knows_its_own_half_by_heart_gains_nothing():
    labels = torch.arange(40) % 2
    by_heart = []
    for half in (0, 1):
        logits = torch.zeros(1, 40, 2, dtype=torch.float64)
        own = torch.arange(half, 40, 2)
        logits[0, own, labels[own]] = 5.0
        by_heart.append(Found([(logits, labels)], [0]))
    nll = crossed_nll(bayesify.Categorical().double(), tuple(by_heart))
    torch.testing.assert_close(nll, torch.full((40,), math.log(2), dtype=torch.float64))


@pytest.mark.parametrize("sizes", [[7, 8, 5], [1] * 6, [20]])
def test_inputs_and_outputs_are_divided_alike(sizes):
    numbers = torch.arange(sum(sizes)).split(sizes)
    outputs = halves([(own[None], own) for own in numbers])
    for half in (0, 1):
        batches = [{"x": own if half else own.numpy()} for own in numbers]
        inputs = torch.cat([own["x"] for own in half_of(batches, half, most=1000)])
        assert inputs.tolist() == torch.cat([target for _, target in outputs[half][0]]).tolist()
    for most in (1, 9, 1000):
        few = torch.cat([own["x"] for own in first_of([{"x": own} for own in numbers], most)])
        assert few.tolist() == list(range(min(most, sum(sizes))))
        odd = [own["x"] for own in half_of([{"x": own} for own in numbers], 1, most=most)]
        assert torch.cat([*odd, torch.empty(0)]).tolist() == list(range(1, min(most, sum(sizes)), 2))


@pytest.mark.slow
def test_random_labels_keep_the_plain_network():
    """There is nothing to be found; judged where it was found, noise was taken in a third of such cases."""
    taken = []
    for seed in range(8):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        val = [(torch.randn(40, 6), torch.randint(3, (40,)))]
        taken.append(choose(network, val, passes=2, seed=seed, verbose=False).choice.chosen)
    assert taken.count("plain + temperature") >= 7, taken
