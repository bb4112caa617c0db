"""Tables by path: every command, and what is said of files that are not as they should be."""

import csv
import json

import pytest
import torch

import bayesify as library
from bayesify.cli._files import Tally
from bayesify.data import Parts, Records, Remark
from bayesify.files import load
from tests.cli.nets import unboxed

QUICK = ("--train-epochs", 3, "--quiet")


def table(rows=200, *, wrong=True):
    """Return lines of a table with a number, a category, a name, and two lines that cannot be read."""
    generator = torch.Generator().manual_seed(0)
    lines = ["name,age,plan,label"]
    for i, value in enumerate(torch.randn(rows, generator=generator).tolist()):
        plan = ("basic", "plus", "")[i % 3]
        lines.append(f"u{i},{50 + 10 * value:.2f},{plan},{'yes' if value + (i % 3 == 0) > 0.3 else 'no'}")
    if wrong:
        lines[21] = "u20,3"
        lines[34] = "u33,old,plus,yes"
    return lines


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("table") / "table.csv"
    found.write_text("\n".join(table()))
    return found


@pytest.fixture(scope="session")
def folder(path):
    """A posterior that was fitted on the table."""
    from bayesify.cli import main

    out = path.parent / "posterior"
    words = ["fit", "--data", path, "--method", "mc-dropout", "--epochs", 1, *QUICK, "--out", out]
    assert main([str(word) for word in words]) == 0
    return out


def test_fit_says_which_rows_it_left_out(bayesify, path, tmp_path):
    out = tmp_path / "posterior"
    code, text, error = bayesify("fit", "--data", path, "--method", "map", *QUICK, "--out", out, "--json")
    assert code == 0, error
    assert json.loads(text)["unread_rows"] == len(error.splitlines()) - 1 == 2
    assert "2 row(s) could not be used" in error
    assert "row 21: it has 2 field(s) where the header has 4" in error
    assert "row 34: 'old' in the column 'age' is not a number" in error
    assert bayesify("fit", "--data", path, "--method", "map", *QUICK, "--out", out, "--strict")[0] == 1
    assert {one.name for one in out.iterdir()} >= {"config.json", "files.json", "network.safetensors"}


def test_fit_says_what_it_does_with_columns(bayesify, path, tmp_path):
    words = ("--data", path, "--method", "map", "--train-epochs", 0, "--out", tmp_path / "posterior")
    error = bayesify("fit", *words)[2]
    assert "table, network mlp" in error
    assert "'name' is left out: it has more than 50 different texts" in error
    assert "'plan' is one of 2 categories, " in error
    assert "the label 'label' is one of 2: no, yes" in error
    error = bayesify("fit", *words, "--ignore", "age", "--ignore", "name")[2]
    assert "'age'" not in error


def test_predict_writes_a_line_for_each_row(bayesify, path, folder, tmp_path):
    out = tmp_path / "predictions.csv"
    code, text, error = bayesify(
        "predict", "--posterior", folder, "--data", path, "--out", out, "--quiet", "--num-draws", 3
    )
    assert (code, text) == (0, f"200 predictions are in {out}.\n")
    assert "2 row(s) could not be used" in error
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [int(row["row"]) for row in rows] == list(range(1, 201))
    assert [row["row"] for row in rows if row["error"]] == ["21", "34"]
    assert rows[20]["label"] == ""
    fitted = load(folder)
    lines = [dict(zip(("name", "age", "plan", "label"), line.split(","), strict=False)) for line in table()[1:]]
    good = [i for i in range(200) if i not in (20, 33)]
    inputs = fitted.encoding.encode(Records.of([lines[i] for i in good])).inputs
    found = library.predict(fitted.posterior, inputs, num_draws=3, seed=0)
    assert [rows[i]["label"] for i in good] == [("no", "yes")[label] for label in found.label.tolist()]
    epistemic = torch.tensor([float(rows[i]["epistemic"]) for i in good])
    torch.testing.assert_close(epistemic, found.epistemic, atol=1e-5, rtol=1e-4)
    assert epistemic.max() > 0


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_predictions_are_the_same_in_every_format(bayesify, path, folder, tmp_path, suffix):
    words = ("predict", "--posterior", folder, "--data", path, "--quiet", "--num-draws", 2, "--batch-size", 32)
    out = tmp_path / f"predictions.{suffix}"
    assert bayesify(*words, "--out", out)[0] == 0
    if suffix == "jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        rows = pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
    code, text, _ = bayesify(*words, "--json")
    assert code == 0
    assert json.loads(text)["predictions"] == rows
    shown = list(csv.DictReader(bayesify(*words)[1].splitlines()))
    assert [row["label"] for row in shown] == [row["label"] or "" for row in rows]
    assert list(tmp_path.iterdir()) == [out]  # nothing half-written stays


