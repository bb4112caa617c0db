"""The folder of a saved posterior: digests, versions beside each other, other people's files, sizes, paths."""

import contextlib
import json
import os
import shutil
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bayesify
from bayesify import APD, SGLD, SWAG, Bernoulli, DeepEnsemble, Gaussian, MCDropout
from bayesify._core.files import FileError, digest, read_tensors, seal, write_tensors
from tests.fixtures.make_format1 import FOLDER as FORMAT1
from tests.fixtures.make_format1 import make_network
from tests.storage.test_storage import change_config, fitted, network, tensor_file

METHODS = {name: cls.example() for name, cls in bayesify.list_methods().items()}
METHODS |= {
    "sgld": SGLD(samples_per_chain=4, chains=2),
    "apd": APD(samples_per_chain=4, hidden=(4, 4), latent=3, num_bn_draws=3),
}


def small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3)).eval()


@pytest.fixture
def saved(tmp_path):
    bayesify.save(bayesify.convert(network(), MCDropout()), tmp_path / "posterior")
    return tmp_path / "posterior"


# -- digests --------------------------------------------------------------------------------------------------------


def test_an_edited_configuration_is_refused(saved):
    text = (saved / "config.json").read_text()
    (saved / "config.json").write_text(text.replace('"default_samples": 20', '"default_samples": 21'))
    with pytest.raises(FileError, match=r"config\.json is not what was saved: it was changed or damaged"):
        bayesify.load(saved, network())
    (saved / "config.json").write_text(json.dumps(json.loads(text), indent=None, sort_keys=True))  # not its values
    assert bayesify.load(saved, network()).default_draws == 20


def test_a_new_configuration_cannot_pass_for_an_old_one(saved):
    change_config(saved, format=1)
    with pytest.raises(FileError, match=r"has \['digest', 'previous'.* which format 1 does not know"):
        bayesify.load(saved, network())


def test_tensors_of_another_posterior_are_refused(tmp_path):
    for name in ("one", "other"):
        posterior = bayesify.convert(network(), MCDropout())
        posterior.likelihood.temperature.fill_(1.5 if name == "one" else 2.5)
        bayesify.save(posterior, tmp_path / name)
    shutil.copy(tensor_file(tmp_path / "other"), tensor_file(tmp_path / "one"))
    with pytest.raises(FileError, match="or it is another file"):
        bayesify.load(tmp_path / "one", network())


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_mapped_tensors_are_not_read_and_the_others_are_checked(tmp_path):
    plain = small()
    bank = bayesify.sample_bank(bayesify.ensemble([small() for _ in range(3)]), 3)
    bayesify.save(bank, tmp_path)
    tensors, _ = read_tensors(tensor_file(tmp_path))
    assert list(tensors)[-1] != "samples"
    flip_last_byte(tensor_file(tmp_path))
    with pytest.raises(FileError, match=r"values of .* were changed or damaged"):
        bayesify.load(tmp_path, plain)
    bayesify.load(tmp_path, plain, memory_map=True)  # all of a bank's are buffers
    bayesify.save(fitted(network(), MCDropout()), tmp_path / "dropout")
    flip_last_byte(tensor_file(tmp_path / "dropout"))
    with pytest.raises(FileError, match=r"values of .* were changed or damaged"):
        bayesify.load(tmp_path / "dropout", network(), memory_map=True)


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf")])
@pytest.mark.parametrize(("likelihood", "name"), [(Bernoulli(), "temperature"), (Gaussian(), "variance_scale")])
def test_a_scale_that_cannot_be_is_refused(tmp_path, likelihood, name, value):
    posterior = bayesify.convert(network(), MCDropout(), likelihood=likelihood)
    getattr(posterior.likelihood, name).fill_(value)
    bayesify.save(posterior, tmp_path)
    with pytest.raises(FileError, match=f"likelihood whose {name} is .* which cannot be"):
        bayesify.load(tmp_path, network())


