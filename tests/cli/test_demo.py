import json
from dataclasses import dataclass

import pytest
import torch

import bayesify as library
from bayesify.cli.demo import CHOSEN, FIVE, PLAIN, TEMPERED, read_data
from bayesify.data import read_digits


@pytest.fixture
def two_methods(monkeypatch):
    """The plain network and dropout, which takes a moment."""
    known = {"map": library.MAP, "mc-dropout": library.MCDropout}
    monkeypatch.setattr("bayesify.cli.demo.list_methods", lambda: known)
    return known


@pytest.mark.slow
def test_every_method_is_in_the_table_and_a_failure_stops_no_other(bayesify, tmp_path, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Broken(library.MAP):
        name = "broken"

        def build(self, network, selection):
            raise ValueError("This one never works.\nAnd a second line.")

    known = library.list_methods()
    monkeypatch.setattr("bayesify.cli.demo.list_methods", lambda: {"broken": Broken, **known})
    code, text, error = bayesify("demo", "--quick", "--all", "--out", tmp_path)
    rows = [line.partition("  ")[0] for line in text[text.index("The comparison") :].splitlines()]
    for name in known:
        assert (name in rows) == (name != "map")
    assert [row for row in rows if row.startswith(("the network", "choose"))] == [PLAIN, TEMPERED, CHOSEN]
    assert "broken failed: This one never works.\n" in text
    assert code == 1
    for word in ("accuracy", "NLL", "Brier", "ECE", "AUROC photos", "AUROC noise", "fit", "predict"):
        assert word in text
    for said in (
        "training a network on 100 digits",
        "swag: fitting it",
        "choose: trying",
        "guards",
        "drawing the report",
    ):
        assert said in error  # the line that says what is being done
    report = tmp_path / "report.html"
    assert f"The report is in {report}." in text
    assert "This one never works." in report.read_text()


@pytest.mark.slow
def test_the_story_comes_first_here_and_in_the_report(bayesify, two_methods, tmp_path):
    code, text, error = bayesify("demo", "--quick", "--out", tmp_path, "--quiet")
    assert code == 0, text
    assert error == ""
    chapters = (
        "Where is it wrong",
        "Who answers?",
        "One pass beside twenty draws",
        "Is it worth it?",
        "The comparison",
    )
    places = [text.index(chapter) for chapter in chapters]
    assert places == sorted(places)
    assert "mc-dropout, one pass" in text
    assert "No guard could be fitted." in text  # of fifty digits
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    sections = [page.index(f'<section id="{key}"') for key in ("mistakes", "passes", "worth", "comparison")]
    assert sections == sorted(sections)


@pytest.mark.slow
def test_json_is_all_there_is_on_stdout(bayesify, two_methods, tmp_path):
    code, text, _ = bayesify("demo", "--quick", "--out", tmp_path, "--json", "--quiet")
    found = json.loads(text)
    assert code == 0
    assert [row["name"] for row in found["evaluations"]] == [PLAIN, TEMPERED, CHOSEN, "mc-dropout"]
    assert found["evaluations"][3]["cost"]["fit_unit"] == "training"
    assert found["failures"] == []
    assert found["report"] == str(tmp_path / "report.html")
    told = found["story"]
    assert told["posterior"] == "mc-dropout"
    wrong = round((1 - found["evaluations"][0]["metrics"]["accuracy"]) * 100)
    assert (told["mistakes"], told["test"]) == (wrong, 100)
    assert told["gains"][0]["name"] == "mc-dropout"


def test_without_a_method_there_is_no_story_and_a_report_that_cannot_be_written_costs_no_table(
    bayesify, tmp_path, monkeypatch
):
    monkeypatch.setattr("bayesify.cli.demo.list_methods", lambda: {"map": library.MAP})
    (tmp_path / "report.html").mkdir()
    code, text, _ = bayesify("demo", "--quick", "--out", tmp_path, "--quiet")
    assert code == 1
    assert TEMPERED in text
    assert "Is it worth it?" not in text
    assert "report failed: " in text


def test_five_methods_are_compared():
    assert len(FIVE) == 5
    assert set(FIVE) <= set(library.list_methods())


@pytest.mark.parametrize("seed", [0, 1])
def test_parts_of_the_data_are_disjoint_and_whole(seed):
    data = read_data(seed=seed, num_train=100, num_val=600)
    images = torch.cat([data.train.inputs, data.val.inputs, data.test.inputs])
    whole = torch.cat([read_digits(split).inputs for split in ("train", "val", "test")])
    assert (len(data.train), len(data.val)) == (100, 600)
    assert torch.equal(images.flatten(1).unique(dim=0), whole.flatten(1).unique(dim=0))
    assert len(images) == len(whole)
    own = read_digits("val")
    assert torch.equal(data.val.inputs[: len(own)], own.inputs)
    assert all(len(ood) == 500 for ood in data.ood.values())
