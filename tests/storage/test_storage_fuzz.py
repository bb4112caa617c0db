"""Damaged folders: never another posterior without a word, never an error that is not a sentence of ours."""

import copy
import json
import linecache
import shutil
import struct
import traceback
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file
from torch import nn

import bayesify
from bayesify import ABNN, APD, IBNN, IVON, MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Gaussian, Laplace, MCDropout
from bayesify._core.files import digest, fingerprint, open_tensors, seal, write_tensors
from tests.fixtures.make_format1 import FOLDER as FORMAT1
from tests.fixtures.make_format1 import make_network

METHODS = {
    "map": MAP(),
    "mc-dropout": MCDropout(),
    "deep-ensemble": DeepEnsemble(members=2),
    "swag": SWAG(rank=2, num_bn_draws=2),
    "bayes-adapter": BayesAdapter(),
    "ivon": IVON(),
    "ibnn": IBNN(components=2),
    "abnn": ABNN(members=2),
    "laplace": Laplace(prior_precision=1.0),
    "laplace-diagonal": Laplace(structure="diagonal"),
    "laplace-kronecker": Laplace(structure="kronecker"),
    "sgld": SGLD(samples_per_chain=2, chains=2),
    "apd": APD(samples_per_chain=2, hidden=(3,), latent=2, num_bn_draws=2),
}
SOURCE = str(Path(bayesify.__file__).parent)


def plain():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.2), nn.Linear(3, 2)).eval()


NETWORK = plain()


class Folder:
    """A saved posterior, which is put back after each damage."""

    def __init__(self, path, network):
        self.path, self.network = path, network
        self.files = {file.name: file.read_bytes() for file in path.iterdir()}
        self.config = json.loads(self.files["config.json"])
        self.tensors = self.config["tensors"]
        self.contents = describe(bayesify.load(path, network))

    def write(self, **files):
        for name, content in files.items():
            (self.path / (self.tensors if name == "tensors" else "config.json")).write_bytes(content)

    def write_config(self, config, *, signed):
        if signed and isinstance(config, dict) and "digest" in config:
            config = {**config, "digest": digest({key: v for key, v in config.items() if key != "digest"})}
        self.write(config=json.dumps(config).encode())

    def restore(self):
        for file in self.path.iterdir():
            if file.name not in self.files:
                file.unlink()
        for name, content in self.files.items():
            (self.path / name).write_bytes(content)

    def check(self, *, changed=False, contents=None):
        """Load; a sentence, or the same posterior (or `contents`, or, with `changed`, another that was asked for)."""
        try:
            found = describe(bayesify.load(self.path, self.network))
        except Exception as error:
            require_sentence(error)
        else:
            assert changed or found == (contents or self.contents)
        finally:
            self.restore()


