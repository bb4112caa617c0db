"""Wrong and unusual inputs: each works right, or gets a sentence of ours and no traceback from inside torch."""

import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import (
    MAP,
    SWAG,
    BayesAdapter,
    Categorical,
    Laplace,
    MCDropout,
    calibrate,
    convert,
    evaluate,
    fit,
    predict,
)

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3
PACKAGE = Path(bayesify.__file__).parent


def posterior(**options):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    return convert(network, options.pop("method", MCDropout()), **options)


class Columns:
    """What `datasets.Dataset` looks like from outside."""

    column_names = ("text", "input_ids")

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"text": "a", "input_ids": [1, 2]}


class Table:
    """What a data frame looks like."""

    iloc = None

    def to_numpy(self):
        return X.numpy()

    def __iter__(self):
        return iter("ab")


def trained(loader, **options):
    made = posterior(method=options.pop("method", MAP()))
    fit(made, loader, epochs=1, progress=False, accuracy_tolerance=1, **{"num_data": 6, **options})
    return made


WORKS = {
    "array": lambda: predict(posterior(), X.numpy(), seed=0),
    "float64 array": lambda: predict(posterior(), X.numpy().astype(np.float64), seed=0),
    "float64 tensor": lambda: predict(posterior(), X.double(), seed=0),
    "array in Fortran's order": lambda: predict(posterior(), np.asfortranarray(X.numpy()), seed=0),
    "reversed array": lambda: predict(posterior(), X.numpy()[::-1].copy()[::-1], seed=0),
    "tuple of arrays": lambda: predict(posterior(), (X.numpy(),), seed=0),
    "mapping of arrays": lambda: predict(posterior(), {"input": X.double().numpy()}, seed=0),
    "list of arrays": lambda: predict(posterior(), [X[:3].numpy(), X[3:].numpy()], seed=0),
    "loader of float64": lambda: predict(posterior(), DataLoader(TensorDataset(X.double(), Y), 2), seed=0),
    "loader of examples": lambda: predict(posterior(), DataLoader([{"input": x} for x in X], 2), seed=0),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_works_gives_what_a_tensor_gives(name):
    expected = predict(posterior(), X, seed=0)
    torch.testing.assert_close(WORKS[name]().log_probs, expected.log_probs)


@pytest.mark.parametrize("method", [MAP(), SWAG(), BayesAdapter(), Laplace(structure="diagonal")], ids=lambda m: m.name)
@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")  # of one snapshot
@pytest.mark.slow
def test_double_precision_data_is_trained_on_as_single(method, kind):
    """Targets too: what a loader makes of numpy's default type."""
    x, y = (X.double(), Y) if kind == "tensor" else (X.double().numpy(), Y.numpy())
    found, expected = trained([(x, y)], method=method), trained([(X, Y)], method=method)
    torch.testing.assert_close(found.state_dict(), expected.state_dict())
    metrics = [evaluate(expected, [batch]).metrics for batch in ((x, y), (X, Y))]
    assert metrics[0] == pytest.approx(metrics[1])
    temperatures = [calibrate(expected, [batch]).likelihood.temperature.clone() for batch in ((x, y), (X, Y))]
    torch.testing.assert_close(*temperatures)


def test_integers_and_networks_of_several_types_are_left_alone():
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3).double()

        def forward(self, x, index):
            seen.append((x.dtype, index.dtype))
            return self.a(x.float()) + self.b(x.double()).float() * index

    seen = []
    predict(convert(Seen().eval(), MAP()), (X.half(), Y[:, None]), seed=0)
    assert set(seen) == {(torch.float16, torch.int64)}


