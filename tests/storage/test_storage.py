"""Saved posteriors: bit for bit, small, never half-written, never executed."""

import copy
import json
import os
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import MAP, SWAG, Custom, DeepEnsemble, Gaussian, MCDropout
from bayesify._core.files import FileError, digest, fingerprint, read_tensors, seal, write_tensors
from bayesify.storage import FORMAT, read_notes
from tests.marks import slow_but

ALL_METHODS = {name: cls.example() for name, cls in bayesify.list_methods().items()}
X = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


def network(width=8):
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16 * width, 3),
    ).eval()


def fitted(plain, method, **settings):
    posterior = bayesify.convert(plain, method, **settings)
    targets = Y if posterior.likelihood.kind == "categorical" else Y.float()[:, None].expand(-1, 3).clone()
    loader = DataLoader(TensorDataset(X, targets), batch_size=12)
    bayesify.fit(posterior, loader, epochs=1, progress=False, accuracy_tolerance=1)
    return posterior.eval()


def kept(state):
    """Return what `save` writes of a state: all but what only learning needs, which a fit after `load` makes anew."""
    return {name: value for name, value in state.items() if not name.startswith("learning.")}


def same_posterior(left, right, **settings):
    ours, theirs = kept(left.state_dict()), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert fingerprint(tensor) == fingerprint(theirs[name]), name
    assert left.method == right.method
    assert left.conversion == right.conversion
    assert left.likelihood.to_dict() == right.likelihood.to_dict()
    trained = kept({name: p.requires_grad for name, p in left.named_parameters()})
    assert trained == {name: p.requires_grad for name, p in right.named_parameters()}
    a, b = (bayesify.predict(p, X, seed=4, **settings) for p in (left, right))
    for (name, ours), (_, theirs) in zip(a._fields(), b._fields(), strict=True):
        assert torch.equal(ours, theirs), name


def tensor_file(folder):
    return folder / json.loads((folder / "config.json").read_text())["tensors"]


