"""What can be predicted on: tensors, tuples, mappings, loaders, and nothing."""

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import DeepEnsemble, MCDropout, convert, predict

A = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
B = torch.randn(7, 2, generator=torch.Generator().manual_seed(1))


class Two(nn.Module):
    """Takes two inputs, by position or name, and maybe a scale and targets."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(10, 3)
        self.eval()

    def forward(self, a, b, scale=None, labels=None):
        h = torch.cat([self.dropout(self.first(a)), b], 1)
        logits = self.second(h) * (1 if scale is None else scale)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


@pytest.fixture(params=[MCDropout(), DeepEnsemble(members=3)])
def posterior(request):
    return convert(Two(), request.param)


@pytest.fixture
def expected(posterior):
    return predict(posterior, (A, B), num_draws=6, seed=0).probs


def test_a_tuple_equals_the_loop(posterior, expected):
    with torch.no_grad():
        draws = []
        for key in posterior.keys(6, 0):
            with posterior.drawn(key):
                draws.append(posterior(A, B)["logits"].softmax(-1))
    torch.testing.assert_close(expected, torch.stack(draws).mean(0))


class Batch(UserDict):
    """A mapping that is no dict, as a tokeniser returns."""


@pytest.mark.parametrize("kind", [dict, Batch])
@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_mappings(posterior, expected, kind, chunk_size):
    options = {"num_draws": 6, "seed": 0, "chunk_size": chunk_size}
    inputs = kind({"a": A, "b": B})
    torch.testing.assert_close(predict(posterior, inputs, **options).probs, expected)
    with_more = kind({"a": A, "b": B, "scale": torch.tensor(1.0), "labels": torch.zeros(7, dtype=torch.long)})
    torch.testing.assert_close(predict(posterior, with_more, **options).probs, expected)


def loaders():
    labels = torch.zeros(7, dtype=torch.long)
    return {
        "tuples": DataLoader(TensorDataset(A, B, labels), batch_size=3),
        "dicts": [{"a": A[:3], "b": B[:3], "labels": labels[:3]}, {"a": A[3:], "b": B[3:], "labels": labels[3:]}],
        "mappings": [Batch({"a": A[i : i + 2], "b": B[i : i + 2]}) for i in range(0, 7, 2)],
        "pairs": [((A[:5], B[:5]), labels[:5]), ((A[5:], B[5:]), labels[5:])],
        "an iterator": iter([((A, B), labels)]),
    }


@pytest.mark.parametrize("kind", sorted(loaders()))
@pytest.mark.parametrize("chunk_size", [2, None])
def test_loaders(posterior, expected, kind, chunk_size):
    prediction = predict(posterior, loaders()[kind], num_draws=6, seed=0, chunk_size=chunk_size)
    torch.testing.assert_close(prediction.probs, expected)


def test_a_loader_of_tensors_alone():
    posterior = convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), MCDropout())
    expected = predict(posterior, A, seed=0).probs
    torch.testing.assert_close(predict(posterior, list(A.split(2)), seed=0).probs, expected)
    torch.testing.assert_close(predict(posterior, DataLoader(TensorDataset(A), 2), seed=0).probs, expected)


@pytest.mark.parametrize("empty", [A[:0], [], DataLoader(TensorDataset(A[:0]))], ids=["tensor", "list", "loader"])
def test_nothing_is_an_error(empty):
    posterior = convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), MCDropout())
    with pytest.raises(ValueError, match="nothing to predict: the inputs are empty"):
        predict(posterior, empty)


def test_inputs_without_a_tensor_are_an_error():
    posterior = convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), MCDropout())
    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        predict(posterior, {"text": "hello"})


def test_progress_goes_to_the_screen(capsys, posterior):
    predict(posterior, loaders()["tuples"], seed=0, progress=True)
    assert "predict" in capsys.readouterr().err
    predict(posterior, loaders()["tuples"], seed=0)
    assert capsys.readouterr().err == ""
