"""Saved posteriors and other architectures: made-up inputs of the shapes last seen tell them apart."""

import copy
import gc
import json
import pickle
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, APD, IBNN, IVON, MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, MCDropout
from bayesify._core.seen import InputsSeen, make_inputs
from tests.fixtures.make_format1 import FOLDER as FORMAT1
from tests.fixtures.make_format1 import make_network

CPU = torch.device("cpu")
METHODS = {
    "map": MAP(lr=0.01, epochs=1),
    "mc-dropout": MCDropout(),
    "deep-ensemble": DeepEnsemble(members=2, epochs=1),
    "swag": SWAG(rank=2, epochs=1, num_bn_draws=2, snapshots_per_epoch=2),
    "bayes-adapter": BayesAdapter(epochs=1),
    "ivon": IVON(epochs=1),
    "ibnn": IBNN(components=2, repeats=1, epochs=1),
    "abnn": ABNN(members=2, epochs=1),
    "laplace": Laplace(prior_precision=1.0),
    "laplace-diagonal": Laplace(structure="diagonal", prior_precision=1.0),
    "laplace-kronecker": Laplace(structure="kronecker", prior_precision=1.0),
    "sgld": SGLD(samples_per_chain=2, thin=1, epochs=2, chains=2),
    "sgld-together": SGLD(samples_per_chain=2, thin=1, epochs=2, chains=2, together=True),
    "apd": APD(samples_per_chain=2, thin=1, epochs=2, hidden=(4,), latent=2, steps=2, batch=2, num_bn_draws=2),
}


class Network(nn.Module):
    """What it computes is in its forward, and not in its tensors or names."""

    def __init__(self, activation=functional.relu, *, swapped=False, p=0.2, scale=1.0):
        super().__init__()
        torch.manual_seed(4)
        self.activation, self.swapped, self.scale = activation, swapped, scale
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm, self.dropout = nn.BatchNorm1d(5), nn.Dropout(p)
        self.eval()

    def forward(self, x):
        for layer in (self.second, self.first) if self.swapped else (self.first, self.second):
            x = self.activation(layer(x))
        return self.last(self.dropout(self.norm(x))) * self.scale


X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
LOADER = DataLoader(TensorDataset(X, torch.arange(16) % 3), batch_size=8)


def learned(method, network=None):
    posterior = bayesify.convert(network or Network(), method)
    bayesify.fit(posterior, LOADER, progress=False, accuracy_tolerance=1)
    return posterior.eval()


def probe_of(folder):
    return json.loads((folder / "config.json").read_text())["probe"]


@pytest.mark.filterwarnings("ignore:The run")  # short runs
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_another_architecture_with_the_same_tensors_is_refused(tmp_path, name):
    posterior = learned(METHODS[name])
    bayesify.save(posterior, tmp_path)
    bayesify.load(tmp_path, Network())
    for other in (Network(torch.tanh), Network(swapped=True), Network(scale=1.01)):
        with pytest.raises(ValueError, match=r"made from: for the probe .* another activation, order of modules"):
            bayesify.load(tmp_path, other)
        bayesify.load(tmp_path, other, probe=False)


@pytest.mark.parametrize("how", ["bank", "pca"])
def test_what_is_made_of_a_posterior_inherits_what_it_saw(tmp_path, how):
    bank = bayesify.sample_bank(learned(METHODS["deep-ensemble"]), 2)
    made = bank if how == "bank" else bayesify.distill(bank, "pca", latent=1, loader=LOADER, num_bn_draws=2)
    bayesify.save(made, tmp_path)
    bayesify.load(tmp_path, Network())
    with pytest.raises(ValueError, match="for the probe in the file"):
        bayesify.load(tmp_path, Network(torch.tanh))


@pytest.mark.parametrize("seen", [False, True])
def test_another_rate_of_dropout_is_refused_also_by_a_posterior_that_never_ran(tmp_path, seen):
    posterior = bayesify.convert(Network(p=0.2), MCDropout())
    if seen:
        posterior(X)
    bayesify.save(posterior, tmp_path)
    with pytest.raises(ValueError, match=r"the dropout rate of 'dropout' was 0\.2 and is 0\.9"):
        bayesify.load(tmp_path, Network(p=0.9), probe=False)
    bayesify.load(tmp_path, Network(p=0.2))


