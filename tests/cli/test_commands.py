"""Each command end to end, its figures against a direct computation."""

import csv
import inspect
import json
import re

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax, softmax

import bayesify as library
from bayesify.cli._arguments import read_command
from bayesify.cli._commands import COMMANDS
from bayesify.data import read_digits
from tests.cli.nets import make_network

NETS = "tests.cli.nets"


def fitted(bayesify, model, out, *more):
    code, text, error = bayesify(
        "fit", *model, "--data", "digits", "--method", "swag", "--epochs", 2, "--out", out, *more
    )
    assert code == 0, error
    return text


def test_version_and_help(bayesify):
    assert bayesify("--version") == (0, f"bayesify {library.__version__}\n", "")
    code, text, _ = bayesify("--help")
    assert code == 0
    assert all(
        word in text for word in ("demo", "fit", "choose", "evaluate", "predict", "compare", "report", "methods")
    )


@pytest.mark.parametrize("command", ["demo", "fit", "choose", "evaluate", "predict", "compare", "report", "methods"])
def test_help_of_each_command_has_examples(bayesify, command):
    code, text, _ = bayesify(command, "--help")
    assert code == 0
    assert f"Examples:\n  bayesify {command}" in text
    assert "exit codes" in text


def test_examples_in_help_texts_are_accepted():
    count = 0
    for command in COMMANDS.values():
        text = inspect.getdoc(command).replace("\\\n", " ").split("\n\n")[1]
        for line in re.findall(r"^  bayesify (.*)$", text, flags=re.M):
            words = re.split(r"\s{3,}(?=[a-z])|>", re.sub(r"\\?\s+--", " --", line))[0].split()
            if "--help" not in words:
                assert isinstance(read_command(words), command)
                count += 1
    assert count >= 10


def test_methods_lists_every_one(bayesify):
    code, text, _ = bayesify("methods", "--settings")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")] == list(library.list_methods())
    assert "rank=20" in text
    found = json.loads(bayesify("methods", "--json")[1])["methods"]
    assert found["swag"]["settings"]["rank"] == 20
    assert found["swag"]["summary"] == library.SWAG.__doc__.partition("\n")[0]


def test_evaluate_measures_the_plain_network(bayesify, model, network):
    code, text, _ = bayesify(
        "evaluate", *model, "--data", "digits", "--method", "map", "--ood", f"{NETS}:photos", "--json"
    )
    assert code == 0
    found = json.loads(text)
    test = read_digits("test")
    with torch.no_grad():
        logits = network(test.inputs)
    assert found["examples"] == len(test)
    assert found["metrics"]["nll"] == pytest.approx(cross_entropy(logits, test.targets).item(), rel=1e-5)
    accuracy = (logits.argmax(-1) == test.targets).double().mean().item()
    assert found["metrics"]["accuracy"] == pytest.approx(accuracy)
    assert accuracy > 0.9
    assert 0.5 < found["metrics"][f"auroc/{NETS}:photos"] <= 1
    shown = bayesify("evaluate", *model, "--data", "digits", "--method", "map")[1]
    assert f"nll                 {found['metrics']['nll']:.4f}" in shown


@pytest.mark.filterwarnings("ignore:The least NLL is at the least noise")  # of three draws, by chance
def test_fit_widens_without_training(bayesify, model, network, tmp_path):
    words = ("fit", *model, "--data", "digits", "--method", "bayes-adapter", "--epochs", 0, "--num-draws", 3)
    code, text, error = bayesify(*words, "--widen", "--out", tmp_path / "wide", "--json")
    assert code == 0, error
    found = json.loads(text)
    val = read_digits("val")
    loader = torch.utils.data.DataLoader(val, batch_size=128)
    posterior = library.convert(network, library.BayesAdapter(epochs=0))
    library.widen(posterior, loader, num_draws=3)
    assert found["widened"] == pytest.approx(posterior.widening.factor)
    loaded = library.load(tmp_path / "wide", network)
    probs = [library.predict(one, val.inputs[:20], num_draws=3).probs for one in (loaded, posterior)]
    assert torch.equal(*probs)


def test_compare_says_what_it_cannot_widen(bayesify, model):
    words = ("compare", *model, "--data", "digits", "--method", "deep-ensemble", "--epochs", 0, "--num-draws", 2)
    code, text, error = bayesify(*words, "--widen")
    assert code == 0, error
    assert "note: deep-ensemble: It is not widened: A network without noise" in text
    assert "map: It is not widened" not in text


def test_evaluate_shows_intervals_on_request(bayesify, model, network):
    words = ("evaluate", *model, "--data", f"{NETS}:few_digits", "--method", "map", "--intervals", 0.9)
    test = read_digits("test").part(slice(60))
    posterior = library.convert(network, "map")
    expected = library.evaluate(posterior, [(test.inputs, test.targets)]).interval("nll", 0.9)
    found = json.loads(bayesify(*words, "--json")[1])["intervals"]["nll"]
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high), rel=1e-5)
    assert re.search(
        rf"^nll +{expected.value:.4f}  \[{expected.low:.4f}, {expected.high:.4f}\]$", bayesify(*words)[1], re.MULTILINE
    )
    code, _, errors = bayesify(*words[:-1], 95)
    assert code == 2
    assert "--intervals 95.0 is no level between 0 and 0.998, such as 0.95." in " ".join(errors.split())


