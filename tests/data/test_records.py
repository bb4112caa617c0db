"""Files of every kind, whole and damaged: what can be read is read, and the rest is named by its row."""

import gzip
import json
import tracemalloc

import pytest

from bayesify.data import Records, read_records


def rows_of(path, **options):
    """Return all rows as (number, record), and all errors by number."""
    found, errors = [], {}
    for records in read_records(path, **options):
        names = list(records.columns)
        found += list(zip(records.rows, zip(*records.columns.values(), strict=True), strict=True)) if names else []
        errors.update({remark.row: remark.text for remark in records.errors})
    return found, errors


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_table_is_read_a_stretch_at_a_time(tmp_path):
    path = written(tmp_path / "a.csv", "x,y\n" + "".join(f"{i},{i * i}\n" for i in range(10)))
    assert [len(records) for records in read_records(path, size=4)] == [4, 4, 2]
    found, errors = rows_of(path, size=3)
    assert found == [(i + 1, (str(i), str(i * i))) for i in range(10)]
    assert errors == {}


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_delimiters_quotes_and_marks_of_byte_order(tmp_path, mark):
    text = f'\ufeffname{mark}text\nann{mark}"two\nlines {mark} ""quoted"""\n\nbob{mark}é\n'
    assert rows_of(written(tmp_path / "a.csv", text))[0] == [
        (1, ("ann", f'two\nlines {mark} "quoted"')),
        (2, ("bob", "é")),
    ]


def test_ragged_rows_and_bytes_that_are_no_text_are_named(tmp_path):
    content = b"x,y\n1,2\n3\n4,5\n\xff\xfe,6\n7,8,9\n\n10,\xc3\xa9\n"
    found, errors = rows_of(written(tmp_path / "a.csv", content))
    assert found == [(1, ("1", "2")), (3, ("4", "5")), (6, ("10", "é"))]
    assert errors[2] == "it has 1 field(s) where the header has 2"
    assert errors[5] == "it has 3 field(s) where the header has 2"
    assert "not UTF-8" in errors[4]


def test_a_quote_that_is_not_closed_is_told_with_its_lines(tmp_path):
    found, errors = rows_of(written(tmp_path / "a.csv", 'x,y\n1,2\n"3,4\n5,6\n7,8\n'))
    assert found == [(1, ("1", "2"))]
    assert errors == {2: "it has 1 field(s) where the header has 2; it spans lines 3 to 5: is a quote not closed?"}


def test_json_lines_with_bad_lines_and_missing_keys(tmp_path):
    lines = ['{"a": 1}', "{", "[1]", "", '{"b": "x"}', '{"a": "\\u00e9", "b": null}']
    found, errors = rows_of(written(tmp_path / "a.jsonl", "\n".join(lines)))
    assert found == [(1, (1, None)), (4, (None, "x")), (5, ("é", None))]
    assert "no JSON:" in errors[2]
    assert errors[3] == "it is no JSON object {...}"
    content = b'{"a": "\xff"}\n{"a": "y"}\n'
    found, errors = rows_of(written(tmp_path / "b.jsonl", content))
    assert (found, list(errors)) == ([(2, ("y",))], [1])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "x,y\n", "a header, but no rows"),
        ("a.csv", "x,x\n1,2\n", "several columns of one name: 'x'"),
        ("a.csv", b"\xff\xfex\0,\0y\0", "UTF-16"),
        ("a.csv", b"\xe9,y\n1,2\n", "not UTF-8"),
        ("a.csv", "\n1,2\n", "header of .* is empty"),
        ("a.csv.gz", "x,y\n1,2\n", "cannot be unpacked"),
        ("a.parquet", "PAR1 and nothing else", "no whole Parquet file"),
        ("a.xlsx", "PK", "Save the sheet as CSV"),
        ("a.json", "[]", "one JSON object per line"),
        ("a.txt", "x", r"\*.csv, \*.tsv, \*.parquet, \*.jsonl"),
    ],
)
def test_files_of_which_nothing_can_be_read(tmp_path, name, content, said):
    with pytest.raises(ValueError, match=said):
        list(read_records(written(tmp_path / name, content)))


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        read_records(tmp_path / "none.csv")


def test_what_comes_before_the_end_of_a_truncated_file_is_read(tmp_path):
    text = "x,y\n" + "".join(f"{i},{i * 7919 % 99991}\n" for i in range(20_000))
    whole = gzip.compress(text.encode())
    found, errors = rows_of(written(tmp_path / "a.csv.gz", whole))
    assert (len(found), errors) == (20_000, {})
    found, errors = rows_of(written(tmp_path / "a.csv.gz", whole[: len(whole) // 2]))
    assert 1000 < len(found) < 20_000
    ((row, said),) = errors.items()
    assert row == len(found) + 1
    assert "damaged or truncated" in said


def test_parquet_is_read_as_the_table_it_was(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"x": [1, None, 3], "y": ["a", "b", None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet", size=2) == ([(1, (1, "a")), (2, (None, "b")), (3, (3, None))], {})
    content = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(ValueError, match="may be truncated"):
        list(read_records(written(tmp_path / "b.parquet", content[:-40])))
    bad = arrow.array([b"ok", b"\xff"]).cast(arrow.string(), safe=False)
    parquet.write_table(arrow.table({"y": bad}), tmp_path / "c.parquet")
    found, errors = rows_of(tmp_path / "c.parquet")
    assert (found, list(errors)) == ([(1, ("ok",))], [2])


def test_images_of_a_folder_are_rows(tmp_path):
    for name in ("b/2.png", "a/1.jpg", "a/deep/3.PNG", "a/.hidden.png", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert rows_of(tmp_path)[0] == [(1, ("a/1.jpg", "a")), (2, ("a/deep/3.PNG", "a")), (3, ("b/2.png", "b"))]
    assert rows_of(tmp_path / "b")[0] == [(1, ("2.png",))]
    (tmp_path / "lost.png").touch()
    with pytest.raises(ValueError, match=r"lost\.png, beside those in sub-folders"):
        list(read_records(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no image"):
        list(read_records(tmp_path / "empty"))


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(rows):
        path = written(tmp_path / "a.jsonl", "".join(json.dumps({"x": i}) + "\n" for i in range(rows)))
        tracemalloc.start()
        for records in read_records(path, size=100):
            assert isinstance(records, Records)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(8000) < 1.5 * peak(1000)
