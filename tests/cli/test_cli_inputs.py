"""Networks, weights and data as the command line loads them."""

import pickle

import pytest
import torch
from safetensors.torch import save_file

from bayesify.cli._data import class_names, images_of, load_split, make_loader, match_images, normalised, ood_sets
from bayesify.cli._network import find_object, load_network, load_weights, parse_arguments
from bayesify.cli._output import JobError, UsageError
from bayesify.data import Split, read_digits
from tests.cli.nets import make_network
from tests.marks import TORCH

NETS = "tests.cli.nets"
SAFE = TORCH >= (2, 10)
PICKLES = pytest.mark.skipif(not SAFE, reason="before torch 2.10 reading a pickle can run code: all are refused")


def same(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "kind", ["safetensors", *(pytest.param(kind, marks=PICKLES) for kind in ("pt", "pth", "nested"))]
)
def test_weights_load_bit_for_bit(kind, network, tmp_path):
    path = tmp_path / f"network.{'pt' if kind == 'nested' else kind}"
    state = network.state_dict()
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if kind == "nested" else state, path)
    loaded = load_network(f"{NETS}:make_network", [], path, "cpu")
    assert same(loaded, network)
    assert not loaded.training


def test_factory_arguments_reach_the_factory():
    assert load_network(f"{NETS}:make_network", ["hidden=5"], None, "cpu")[1].out_features == 5


def test_factory_arguments_are_literals_or_text():
    pairs = ["n=3", "name=resnet", "flag=True", "shape=(1, 2)", "url=a=b"]
    expected = {"n": 3, "name": "resnet", "flag": True, "shape": (1, 2), "url": "a=b"}
    assert parse_arguments(pairs) == expected
    with pytest.raises(UsageError, match="--model-arg 'n' is not of the form KEY=VALUE"):
        parse_arguments(["n"])


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_weights_never_run_code(tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "evil.pt"
    torch.save({"weight": _Evil(mark)}, path)
    with pytest.raises(JobError, match="could run code" if SAFE else "can run code before torch 2.10"):
        load_weights(make_network(), path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(_Evil(mark))).close()
    assert mark.exists()  # the file would have done harm


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("w.safetensors", b"short", JobError, "damaged"),
        ("w.pt", b"short", JobError, "damaged" if SAFE else "can run code"),
        ("w.h5", b"", UsageError, "end in .safetensors, .pt or .pth"),
        ("w.pt", None, JobError, "no file"),
        ("w.safetensors", None, JobError, "no file"),
    ],
)
def test_files_that_hold_no_weights_are_refused(name, content, error, said, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((error, ValueError), match=said):
        load_weights(make_network(), tmp_path / name)


def test_weights_of_another_network_are_named(tmp_path):
    state = make_network(5).state_dict()
    state["extra"] = state.pop("4.bias")
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(JobError) as caught:
        load_weights(make_network(), tmp_path / "w.safetensors")
    said = str(caught.value)
    assert "it lacks 4.bias; it has unknown extra; 1.weight is (5, 64) instead of (32, 64), " in said
    torch.save([1, 2], tmp_path / "w.pt")
    with pytest.raises(JobError, match="no state dict" if SAFE else "can run code"):
        load_weights(make_network(), tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("make_network", UsageError, "package.module:name"),
        ("nowhere.nets:f", UsageError, "no module 'nowhere'"),
        (f"{NETS}.deeper:f", UsageError, "no module 'tests.cli.nets.deeper'|is not a package"),
        (f"{NETS}:make_netwrk", UsageError, "has no 'make_netwrk'; it has .*make_network"),
    ],
)
def test_objects_that_are_not_there(spec, error, said):
    with pytest.raises(error, match=said):
        find_object(spec, "--model")


def test_a_module_that_fails_to_import_is_the_job_failing(tmp_path, monkeypatch):
    (tmp_path / "fails_at_import.py").write_text("import missing_dependency")
    (tmp_path / "raises_at_import.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(JobError, match="missing_dependency"):
        find_object("fails_at_import:f", "--model")
    with pytest.raises(JobError, match="ZeroDivisionError"):
        find_object("raises_at_import:f", "--model")


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("broken", JobError, "failed: RuntimeError: out of coffee"),
        ("no_network", JobError, "returned a list"),
        ("NOT_A_FUNCTION", UsageError, "is a int"),
    ],
)
def test_factories_that_make_no_network(name, error, said):
    with pytest.raises(error, match=said):
        load_network(f"{NETS}:{name}", [], None, "cpu")


