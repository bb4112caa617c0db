"""Parts of a file by seed and by column."""

import pytest

from bayesify.data import Parts, Records


def parts_of(parts, rows):
    return parts.of(Records(rows, {}))


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("shares", [(0.7, 0.15, 0.15), (8, 1, 1), (0.5, 0.5, 0), (0.9, 0.03, 0.07)])
def test_shares_are_met(shares, seed):
    names = parts_of(Parts(shares, seed), list(range(1, 4001)))
    for name, share in zip(("train", "val", "test"), shares, strict=True):
        assert names.count(name) / 4000 == pytest.approx(share / sum(shares), abs=0.01)


def test_a_row_is_in_its_part_whatever_is_read_with_it():
    parts = Parts(seed=5)
    whole = parts_of(parts, list(range(1, 101)))
    assert [parts_of(parts, [row])[0] for row in range(1, 101)] == whole
    assert parts_of(Parts(seed=6), list(range(1, 101))) != whole
    assert Parts.from_dict(parts.to_dict()) == parts


def test_parts_are_these_on_every_machine():
    """A saved posterior finds its test rows again."""
    letters = "".join(name[1] for name in parts_of(Parts(), list(range(1, 41))))
    assert letters == "rrrerrrrrerrrerrraaarrerrrerrrrrraarrrae"


def test_neighbours_are_independent_of_where_they_stand():
    """In blocks of twenty every place is as likely to be of the test part."""
    names = parts_of(Parts(seed=1), list(range(1, 20_001)))
    counts = [sum(names[place::20][i] == "test" for i in range(1000)) for place in range(20)]
    assert all(abs(count - 150) < 5 * (150 * 0.85) ** 0.5 for count in counts)  # false alarms: 1 in 10^5


def test_a_column_says_what_is_what():
    records = Records.of([{"set": "Train"}, {"set": " valid"}, {"set": "test"}, {"set": "other"}, {"set": None}])
    parts = Parts(column="set")
    assert parts.of(records) == ["train", "val", "test", "", ""]
    assert [remark.row for remark in parts.remarks(records)] == [4, 5]
    assert [part.rows for part in parts.select([records], "val")] == [[2]]
    with pytest.raises(ValueError, match=r"no column 'fold'.*there are 'set'"):
        Parts(column="fold").of(records)


@pytest.mark.parametrize("shares", [(0.0, 0.5, 0.5), (1.0, -0.1, 0.1), (1.0, float("nan"), 0.0)])
def test_shares_that_are_none(shares):
    with pytest.raises(ValueError, match="three numbers"):
        Parts(shares)
