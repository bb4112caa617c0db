"""Requests that are decided together get what they would get alone."""

import pytest
import torch
from torch import nn

from bayesify import convert
from bayesify.data import Batch, Records, TableEncoding
from bayesify.decide import Guard
from bayesify.serve import Decided, Engine, Requested, RequestError


def asked(inputs, **options):
    return Requested(Batch(list(range(1, len(inputs) + 1)), inputs), **options)


def test_answers_are_the_guards(guard, inputs):
    verdicts = guard(inputs)
    records = verdicts.to_records()
    answers = Engine(guard)([asked(inputs[:5]), asked(inputs[5:6]), asked(inputs[6:])])
    lines = [line for answer in answers for line in answer.lines]
    names = ("left", "right")
    assert [line["verdict"] for line in lines] == verdicts.verdict
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5, 1, 1, 2, 3, 4, 5, 6]
    assert [line["label"] for line in lines] == [names[record["label"]] for record in records]
    for name in ("confidence", "p_value", "total", "reason"):
        assert [line[name] for line in lines] == [record[name] for record in records]
    assert [code for answer in answers for code in answer.codes] == verdicts.codes.tolist()
    assert [value for answer in answers for value in answer.p_values] == verdicts.p_value.tolist()


def test_probabilities_where_they_are_wanted(guard, inputs):
    first, second = Engine(guard)([asked(inputs[:2], probs=True), asked(inputs[2:4])])
    expected = guard(inputs[:2]).prediction.log_probs.exp().tolist()
    assert [list(line["probs"].values()) for line in first.lines] == expected
    assert list(first.lines[0]["probs"]) == ["left", "right"]
    assert "probs" not in second.lines[0]


def test_a_malformed_request_harms_nobody(guard, inputs):
    wrong = [torch.zeros(1, 5), torch.zeros(2, 2, dtype=torch.int64), {"x": torch.zeros(1, 2)}]
    requests = [asked(inputs[:1]), *map(asked, wrong[:2]), Requested(Batch([1], wrong[2])), asked(inputs[1:2])]
    answers = Engine(guard)(requests)
    assert [type(answer) for answer in answers] == [Decided, RequestError, RequestError, RequestError, Decided]
    assert all(answer.status == 422 for answer in answers[1:4])
    good = [answers[0].lines[0], answers[4].lines[0]]
    assert [line["p_value"] for line in good] == guard(inputs[:2]).p_value.tolist()


def test_a_value_that_the_network_refuses_harms_nobody_of_its_shape():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(16, 2))
    x = torch.randint(0, 5, (300, 2))
    with torch.no_grad():
        y = network(x).argmax(1)
    guard = Guard.fit(convert(network, "map"), [(x, y)], max_risk=0.1)
    tokens = torch.tensor([[1, 2], [3, 99], [0, 4]])
    answers = Engine(guard)([asked(row[None]) for row in tokens])
    assert isinstance(answers[1], RequestError)
    assert "IndexError" in str(answers[1])
    assert [answers[i].lines[0]["p_value"] for i in (0, 2)] == guard(tokens[[0, 2]]).p_value.tolist()


def test_nan_is_ood_and_its_neighbours_are_not_harmed(guard, inputs):
    first, second = Engine(guard)([asked(torch.full((1, 2), torch.nan)), asked(inputs)])
    assert first.lines[0]["verdict"] == "ood"
    assert first.lines[0]["confidence"] is None
    assert [line["p_value"] for line in second.lines] == guard(inputs).p_value.tolist()


def test_rows_that_cannot_be_read_have_a_line():
    ages = [(i / 6, "young" if (i < 300) != (i % 17 == 0) else "old") for i in range(600)]
    table = [Records.of([{"age": age, "label": label} for age, label in ages])]
    encoding = TableEncoding.fit(table, "label")
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[2.0], [-2.0]]))  # old, young
        network.bias.zero_()
    batch = encoding.encode(table[0], labels=True)
    loader = [(batch.inputs, batch.targets)]
    guard = Guard.fit(convert(network, "map"), loader, max_risk=0.2, class_names=encoding.labels.classes)
    requests = [Requested(encoding.encode(Records.of(rows))) for rows in ([{"age": 9}, {"age": "x"}], [{"age": "y"}])]
    first, second = Engine(guard, encoding.labels)(requests)
    assert [line["row"] for line in first.lines] == [1, 2]
    assert first.lines[0]["label"] == "young"
    assert [line["verdict"] for line in (first.lines[1], second.lines[0])] == ["unreadable", "unreadable"]
    assert first.codes == tuple(guard(requests[0].batch.inputs).codes.tolist())
    assert second.codes == ()


def test_warming_up_decides_made_up_inputs(guard):
    calls = []
    posterior = guard.posterior
    handle = posterior.network.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    try:
        assert Engine(guard).warm_up(7) > 0
    finally:
        handle.remove()
    assert max(calls) == 7
    fresh = Guard(**{**vars(guard), "posterior": convert(nn.Linear(2, 2), "map")})
    assert Engine(fresh).warm_up(7) is None


@pytest.mark.parametrize("count", [1, 3])
def test_requests_of_no_readable_row_alone(guard, count):
    answers = Engine(guard)([Requested(Batch([], None)) for _ in range(count)])
    assert [answer.lines for answer in answers] == [[]] * count
