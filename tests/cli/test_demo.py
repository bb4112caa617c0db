import json
from dataclasses import dataclass

import pytest
import torch

import bayesify as library
from bayesify.cli.demo import read_data
from bayesify.data import read_digits


@pytest.mark.slow
def test_every_method_is_in_the_table_and_a_failure_stops_no_other(bayesify, tmp_path, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Broken(library.MAP):
        name = "broken"

        def build(self, network, selection):
            raise ValueError("This one never works.\nAnd a second line.")

    known = library.list_methods()
    monkeypatch.setattr("bayesify.cli.demo.list_methods", lambda: {"broken": Broken, **known})
    code, text, error = bayesify("demo", "--quick", "--out", tmp_path)
    rows = [line.partition("  ")[0] for line in text.splitlines()]
    for name in known:
        assert name in rows
        assert f"{name} + calibration" in rows
    assert rows.index("map") == min(rows.index(name) for name in known)
    assert "broken failed: This one never works.\n" in text
    assert code == 1
    for word in ("accuracy", "NLL", "Brier", "ECE", "AUROC photos", "AUROC noise", "fit", "predict"):
        assert word in text
    assert "training" in error  # the overall bar
    assert "epoch" in error  # the library's own
    report = tmp_path / "report.html"
    assert f"The report is in {report}." in text
    assert "This one never works." in report.read_text()


@pytest.mark.slow
def test_json_is_all_there_is_on_stdout(bayesify, tmp_path, monkeypatch):
    monkeypatch.setattr("bayesify.cli.demo.list_methods", lambda: {"map": library.MAP})
    code, text, _ = bayesify("demo", "--quick", "--out", tmp_path, "--json", "--quiet")
    found = json.loads(text)
    assert code == 0
    assert [row["name"] for row in found["evaluations"]] == ["map", "map + calibration"]
    assert found["evaluations"][0]["cost"]["fit_unit"] == "training"
    assert found["failures"] == []
    assert found["report"] == str(tmp_path / "report.html")


def test_a_report_that_cannot_be_written_costs_no_table(bayesify, tmp_path, monkeypatch):
    monkeypatch.setattr("bayesify.cli.demo.list_methods", lambda: {"map": library.MAP})
    (tmp_path / "report.html").mkdir()
    code, text, _ = bayesify("demo", "--quick", "--out", tmp_path, "--quiet")
    assert code == 1
    assert "map + calibration" in text
    assert "report failed: " in text


@pytest.mark.parametrize("seed", [0, 1])
def test_parts_of_the_data_are_disjoint_and_whole(seed):
    data = read_data(seed=seed, num_train=200)
    images = torch.cat([data.train.inputs, data.val.inputs, data.test.inputs])
    whole = torch.cat([read_digits(split).inputs for split in ("train", "val", "test")])
    assert len(data.train) == 200
    assert torch.equal(images.flatten(1).unique(dim=0), whole.flatten(1).unique(dim=0))
    assert len(images) == len(whole)
    assert torch.equal(data.val.inputs, read_digits("val").inputs)
    assert all(len(ood) == 500 for ood in data.ood.values())
