"""What goes wrong gets a sentence and the right exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bayesify.cli._output import finite
from tests.cli.nets import make_network, unboxed

NETS = "tests.cli.nets"
ROOT = Path(__file__).parents[2]
DIGITS = ("--data", "digits")
MAP = ("--method", "map")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "a command is required; the commands are demo, methods, fit"),
        (("evaluat",), 2, "there is no command 'evaluat'; the commands are demo"),
        (("evaluate", *DIGITS, *MAP), 2, "--model"),
        (("evaluate", "--model", f"{NETS}:make_netwrk", *DIGITS, *MAP), 2, "has no 'make_netwrk'"),
        (("evaluate", "--model", f"{NETS}:broken", *DIGITS, *MAP), 1, "out of coffee"),
        (("evaluate", "--model", f"{NETS}:make_network", *DIGITS), 2, "either --posterior DIR, or --method NAME"),
        (("evaluate", "--model", f"{NETS}:make_network", *DIGITS, "--method", "swga"), 2, "there is no method 'swga'"),
        (
            ("evaluate", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--set", "rate=1"),
            2,
            "there is no setting 'rate'; map has epochs, lr",
        ),
        (
            ("evaluate", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--set", "lr=fast"),
            2,
            "Error parsing --map.lr: could not convert string to float: 'fast'",
        ),
        (("evaluate", "--model", f"{NETS}:make_network", "--data", "didgits", *MAP), 2, "there is no set 'didgits'"),
        (("evaluate", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--split", "dev"), 1, "not 'dev'"),
        (("evaluate", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--weights", "no.pt"), 1, "no file no.pt"),
        (("evaluate", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--score", "fear"), 1, "no score 'fear'"),
        (("evaluate", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--how", "magic"), 1, "'magic'"),
        (("evaluate", "--model", f"{NETS}:make_regressor", *DIGITS, *MAP), 1, "RuntimeError"),
        (("evaluate", "--model", f"{NETS}:make_network", *DIGITS, "--posterior", "no"), 1, "There is no file no"),
        (
            ("evaluate", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--normalise", "imagenet"),
            2,
            "three colours",
        ),
        (("predict", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--out", "a.txt"), 2, ".csv or .jsonl"),
        (("predict", "--model", f"{NETS}:dense", *DIGITS, *MAP), 1, "several outputs per input"),
        (
            ("predict", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--batch-size", "0"),
            2,
            "--batch-size 0 is less than 1",
        ),
        (
            ("predict", "--model", f"{NETS}:make_network", *DIGITS, *MAP, "--batch-size", "x"),
            2,
            "Error parsing --batch-size: invalid",
        ),
        (("compare", "--model", f"{NETS}:make_network", *DIGITS), 2, "nothing to compare"),
        (("report", "--model", f"{NETS}:make_network", *DIGITS), 2, "--posterior"),
    ],
)
def test_wrong_input_is_explained(bayesify, words, code, said):
    found, out, error = bayesify(*words, *(["--quiet", "--json"] if words[1:] else []))
    assert (found, out) == (code, "")
    assert said in unboxed(error)
    assert "Traceback" not in error


def test_weights_of_another_network(bayesify, tmp_path):
    save_file(make_network(5).state_dict(), tmp_path / "w.safetensors")
    words = ("evaluate", "--model", f"{NETS}:make_network", "--weights", tmp_path / "w.safetensors", *DIGITS, *MAP)
    code, _, error = bayesify(*words)
    assert code == 1
    assert "does not fit the network of --model: 1.weight is (5, 64) instead of (32, 64)" in error


@pytest.mark.slow
def test_a_posterior_of_other_weights(bayesify, model, tmp_path):
    data = ("--data", f"{NETS}:few_digits", "--quiet")
    assert bayesify("fit", *model, *data, *MAP, "--out", tmp_path / "a")[0] == 0
    words = ("evaluate", "--model", f"{NETS}:make_network", *data, "--posterior", tmp_path / "a")
    code, _, error = bayesify(*words)
    assert code == 1
    assert "not the one that" in error


def test_missing_data_say_how_to_give_them(bayesify, model):
    code, out, error = bayesify("evaluate", *model, "--data", "omniglot", *MAP)
    assert (code, out) == (2, "")
    assert "the sets are digits" in error
    assert "package.module:function" in error


def test_debug_shows_where(bayesify):
    words = ("evaluate", "--model", f"{NETS}:make_regressor", *DIGITS, *MAP, "--debug", "--quiet")
    with pytest.raises(RuntimeError):
        bayesify(*words)


def test_an_interrupt_is_no_traceback(bayesify, model, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("bayesify.cli._options.load_network", interrupt)
    code, out, error = bayesify("evaluate", *model, *DIGITS, *MAP)
    assert (code, out, error) == (130, "", "bayesify evaluate: interrupted\n")


def test_warnings_are_sentences_without_paths(bayesify, model, monkeypatch):
    import warnings

    def warned(*args):
        warnings.simplefilter("always")
        warnings.warn("mind the gap", stacklevel=1)
        raise ValueError("and fall")

    monkeypatch.setattr("bayesify.cli._options.load_network", warned)
    error = bayesify("evaluate", *model, *DIGITS, *MAP)[2]
    assert error == "UserWarning: mind the gap\nbayesify evaluate: and fall\n"


def start(*words):
    command = [sys.executable, "-c", "import sys; from bayesify.cli import main; sys.exit(main())", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_as_a_process(weights):
    words = ("predict", "--model", f"{NETS}:make_network", "--weights", str(weights))
    with start(*words, "--data", f"{NETS}:few_digits", *MAP) as process:
        out, error = process.communicate(timeout=60)
    assert (process.returncode, len(out.splitlines())) == (0, 61)
    assert "predict" in error  # the progress bar


@pytest.mark.slow
def test_the_parser_loads_neither_figures_nor_data_readers():
    code = "from bayesify.cli._arguments import read_command; read_command(['methods'])"
    code += "; import sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout
    for heavy in ("matplotlib", "jinja2", "sklearn", "bayesify.cli.demo", "bayesify.report"):
        assert f"'{heavy}'" not in loaded


def test_what_is_missing_is_named_with_the_extra_that_brings_it(bayesify, monkeypatch):
    for name in ("bayesify.cli._arguments", "bayesify.cli._commands", "bayesify.cli._options"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.setitem(sys.modules, "tyro.conf", None)
    said = "bayesify methods: The command line needs tyro: pip install 'bayesify[cli]'.\n"
    assert bayesify("methods") == (1, "", said)


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_traceback(weights):
    words = ("predict", "--model", f"{NETS}:make_network", "--weights", str(weights), *DIGITS, *MAP, "--quiet")
    with start(*words) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (1, "")


def test_numbers_that_json_lacks_become_null():
    assert finite({"a": (1.0, torch.inf), "b": torch.nan, "c": [2]}) == {"a": [1.0, None], "b": None, "c": [2]}
