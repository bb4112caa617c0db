"""Batches of any structure."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from bayesify._core.trees import (
    batch_rows,
    call,
    map_tensors,
    output_tensor,
    repeat_rows,
    slice_rows,
    split_batch,
    to_device,
)

Pair = namedtuple("Pair", ["left", "right"])


def same(left, right):
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            same(a, b)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def test_map_keeps_every_structure():
    x = torch.arange(3.0)
    tree = {"a": x, "b": [x, (x, None)], "c": Pair(x, "text"), "d": 4}
    doubled = {"a": 2 * x, "b": [2 * x, (2 * x, None)], "c": Pair(2 * x, "text"), "d": 4}
    same(map_tensors(lambda t: 2 * t, tree), doubled)


def test_a_huggingface_batch_is_a_mapping():
    batch = BatchEncoding({"input_ids": torch.arange(6).reshape(3, 2), "labels": torch.tensor([0, 1, 2])})
    inputs, targets = split_batch(batch)
    same(inputs, {"input_ids": torch.arange(6).reshape(3, 2)})
    same(targets, torch.tensor([0, 1, 2]))
    same(slice_rows(batch, 1, 2), {"input_ids": torch.tensor([[2, 3]]), "labels": torch.tensor([1])})


def test_to_device_moves_all_tensors():
    moved = to_device({"a": (torch.zeros(2), 1)}, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] == 1


def test_rows_come_from_the_first_tensor_that_has_a_batch():
    assert batch_rows({"scale": torch.tensor(2.0), "x": torch.zeros(5, 2)}) == 5
    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        batch_rows({"scale": torch.tensor(2.0), "name": "x"})


def test_slices_and_repeats_leave_what_has_no_batch():
    x, scale, table = torch.arange(4), torch.tensor(2.0), torch.zeros(7)
    same(slice_rows((x, scale, table), 1, 3), (torch.tensor([1, 2]), scale, table))
    same(repeat_rows((x, scale, table), 2), (torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), scale, table))
    same(repeat_rows(torch.arange(4).reshape(2, 2), 2), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]))


def test_split_finds_the_targets():
    assert split_batch([1, 2]) == (1, 2)
    assert split_batch((1, 2, 3)) == ((1, 2), 3)
    for key in ("labels", "label", "targets", "target", "y"):
        assert split_batch({"x": 1, key: 2}) == ({"x": 1}, 2)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"x": 1, "z": 2}, r"keys \['x', 'z'\] and none of"),
        (torch.zeros(3), "a training batch must be .* it is a Tensor"),
        ((1,), "it is a tuple of 1 entries"),
    ],
)
def test_a_batch_without_targets_says_what_to_do(batch, sentence):
    with pytest.raises(ValueError, match=f"(?i){sentence}"):
        split_batch(batch)


def test_call_passes_inputs_as_the_network_takes_them():
    def function(a, b=1):
        return a - b

    assert call(function, 5) == 4
    assert call(function, (5, 2)) == 3
    assert call(function, [5, 2]) == 3
    assert call(function, {"b": 2, "a": 5}) == 3


def test_the_output_tensor_is_found():
    x, other = torch.ones(2), torch.zeros(2)
    assert output_tensor(x) is x
    assert output_tensor((x, other)) is x
    assert output_tensor([x, other]) is x
    assert output_tensor({"loss": other, "logits": x}) is x
    assert output_tensor({"mean": x}) is x
    assert output_tensor({"mean": x, "other": other}, "mean") is x
    assert output_tensor((other, x), 1) is x
    assert output_tensor(SequenceClassifierOutput(loss=other, logits=x)) is x


@pytest.mark.parametrize(
    ("output", "key", "sentence"),
    [
        ({"a": torch.ones(1), "b": torch.ones(1)}, None, r"a dict with the keys \['a', 'b'\].*output_key"),
        ((), None, "a tuple of 0 entries"),
        ((None, torch.ones(1)), None, "a tuple of 2 entries"),
        ({"a": torch.ones(1)}, "c", "no entry 'c'"),
        ((torch.ones(1),), 3, "no entry 3"),
        (nn.Linear(1, 1), "c", "no entry 'c'"),
    ],
)
def test_an_unknown_output_says_what_to_do(output, key, sentence):
    with pytest.raises(ValueError, match=sentence):
        output_tensor(output, key)
