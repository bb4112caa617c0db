"""Encodings of tables against a naive computation; labels; what is odd in new rows."""

import json
import math
from datetime import date

import pytest
import torch

from bayesify.data import Category, Labels, Number, Records, TableEncoding, load_records, stream

AGES = [30, "", 41.5, "52", None, "nan", 60, 33, "1e1", "7"]
CITIES = ["Lyon", "Oslo", "Lyon", "", "Rome", "Oslo", "Lyon", "Lyon", "Rome", "Oslo"]
TABLE = [
    {"id": f"u{i}", "age": age, "city": city, "same": "x", "label": "no" if i % 2 else "yes"}
    for i, (age, city) in enumerate(zip(AGES, CITIES, strict=True))
]


def stretched(records, size):
    return [Records.of(records[i : i + size], first=i + 1) for i in range(0, len(records), size)]


@pytest.mark.parametrize("size", [1, 3, 10])
def test_encoding_equals_a_naive_one(size):
    encoding = TableEncoding.fit(stretched(TABLE, size), "label", ignore=["id"])
    known = [float(age) for age in AGES if age not in ("", None, "nan")]
    mean = sum(known) / len(known)
    std = math.sqrt(sum((age - mean) ** 2 for age in known) / len(known))
    for row, inputs in zip(TABLE, encoding.encode(Records.of(TABLE)).inputs, strict=True):
        missing = row["age"] in ("", None, "nan")
        number = [0.0 if missing else (float(row["age"]) - mean) / std, float(missing)]
        city = [float(row["city"] == name) for name in ("Lyon", "Oslo", "Rome", "")]
        torch.testing.assert_close(inputs, torch.tensor(number + city))
    assert [column.name for column in encoding.columns] == ["age", "city"]
    assert encoding.width == 6
    assert "'same' is left out: it is always 'x'" in encoding.notes


def test_what_is_saved_encodes_alike():
    encoding = TableEncoding.fit(stretched(TABLE, 4), "label")
    again = TableEncoding.from_dict(json.loads(json.dumps(encoding.to_dict())))
    assert again == encoding
    records = Records.of(TABLE)
    assert torch.equal(again.encode(records).inputs, encoding.encode(records).inputs)


def test_kinds_of_columns():
    rows = [
        {"n": i, "text": f"t{i}", "bool": i % 2 == 0, "day": date(2020, 1, 1 + i % 3), "typo": "x" if i == 50 else i,
         "mixed": i if i % 2 else "many", "gone": None, "label": i % 3}
        for i in range(100)
    ]  # fmt: skip
    encoding = TableEncoding.fit([Records.of(rows)], "label")
    kinds = {column.name: type(column) for column in encoding.columns}
    assert kinds == {"n": Number, "bool": Category, "day": Category, "typo": Number}
    batch = encoding.encode(Records.of(rows), labels=True)
    assert [(error.row, error.text) for error in batch.errors] == [(51, "'x' in the column 'typo' is not a number")]
    assert len(batch) == 99
    assert 51 not in batch.rows
    assert encoding.labels.classes == ("0", "1", "2")


def test_new_rows_that_are_odd_are_told_and_encoded():
    encoding = TableEncoding.fit([Records.of([{"n": i, "c": "ab"[i % 2], "label": i % 2} for i in range(10)])], "label")
    batch = encoding.encode(Records.of([{"n": None, "c": "a"}, {"n": 4.5, "c": "z"}, {"n": math.inf, "c": "a"}]))
    torch.testing.assert_close(batch.inputs, torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert [remark.row for remark in batch.remarks] == [1, 2]
    assert "'c' is 'z', which it never was in training: it counts as none of the known" in batch.remarks[1].text
    assert [error.row for error in batch.errors] == [3]


def test_a_column_that_is_missing_in_a_new_file():
    encoding = TableEncoding.fit([Records.of([{"n": i, "label": i % 2} for i in range(10)])], "label")
    with pytest.raises(
        ValueError, match=r"training data had the column\(s\) 'n', which are missing here; here are 'm'"
    ):
        encoding.encode(Records.of([{"m": 1}]))
    with pytest.raises(ValueError, match=r"no column 'label' for the label; there are 'n'"):
        encoding.encode(Records.of([{"n": 1}]), labels=True)


def test_labels_that_training_never_saw_are_errors():
    encoding = TableEncoding.fit([Records.of([{"n": i, "label": "ab"[i % 2]} for i in range(10)])], "label")
    rows = [{"n": 1, "label": "b"}, {"n": 2, "label": "zebra"}, {"n": 3, "label": None}]
    batch = encoding.encode(Records.of(rows), labels=True)
    assert batch.targets.tolist() == [1]
    assert [error.text for error in batch.errors] == [
        "the training data have no label 'zebra', only 'a', 'b'",
        "it has no label ('label' is empty)",
    ]


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{"n": 1, "y": 2}], {}, r"no column 'label' for the label; there are 'n', 'y'"),
        ([{"n": 1, "label": None}], {}, "has no label in the training part"),
        ([{"n": i, "label": "a"} for i in range(4)], {}, "nothing to tell apart"),
        (
            [{"n": i, "label": i + 0.5} for i in range(60)],
            {},
            "60 different numbers in 60 rows.*--likelihood regression",
        ),
        ([{"n": i, "label": f"u{i}"} for i in range(1001)], {}, "more than 1000 different labels"),
        ([{"n": i, "label": "abc"[i % 3]} for i in range(9)], {"likelihood": "binary"}, "needs two labels"),
        (
            [{"n": i, "label": "abc"[i % 3]} for i in range(9)],
            {"classes": ["a", "b"]},
            "not among the given classes: 'c'",
        ),
        ([{"n": i, "label": "x"} for i in range(9)], {"likelihood": "regression"}, "no number in the training part"),
        ([{"n": 1, "label": "ab"[i % 2]} for i in range(9)], {}, "'n' is left out: it is always '1'"),
        ([{"label": "ab"[i % 2]} for i in range(9)], {}, "there is no other column"),
        ([], {}, "no row that can be read"),
    ],
)
def test_tables_that_cannot_be_learned_from(rows, options, said):
    with pytest.raises(ValueError, match=said):
        TableEncoding.fit([Records.of(rows)], "label", **options)


