"""`bayesify guard` and `bayesify decide`: a line for each row, whatever the rows, and after any interruption."""

import io
import json
import sys

import pytest
import torch

from bayesify.cli import main
from bayesify.data import read_digits
from bayesify.files import load_guard
from tests.files.makers import make_images

COLUMNS = "length,width,kind"


def table(path, count, seed=0):
    """Two kinds of leaves, told apart by their length; some lie between."""
    generator = torch.Generator().manual_seed(seed)
    lines = [COLUMNS]
    for i in range(count):
        length, width = torch.randn(2, generator=generator).tolist()
        lines.append(f"{length + 3.5 * (i % 2):.4f},{width:.4f},{('oak', 'ash')[i % 2]}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A guard from the command line, the table it was made of, and what was said."""
    folder = tmp_path_factory.mktemp("guard")
    rows = table(folder / "leaves.csv", 600)
    fit = ["fit", "--data", rows, "--label", "kind", "--method", "map", "--epochs", "0", "--out", folder / "posterior"]
    more = ["--train-epochs", "20", "--train-lr", ".02", "--shares", ".2,.1,.7", "--batch-size", "16"]
    assert main([str(word) for word in [*fit, *more, "--quiet"]]) == 0
    guard = ["guard", "--posterior", folder / "posterior", "--data", rows, "--max-risk", ".15", "--quiet"]
    assert main([str(word) for word in [*guard, "--out", folder / "guard"]]) == 0
    return folder / "guard", rows


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_guard_is_made_of_the_part_that_nobody_looked_at(made, bayesify, tmp_path):
    folder, _ = made
    guarded = load_guard(folder)
    assert guarded.guard.class_names == ("ash", "oak")
    # 70 % of 600 rows are the test part, half of which promises.
    assert guarded.guard.numbers["choosing"] + guarded.guard.numbers["promising"] == 420
    other = table(tmp_path / "other.csv", 300, seed=1)
    words = ("guard", "--posterior", folder.parent / "posterior", "--data", other, "--max-risk", ".2", "--by-class")
    code, out, err = bayesify(*words, "--json", "--quiet", "--out", tmp_path / "g")
    assert code == 0, err
    assert json.loads(out)["choosing"] == json.loads(out)["promising"] == 150
    assert load_guard(tmp_path / "g").guard.sets.condition == "class"


def test_every_row_has_a_line_in_the_order_of_the_file(made, bayesify, tmp_path):
    folder, _ = made
    new = tmp_path / "new.csv"
    new.write_text("id,length,width\na,-1,0\nb,long,0\nc,1.75,0\nd\ne,4.5,\nf,900,-900\n")
    code, out, err = bayesify("decide", folder, "--data", new, "--keep", "id", "--batch-size", "4", "--quiet")
    found = lines(out)
    assert (code, err) == (0, "")
    assert [line["row"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line.get("id") for line in found] == ["a", "b", "c", None, "e", "f"]
    assert found[0]["verdict"] == "answer"
    assert found[0]["label"] == "oak"
    assert found[0]["prediction_set"] == ["oak"]
    assert found[1] == {"row": 2, "id": "b", "verdict": "unreadable", "error": found[1]["error"]}
    assert "'long' in the column 'length' is not a number" in found[1]["error"]
    assert found[3]["error"] == "it has 1 field(s) where the header has 3"
    assert "missing" in found[4]["remark"]
    guarded = load_guard(folder)
    alone = guarded.guard(guarded.encoding.encode(next(_records(new))).inputs)
    kept = [line for line in found if line["verdict"] != "unreadable"]
    assert [line["verdict"] for line in kept] == alone.verdict
    assert [line["reason"] for line in kept] == alone.reason
    assert torch.allclose(torch.tensor([line["total"] for line in kept]), alone.total, atol=1e-6)
    assert bayesify("decide", folder, "--data", new, "--strict", "--quiet")[0] == 1


def _records(path):
    from bayesify.data import read_records

    return read_records(path)


def test_standard_input_is_read_as_it_comes(made, bayesify, monkeypatch, capsys):
    folder, _ = made
    text = b'{"length": -1, "width": 0}\nnothing\n{"length": 4.5, "width": 0}\n'

    class Stdin:
        buffer = io.BytesIO(text)

    monkeypatch.setattr(sys, "stdin", Stdin)
    code, out, err = bayesify("decide", folder, "--data", "-", "--batch-size", "1")
    assert code == 0
    assert [line["verdict"] for line in lines(out)] == ["answer", "unreadable", "answer"]
    assert err == "3 rows: 2 answer, 1 unreadable\n"
    Stdin.buffer = io.BytesIO(b"length,width\n-1,0\n")
    assert lines(bayesify("decide", folder, "--data", "-", "--form", "csv", "--quiet")[1])[0]["label"] == "oak"
    Stdin.buffer = io.BytesIO(b"")
    assert bayesify("decide", folder, "--data", "-", "--form", "csv") == (0, "", "There were no rows.\n")


@pytest.mark.parametrize(("form", "torn"), [("csv", 0), ("csv", 7), ("csv", 100), ("parquet", 7)])
def test_an_interrupted_run_ends_in_the_same_file(made, bayesify, tmp_path, monkeypatch, form, torn):
    folder, rows = made
    if form == "parquet":
        pandas = pytest.importorskip("pandas")
        rows = tmp_path / "rows.parquet"
        pandas.read_csv(made[1]).to_parquet(rows, row_group_size=50)
    words = ["decide", folder, "--data", rows, "--batch-size", "64", "--skip", "10", "--quiet"]
    assert bayesify(*words, "--out", tmp_path / "whole.jsonl")[0] == 0
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert len(whole.splitlines()) == 590

    from bayesify.cli import _resuming

    write, written = _resuming.Lines.write, []

    def die(self, some):
        if len(written) == 4:
            self.file.write('{"row": 5000'[:torn] * (torn // 2))  # a part of what should come
            self.file.flush()
            raise KeyboardInterrupt
        written.append(write(self, some))

    monkeypatch.setattr(_resuming.Lines, "write", die)
    out = tmp_path / "again.jsonl"
    assert bayesify(*words, "--out", out)[0] == 130
    assert not out.exists()
    monkeypatch.setattr(_resuming.Lines, "write", write)
    code, _, err = bayesify(*words, "--out", out)
    assert code == 1
    assert "--resume" in err
    code, _, err = bayesify(*words[:-3], "--out", out, "--resume")
    assert code == 1
    assert "begun with another guard" in err
    code, said, err = bayesify(*words, "--out", out, "--resume")
    assert (code, err) == (0, "Going on after 246 lines that are there.\n")
    assert said.startswith("590 rows: ")
    assert out.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []
    assert bayesify(*words, "--out", out, "--resume")[0] == 1


def test_images_of_a_folder_name_their_files(bayesify, tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "photos").mkdir()
    photos = make_images(tmp_path / "photos", 160)
    words = ("--data", photos, "--model", "tests.cli.nets:make_pixels", "--image-size", "8", "--quiet")
    shares = ("--shares", ".2,.1,.7", "--method", "map", "--train-epochs", "10", "--train-lr", ".01")
    shares += ("--batch-size", "8")
    code, _, err = bayesify("guard", *words, *shares, "--max-risk", ".2", "--out", tmp_path / "guard")
    assert code == 0, err
    (photos / "dark" / "0.png").write_bytes(b"no image")
    code, out, err = bayesify("decide", tmp_path / "guard", "--data", photos, "--quiet")
    assert code == 2
    assert "--model tests.cli.nets:make_pixels" in err
    code, out, err = bayesify(
        "decide", tmp_path / "guard", "--data", photos, "--model", "tests.cli.nets:make_pixels", "--quiet"
    )
    found = lines(out)
    assert (code, err) == (0, "")
    assert len(found) == 160
    assert found[0]["file"] == "dark/0.png"
    assert found[0]["verdict"] == "unreadable"
    assert found[-1]["file"].startswith("light/")
    assert found[-1]["label"] == "light"


def test_numbers_are_in_their_own_units(bayesify, tmp_path):
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([torch.rand(600, generator=generator), torch.randn(600, generator=generator)], 1).tolist()
    rows = ["x,price", *(f"{x},{1000 + 5000 * x + 200 * x * noise}" for x, noise in draws)]
    path = tmp_path / "prices.csv"
    path.write_text("\n".join(rows))
    words = ("--data", path, "--label", "price", "--likelihood", "regression", "--shares", ".3,.1,.6", "--quiet")
    noise = ("--method", "mc-dropout", "--epochs", "0", "--train-epochs", "20", "--train-lr", ".01")
    rule = ("--tolerance", "2000", "--max-risk", ".1", "--num-draws", "8")
    code, out, err = bayesify("guard", *words, *noise, *rule, "--out", tmp_path / "guard")
    assert code == 0, err
    assert "unit of 'price'" in out
    code, out, _ = bayesify("decide", tmp_path / "guard", "--data", path, "--quiet")
    found = lines(out)
    prices = torch.tensor([float(row.split(",")[1]) for row in rows[1:]])
    low, high, mean = (torch.tensor([line[name] for line in found]) for name in ("low", "high", "mean"))
    assert ((mean - prices).abs().mean() / prices.std()) < 0.5
    assert 0.9 < float(((low <= prices) & (prices <= high)).double().mean()) <= 1
    std, total = (torch.tensor([line[name] for line in found]) for name in ("std", "total"))
    assert torch.allclose(std**2, total, rtol=1e-4)
    answered = next(line for line in found if line["verdict"] == "answer")
    assert "are off by more than 2000" in answered["reason"]


def test_a_guard_of_ones_own_is_told_how_rows_become_inputs(bayesify, model, tmp_path):
    words = ("--data", "digits", "--split", "val", "--method", "map", "--max-risk", ".1")
    code, _, err = bayesify("guard", *words, *model, "--out", tmp_path / "guard")
    assert code == 0, err
    code, out, err = bayesify("decide", tmp_path / "guard", "--data", "digits", *model)
    found = lines(out)
    assert (code, len(found)) == (0, len(read_digits("test")))
    assert [line["row"] for line in found] == list(range(1, len(found) + 1))
    right = sum(
        line["label"] == target for line, target in zip(found, read_digits("test").targets.tolist(), strict=True)
    )
    assert right > 0.9 * len(found)
    rest = lines(bayesify("decide", tmp_path / "guard", "--data", "digits", "--skip", "300", *model)[1])
    assert [line["row"] for line in rest] == list(range(301, 361))
    assert [line["verdict"] for line in rest] == [line["verdict"] for line in found[300:]]
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    code, _, err = bayesify("decide", tmp_path / "guard", "--data", path, *model)
    assert code == 2
    assert "--column NAME" in err


def test_mistakes_are_told(made, bayesify, tmp_path):
    folder, rows = made
    for words, code, said in (
        (("decide", folder, "--data", rows, "--json"), 2, "--json needs --out"),
        (("decide", folder, "--data", rows, "--out", "x.csv"), 2, "must end in .jsonl"),
        (("decide", tmp_path, "--data", rows), 2, "is no guard"),
        (("decide", folder, "--data", tmp_path / "none.csv"), 1, "There is no file or folder"),
        (("decide", folder, "--data", rows, "--resume", "--out", tmp_path / "y.jsonl"), 1, "nothing to go on with"),
        (
            ("guard", "--posterior", folder.parent / "posterior", "--data", rows, "--out", "g", "--max-risk", "1e-4"),
            1,
            "",
        ),
    ):
        found, _, err = bayesify(*words, "--quiet")
        assert found == code, err
        assert said in err
