from __future__ import annotations

import json

import pytest
import torch

from experiments.data import TextSplit, read_clinc150, read_sst2, read_table
from tests.experiments.data.makers import write


def test_columns_by_name_in_a_quoted_csv(tmp_path):
    content = 'id,intent,text\r\n1,b,"a, ""quoted""\nline"\r\n\r\n2,a,plain\r\n'
    path = write(tmp_path / "a.csv", b"\xef\xbb\xbf" + content.encode())
    split = read_table(path, text="text", label="intent")
    assert split.texts == ('a, "quoted"\nline', "plain")
    assert split.labels.tolist() == [1, 0]
    assert split.label_names == ("a", "b")


def test_columns_by_index_in_a_packed_tsv_keep_quotation_marks(tmp_path):
    path = write(tmp_path / "a.tsv.gz", '10\the said "hi\n2\tü\n10\tbye"\n'.encode())
    split = read_table(path, text=1, label=0, header=False)
    assert split.texts == ('he said "hi', "ü", 'bye"')
    assert split.label_names == ("2", "10")  # whole numbers sort as numbers
    assert split.labels.tolist() == [1, 0, 1]


def test_given_names_fix_the_labels_of_every_file(tmp_path):
    path = write(tmp_path / "a.txt", b"t;l\nx;b\n")
    options = {"text": "t", "label": "l", "delimiter": ";"}
    assert read_table(path, **options, label_names=["a", "b"]).labels.tolist() == [1]
    with pytest.raises(ValueError, match=r"label 'b', which is none of \['a'\]"):
        read_table(path, **options, label_names=["a"])


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (b"", {}, "0 columns called 't'"),
        (b"t,l\n", {}, "no rows below its header"),
        (b"t,l\na,b\nc\n", {}, "line 3: 1 columns, but column 1"),
        (b"x,l\na,b\n", {}, r"0 columns called 't'; its columns are \['x', 'l'\]"),
        (b"t,t,l\na,a,b\n", {}, "2 columns called 't'"),
        (b"a,b\n", {"header": False}, "header=False: give its index"),
        (b"t,l\na,b\n", {"text": -1}, "count from 0"),
        (b"t,l\n\xff,b\n", {}, r"not UTF-8 text \(byte 4\)"),
        (b't,l\n"a,b\n', {}, "line 2: unexpected end of data"),
        (b"t,l\na,b\n", {"delimiter": ", "}, "one character"),
    ],
)
def test_a_bad_table_is_described(tmp_path, content, options, says):
    with pytest.raises(ValueError, match=says):
        read_table(write(tmp_path / "a.csv", content), **{"text": "t", "label": "l", **options})


def test_an_unknown_suffix_needs_a_delimiter(tmp_path):
    with pytest.raises(ValueError, match="give the delimiter"):
        read_table(write(tmp_path / "a.dat", b"t,l\na,b\n"), text="t", label="l")


def test_sst2(tmp_path):
    split = read_sst2(write(tmp_path / "dev.tsv.gz", b'a fine film\t1\n"dull\t0\n'))
    assert list(split) == [("a fine film", 1), ('"dull', 0)]
    assert split.label_names == ("negative", "positive")
    with pytest.raises(ValueError, match=r"label '2', which is none of \['0', '1'\]"):
        read_sst2(write(tmp_path / "odd.tsv", b"a\t2\n"))


CLINC = {
    "train": [["t1", "pay"], ["t2", "book"]],
    "val": [["v", "pay"]],
    "test": [["x", "book"]],
    "oos_train": [["o1", "oos"]],
    "oos_val": [["o2", "oos"]],
    "oos_test": [["o3", "oos"], ["o4", "oos"]],
}


def test_clinc150_labels_agree_and_out_of_scope_has_none(tmp_path):
    path = write(tmp_path / "a.json.gz", json.dumps(CLINC).encode())
    assert list(read_clinc150(path, "val")) == [("v", 1)]
    assert list(read_clinc150(path, "test")) == [("x", 0)]
    ood = read_clinc150(path, "oos_test")
    assert list(ood) == [("o3", -1), ("o4", -1)]
    assert ood.label_names == ("book", "pay")
    with pytest.raises(ValueError, match="not 'dev'"):
        read_clinc150(path, "dev")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"train": 3}', b'{"train": [["a"]]}'])
def test_another_json_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match=r"not CLINC150's data_full\.json"):
        read_clinc150(write(tmp_path / "a.json", content), "train")


def test_texts_and_labels_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="1 texts but 2 labels"):
        TextSplit(("a",), torch.tensor([0, 0]), ("x",))
    for label in (-2, 1):
        with pytest.raises(ValueError, match=f"labels go from {label} to {label}"):
            TextSplit(("a",), torch.tensor([label]), ("x",))