def test_compare_shows_paired_differences(bayesify, model, tmp_path):
    report = tmp_path / "comparison.html"
    words = ("--data", f"{NETS}:few_digits", "--method", "mc-dropout", "--num-draws", 3, "--intervals", 0.95)
    code, text, _ = bayesify("compare", *model, *words, "--report", report)
    assert code == 0
    assert "95% bootstrap intervals over 60 examples" in text
    assert "Differences to map, with paired 95% bootstrap intervals." in text
    assert "Is the difference more than chance?" in report.read_text()
    found = json.loads(bayesify("compare", *model, *words, "--json")[1])
    difference = found["comparison"]["differences"]["mc-dropout"]["nll"]
    plain, other = found["evaluations"]
    assert difference["value"] == pytest.approx(other["metrics"]["nll"] - plain["metrics"]["nll"])
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert f"{difference['value']:+.4f}" in text
    assert f"[{difference['low']:+.4f}, {difference['high']:+.4f}]" in text


def test_evaluate_calibrates_on_the_validation_part(bayesify, model, network):
    words = ("evaluate", *model, "--data", "digits", "--method", "map", "--calibrate", "--json")
    found = json.loads(bayesify(*words)[1])
    val, test = read_digits("val"), read_digits("test")
    with torch.no_grad():
        val_logits, test_logits = network(val.inputs), network(test.inputs)
    grid = torch.logspace(-1, 1, 4001).tolist()
    best = min(grid, key=lambda t: cross_entropy(val_logits / t, val.targets).item())
    expected = cross_entropy(test_logits / best, test.targets).item()
    assert found["metrics"]["nll"] == pytest.approx(expected, rel=1e-3)
    assert found["name"] == "map + calibration"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predict_writes_a_line_for_each_input(bayesify, model, network, tmp_path, suffix):
    out = tmp_path / f"predictions.{suffix}"
    words = ("predict", *model, "--data", "digits", "--split", "val", "--method", "map", "--out", out)
    assert bayesify(*words)[:2] == (0, f"359 predictions are in {out}.\n")
    lines = out.read_text().splitlines()
    rows = list(csv.DictReader(lines)) if suffix == "csv" else [json.loads(line) for line in lines]
    with torch.no_grad():
        probs = softmax(network(read_digits("val").inputs), -1)
    entropy = -(probs * probs.log()).sum(-1)
    assert [int(row["label"]) for row in rows] == probs.argmax(-1).tolist()
    assert [int(row["index"]) for row in rows] == list(range(359))
    for name, values in {"confidence": probs.amax(-1), "total": entropy, "aleatoric": entropy}.items():
        torch.testing.assert_close(torch.tensor([float(r[name]) for r in rows]), values, atol=1e-5, rtol=1e-4)
    assert all(abs(float(row["epistemic"])) < 1e-6 for row in rows)


def test_predict_answers_on_stdout(bayesify, model):
    words = ("predict", *model, "--data", f"{NETS}:few_digits", "--method", "mc-dropout", "--num-draws", 3)
    code, text, _ = bayesify(*words)
    table = list(csv.DictReader(text.splitlines()))
    found = json.loads(bayesify(*words, "--json")[1])["predictions"]
    assert code == 0
    assert len(table) == len(found) == 60
    assert [float(row["epistemic"]) for row in table] == [row["epistemic"] for row in found]
    assert max(row["epistemic"] for row in found) > 0
    assert json.loads(bayesify(*words, "--json", "--seed", 1)[1])["predictions"] != found


