"""`bayesify serve`: what is wrong is said before anything is started."""

import os
import socket

import pytest

from bayesify.cli import main
from bayesify.cli._guard import SavedNetworkOptions
from bayesify.cli._serving import Loader, ServedImages


@pytest.fixture
def folder(guard, tmp_path):
    guard.save(tmp_path / "guard")
    return str(tmp_path / "guard")


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(os.getcwd())  # loading goes to the folder of the command
    monkeypatch.delenv("BAYESIFY_TOKEN", raising=False)


def test_what_is_wrong_is_a_sentence(folder, tmp_path, capsys):
    model = ["--model", "tests.serve.nets:larger"]
    (tmp_path / "empty").write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, code, text in (
            ([folder], 2, "network of your own"),
            ([str(tmp_path / "nothing"), *model], 1, "guard"),
            ([folder, "--model", "tests.serve.nets:quarters"], 1, "guard"),
            ([folder, *model, "--normalise", "imagenet"], 2, "--image-size"),
            ([folder, *model, "--token-file", str(tmp_path / "absent")], 1, "token"),
            ([folder, *model, "--token-file", str(tmp_path / "empty")], 1, "is empty"),
            ([folder, *model, "--replicas", "0"], 1, "at least one replica"),
            ([folder, *model, "--port", port], 1, "another --port"),
        ):
            assert main(["serve", *words]) == code, words
            assert text in capsys.readouterr().err, words


def test_a_replica_loads_what_the_command_named(folder, image_guard, tmp_path):
    own = SavedNetworkOptions(model="tests.serve.nets:larger")
    guard, encoding = Loader(folder, own, ServedImages(), os.getcwd())()
    assert guard.class_names == ("left", "right")
    assert encoding is None
    image_guard.save(tmp_path / "images")
    named = SavedNetworkOptions(model="tests.serve.nets:quarters")
    load = Loader(str(tmp_path / "images"), named, ServedImages(image_size=4, normalise="imagenet"), os.getcwd())
    _, encoding = load()
    assert encoding.size == (4, 4)
    assert encoding.std == (0.229, 0.224, 0.225)
    grey = ServedImages(image_size=4, grey=True).encoding()
    assert (grey.mode, grey.mean, grey.std) == ("L", (0.0,), (1.0,))
