"""Every registered method gets through every command: what a method learns from is its own affair."""

import json

import pytest
import torch
from torch.utils.data import DataLoader

import bayesify as library
from tests.cli.nets import few_digits, make_trained
from tests.marks import slow_but

NETS = "tests.cli.nets"
MODEL = ("--model", f"{NETS}:make_normed", "--data", f"{NETS}:few_digits", "--quiet", "--batch-size", 20)
QUICK = {
    "map": (),
    "mc-dropout": (),
    "laplace": (),
    "swag": ("--epochs", 2),
    "sgld": ("--epochs", 2, "--set", "samples_per_chain=3"),
    "apd": ("--epochs", 2, "--set", "samples_per_chain=3", "--set", "chains=2", "--set", "steps=5"),
    "deep-ensemble": ("--epochs", 1, "--set", "members=2"),
    "abnn": ("--epochs", 1, "--set", "members=2"),
    "bayes-adapter": ("--epochs", 1),
    "ibnn": ("--epochs", 1),
    "ivon": ("--epochs", 1),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the network is not trained


def test_every_method_is_here():
    assert set(QUICK) == set(library.list_methods())


@pytest.mark.parametrize("name", slow_but(["mc-dropout"], QUICK))
def test_every_command(bayesify, tmp_path, name):
    words = (*MODEL, "--method", name, *QUICK[name])
    code, text, error = bayesify("fit", *words, "--out", tmp_path / name, "--json")
    assert code == 0, error
    kept = json.loads(text)["after"]["nll"]
    saved = json.loads(bayesify("evaluate", *MODEL, "--posterior", tmp_path / name, "--split", "val", "--json")[1])
    assert saved["metrics"]["nll"] == pytest.approx(kept, rel=1e-6)
    code, text, error = bayesify("evaluate", *words, "--split", "val", "--json")
    assert code == 0, error
    assert json.loads(text)["metrics"]["nll"] == pytest.approx(kept, rel=1e-6)  # fitted now, by the same seed
    code, text, error = bayesify("predict", *words, "--json")
    assert code == 0, error
    found = [row["epistemic"] for row in json.loads(text)["predictions"]]
    assert (max(found) > 0) == (name != "map")
    code, text, error = bayesify("compare", *words, "--json")
    assert code == 0, error
    assert json.loads(text)["failures"] == []


@pytest.mark.slow
def test_a_method_that_learns_without_epochs_needs_no_company(bayesify):
    """Whether training data are loaded was decided by the number of epochs, and Laplace has none."""
    assert library.Laplace().learns
    assert library.Laplace().surveys
    assert not library.MAP().learns
    assert not library.MCDropout().learns
    code, text, error = bayesify("compare", *MODEL, "--method", "laplace", "--epochs", 0, "--json")
    assert code == 0, error
    assert json.loads(text)["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--calibrate",)])
def test_the_prior_is_chosen_on_the_validation_part(bayesify, tmp_path, more):
    model = ("--model", f"{NETS}:make_trained", *MODEL[2:])
    code, _, error = bayesify("fit", *model, "--method", "laplace", "--out", tmp_path / "laplace", *more)
    assert code == 0, error
    found = library.load(tmp_path / "laplace", make_trained())
    expected = library.convert(make_trained(), library.Laplace())
    loaders = {split: DataLoader(few_digits(split), batch_size=20) for split in ("train", "val")}
    library.fit(expected, loaders["train"], val_loader=loaders["val"], progress=False)
    # The command shuffles, and sums in another order.
    torch.testing.assert_close(found.law.prior_precision, expected.law.prior_precision, rtol=0.02, atol=0)
    without = library.convert(make_trained(), library.Laplace())
    library.fit(without, loaders["train"], progress=False)
    assert not torch.allclose(found.law.prior_precision, without.law.prior_precision, rtol=1.0)