def test_evaluate_measures_the_test_part_of_its_own_file_and_all_of_another(bayesify, path, folder, tmp_path):
    words = ("evaluate", "--posterior", folder, "--quiet", "--json", "--data")
    found = json.loads(bayesify(*words, path)[1])
    names = Parts().of(Records([row for row in range(1, 201) if row not in (21, 34)], {}))
    assert (found["split"], found["examples"]) == ("test", names.count("test"))
    other = tmp_path / "other.csv"
    other.write_text("\n".join(table(wrong=False)))
    found = json.loads(bayesify(*words, other)[1])
    assert (found["split"], found["examples"]) == ("all", 200)
    assert found["metrics"]["accuracy"] > 0.6
    found = json.loads(bayesify(*words, other, "--split", "val")[1])
    assert (found["split"], found["examples"]) == ("val", 30)


def test_evaluate_finds_other_rows_by_path(bayesify, path, folder, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("age,plan\n" + "900,plus\n-900,basic\n" * 10)
    words = ("evaluate", "--posterior", folder, "--quiet", "--json", "--data", path, "--ood", other)
    code, text, error = bayesify(*words)
    assert code == 0, error
    assert f"auroc/{other}" in json.loads(text)["metrics"]


def test_a_label_that_training_never_saw(bayesify, folder, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("age,plan,label\n50,plus,yes\n51,plus,maybe\n30,gold,no\n" + "20,,no\n" * 5)
    code, text, error = bayesify("evaluate", "--posterior", folder, "--quiet", "--json", "--data", other)
    assert code == 0
    assert json.loads(text)["examples"] == 7
    assert "row 2: the training data have no label 'maybe', only 'no', 'yes'" in error
    assert "1 row(s) are odd:\n  row 3: 'plan' is 'gold', which it never was in training" in error


@pytest.mark.slow
def test_compare_and_report_take_posteriors_of_files(bayesify, path, folder, tmp_path):
    words = ("--data", path, "--quiet", "--num-draws", 2)
    found = json.loads(bayesify("compare", *words, "--posterior", folder, "--json")[1])
    assert [row["name"] for row in found["evaluations"]] == ["map", str(folder)]
    code, text, error = bayesify("compare", *words, "--method", "mc-dropout", "--epochs", 0, "--train-epochs", 1)
    assert code == 0, error
    assert "mc-dropout" in text
    code, _, error = bayesify("report", *words, "--posterior", folder, "--out", tmp_path / "report.html")
    assert code == 0, error
    assert "</html>" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_choose_saves_what_it_takes(bayesify, path, tmp_path):
    words = ("choose", "--data", path, *QUICK, "--passes", 1, "--out", tmp_path / "chosen")
    code, text, error = bayesify(*words)
    assert code == 0, error
    assert "<- chosen" in text
    assert "could not be used" in error
    code, text, error = bayesify("evaluate", "--posterior", tmp_path / "chosen", "--data", path, "--quiet", "--json")
    assert code == 0, error
    assert json.loads(text)["split"] == "test"


@pytest.mark.slow
def test_numbers_are_predicted_in_their_own_units(bayesify, tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("size,price\n" + "".join(f"{i},{1000 + 10 * i}\n" for i in range(100)))
    words = ("--data", path, "--label", "price", "--likelihood", "regression", "--train-epochs", 60, "--quiet")
    code, _, error = bayesify("fit", *words, "--method", "mc-dropout", "--epochs", 1, "--out", tmp_path / "p")
    assert code == 0, error
    words = ("predict", "--posterior", tmp_path / "p", "--data", path, "--json", "--quiet")
    rows = json.loads(bayesify(*words)[1])["predictions"]
    scaled = load(tmp_path / "p")
    found = library.predict(scaled.posterior, scaled.encoding.encode(Records.of([{"size": 50}])).inputs, seed=0)
    std = scaled.encoding.labels.std
    assert rows[50]["mean"] == pytest.approx(found.mean.item() * std + scaled.encoding.labels.mean, rel=1e-4)
    assert rows[50]["std"] == pytest.approx(found.std.item() * std, rel=1e-4)
    assert rows[50]["std"] ** 2 == pytest.approx(rows[50]["aleatoric"] + rows[50]["epistemic"], rel=1e-4)
    assert abs(rows[50]["mean"] - 1500) < 150


def test_a_network_of_ones_own(bayesify, path, tmp_path):
    own = ("--model", "tests.cli.nets:make_small", "--model-arg", "inputs=4")
    code, _, error = bayesify("fit", *own, "--data", path, "--method", "map", "--quiet", "--out", tmp_path / "p")
    assert code == 0, error
    assert not (tmp_path / "p" / "network.safetensors").exists()
    words = ("predict", "--posterior", tmp_path / "p", "--data", path, "--quiet", "--json")
    code, _, error = bayesify(*words)
    assert (code, "network of your own: give it again, --model tests.cli.nets:make_small" in error) == (2, True)
    assert bayesify(*words, *own)[0] == 0
    words = (
        "fit",
        *own,
        "--model-arg",
        "outputs=3",
        "--data",
        path,
        "--method",
        "map",
        "--quiet",
        "--out",
        tmp_path / "q",
    )
    code, _, error = bayesify(*words)
    assert (code, "3 outputs, and the training part 2 labels. Name the classes" in error) == (1, True)
    assert bayesify(*words, "--classes", "no,yes,other")[0] == 0


def test_parts_by_column(bayesify, tmp_path):
    path = tmp_path / "table.csv"
    parts = ["train"] * 150 + ["val"] * 30 + ["test"] * 17 + ["other"] * 3
    path.write_text(
        "\n".join(["set," + table()[0], *(f"{a},{b}" for a, b in zip(parts, table(wrong=False)[1:], strict=True))])
    )
    words = ("--data", path, "--quiet", "--json", "--split-column", "set")
    code, text, error = bayesify("fit", *words, "--train-epochs", 1, "--method", "map", "--out", tmp_path / "p")
    assert code == 0, error
    assert json.loads(text)["examples"] == 30
    assert "row 198: the column 'set' says none of train, val and test" in error
    found = json.loads(bayesify("evaluate", *words, "--posterior", tmp_path / "p")[1])
    assert found["examples"] == 17


def bad(tmp_path, content):
    path = tmp_path / "bad.csv"
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "words", "code", "said"),
    [
        ("", (), 1, "is empty"),
        ("age,label\n", (), 1, "a header, but no rows"),
        ("age,y\n1,2\n", (), 1, "no column 'label' for the label; there are 'age', 'y'. Name it with --label"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--split-column", "fold"), 1, "no column 'fold'"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--shares", "1,2"), 2, "--shares '1,2' are not three numbers"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--model", "timm:resnet10t"), 2, "no column 'file' with images"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--model", "hf:none"), 2, "no column 'text' with text"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--text", "age"), 2, "name a network, --model hf:FOLDER"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--model", "mlp", "--text", "age"), 2, "mlp is for table"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--text", "age", "--image", "age"), 2, "not both"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--model-arg", "checkpoint_path=x"), 1, "could name files or code"),
        ("age,label\n" + "1,a\n2,b\n" * 9, ("--model-arg", "hidden=0"), 1, "mlp cannot be made"),
    ],
)  # fmt: skip
def test_files_that_are_not_as_they_should_be(bayesify, tmp_path, content, words, code, said):
    path = bad(tmp_path, content)
    found, out, error = bayesify("fit", "--data", path, *words, "--method", "map", *QUICK, "--out", tmp_path / "p")
    assert (found, out) == (code, "")
    assert said in unboxed(error)
    assert "Traceback" not in error
    assert not (tmp_path / "p").exists()