ODD = {
    "None": lambda: predict(posterior(), None),
    "a number": lambda: predict(posterior(), 3),
    "text": lambda: predict(posterior(), "a text"),
    "texts": lambda: predict(posterior(), ["a", "b"]),
    "array of texts": lambda: predict(posterior(), np.array(["a", "b"])),
    "array of objects": lambda: predict(posterior(), np.array([None, 1], dtype=object)),
    "numbers": lambda: predict(posterior(), [1.0, 2.0]),
    "lists of numbers": lambda: predict(posterior(), X.tolist()),
    "mapping of lists": lambda: predict(posterior(), {"input": X.tolist()}),
    "mapping of nothing": lambda: predict(posterior(), {}),
    "empty tuple": lambda: predict(posterior(), ()),
    "examples with lists": lambda: predict(posterior(), [{"input_ids": [1, 2], "labels": 1}] * 2),
    "examples with tensors": lambda: predict(posterior(), [{"input_ids": Y[:2], "attention_mask": Y[:2]}] * 2),
    "torch data set": lambda: predict(posterior(), TensorDataset(X)),
    "data set with columns": lambda: predict(posterior(), Columns()),
    "data frame": lambda: predict(posterior(), Table()),
    "a module": lambda: predict(posterior(), nn.Linear(2, 2)),
    "a namespace": lambda: predict(posterior(), SimpleNamespace(x=X)),
    "a scalar tensor": lambda: predict(posterior(), torch.tensor(1.0)),
    "no rows": lambda: predict(posterior(), X[:0]),
    "fit None": lambda: trained(None),
    "fit a tensor": lambda: trained(X),
    "fit text": lambda: trained("data.csv"),
    "fit a data set with columns": lambda: trained(Columns()),
    "fit a data frame": lambda: trained(Table()),
    "fit inputs alone": lambda: trained([X]),
    "fit examples": lambda: trained([{"input_ids": [1, 2], "labels": 1}]),
    "fit lr": lambda: trained([(X, Y)], lr=0.1),
    "fit unknown": lambda: trained([(X, Y)], learning_rate=0.1),
    "fit precision": lambda: trained([(X, Y)], precision="fp8"),
    "fit half an epoch": lambda: fit(posterior(method=MAP()), [(X, Y)], epochs=1.5, num_data=6),
    "fit a fraction of steps": lambda: trained([(X, Y)], accumulate=1.5),
    "fit float targets": lambda: trained([(X, Y.float())]),
    "evaluate None": lambda: evaluate(posterior(), None),
    "evaluate a tensor": lambda: evaluate(posterior(), X),
    "evaluate a data set": lambda: evaluate(posterior(), TensorDataset(X, Y)),
    "evaluate inputs alone": lambda: evaluate(posterior(), [X]),
    "calibrate None": lambda: calibrate(posterior(), None),
    "calibrate a tensor": lambda: calibrate(posterior(), X),
    "calibrate a data set": lambda: calibrate(posterior(), Columns()),
    "calibrate inputs alone": lambda: calibrate(posterior(), [X]),
    "calibrate nothing": lambda: calibrate(posterior(), []),
}


def raised(call):
    """Return what a call raises, and whether a `raise` of ours did."""
    try:
        call()
    except Exception as error:
        frame = traceback.extract_tb(sys.exc_info()[2])[-1]
        return error, Path(frame.filename).is_relative_to(PACKAGE) and frame.line.startswith("raise")
    return None, False


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_gets_a_sentence(name):
    error, ours = raised(ODD[name])
    assert error is not None, "accepted"
    assert ours, repr(error)
    assert len(str(error)) > 40
    assert str(error).endswith((".", ")"))


def test_the_sentences_say_what_to_do():
    for name, words in {
        "fit lr": r"MAP(lr=0.1",
        "data set with columns": "collate_fn",
        "examples with lists": "collate_fn",
        "texts": "batches",
        "text": "tokenise",
        "data frame": "to_numpy",
        "fit half an epoch": "whole number",
        "fit precision": "'bf16'",
    }.items():
        assert words in str(raised(ODD[name])[0]), name


@pytest.mark.parametrize("method", [MAP(), BayesAdapter()], ids=lambda method: method.name)
def test_labels_that_all_do_not_count_are_told(method):
    with pytest.warns(UserWarning, match="All 6 targets of a batch are ignore_index = -100"):
        trained([(X, torch.full((6,), -100))], method=method)
    made = posterior(likelihood=Categorical(ignore_index=1))
    with pytest.warns(UserWarning, match="ignore_index = 1"):
        made.loss((X, torch.ones(6, dtype=torch.long)), num_data=6)
    made.loss((X, torch.tensor([1, 1, 1, 1, 1, 0])), num_data=6)


def test_weights_that_are_nan_are_told():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with torch.no_grad():
        network[0].weight[0, 0] = torch.nan
        network[1].running_var[0] = torch.nan
        network[2].bias[0] = torch.inf  # a mask may hold it
    with pytest.warns(UserWarning, match=r"The network's '0.weight', '1.running_var' hold NaN"):
        convert(network, MAP())
