"""A bank: rows of weights, one by one and together, stored in any precision, taken from any posterior."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import (
    ABNN,
    IBNN,
    SGLD,
    SWAG,
    BayesAdapter,
    DeepEnsemble,
    Laplace,
    MCDropout,
    join_banks,
    sample_bank,
)
from bayesify.laws import STORAGE, BankLaw, Key, Posterior

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def mlp(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(6)] if batch_norm else []
    return nn.Sequential(nn.Linear(4, 6), *norm, nn.ReLU(), nn.Linear(6, 3)).double().eval()


def empty(network: nn.Module, size: int, storage: str | None = None, names: str = "") -> Posterior:
    network = copy.deepcopy(network)
    random = [name for name, _ in network.named_parameters() if name.startswith(names)]
    dtype = STORAGE[storage] if storage else None
    return Posterior(network, BankLaw(network, names=random, size=size, dtype=dtype)).eval()


def filled(network: nn.Module, size: int = 12, storage: str | None = None, names: str = "") -> Posterior:
    bank = empty(network, size, storage, names)
    for row in torch.randn(size, bank.law.samples.shape[1], dtype=torch.float64):
        bank.law.append(row)
    return bank


X = torch.randn(5, 4, dtype=torch.float64)


def plain(bank: Posterior, rows: list[int], x: torch.Tensor = X) -> torch.Tensor:
    """Put each row into a network by hand."""
    network, outputs = mlp(), []
    for row in rows:
        nn.utils.vector_to_parameters(bank.law.samples[row].double(), network.parameters())
        outputs.append(network(x).detach())
    return torch.stack(outputs)


def test_draws_are_rows():
    bank = filled(mlp())
    keys = bank.keys(12, seed=0)
    assert [key.index for key in keys] == list(range(12))
    assert_close(torch.cat([bank.evaluate(X, [key]) for key in keys]), plain(bank, range(12)), **EXACT)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 12])
def test_vectorised_passes_are_the_plain_ones(number: int):
    bank = filled(mlp())
    keys = bank.keys(number, seed=3)
    assert bank.law.together(None) == "stack"
    assert_close(bank.evaluate(X, keys), plain(bank, [key.index for key in keys]), **EXACT)


def test_what_is_kept_of_the_last_prediction_follows_the_samples():
    bank = filled(mlp())

    def compared() -> None:
        rows = [key.index for key in bank.keys(12, seed=0)]
        found = bayesify.predict(bank, X, num_draws=12, seed=0, keep_samples=True)
        assert_close(found.samples, plain(bank, rows).softmax(-1), **EXACT)

    compared()
    compared()  # by what was kept
    with torch.no_grad():
        bank.law.samples.mul_(2)
    compared()
    bank.law.samples = bank.law.samples.flip(0).contiguous()  # other memory
    compared()
    bank.law.samples.data = 3 * bank.law.samples
    compared()
    other = copy.deepcopy(bank)
    with torch.no_grad():
        other.law.samples.zero_()
    compared()
    assert float(bayesify.predict(other, X).epistemic.max()) < 1e-12
    half = bayesify.predict(bank.float(), X.float(), num_draws=12, seed=0)
    assert half.log_probs.dtype == torch.float32


def test_what_is_kept_of_the_last_prediction_is_in_no_copy():
    bank = filled(mlp())
    before = len(pickle.dumps(bank))
    bayesify.predict(bank, X)
    bayesify.predict(bank, X)
    assert len(pickle.dumps(bank)) < before + bank.law.samples.nbytes


def test_draws_of_a_growing_bank_are_named_anew():
    bank = empty(mlp(), 12)
    rows = torch.randn(12, bank.law.samples.shape[1], dtype=torch.float64)
    for number in range(1, 13):
        bank.law.append(rows[number - 1])
        assert [key.index for key in bank.keys(12, seed=0)] == list(range(number))
    with pytest.raises(ValueError, match="whole number"):
        bank.keys(12.0, seed=0)


def test_predictions_average_rows():
    bank = filled(mlp())
    expected = plain(bank, range(12)).softmax(-1)
    prediction = bayesify.predict(bank, X, seed=0, keep_samples=True)
    assert_close(prediction.probs, expected.mean(0), **EXACT)
    assert_close(prediction.samples, expected, **EXACT)


def test_chunks_of_weights(monkeypatch: pytest.MonkeyPatch):
    bank = filled(mlp())
    whole = bayesify.predict(bank, X, seed=0, keep_samples=True)
    monkeypatch.setattr("bayesify.prediction.layout.STACKED", 2 * bank.law.samples.shape[1])
    passes = []
    evaluate = bank.evaluate
    monkeypatch.setattr(
        bank, "evaluate", lambda x, keys, **more: (passes.append(len(keys)), evaluate(x, keys, **more))[1]
    )
    assert_close(bayesify.predict(bank, X, seed=0, keep_samples=True).samples, whole.samples, **EXACT)
    assert passes == [2] * 6


def test_networks_with_convolutions_share_passes_too():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
    bank = filled(network)
    assert bank.law.together(None) == "stack"
    assert filled(network, 2, names="2").law.together(None) == "stack"
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    keys = bank.keys(5, seed=1)
    assert_close(bank.evaluate(x, keys), torch.cat([bank.evaluate(x, [key]) for key in keys]), **EXACT)


def test_fewer_draws_are_at_equal_distances():
    bank = filled(mlp())
    seen = set()
    for seed in range(20):
        index = torch.tensor([key.index for key in bank.keys(4, seed)])
        assert (index.diff() == 3).all()
        seen.add(int(index[0]))
    assert seen == {0, 1, 2}


def test_the_mean_is_the_average_of_the_rows():
    bank = filled(mlp())
    network = mlp()
    nn.utils.vector_to_parameters(bank.law.samples.mean(0), network.parameters())
    with bank.mean():
        assert_close(bank(X), network(X), **EXACT)
    with torch.no_grad():
        bank.law.samples.mul_(2)  # the average is remembered, and must not be after this
    nn.utils.vector_to_parameters(bank.law.samples.mean(0), network.parameters())
    with bank.mean():
        assert_close(bank(X), network(X), **EXACT)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16"])
def test_half_precision_is_for_storage_only(storage: str, tmp_path: Path):
    bank = filled(mlp(), storage=storage)
    assert str(bank.law.samples.dtype) == f"torch.{storage}"
    keys = bank.keys(12, seed=0)
    assert bank.evaluate(X, keys).dtype == torch.float64
    assert_close(bank.evaluate(X, keys), plain(bank, range(12)), **EXACT)
    bayesify.save(bank, tmp_path / "bank")
    loaded = bayesify.load(tmp_path / "bank", mlp())
    assert loaded.law.samples.dtype == bank.law.samples.dtype
    assert torch.equal(loaded.law.samples, bank.law.samples)


def test_weights_beyond_float16_are_said():
    bank = empty(mlp(), 1, "float16")
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        bank.law.append(torch.full((bank.law.samples.shape[1],), 1e6))


def test_a_full_bank_says_so():
    with pytest.raises(ValueError, match="room for 12"):
        filled(mlp()).law.append(torch.zeros(51))


def test_a_loaded_bank_can_stay_on_disk(tmp_path: Path):
    network = mlp()
    bank = filled(network)
    bayesify.save(bank, tmp_path / "bank")
    mapped = bayesify.load(tmp_path / "bank", network, memory_map=True)
    file = next((tmp_path / "bank").glob("*.safetensors"))
    content = file.read_bytes()
    assert torch.equal(mapped.law.samples, bank.law.samples)
    assert_close(bayesify.predict(mapped, X, seed=0).probs, bayesify.predict(bank, X, seed=0).probs, rtol=0, atol=0)
    mapped.law.samples.zero_()  # a private copy of the page
    assert file.read_bytes() == content


@pytest.mark.parametrize("storage", [None, "float32", "bfloat16", "float16"])
def test_samples_can_be_written_to_a_file_as_they_come(storage: str | None, tmp_path: Path):
    network = mlp()
    posterior = bayesify.convert(
        network, SGLD(samples_per_chain=6, epochs=4, lr=0.1, weight_decay=0.0, storage=storage)
    )
    posterior.law.map_samples(tmp_path / "bank" / "samples.safetensors")
    bayesify.fit(posterior, data(), progress=False, accuracy_tolerance=1)
    plain = bayesify.convert(network, posterior.method)
    bayesify.fit(plain, data(), progress=False, accuracy_tolerance=1)
    found = load_file(tmp_path / "bank" / "samples.safetensors")["samples"]
    assert found.dtype == plain.law.samples.dtype
    assert len(posterior.law) > 2
    assert torch.equal(found, plain.law.samples)
    assert torch.equal(bayesify.predict(posterior, X, seed=0).probs, bayesify.predict(plain, X, seed=0).probs)
    with pytest.raises(FileExistsError):
        posterior.law.map_samples(tmp_path / "bank" / "samples.safetensors")


def test_mapping_keeps_what_is_there(tmp_path: Path):
    bank = filled(mlp())
    before = bank.law.samples.clone()
    bank.law.map_samples(tmp_path / "samples.safetensors")
    assert torch.equal(bank.law.samples, before)
    assert torch.equal(load_file(tmp_path / "samples.safetensors")["samples"], before)


# -- from other posteriors ----------------------------------------------------------------------------------------


def data() -> DataLoader:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 4, dtype=torch.float64), torch.arange(16) % 3), batch_size=8)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    "method", [SWAG(rank=2, epochs=3, num_bn_draws=5, lr=0.1), DeepEnsemble(members=5, epochs=1)], ids=lambda m: m.name
)
def test_a_bank_of_another_posterior_is_its_draws(method: bayesify.Method, batch_norm: bool, tmp_path: Path):
    network = mlp(batch_norm)
    posterior = bayesify.convert(network, method)
    bayesify.fit(posterior, data(), progress=False, accuracy_tolerance=1)
    posterior.eval()
    bank = sample_bank(posterior, 5, seed=2)
    keys = posterior.keys(5, seed=2)
    expected = torch.cat([posterior.evaluate(X, [key]) for key in keys])
    assert_close(bank.evaluate(X, bank.keys(5, seed=0)), expected, **EXACT)
    assert_close(
        bayesify.predict(bank, X, seed=0).probs, bayesify.predict(posterior, X, num_draws=5, seed=2).probs, **EXACT
    )
    keys = bank.keys(5, seed=0)
    bayesify.save(bank, tmp_path / "bank")
    loaded = bayesify.load(tmp_path / "bank", network)
    assert loaded.method == bank.method
    assert bank.method is None
    assert (len(bank.law), bank.law.source) == (5, method.name)
    assert torch.equal(loaded.eval().evaluate(X, keys), bank.evaluate(X, keys))


@pytest.mark.parametrize(
    "method",
    [
        BayesAdapter(start_std=(0.1, 0.2)),
        IBNN(components=2, start_std=(0.3, 0.3)),
        Laplace(structure="diagonal"),
        Laplace(structure="kronecker"),
        ABNN(members=2, alpha=0.3),
        ABNN(members=2, alpha=0.3, statistics="updated", train="all"),
    ],
    ids=str,
)
def test_any_posterior_that_draws_weights_gives_a_bank(method: bayesify.Method, tmp_path: Path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))
    network = network.double().eval()
    posterior = bayesify.convert(network, method)
    bayesify.fit(posterior, data(), epochs=1, progress=False, accuracy_tolerance=1)
    posterior.eval()
    bank = sample_bank(posterior, 4, seed=2)
    keys = posterior.keys(4, seed=2)
    expected = torch.cat([posterior.evaluate(X, [key]) for key in keys])
    assert not torch.isclose(expected[0], expected[1]).all()
    assert_close(bank.evaluate(X, bank.keys(4, seed=0)), expected, **EXACT)
    bayesify.save(bank, tmp_path / "bank")
    loaded = bayesify.load(tmp_path / "bank", network).eval()
    assert torch.equal(loaded.evaluate(X, bank.keys(4, seed=0)), bank.evaluate(X, bank.keys(4, seed=0)))


def test_noise_for_each_element_is_no_weight():
    posterior = bayesify.convert(mlp(batch_norm=True), ABNN(noise="element", alpha=0.3))
    with pytest.raises(ValueError, match="not in the network's weights"):
        sample_bank(posterior, 3)


def test_banks_are_joined_chain_by_chain(tmp_path: Path):
    network = mlp(batch_norm=True)
    banks = []
    for seed in range(3):
        posterior = bayesify.convert(network, SGLD(samples_per_chain=4 + seed, epochs=5, lr=0.1, weight_decay=0.0))
        bayesify.fit(posterior, data(), seed=seed, progress=False, accuracy_tolerance=1)
        banks.append(posterior.eval())
    joined = join_banks(banks)
    assert joined.law.by_chain().shape == (3, 4, banks[0].law.samples.shape[1])
    assert torch.equal(joined.law.by_chain()[0], banks[0].law.samples)
    last = len(banks[2].law)
    rows = [(place + 1) * last // 4 - 1 for place in range(4)]
    assert torch.equal(joined.law.by_chain()[2], banks[2].law.samples[rows])
    own, old = ([Key(0, row) for row in some] for some in (range(8, 12), rows))
    assert_close(joined.evaluate(X, own), banks[2].evaluate(X, old), **EXACT)
    with pytest.raises(ValueError, match="no mean network"), joined.mean():
        pass
    bayesify.save(joined, tmp_path / "bank")
    loaded = bayesify.load(tmp_path / "bank", network)
    assert torch.equal(loaded.law.by_chain(), joined.law.by_chain())
    with pytest.raises(ValueError, match="different parameters"):
        join_banks([banks[0], filled(mlp())])
    with pytest.raises(ValueError, match="no samples yet"):
        join_banks([bayesify.convert(network, SGLD())])


def test_a_bank_is_not_trained():
    with pytest.raises(ValueError, match="made from another"):
        bayesify.fit(filled(mlp()), data(), epochs=1, progress=False)


def test_a_bank_of_a_bank_is_thinned():
    bank = filled(mlp())
    thinned = sample_bank(bank, 3, seed=0)
    rows = [key.index for key in bank.keys(3, seed=0)]
    assert torch.equal(thinned.law.samples, bank.law.samples[rows])
    assert len(sample_bank(bank, 100).law) == 12


def test_statistics_of_the_mean_are_estimated_when_asked():
    network = mlp(batch_norm=True)
    posterior = bayesify.convert(network, SWAG(rank=2, epochs=2, num_bn_draws=3))
    bayesify.fit(posterior, data(), progress=False, accuracy_tolerance=1)
    bank = sample_bank(posterior, 3).eval()
    with pytest.raises(ValueError, match="refresh_statistics"), bank.mean():
        pass
    bank.refresh_statistics(data())
    with bank.mean():
        assert bank(X).isfinite().all()


def test_noise_in_layers_is_no_weight():
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="not in the network's weights"):
        sample_bank(bayesify.convert(network, MCDropout()), 3)


def test_a_bank_is_no_method_to_choose():
    assert "bank" not in bayesify.list_methods()
    with pytest.raises(ValueError, match="There is no method 'bank'"):
        bayesify.convert(mlp(), "bank")