def test_a_path_that_is_none(bayesify, tmp_path):
    words = ("--method", "map", "--out", tmp_path / "p", "--data")
    assert "There is no file or folder" in bayesify("fit", *words, tmp_path / "none.csv")[2]
    assert "a path (there is none of this name)" in bayesify("fit", *words, "nowhere")[2]
    assert "networks by name are for data by path" in bayesify("fit", *words, "digits")[2]
    code, _, error = bayesify("predict", "--posterior", tmp_path, "--data", bad(tmp_path, "x\n1\n"))
    assert (code, "has no files.json: it was not made from files" in error) == (1, True)
    words = ("predict", "--posterior", tmp_path, "--data", tmp_path / "bad.csv", "--out", "a.txt")
    assert "must end in .csv or .jsonl or .parquet" in bayesify(*words)[2]


def test_the_first_rows_are_told_in_order(capsys):
    tally = Tally()
    tally.add(Remark(row, "it is short") for row in range(40, 20, -2))
    tally.add([Remark(3, "it is odd"), Remark(40, "again"), Remark(25, "it is long")])
    tally.tell("could not be used")
    head, *lines, more = capsys.readouterr().err.splitlines()
    assert head == "12 row(s) could not be used:"
    assert [int(line.split()[1][:-1]) for line in lines] == [3, 22, 24, 25, 26, 28, 30, 32, 34, 36]
    assert more == "  and 2 more"


def test_an_error_has_a_line_of_its_own_beside_a_progress_bar(bayesify, path, tmp_path):
    words = ("fit", "--data", path, "--label", "lable", "--method", "map", "--out", tmp_path / "no")
    code, _, error = bayesify(*words)
    assert code == 1
    shown = error.replace("\r", "\n").splitlines()  # what a terminal has left of a line
    (line,) = (line for line in shown if "There is no column 'lable'" in line)
    assert line.startswith("bayesify fit: There")