@pytest.mark.slow
def test_fit_saves_a_posterior_that_loads(bayesify, model, network, tmp_path):
    text = fitted(bayesify, model, tmp_path / "swag", "--set", "rank=3", "--calibrate", "--json")
    summary = json.loads(text)
    posterior = library.load(tmp_path / "swag", network)
    assert posterior.method == library.SWAG(rank=3, epochs=2)
    val = read_digits("val")
    with torch.no_grad():
        before = cross_entropy(network(val.inputs), val.targets).item()
    assert summary["before"]["nll"] == pytest.approx(before, rel=1e-5)
    prediction = library.predict(posterior, val.inputs, seed=0)
    nll = -prediction.log_probs[torch.arange(len(val)), val.targets].mean().item()
    assert summary["after"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert summary["split"] == "val"
    assert posterior.likelihood.temperature != 1
    shown = fitted(bayesify, model, tmp_path / "again", "--set", "rank=3", "--calibrate")
    assert re.search(rf"^nll +{before:.4f} -> {nll:.4f}$", shown, re.MULTILINE)


def test_fit_without_validation_data(bayesify, model, tmp_path):
    words = ("fit", *model, "--data", f"{NETS}:no_val", "--method", "map", "--out", tmp_path / "map")
    assert json.loads(bayesify(*words, "--json")[1])["split"] == "train"
    code, _, error = bayesify(*words, "--calibrate")
    assert code == 1
    assert "'val'" in error


@pytest.mark.slow
def test_fit_goes_on_from_a_checkpoint(bayesify, model, tmp_path):
    whole = json.loads(fitted(bayesify, model, tmp_path / "a", "--json"))
    words = ("--checkpoint", tmp_path / "state", "--json")
    first = json.loads(fitted(bayesify, model, tmp_path / "b", *words))
    again = json.loads(fitted(bayesify, model, tmp_path / "c", *words))
    assert whole["after"] == first["after"] == again["after"]
    assert any((tmp_path / "state").iterdir())


def test_a_network_with_random_weights_goes_on_from_its_checkpoint(bayesify, tmp_path):
    words = ("fit", "--model", f"{NETS}:make_network", "--data", f"{NETS}:few_digits", "--method", "map", "--epochs", 1,
             "--checkpoint", tmp_path / "state", "--quiet", "--out")  # fmt: skip
    for seed in (1, 2):
        torch.manual_seed(seed)
        code, _, error = bayesify(*words, tmp_path / str(seed))
        assert code == 0, error


@pytest.mark.slow
def test_saved_posteriors_evaluate_and_compare_alike(bayesify, model, tmp_path):
    fitted(bayesify, model, tmp_path / "swag")
    common = (*model, "--data", "digits", "--posterior", tmp_path / "swag", "--num-draws", 5, "--json")
    alone = json.loads(bayesify("evaluate", *common)[1])
    report = tmp_path / "out" / "report.html"
    code, text, _ = bayesify("report", *common, "--ood", f"{NETS}:photos", "--out", report)
    assert code == 0
    found = json.loads(text)
    assert [row["name"] for row in found["evaluations"]] == ["map", str(tmp_path / "swag")]
    assert found["evaluations"][1]["metrics"]["nll"] == alone["metrics"]["nll"]
    assert found["evaluations"][1]["cost"]["fit"] is None
    assert found["report"] == str(report)
    assert "</html>" in report.read_text()


@pytest.mark.slow
def test_compare_prints_every_method_and_what_failed(bayesify, model, tmp_path):
    report = tmp_path / "comparison.html"
    words = ("--data", f"{NETS}:few_digits", "--method", "mc-dropout", "--method", "swag", "--epochs", 1)
    words += ("--calibrate", "--num-draws", 3, "--posterior", tmp_path / "nowhere", "--report", report)
    code, text, _ = bayesify("compare", *model, *words)
    assert code == 1
    rows = [re.split(r"\s{2,}", line)[0] for line in text.splitlines()]
    calibrated = [f"{name}{more}" for name in ("map", "mc-dropout", "swag") for more in ("", " + calibration")]
    assert rows[1:7] == calibrated
    assert f"{tmp_path / 'nowhere'} failed: There is no file" in text
    assert "fit: in multiples of one epoch" in text
    assert f"The report is in {report}." in text
    assert "nowhere failed" in report.read_text()


def test_compare_leaves_the_plain_network_alone(bayesify, model, network):
    words = ("--data", f"{NETS}:few_digits", "--method", "deep-ensemble", "--set", "members=2", "--epochs", 1)
    found = json.loads(bayesify("compare", *model, *words, "--json")[1])
    test = read_digits("test").part(slice(60))
    with torch.no_grad():
        expected = cross_entropy(network(test.inputs), test.targets).item()
    plain, other = found["evaluations"]
    assert plain["metrics"]["nll"] == pytest.approx(expected, rel=1e-5)
    assert plain["cost"]["fit"] == 0
    assert other["cost"]["fit"] > 0
    assert found["failures"] == []


@pytest.mark.slow
def test_regression(bayesify, tmp_path):
    model = ("--model", f"{NETS}:make_regressor", "--data", f"{NETS}:line", "--quiet")
    words = (
        "--method",
        "map",
        "--likelihood",
        "regression",
        "--epochs",
        60,
        "--set",
        "lr=0.05",
        "--set",
        "optimizer=adam",
    )
    code, _, error = bayesify("fit", *model, *words, "--out", tmp_path / "line", "--batch-size", 10)
    assert code == 0, error
    found = json.loads(bayesify("evaluate", *model, "--posterior", tmp_path / "line", "--json")[1])
    assert 0.05 < found["metrics"]["rmse"] < 0.2  # the noise of the data is 0.1
    text = bayesify("predict", *model, "--posterior", tmp_path / "line")[1]
    rows = list(csv.DictReader(text.splitlines()))
    assert list(rows[0]) == ["index", "mean", "std", "aleatoric", "epistemic"]
    for row in rows:
        assert float(row["std"]) ** 2 == pytest.approx(float(row["aleatoric"]) + float(row["epistemic"]), rel=1e-4)


def test_the_network_of_the_tests_is_the_one_of_the_file(network, weights):
    fresh = make_network()
    x = read_digits("test").inputs[:2]
    with torch.no_grad():
        assert not torch.allclose(log_softmax(fresh(x), -1), log_softmax(network(x), -1))
