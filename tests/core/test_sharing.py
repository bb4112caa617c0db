"""Posteriors share the memory of frozen tensors with the network, and neither ever sees the other change."""

import copy

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import MAP, BayesAdapter, Laplace, Objective
from bayesify._core.files import fingerprint
from bayesify._core.sharing import Shared, constants, copied

METHOD = BayesAdapter(epochs=1, start_std=(0.05, 0.06))


def network():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    made[0].requires_grad_(False)
    made[3].requires_grad_(False)
    return made.eval()


def loader():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 4), torch.arange(16) % 3), batch_size=8)


def kept(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_kept(module, before):
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == before[name].dtype, name
        assert torch.equal(tensor, before[name]), name


def addresses(module):
    return {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}


def test_only_what_does_not_learn_is_shared():
    plain = network()
    own, theirs = addresses(plain), addresses(bayesify.convert(plain, METHOD).network)
    assert {name for name in own if own[name] == theirs[name]} == {"0.weight", "0.bias", "3.weight", "3.bias"}
    alone = addresses(bayesify.convert(plain, METHOD, share=False).network)
    assert not set(own.values()) & set(alone.values())


@pytest.mark.parametrize(
    "method", [METHOD, Laplace(structure="kronecker"), bayesify.SWAG(epochs=1, snapshots_per_epoch=2), MAP(epochs=1)]
)
def test_sharing_changes_no_number_and_leaves_the_network_untouched(method):
    plain = network().train()
    before = kept(plain)
    found = []
    for share in (True, False):
        posterior = bayesify.convert(plain, method, share=share)
        bayesify.fit(posterior, loader(), progress=False)
        found.append(bayesify.predict(posterior, torch.ones(2, 4), num_draws=3, seed=2).probs)
        assert_kept(plain, before)
    assert torch.equal(*found)


def test_each_moves_without_the_other():
    plain = network()
    before = kept(plain)
    posterior = bayesify.convert(plain, METHOD).double()
    assert posterior.network[0].weight.dtype == torch.float64
    assert_kept(plain, before)
    posterior = bayesify.convert(plain, METHOD)
    plain.double()
    assert posterior.network[0].weight.dtype == torch.float32
    assert_kept(posterior.network, before)


def test_flags_and_ties_are_those_of_the_network():
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 3))
    plain[1].weight = plain[0].weight
    plain[0].weight.requires_grad_(False)
    posterior = bayesify.convert(plain, METHOD)
    assert posterior.network[0].weight is posterior.network[1].weight is not plain[0].weight
    posterior.network[0].weight.requires_grad_(True)
    assert not plain[0].weight.requires_grad


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_begins_to_learn_gets_memory_of_its_own(by_hand):
    plain = network()
    before = kept(plain)
    posterior = bayesify.convert(plain, METHOD)
    posterior.network[3].requires_grad_(True)
    assert copy.deepcopy(posterior).network[3].weight.requires_grad
    if by_hand:
        optimizer = torch.optim.SGD([p for p in posterior.parameters() if p.requires_grad], lr=0.1)
        Objective(posterior, num_data=16)(next(iter(loader()))).backward()
        optimizer.step()
    else:
        bayesify.fit(posterior, loader(), progress=False)
    assert not torch.equal(posterior.network[3].weight, plain[3].weight)
    assert posterior.network[0].weight.data_ptr() == plain[0].weight.data_ptr()
    assert_kept(plain, before)


def test_a_state_that_is_loaded_does_not_reach_the_network():
    plain = network()
    before = kept(plain)
    posterior = bayesify.convert(plain, METHOD)
    posterior.load_state_dict(posterior.state_dict())
    assert posterior.network[0].weight.data_ptr() == plain[0].weight.data_ptr(), "equal numbers are no change"
    posterior.load_state_dict({name: t + 1 for name, t in posterior.state_dict().items()})
    assert torch.equal(posterior.network[0].weight, plain[0].weight + 1)
    assert_kept(plain, before)


def test_copies_and_banks_share_too():
    plain = network()
    posterior = bayesify.convert(plain, METHOD)
    made = [copy.deepcopy(posterior), bayesify.sample_bank(posterior, 3), bayesify.ensemble([posterior, posterior])]
    for one in made:
        assert one.network[3].weight.data_ptr() == plain[3].weight.data_ptr()
        assert one.network[3].weight is not posterior.network[3].weight
        assert one.shared.names == posterior.shared.names
    expected = bayesify.predict(posterior, torch.ones(1, 4), seed=0).probs
    assert torch.equal(bayesify.predict(made[0], torch.ones(1, 4), seed=0).probs, expected)
    assert posterior.plain_network()[3].weight.data_ptr() != plain[3].weight.data_ptr(), "a plain network is its own"