def test_numbers_as_labels_are_standardised_or_not():
    values = [3.0, 5.0, 10.0, "x"]
    records = [Records.of([{"y": value} for value in values])]
    labels = Labels.fit(records, "y", likelihood="regression")
    assert (labels.mean, labels.std) == pytest.approx((6.0, math.sqrt(26 / 3)))
    targets, wrong = labels.encode(values)
    torch.testing.assert_close(targets[:3, 0] * labels.std + labels.mean, torch.tensor(values[:3]))
    assert wrong == {3: "the label 'x' is not a number"}
    raw = Labels.fit(records, "y", likelihood="regression", scaled=False)
    assert raw.encode([4])[0].tolist() == [[4.0]]


def test_classes_sort_as_numbers_and_are_one_whatever_their_type():
    labels = Labels.fit([Records.of([{"y": value} for value in ("10", 9, 9.0, "b", "a")])], "y")
    assert labels.classes == ("9", "10", "a", "b")
    assert labels.encode(["9", 10.0, "b"])[0].tolist() == [0, 1, 3]
    assert Labels.from_dict(labels.to_dict()) == labels
    binary = Labels.fit([Records.of([{"y": value} for value in "ab"])], "y", likelihood="binary")
    assert (binary.outputs, binary.encode(["b"])[0].tolist()) == (1, [[1.0]])


def test_a_stream_and_a_data_set_are_the_same_rows(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("n,label\n" + "".join(f"{i % 7},{'ab'[i % 2]}\n" for i in range(50)) + "oops,a\n")
    encoding = TableEncoding.fit([Records.of([{"n": i, "label": "ab"[i % 2]} for i in range(7)])], "label")
    batches = list(stream(path, encoding, size=8, labels=True))
    assert max(map(len, batches)) == 8
    told = []
    from bayesify.data import read_records

    whole = load_records(read_records(path), encoding, each=told.append)
    assert torch.equal(torch.cat([batch.inputs for batch in batches if len(batch)]), whole.inputs)
    assert torch.equal(torch.cat([batch.targets for batch in batches if len(batch)]), whole.targets)
    assert [error.row for batch in told for error in batch.errors] == [51]
    with pytest.raises(ValueError, match="Not one row can be used; row 1: 'x' in the column 'n'"):
        load_records([Records.of([{"n": "x", "label": "a"}])], encoding)


def test_numbers_far_from_training_are_told_and_raw_ones_are_not():
    table = [Records.of([{"age": 30 + i % 20, "label": i % 2} for i in range(100)])]
    mean, std = 39.5, (sum((i - 9.5) ** 2 for i in range(20)) / 20) ** 0.5
    near, far = mean + 19.9 * std, mean - 20.1 * std
    new = Records.of([{"age": near}, {"age": far}, {"age": None}])
    batch = TableEncoding.fit(table, "label").encode(new)
    assert [remark.row for remark in batch.remarks] == [2, 3]
    assert batch.remarks[0].text == f"'age' is {far:.4g}, -20 standard deviations from training's mean"
    assert [remark.row for remark in TableEncoding.fit(table, "label", scaled=False).encode(new).remarks] == [3]