def require_sentence(error):
    """Fail where the innermost frame of an error is not a `raise` of ours."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno).strip()
    if not (frame.filename.startswith(SOURCE) and line.startswith("raise ") and isinstance(error, ValueError)):
        raise AssertionError(f"{type(error).__name__}: {error} at {frame.filename}:{frame.lineno}: {line}") from error


def describe(posterior):
    tensors = {name: fingerprint(tensor) for name, tensor in posterior.state_dict().items()}
    learns = [(name, parameter.requires_grad) for name, parameter in posterior.named_parameters()]
    return [
        tensors, learns, posterior.method, posterior.likelihood.to_dict(), posterior.conversion, posterior.output_key,
        posterior.default_draws, posterior.frozen,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, found = tmp_path_factory.mktemp("folders"), {}
    for name, method in METHODS.items():
        likelihood = Gaussian("per-output", num_outputs=2) if name in ("map", "swag") else "classification"
        posterior = bayesify.convert(NETWORK, method, likelihood=likelihood)
        posterior(torch.randn(3, 2))
        bayesify.save(posterior, root / name)
        found[name] = Folder(root / name, NETWORK)
    bayesify.save(bayesify.sample_bank(bayesify.ensemble([NETWORK, plain()]), 2), root / "bank")
    found["bank"] = Folder(root / "bank", NETWORK)
    return found


@pytest.fixture(scope="module")
def old_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("format1")
    network = make_network()
    network.load_state_dict(load_file(FORMAT1 / "network.safetensors"))
    shutil.copytree(FORMAT1, root, dirs_exist_ok=True)
    return {path.name: Folder(path, network) for path in root.iterdir() if path.is_dir()}


def examples(quick, slow):
    return pytest.mark.parametrize("examples", [quick, pytest.param(slow, marks=pytest.mark.slow)])


def search(count, strategy, check):
    kept = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    limits = settings(max_examples=count, database=None, suppress_health_check=kept)
    limits(given(strategy)(check))()


NAMES = st.sampled_from([*METHODS, "bank"])
PLACE = st.floats(0, 1, exclude_max=True)


@examples(60, 900)
def test_a_flipped_bit_is_refused_or_harmless(folders, examples):
    def check(case):
        name, part, place, bit = case
        folder = folders[name]
        content = bytearray(folder.files[folder.tensors if part == "tensors" else "config.json"])
        content[int(place * len(content))] ^= 1 << bit
        folder.write(**{part: bytes(content)})
        folder.check()

    search(examples, st.tuples(NAMES, st.sampled_from(["tensors", "config"]), PLACE, st.integers(0, 7)), check)


@examples(40, 400)
def test_cut_short_or_patched_files_are_refused_or_harmless(folders, examples):
    def check(case):
        name, part, how, first, second, filling = case
        folder = folders[name]
        content = folder.files[folder.tensors if part == "tensors" else "config.json"]
        start, stop = sorted(int(place * len(content)) for place in (first, second))
        changed = {
            "cut": content[:start],
            "without": content[:start] + content[stop:],
            "zeros": content[:start] + bytes(stop - start) + content[stop:],
            "filled": content[:start] + filling + content[start + len(filling) :],
            "inserted": content[:start] + filling + content[start:],
            "twice": content[:stop] + content[start:],
            "longer": content + filling,
        }[how]
        folder.write(**{part: changed})
        folder.check()

    hows = st.sampled_from(["cut", "without", "zeros", "filled", "inserted", "twice", "longer"])
    parts = st.sampled_from(["tensors", "config"])
    search(examples, st.tuples(NAMES, parts, hows, PLACE, PLACE, st.binary(max_size=12)), check)


VALUES = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 2, 10**6, 10**9, 2**63, 10**400, 0.0, -0.5, 1e308, float("inf")]),
    st.sampled_from(["", "a", "0.weight", "0", "../x", "network", "categorical", "swag", [], {}, [[]], [None]]),
    st.sampled_from([{"a": 1}, {"kind": "custom", "log_prob": 5}, [10**9], [0], ["x"] * 3, ["0.weight"] * 2]),
    st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=3),
)  # fmt: skip


def places(tree, path=()):
    """Return the paths to all values of a tree."""
    inside = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    return [path, *(found for key, value in inside for found in places(value, (*path, key)))]


def edited(config, place, how, value):
    """Change one value of a configuration: the place is a share of all its paths."""
    config = copy.deepcopy(config)
    *path, last = (paths := places(config)[1:])[int(place * len(paths))]
    node = config
    for key in path:
        node = node[key]
    if how == "removed":
        del node[last]
    elif how == "added":
        (node.append if isinstance(node, list) else lambda new: node.update({"more": new}))(value)
    elif how == "renamed" and isinstance(node, dict):
        node[str(value)] = node.pop(last)
    else:
        node[last] = value
    return config


EDITS = st.tuples(NAMES, PLACE, st.sampled_from(["set", "set", "removed", "added", "renamed"]), VALUES)


@examples(40, 400)
def test_an_edited_configuration_is_refused_or_harmless(folders, examples):
    def check(case):
        name, *edit = case
        folders[name].write_config(edited(folders[name].config, *edit), signed=False)
        folders[name].check()

    search(examples, EDITS, check)


@examples(60, 800)
def test_an_edited_configuration_with_a_digest_has_sentences_only(folders, examples):
    def check(case):
        name, *edit = case
        folders[name].write_config(edited(folders[name].config, *edit), signed=True)
        folders[name].check(changed=True)

    search(examples, EDITS, check)


@examples(40, 400)
def test_an_edited_configuration_of_the_first_format_has_sentences_only(old_folders, examples):
    def check(case):
        name, *edit = case
        old_folders[name].write_config(edited(old_folders[name].config, *edit), signed=False)
        old_folders[name].check(changed=True)

    names = st.sampled_from(sorted(path.name for path in FORMAT1.iterdir() if path.is_dir()))
    search(examples, st.tuples(names, *EDITS.wrapped_strategy.element_strategies[1:]), check)


@examples(20, 156)
def test_files_of_two_posteriors_are_refused(folders, examples):
    def check(case):
        (name, other), part, renamed = case
        folder, from_other = folders[name], folders[other]
        alike = folder.files[folder.tensors] == from_other.files[from_other.tensors]  # both added nothing
        if part == "config":
            config = from_other.config | ({"tensors": folder.tensors} if renamed else {})
            folder.write_config(config, signed=renamed)
        else:
            folder.write(tensors=from_other.files[from_other.tensors])
        # With its configuration and the same tensors a folder is the other's, whole. A configuration that is signed
        # anew for tensors of the same names (two methods with one law) was asked for.
        asked = part == "config" and renamed and {name, other} == {"bayes-adapter", "ivon"}
        folder.check(changed=asked, contents=from_other.contents if alike and part == "config" else None)

    pairs = st.tuples(NAMES, NAMES).filter(lambda pair: pair[0] != pair[1])
    search(examples, st.tuples(pairs, st.sampled_from(["config", "tensors"]), st.booleans()), check)


HEADERS = st.one_of(
    st.sampled_from([None, [], {}, 0, -1, 2**64, "F32", "I32", "BF16", "F64", "F8_E4M3", "C64", [0, 4], [2**40]]),
    st.integers(-9, 99), st.lists(st.integers(-9, 99), max_size=3),
)  # fmt: skip


@examples(30, 300)
def test_an_edited_header_of_the_tensors_is_refused_or_harmless(folders, examples):
    def check(case):
        name, *edit = case
        folder = folders[name]
        content = folder.files[folder.tensors]
        (length,) = struct.unpack("<Q", content[:8])
        header = edited(json.loads(content[8 : 8 + length]), *edit)
        text = json.dumps(header).encode()
        folder.write(tensors=struct.pack("<Q", len(text)) + text + content[8 + length :])
        folder.check()

    hows = st.sampled_from(["set", "set", "removed", "added", "renamed"])
    search(examples, st.tuples(NAMES, PLACE, hows, HEADERS), check)


@examples(30, 200)
def test_other_tensors_with_a_seal_and_a_digest_have_sentences_only(folders, examples):
    def check(case):
        name, place, how = case
        folder = folders[name]
        tensors, _, _ = open_tensors(folder.path / folder.tensors)
        chosen = sorted(tensors)[int(place * len(tensors))]
        tensor = tensors[chosen].clone()
        changed = {
            "nan": lambda: torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor,
            "minus": lambda: -torch.ones_like(tensor) if tensor.dtype != torch.bool else ~tensor,
            "many": lambda: torch.full_like(tensor, 10**6) if tensor.dtype != torch.bool else ~tensor,
            "whole": lambda: tensor.long(),
            "half": lambda: tensor.half(),
            "complex": lambda: tensor.to(torch.complex64),
            "longer": lambda: torch.cat([tensor.reshape(-1)] * 2),
            "shorter": lambda: tensor.reshape(-1)[:0],
            "deeper": lambda: tensor[None],
            "gone": lambda: None,
        }[how]()
        tensors = {key: changed if key == chosen else value.clone() for key, value in tensors.items()}
        tensors = {key: value for key, value in tensors.items() if value is not None}
        marks = {key: fingerprint(value) for key, value in tensors.items()}
        file = f"posterior-{seal(tensors, marks)}.safetensors"
        write_tensors(folder.path / file, tensors)
        folder.write_config({**folder.config, "tensors": file}, signed=True)
        folder.check(changed=True)

    hows = ["nan", "minus", "many", "whole", "half", "complex", "longer", "shorter", "deeper", "gone"]
    search(examples, st.tuples(NAMES, PLACE, st.sampled_from(hows)), check)
