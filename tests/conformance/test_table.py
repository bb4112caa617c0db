"""What is tried: every method, every pair of a property, a method and a network."""

import itertools

import pytest

import bayesify
from tests.conformance.cases import CASES, EXAMPLES, fitted, has_mean, is_random, several_keys
from tests.conformance.conftest import cells, properties
from tests.conformance.pairs import covers, pairwise


def test_every_registered_method_has_a_row():
    assert {case.noisy.name for case in CASES} == set(bayesify.list_methods())
    assert len({case.name for case in CASES}) == len(CASES)


def test_rows_are_of_one_method_each():
    for case in CASES:
        assert type(case.noisy) is type(case.silent) is bayesify.list_methods()[case.noisy.name]


def test_what_posteriors_say_of_themselves():
    """Tests skip by these answers, so that a wrong one would go unseen."""
    posteriors = {case.name: fitted(case, EXAMPLES["mlp"]) for case in CASES}
    assert {name for name, one in posteriors.items() if not is_random(one)} == {"map"}
    without_mean = {"deep-ensemble", "abnn", "sgld, together"}
    assert {name for name, one in posteriors.items() if not has_mean(one)} == without_mean
    few = {name: len(several_keys(one, seed=0)) for name, one in posteriors.items()}
    assert {name: number for name, number in few.items() if number < 3} == {"map": 1, "deep-ensemble": 2}


def test_properties_are_found():
    assert len(properties()) > 10
    assert len(set(properties())) == len(properties())
    assert "test_a_draw_is_one_function" in properties()


def test_every_two_of_a_property_a_method_and_a_network_meet():
    rows = [(name, case, example) for name in properties() for case, example in cells(name)]
    assert covers(rows, properties(), CASES, list(EXAMPLES))
    assert len(rows) <= 1.2 * len(properties()) * len(CASES)  # and not by a full product


AXES = [
    ["ab"],
    ["ab", "xyz"],
    ["ab", "xy", "12"],
    ["abcde", "xyz", "1234", "pq"],
    [range(14), range(5), range(4), range(2), range(2)],
    ["a", "xyz", "1"],
]


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "x".join(str(len(axis)) for axis in axes))
def test_all_pairs_are_there_and_rows_are_few(axes):
    rows = pairwise(*axes)
    assert covers(rows, *axes)
    assert all(value in axis for row in rows for value, axis in zip(row, axes, strict=True))
    largest = sorted((len(axis) for axis in axes), reverse=True)
    least = largest[0] * largest[1] if len(axes) > 1 else 0
    assert least <= len(rows) <= 1.5 * least
    assert len(set(rows)) == len(rows)
    assert rows == pairwise(*axes)


def test_a_missing_pair_is_seen():
    axes = ("abc", "xy", "12")
    product = list(itertools.product(*axes))
    assert covers(product, *axes)
    assert not covers([row for row in product if (row[0], row[2]) != ("b", "2")], *axes)
    assert not covers([], *axes)