def test_dropout_in_another_place_shows_in_a_draw_only(tmp_path):
    class Elsewhere(Network):
        def forward(self, x):
            x = self.activation(self.second(self.activation(self.first(x))))
            return self.dropout(self.last(self.norm(x)))

    posterior = bayesify.convert(Network(), MCDropout())
    posterior(X)
    bayesify.save(posterior, tmp_path)
    with pytest.raises(ValueError, match="a draw of it returns other numbers"):
        bayesify.load(tmp_path, Elsewhere())


def test_a_posterior_that_never_ran_has_no_probe(tmp_path):
    bayesify.save(bayesify.convert(Network(), MAP()), tmp_path)
    assert probe_of(tmp_path) is None
    bayesify.load(tmp_path, Network(torch.tanh))  # as the docstring says


def test_a_folder_of_the_first_format_gets_a_probe_when_it_is_saved_again(tmp_path):
    plain = make_network()
    plain.load_state_dict(load_file(FORMAT1 / "network.safetensors"))
    posterior = bayesify.load(FORMAT1 / "swag", plain)
    bayesify.predict(posterior, torch.randn(4, 3), num_draws=2)
    bayesify.save(posterior, tmp_path)
    assert probe_of(tmp_path)["mean"]


# -- inputs of every structure --------------------------------------------------------------------------------------


class Words(nn.Module):
    """Takes identifiers and a mask by name, a pair of tensors, and a setting."""

    def __init__(self, activation=torch.relu):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dropout, self.last = nn.Embedding(40, 6), nn.Dropout(0.3), nn.Linear(6, 3)
        self.activation = activation
        self.eval()

    def forward(self, input_ids, attention_mask=None, pair=(0.0, 0.0), scale=1.0):
        x = self.embedding(input_ids) + pair[0][..., None] + pair[1].to(pair[0].dtype)[..., None]
        mask = attention_mask[..., None]
        x = (x * mask).sum(1) / mask.sum(1)
        return {"logits": self.last(self.dropout(self.activation(x))) * scale}


def batch(rows=4, length=7):
    ids = torch.arange(rows * length).reshape(rows, length) % 37 + 3
    mask = torch.ones(rows, length, dtype=torch.long)
    pair = (torch.randn(rows, length), torch.arange(rows * length, dtype=torch.int32).reshape(rows, length) % 3 - 1)
    return {"input_ids": ids, "attention_mask": mask, "pair": pair, "scale": 2.0}


def encoding(values):
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding(values)


CALLS = {
    "names": lambda posterior, values: posterior(**values),
    "positions": lambda posterior, values: posterior(*values.values()),
    "mapping": lambda posterior, values: bayesify.predict(posterior, values, num_draws=2),
    "tuple": lambda posterior, values: bayesify.predict(posterior, tuple(values.values()), num_draws=2),
    "encoding": lambda posterior, values: bayesify.predict(posterior, encoding(values), num_draws=2),
}


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("method", [MAP(), MCDropout()], ids=lambda m: m.name)
def test_inputs_of_every_structure_are_made_up(tmp_path, method, way):
    posterior = bayesify.convert(Words(), method)
    CALLS[way](posterior, batch())
    bayesify.save(posterior, tmp_path)
    args, kwargs = make_inputs(probe_of(tmp_path)["form"], "spread", CPU)
    values = dict(zip(batch(), args, strict=False)) | kwargs
    assert values["input_ids"].shape == (2, 7)
    assert values["input_ids"].min() >= 3
    assert 3 < values["input_ids"].max() <= 30  # 4 x 7 words
    assert values["attention_mask"].unique().tolist() == [1]
    assert [t.dtype for t in values["pair"]] == [torch.float32, torch.int32]
    assert values["scale"] == 2.0
    bayesify.load(tmp_path, Words())
    with pytest.raises(ValueError, match="for the probe in the file"):
        bayesify.load(tmp_path, Words(torch.tanh))


@pytest.mark.parametrize("inputs", [(None,), ("text",), (object(),), ([0.5] * 20,), (torch.zeros(2, 2).to_sparse(),)])
def test_inputs_that_cannot_be_made_up_leave_no_probe(tmp_path, inputs):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(2, 2)

        def forward(self, anything):
            return self.last(torch.ones(2, 2))

    posterior = bayesify.convert(Constant(), MAP())
    posterior(*inputs)
    assert posterior.inputs_seen.form is None
    bayesify.save(posterior, tmp_path)
    assert probe_of(tmp_path) is None