# -- what is not ours -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ['{"model_type": "bert"}', "", "[]", '{"format": 2}', "{"])
def test_a_foreign_configuration_is_neither_overwritten_nor_joined(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(FileError, match=r"config\.json is damaged, or not a posterior's .* nothing was saved"):
        bayesify.save(bayesify.convert(network(), MCDropout()), tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]
    assert (tmp_path / "config.json").read_text() == content


def test_foreign_files_are_left_alone(tmp_path):
    foreign = [
        "posterior-of-my-thesis.safetensors", "posterior-0123456789abcdef.safetensors", "model.safetensors",
        "posterior-0123456789ab.safetensors", ".config.json.swp", "config.json.0123abcd", "posterior-x.safetensors",
    ]  # fmt: skip
    for name in foreign:
        (tmp_path / name).write_bytes(name.encode())
    write_tensors(tmp_path / "posterior-00000000000000aa.safetensors", {"a": torch.zeros(1)})  # named by somebody else
    foreign.append("posterior-00000000000000aa.safetensors")
    for p in (0.1, 0.2, 0.3):
        bayesify.save(bayesify.convert(network(), MCDropout(p=p)), tmp_path)
    assert set(foreign) <= set(os.listdir(tmp_path))
    assert all((tmp_path / name).read_bytes() == name.encode() for name in foreign[:-1])


def test_a_configuration_that_names_other_files_does_not_delete_them(saved):
    (saved.parent / "posterior-0123456789ab.safetensors").write_bytes(b"")
    (saved / "thesis.safetensors").write_bytes(b"")
    for name in ("../posterior-0123456789ab.safetensors", "thesis.safetensors"):
        change_config(saved, previous=name, tensors=name)
        bayesify.save(bayesify.convert(network(), MCDropout()), saved)
    assert (saved.parent / "posterior-0123456789ab.safetensors").exists()
    assert (saved / "thesis.safetensors").exists()


def leave_orphans(folder):
    tensors = {"a": torch.zeros(2)}
    mark = {"a": "0" * 16}
    orphans = [f"posterior-{seal(tensors, mark)}.safetensors", ".config.json.0123abcd"]
    orphans += [".posterior-0123456789ab.safetensors.0123abcd", ".posterior-0123456789abcdef.safetensors.89abcdef"]
    write_tensors(folder / orphans[0], tensors, marks=mark)
    for name in orphans[1:]:
        (folder / name).write_bytes(b"half")
    return orphans


def test_what_killed_savers_left_is_removed(saved):
    orphans = leave_orphans(saved)
    bayesify.save(bayesify.convert(network(), MCDropout()), saved)
    assert not set(orphans) & set(os.listdir(saved))


def test_without_locks_only_old_orphans_are_removed(saved, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def fail(*_):
        raise OSError("not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    orphans = leave_orphans(saved)
    bayesify.save(bayesify.convert(network(), MCDropout()), saved)
    assert set(orphans) <= set(os.listdir(saved))  # another saver may be about to name them
    for name in orphans:
        os.utime(saved / name, (time.time() - 7200,) * 2)
    bayesify.save(bayesify.convert(network(), MCDropout()), saved)
    assert not set(orphans) & set(os.listdir(saved))
    bayesify.load(saved, network())


def test_a_folder_of_the_first_format_is_saved_over(tmp_path):
    shutil.copytree(FORMAT1 / "mc-dropout", tmp_path / "posterior")
    plain = make_network()
    plain.load_state_dict(read_tensors(FORMAT1 / "network.safetensors")[0])
    posterior = bayesify.load(tmp_path / "posterior", plain)
    first = tensor_file(tmp_path / "posterior").name
    for _ in range(2):
        bayesify.save(posterior, tmp_path / "posterior")
        bayesify.load(tmp_path / "posterior", plain)
        assert (tmp_path / "posterior" / first).exists() == (_ == 0)


# -- paths ----------------------------------------------------------------------------------------------------------


def test_tensors_outside_of_the_folder_are_not_read(saved):
    outside = saved.parent / tensor_file(saved).name
    shutil.copy(tensor_file(saved), outside)
    for name in (str(outside), f"../{outside.name}", "..", "", ".", "a\0b", f"posterior/../../{outside.name}", "a\\b"):
        change_config(saved, tensors=name)
        with pytest.raises(FileError, match="which is not a file in its folder"):
            bayesify.load(saved, network())
    (saved / "link.safetensors").symlink_to(outside)
    change_config(saved, tensors="link.safetensors")
    with pytest.raises(FileError, match="which is not a file in its folder"):
        bayesify.load(saved, network())


def test_a_folder_of_links_into_one_other_folder_loads(saved):
    links = saved.parent / "links"  # as a cache of downloads has it
    links.mkdir()
    for file in saved.iterdir():
        (links / file.name).symlink_to(file)
    bayesify.load(links, network())


# -- sizes ----------------------------------------------------------------------------------------------------------

COUNTS = [
    (name, field)
    for name, method in METHODS.items()
    for field, value in method.to_dict().items()
    if field not in ("version", "name") and isinstance(value, int | tuple) and not isinstance(value, bool)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = tmp_path_factory.mktemp("folders")
    for name, method in METHODS.items():
        bayesify.save(bayesify.convert(small(), method), found / name)
    return found


class Made(TorchDispatchMode):
    """How many numbers the largest tensor has that is made, and how many tensors are made."""

    numbers = tensors = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers, self.tensors = max(self.numbers, tensor.numel()), self.tensors + 1
        return result


@pytest.mark.parametrize(("name", "field"), COUNTS)
@pytest.mark.parametrize("factor", [10**9, 10**6, -1, 10**30])
def test_a_configuration_cannot_ask_for_more_than_its_file_holds(folders, tmp_path, name, field, factor):
    shutil.copytree(folders / name, tmp_path / "posterior")
    method = json.loads((folders / name / "config.json").read_text())["method"]
    value = method[field]
    changed = [factor for _ in value] if isinstance(value, list) else factor
    change_config(tmp_path / "posterior", method={**method, field: changed})
    with Made() as made, contextlib.suppress(ValueError):  # many settings matter to `fit` alone
        bayesify.load(tmp_path / "posterior", small())
    assert made.numbers < 10**5  # not 524 GB
    assert made.tensors < 10**4


def test_a_finished_generator_makes_no_room_for_what_it_was_learned_with(tmp_path):
    posterior = bayesify.convert(small(), METHODS["apd"])
    posterior.learning = None  # as a fit leaves it
    bayesify.save(posterior, tmp_path)
    method = json.loads((tmp_path / "config.json").read_text())["method"]
    change_config(tmp_path, method={**method, "samples_per_chain": 10**9, "chains": 10**6})
    assert bayesify.load(tmp_path, small()).method.samples_per_chain == 10**9  # a setting of a run that is over


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        (DeepEnsemble(members=2), {"members": 10**6}, "asks for members=1000000, and there are 2"),
        (SWAG(rank=2), {"rank": 10**9}, "asks for rank=1000000000, and there are 2"),
        (
            SGLD(samples_per_chain=4),
            {"samples_per_chain": 10**9},
            "asks for chains x samples_per_chain=1000000000, and there are 4",
        ),
        (SGLD(samples_per_chain=4), {"chains": 10**6}, "asks for chains=1000000, and there are 1"),
    ],
)
def test_the_sentence_says_what_is_asked_and_what_there_is(tmp_path, method, changes, sentence):
    bayesify.save(bayesify.convert(small(), method), tmp_path)
    change_config(tmp_path, method={**method.to_dict(), **changes})
    with pytest.raises(FileError, match=sentence):
        bayesify.load(tmp_path, small())


def test_noise_for_many_outputs_is_bounded_too(tmp_path):
    bayesify.save(bayesify.convert(small(), MCDropout(), likelihood=Gaussian("per-output", num_outputs=3)), tmp_path)
    change_config(tmp_path, likelihood={"kind": "gaussian", "noise_std": "per-output", "num_outputs": 10**12})
    with pytest.raises(FileError, match="asks for the noise of 1000000000000 outputs, and there is that of"):
        bayesify.load(tmp_path, small())


def test_a_digest_is_of_values_and_not_of_text():
    assert digest({"a": [1, {"b": None}], "c": 2.0}) == digest({"c": 2.0, "a": [1, {"b": None}]})