def test_a_network_that_is_changed_in_place_is_noticed(tmp_path):
    plain = network()
    posterior, alone = (bayesify.convert(plain, METHOD, share=share) for share in (True, False))
    expected = bayesify.predict(alone, torch.ones(1, 4), seed=0).probs
    plain[3].weight.data += 0.1  # as peft merges
    for act in (
        lambda: bayesify.predict(posterior, torch.ones(1, 4)),
        lambda: bayesify.save(posterior, tmp_path / "a"),
    ):
        with pytest.raises(ValueError, match=r"changed in place.*'3.weight'.*share=False"):
            act()
    assert torch.equal(bayesify.predict(alone, torch.ones(1, 4), seed=0).probs, expected)


def test_checkpoints_leave_out_what_is_shared_and_go_on(tmp_path):
    expected = bayesify.convert(network(), METHOD)
    bayesify.fit(expected, loader(), epochs=2, progress=False)
    first = bayesify.convert(network(), METHOD)
    bayesify.fit(first, loader(), epochs=2, progress=False, checkpoint=tmp_path)
    with safe_open(tmp_path / "checkpoint.safetensors", framework="pt") as file:
        names = {name.removeprefix("posterior.network.") for name in file.keys()}  # noqa: SIM118
    assert {"5.weight", "1.running_mean"} < names
    assert "3.weight" not in names
    again = bayesify.convert(network(), METHOD)
    bayesify.fit(again, loader(), epochs=2, progress=False, checkpoint=tmp_path)
    for one in (first, again):
        assert_kept(one, kept(expected))


def test_a_saved_posterior_shares_with_the_network_that_it_is_loaded_onto(tmp_path):
    plain = network()
    posterior = bayesify.convert(plain, METHOD)
    bayesify.fit(posterior, loader(), progress=False)
    bayesify.save(posterior, tmp_path)
    loaded = bayesify.load(tmp_path, plain)
    assert loaded.network[0].weight.data_ptr() == plain[0].weight.data_ptr()
    assert_kept(loaded, kept(posterior))
    plain.requires_grad_(False)  # as a model that was loaded to predict with: what the posterior learned is its own
    assert bayesify.load(tmp_path, plain).network[5].weight.data_ptr() != plain[5].weight.data_ptr()


class Int8(nn.Module):
    """A layer of whole numbers, kept as a buffer, which is scaled in each pass; and a counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("numbers", torch.randint(-127, 127, (4, 4), dtype=torch.int8))
        self.register_buffer("scale", torch.tensor(0.01))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x @ (self.numbers * self.scale).T


def test_matrices_of_whole_numbers_are_shared_and_counters_are_not():
    plain = nn.Sequential(Int8(), nn.Linear(4, 3))
    assert constants(plain) == ["0.numbers"]
    posterior = bayesify.convert(plain, METHOD)
    bayesify.fit(posterior, loader(), progress=False)
    assert posterior.network[0].calls > 0 == plain[0].calls
    assert posterior.network[0].numbers.data_ptr() == plain[0].numbers.data_ptr()


class Packed(nn.Parameter):
    """A parameter with a state of its own, as bitsandbytes has."""


def test_parameters_of_other_types_keep_type_and_state():
    plain = nn.Linear(2, 2)
    plain.weight = torch.Tensor._make_subclass(Packed, torch.ones(2, 2), False)
    plain.weight.state = {"absmax": torch.ones(2)}
    other = copied(plain, ["weight"])
    assert type(other.weight) is Packed
    assert other.weight is not plain.weight
    assert other.weight.data_ptr() == plain.weight.data_ptr()
    assert torch.equal(other.weight.state["absmax"], torch.ones(2))
    assert other.weight.state is not plain.weight.state


def test_tensors_made_of_tensors_are_shared_and_have_a_fingerprint():
    plain = nn.Linear(2, 2)
    plain.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)), requires_grad=False)
    other = copied(plain, ["weight"])
    assert isinstance(other.weight, TwoTensor)
    assert other.weight.a.data_ptr() == plain.weight.a.data_ptr()
    assert Shared(other, ["weight"]).changed(other) == []
    marks = {fingerprint(TwoTensor(torch.ones(2), torch.full((2,), value))) for value in (0.0, 1.0)}
    assert len(marks) == 2


def test_nan_is_no_change():
    plain = nn.Linear(2, 2).requires_grad_(False)
    plain.weight[0, 0] = torch.nan
    assert Shared(plain, ["weight"]).changed(plain) == []