def test_made_up_numbers_are_the_same_everywhere():
    seen = InputsSeen()
    seen.note((torch.zeros(9, 2), torch.tensor([[3, 8]] * 9)), {"flag": torch.ones(9, dtype=torch.bool), "rate": 0.5})
    args, kwargs = make_inputs(seen.form, "spread", CPU)
    assert [round(n, 4) for n in args[0].flatten().tolist()] == [
        1.3278,
        -0.2372,
        -1.6405,
        1.6312,
    ]  # as SplitMix64's first numbers give
    assert args[1].tolist() == [[4, 8], [6, 3]]
    assert (kwargs["flag"].tolist(), kwargs["rate"]) == ([False, True], 0.5)
    many = InputsSeen()
    many.note((torch.zeros(2, 5000),), {})
    numbers = make_inputs(many.form, "spread", CPU)[0][0]
    assert abs(numbers.mean()) < 0.05
    assert abs(numbers.std() - 1) < 0.02


# -- nothing is kept, nothing is changed ------------------------------------------------------------------------


def test_inputs_are_not_kept(tmp_path):
    posterior = bayesify.convert(Network(), MCDropout())
    inputs = torch.full((4, 5), 7.25)
    gone = weakref.ref(inputs)
    posterior(inputs)
    bayesify.predict(posterior, inputs, num_draws=2)
    bayesify.save(posterior, tmp_path)
    assert "7.25" not in (tmp_path / "config.json").read_text()
    posterior.runtime.predictors = {}  # speed's own notes
    del inputs
    gc.collect()
    assert gone() is None


def test_copies_and_pickles_know_what_was_seen():
    posterior = bayesify.convert(Network(), MCDropout())
    posterior(X)
    for other in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert other.inputs_seen.form == posterior.inputs_seen.form is not None
        other(X[:, None].expand(-1, 5, -1)[:, 0][:1])
        assert other.inputs_seen.form["tensors"][0]["shape"] == [1, 5]
    assert posterior.inputs_seen.form["tensors"][0]["shape"] == [2, 5]


class Counting(Network):
    """Has a buffer that counts its passes, and takes random numbers that change nothing."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        torch.rand(1)
        return super().forward(x)


def test_saving_and_loading_change_nothing(tmp_path):
    plain, posterior = Counting(), bayesify.convert(Counting(), MCDropout()).train()
    posterior.network.norm.eval()
    posterior(X)
    form, dims = copy.deepcopy(posterior.inputs_seen.form), list(posterior.runtime.traces)
    state, random = copy.deepcopy(posterior.state_dict()), torch.get_rng_state()
    modes = [module.training for module in posterior.modules()]
    bayesify.save(posterior, tmp_path)
    assert probe_of(tmp_path) is not None
    loaded = bayesify.load(tmp_path, plain)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in posterior.modules()] == modes
    assert (posterior.inputs_seen.form, list(posterior.runtime.traces)) == (form, dims)
    for other in (posterior, loaded):
        assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())
    assert not loaded.runtime.traces


def test_a_network_that_is_random_itself_has_no_probe(tmp_path):
    class Random(Network):
        def forward(self, x):
            return super().forward(x) + torch.randn(3)

    posterior = bayesify.convert(Random(), MAP())
    posterior(X)
    with torch.random.fork_rng():
        bayesify.save(posterior, tmp_path)
    assert probe_of(tmp_path) is None


def test_a_network_that_takes_other_inputs_is_refused_with_its_error(tmp_path):
    class Other(Network):
        def forward(self, x):
            raise KeyError("pixel_values")

    posterior = bayesify.convert(Network(), MAP())
    posterior(X)
    bayesify.save(posterior, tmp_path)
    with pytest.raises(ValueError, match=r"cannot be run on the probe of .* \(KeyError: 'pixel_values'\)"):
        bayesify.load(tmp_path, Other())
    bayesify.load(tmp_path, Other(), probe=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_probe_knows_rounding(tmp_path, dtype):
    posterior = bayesify.convert(Network(), MAP()).to(dtype)
    posterior(X.to(dtype))
    bayesify.save(posterior, tmp_path)
    bayesify.load(tmp_path, Network())
    with pytest.raises(ValueError, match="for the probe in the file"):
        bayesify.load(tmp_path, Network(torch.tanh))