def test_an_unknown_device_is_explained():
    with pytest.raises(JobError, match="device 'abacus'"):
        load_network(f"{NETS}:make_network", [], None, "abacus")


def test_named_sets_load_as_they_are():
    assert torch.equal(load_split("digits", "val").inputs, read_digits("val").inputs)
    assert load_split(f"{NETS}:no_val", "val") is None


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("digit", UsageError, "no set 'digit'; the sets are digits.*package.module:function"),
        (f"{NETS}:without_split", UsageError, "argument `split`"),
        (f"{NETS}:NOT_A_FUNCTION", UsageError, "argument `split`"),
        (f"{NETS}:bad_data", JobError, "RuntimeError: disk on fire"),
        (f"{NETS}:no_val", JobError, "NoneType"),
    ],
)
def test_data_that_are_not_there(spec, error, said, monkeypatch):
    monkeypatch.setattr("tests.cli.nets.few_digits", lambda split: None)
    with pytest.raises(error, match=said):
        load_split(spec, "test")


def test_classes_have_the_names_that_the_data_set_gives():
    split = read_digits("test")
    assert class_names(split) is None
    object.__setattr__(split, "classes", ("zero", "one"))
    assert class_names(split) == ["zero", "one"]


def test_an_empty_set_is_refused():
    with pytest.raises(JobError, match="empty"):
        make_loader(Split(torch.zeros(0, 2), torch.zeros(0)), 4)


def test_images_change_channels_exactly():
    grey = torch.rand(3, 1, 4, 5)
    colour = match_images(grey, (3, 4, 5))
    assert torch.equal(colour, torch.cat([grey, grey, grey], 1))
    back = match_images(colour * torch.tensor([1.0, 0.5, 0.0])[:, None, None], (1, 4, 5))
    torch.testing.assert_close(back, (0.299 + 0.5 * 0.587) * grey)
    with pytest.raises(JobError, match="3 channels cannot become images with 2"):
        match_images(colour, (2, 4, 5))


def test_images_change_size():
    image = torch.rand(2, 1, 4, 4)
    flat = torch.full((1, 1, 8, 8), 0.3)
    torch.testing.assert_close(match_images(flat, (1, 5, 7)), torch.full((1, 1, 5, 7), 0.3))
    assert torch.equal(match_images(image, (1, 4, 4)), image)


def test_imagenet_normalisation_is_that_of_a_naive_loop():
    images = torch.rand(2, 3, 2, 2)
    found = normalised(images)
    for channel, (mean, std) in enumerate(zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)):
        torch.testing.assert_close(found[:, channel], (images[:, channel] - mean) / std)
    with pytest.raises(UsageError, match="three colours"):
        normalised(images[:, :1])


def test_ood_images_look_like_the_data(monkeypatch):
    cifar = Split(torch.rand(4, 3, 32, 32), torch.zeros(4).long())
    sets = ood_sets(["digits", f"{NETS}:photos"], cifar, normalise="imagenet")
    expected = normalised(match_images(read_digits("test").inputs, (3, 32, 32)))
    assert torch.equal(sets["digits"].inputs, expected)
    assert sets[f"{NETS}:photos"][0][0].shape == (1, 8, 8)  # the user's own are left alone


def test_pictures_are_stretched_to_unit_range_per_channel():
    images = torch.randn(5, 3, 2, 2)
    shown = images_of(Split(images, torch.zeros(5)))
    for channel in range(3):
        low, high = images[:, channel].min(), images[:, channel].max()
        torch.testing.assert_close(shown[:, channel], (images[:, channel] - low) / (high - low))
    assert images_of(Split(torch.zeros(5, 3), torch.zeros(5))) is None
    assert torch.equal(images_of(load_split(f"{NETS}:few_digits", "test")), read_digits("test").inputs[:60])