def change_config(folder, **changes):
    """Change a configuration as if it had been saved so: with the digest that it then has."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    if "digest" not in changes:
        config["digest"] = digest({key: value for key, value in config.items() if key != "digest"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def saved(tmp_path):
    plain = network()
    bayesify.save(bayesify.convert(plain, MCDropout()), tmp_path / "posterior")
    return tmp_path / "posterior", plain


# -- what comes back ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")
@pytest.mark.parametrize("learned", slow_but([False], [False, True]), ids=["converted", "fitted"])
@pytest.mark.parametrize("method", ALL_METHODS.values(), ids=ALL_METHODS)
@pytest.mark.slow
def test_every_method_comes_back_bit_for_bit(tmp_path, method, learned):
    plain = network()
    state = copy.deepcopy(plain.state_dict())
    posterior = fitted(plain, method) if learned else bayesify.convert(plain, method)
    bayesify.save(posterior, tmp_path)
    random_state = torch.get_rng_state()
    loaded = bayesify.load(tmp_path, plain)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(t, state[name]) for name, t in plain.state_dict().items())
    again = tmp_path / "again"
    bayesify.save(loaded, again)
    assert (again / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    assert tensor_file(again).read_bytes() == tensor_file(tmp_path).read_bytes()
    same_posterior(posterior, loaded)


@pytest.mark.parametrize(
    "likelihood", [Gaussian(), Gaussian(0.3), Gaussian("per-output", num_outputs=3), "regression"], ids=str
)
def test_likelihoods_come_back_with_what_they_learned(tmp_path, likelihood):
    plain = network()
    posterior = fitted(plain, MCDropout(lr=1e-3), likelihood=likelihood)
    bayesify.save(posterior, tmp_path)
    same_posterior(posterior, bayesify.load(tmp_path, plain))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_posterior_in_another_precision_keeps_it(tmp_path, dtype):
    plain = network()
    posterior = bayesify.convert(plain, MCDropout()).to(dtype)
    bayesify.save(posterior, tmp_path)
    loaded = bayesify.load(tmp_path, plain)
    state = loaded.state_dict()
    for name, tensor in posterior.state_dict().items():
        assert fingerprint(tensor) == fingerprint(state[name]), name
    assert next(loaded.parameters()).dtype == dtype


def test_tied_weights_stay_tied_in_another_precision(tmp_path):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
    plain[2].weight = plain[0].weight
    bayesify.save(bayesify.convert(plain, MCDropout()).double(), tmp_path)
    loaded = bayesify.load(tmp_path, plain).network
    assert loaded[0].weight is loaded[2].weight


def test_settings_come_back(tmp_path):
    plain = network()
    posterior = bayesify.convert(plain, MCDropout())
    posterior.output_key, posterior.default_draws = "logits", 7
    bayesify.save(posterior, tmp_path)
    loaded = bayesify.load(tmp_path, plain)
    assert (loaded.output_key, loaded.default_draws) == ("logits", 7)


@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")
@pytest.mark.parametrize("method", [SWAG(), DeepEnsemble(members=2)], ids=lambda m: m.name)
def test_what_was_converted_is_converted_again(tmp_path, method):
    plain = network()
    plain[5].bias.requires_grad_(False)
    posterior = bayesify.convert(plain, method, exclude="0")
    bayesify.save(posterior, tmp_path)
    plain.requires_grad_(False)  # for inference, as many do
    loaded = bayesify.load(tmp_path, plain)
    same_posterior(posterior, loaded)
    assert loaded.conversion.converted == ("1", "5")
    assert not any(p.requires_grad for p in plain.parameters())


def test_extra_state_of_modules_is_the_networks_own(tmp_path):
    class Counting(nn.Linear):
        calls = 3

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    plain = nn.Sequential(Counting(4, 4), nn.Dropout(0.5))
    bayesify.save(bayesify.convert(plain, MCDropout()), tmp_path)
    plain[0].calls = 5
    assert bayesify.load(tmp_path, plain).network[0].calls == 5


# -- what is stored -----------------------------------------------------------------------------------------------


def test_the_networks_own_tensors_are_not_stored(tmp_path):
    plain = network(64)
    for method in (MAP(), MCDropout()):
        bayesify.save(bayesify.convert(plain, method), tmp_path / method.name)
        tensors, _ = read_tensors(tensor_file(tmp_path / method.name))
        assert tensors.keys() == {"likelihood.temperature"}
        assert tensor_file(tmp_path / method.name).stat().st_size < 300  # a header with digests, and one number
    members = DeepEnsemble(members=2, start="perturbed")
    bayesify.save(bayesify.convert(plain, members, include="5"), tmp_path / "members")
    weights = 4 * (plain[5].weight.numel() + plain[5].bias.numel())
    assert 2 * weights < tensor_file(tmp_path / "members").stat().st_size < 2 * weights + 2000


def test_the_version_before_is_kept_and_older_ones_are_removed(tmp_path):
    plain, names = network(), []
    for p in (0.1, 0.2, 0.3):
        posterior = fitted(plain, MCDropout(p=p))
        bayesify.save(posterior, tmp_path)
        names.append(tensor_file(tmp_path).name)
        assert sorted(os.listdir(tmp_path)) == sorted(["config.json", *names[-2:]])
        same_posterior(posterior, bayesify.load(tmp_path, plain))
    assert len(set(names)) == 3
    bayesify.save(posterior, tmp_path)  # once more, under the same name
    assert sorted(os.listdir(tmp_path)) == ["config.json", names[-1]]
    same_posterior(posterior, bayesify.load(tmp_path, plain))


@pytest.mark.parametrize("survives", [0, 1])
def test_a_save_that_is_interrupted_leaves_the_old_posterior(tmp_path, monkeypatch, survives):
    plain = network()
    old = bayesify.convert(plain, MCDropout(p=0.3))
    bayesify.save(old, tmp_path)
    replace, done = os.replace, []

    def interrupted(source, target):
        if len(done) == survives:  # the tensors are written first, then the configuration
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bayesify.save(fitted(plain, MCDropout(p=0.4)), tmp_path)
    monkeypatch.undo()
    same_posterior(old, bayesify.load(tmp_path, plain))


def test_one_state_split_in_two_ways_has_two_names(tmp_path):
    plain = network()
    posterior = fitted(plain, MCDropout())
    bayesify.save(posterior, tmp_path / "apart")
    posterior.origin = {}  # as if made from another network: everything is stored
    bayesify.save(posterior, tmp_path / "whole")
    assert tensor_file(tmp_path / "apart").name != tensor_file(tmp_path / "whole").name


# -- what is refused ----------------------------------------------------------------------------------------------


def test_a_missing_folder_says_so(tmp_path):
    with pytest.raises(FileError, match=r"There is no file .*nowhere.config\.json. A saved posterior is a folder"):
        bayesify.load(tmp_path / "nowhere", network())


def test_a_file_in_the_way_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is a file, and a posterior is saved as a folder"):
        bayesify.save(bayesify.convert(network(), MAP()), tmp_path / "file")


def test_a_custom_likelihood_is_refused_before_anything_is_written(tmp_path):
    posterior = bayesify.convert(network(), MAP(), likelihood=Custom(lambda output, target: output))
    with pytest.raises(ValueError, match="a function and cannot be saved"):
        bayesify.save(posterior, tmp_path / "posterior")
    assert not (tmp_path / "posterior").exists()


def test_other_weights_say_so(saved):
    folder, plain = saved
    with torch.no_grad():
        plain[5].bias[1] += 1e-6
    with pytest.raises(ValueError, match=r"not the one that .* was made from: for '5.bias' it has another.*pretrained"):
        bayesify.load(folder, plain)


def test_another_width_says_so(tmp_path, saved):
    with pytest.raises(ValueError, match=r"not the one that .* another shape, type or values"):
        bayesify.load(saved[0], network(4))
    bayesify.save(fitted(network(), DeepEnsemble(members=2)), tmp_path / "members")
    sentence = r"'members\.0\.0\.bias' with the shape \(8,\), .* needs \(4,\): it is another architecture"
    with pytest.raises(ValueError, match=sentence):
        bayesify.load(tmp_path / "members", network(4))


def test_another_architecture_says_so(tmp_path, saved):
    folder, plain = saved
    with pytest.raises(ValueError, match=r"another architecture: it converted \['3'\], which the network given"):
        bayesify.load(folder, nn.Linear(2, 3))
    longer = nn.Sequential(*plain, nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"lacks \['network\.6\.bias', 'network\.6\.weight'\]: it was saved"):
        bayesify.load(folder, longer)
    bayesify.save(bayesify.convert(longer, MCDropout()), tmp_path / "longer")
    with pytest.raises(ValueError, match=r"has unknown \['network\.6\.bias', 'network\.6\.weight'\]: it was saved"):
        bayesify.load(tmp_path / "longer", plain)


@pytest.mark.parametrize("keep", [0, 5, 50, -1])
def test_truncated_tensors_say_so(saved, keep):
    folder, plain = saved
    file = tensor_file(folder)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(FileError, match="is damaged or not a safetensors file"):
        bayesify.load(folder, plain)


def test_missing_tensors_say_so(saved):
    folder, plain = saved
    file = tensor_file(folder)
    write_tensors(folder / f"posterior-{seal({}, {})}.safetensors", {})
    change_config(folder, tensors=f"posterior-{seal({}, {})}.safetensors")
    with pytest.raises(ValueError, match=r"lacks \['likelihood\.temperature'\]"):
        bayesify.load(folder, plain)
    change_config(folder, tensors=file.name)
    file.unlink()
    with pytest.raises(FileError, match=f"There is no file .*{file.name}"):
        bayesify.load(folder, plain)


def test_damaged_json_says_so(saved):
    folder, plain = saved
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])
    with pytest.raises(FileError, match=r"config\.json is not valid JSON"):
        bayesify.load(folder, plain)


@pytest.mark.parametrize("version", [FORMAT + 1, 0, "1", None, ...])
def test_other_formats_say_so(saved, version):
    folder, plain = saved
    change_config(folder, format=version)
    with pytest.raises(ValueError, match=f"this bayesify reads formats 1 to {FORMAT}. Upgrade bayesify"):
        bayesify.load(folder, plain)


KEYS = "conversion default_samples fingerprints frozen likelihood method network output_key tensors"


@pytest.mark.parametrize("key", KEYS.split())
def test_missing_and_mistyped_keys_say_so(saved, key):
    folder, plain = saved
    change_config(folder, **{key: 1.5})
    with pytest.raises(FileError, match=rf"config\.json has values of the wrong type for \['{key}'\]"):
        bayesify.load(folder, plain)
    change_config(folder, **{key: ...})
    with pytest.raises(FileError, match=rf"config\.json lacks \['{key}'\]. Save the posterior again"):
        bayesify.load(folder, plain)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": {"name": "magic", "version": 1}}, "names a method 'magic', which is unknown here"),
        ({"method": {"name": "mc-dropout", "version": 99}}, "has version 99 of 'mc-dropout'.*Upgrade bayesify"),
        ({"method": {"name": "mc-dropout", "version": 1, "speed": 2}}, r"unknown settings \['speed'\]"),
        ({"likelihood": {"kind": "cauchy"}}, "names a likelihood 'cauchy', which is unknown here"),
        ({"likelihood": {"kind": "categorical", "speed": 2}}, "'categorical' has settings that do not fit"),
        ({"conversion": [{"name": "3"}]}, "has a damaged conversion"),
    ],
)
def test_unknown_methods_and_likelihoods_say_so(saved, changes, sentence):
    folder, plain = saved
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=sentence):
        bayesify.load(folder, plain)


# -- nothing is executed ------------------------------------------------------------------------------------------


def forbidden(*_, **__):
    raise AssertionError("something was unpickled")


def test_loading_never_unpickles(saved, monkeypatch):
    folder, plain = saved
    assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}
    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, forbidden)
    bayesify.load(folder, plain)


class Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_pickle_in_place_of_the_tensors_is_not_executed(saved, tmp_path):
    folder, plain = saved
    tensor_file(folder).write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    with pytest.raises(FileError, match="not a safetensors file"):
        bayesify.load(folder, plain)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", slow_but(["mc-dropout", "laplace"], sorted(ALL_METHODS)))
def test_a_whole_posterior_needs_the_architecture_only(name, tmp_path):
    posterior = fitted(network(), ALL_METHODS[name])
    bayesify.save(posterior, tmp_path, whole=True, notes={"classes": ["a", "b"], "at": [0.5, None]})
    other = network()
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.normal_()
    same_posterior(posterior, bayesify.load(tmp_path, other))
    assert read_notes(tmp_path) == {"classes": ["a", "b"], "at": [0.5, None]}


def test_notes_are_none_unless_given_and_under_the_digest(tmp_path):
    posterior = bayesify.convert(network(), MAP())
    bayesify.save(posterior, tmp_path)
    assert read_notes(tmp_path) == {}
    assert "notes" not in json.loads((tmp_path / "config.json").read_text())
    bayesify.save(posterior, tmp_path, notes={"a": 1})
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"a": 1', '"a": 2'))
    with pytest.raises(FileError, match="changed or damaged"):
        read_notes(tmp_path)
