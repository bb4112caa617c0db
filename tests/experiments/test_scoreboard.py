"""Tables, differences and pictures of the scoreboard, from rows that are made up."""

import json

import pytest
import torch

from experiments.board_tables import QUALITY, SHIFT, board, made_rows, uci
from experiments.configs.scoreboard import DRAWS, EXPERIMENTS
from experiments.examples import figures, save_columns
from experiments.run import examples_path
from experiments.scoreboard import BARS, Point, compare, draw, front, main, points

TASK = "scoreboard_cifar_resnet20"


def columns(seed: int, sharper: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    msp = torch.rand(80, generator=generator, dtype=torch.float64) ** sharper / 2
    right = torch.rand(80, generator=generator) > 0.2
    return {"log_prob": -msp, "correct": right, "msp": msp, "brier": msp**2}


def row(name: str, passes: int, seed: int = 0, **measures):
    return {"name": name, "seed": seed, "hash": name, "measures": {"passes": passes, **measures}}


def written(folder, rows) -> None:
    (folder / f"{TASK}.json").write_text(json.dumps({"rows": rows}))


@pytest.fixture
def results(tmp_path):
    rows = []
    for number, (name, passes) in enumerate([("plain + temperature", 1), (BARS[0], 2), ("ABNN, not fitted", 8)]):
        found = columns(0, 1 + number / 4)
        save_columns(examples_path(tmp_path, name, 0), found)
        told = {"auroc-total": 0.8, "fpr95-total": 0.5}
        rows.append(
            row(name, passes, test=figures(found), shift={"nll": 1.5 - number / 9, "ece": 0.1, "error": 0.3}, near=told)
        )
    rows[-1]["measures"]["near"]["auroc-epistemic"] = 0.75
    written(tmp_path, rows)
    return tmp_path


def test_differences_are_from_the_bar_on_the_same_examples(results, capsys):
    compare(TASK, work=results, results=results, resamples=30)
    pairs = json.loads((results / f"{TASK}_pairs.json").read_text())["rows"]
    assert [one["name"] for one in pairs] == ["plain + temperature", "ABNN, not fitted"]
    plain, bar = figures(columns(0, 1.0)), figures(columns(0, 1.25))
    found = pairs[0]["measures"]["nll"]
    assert found["difference"] == pytest.approx(plain["nll"] - bar["nll"], abs=1e-5)
    assert found["interval"][0] < found["difference"] < found["interval"][1]
    assert pairs[0]["config"]["bar row"] == BARS[0]
    before = (results / f"{TASK}_pairs.json").read_text()
    compare(TASK, work=results, results=results, resamples=30)
    assert (results / f"{TASK}_pairs.json").read_text() == before, "what is there is not made again"
    text = board(TASK, QUALITY, folder=results, first=True)
    assert "NLL − the bar's" in text.splitlines()[0]
    assert " to " in text.splitlines()[2]
    assert text.splitlines()[3].endswith("| |"), "the bar has no difference from itself"
    capsys.readouterr()


def test_a_table_shows_the_rows_that_are_there_in_the_order_of_the_configurations(results):
    assert list(made_rows(TASK, results)) == ["plain + temperature", BARS[0], "ABNN, not fitted"]
    lines = board(TASK, SHIFT, folder=results).splitlines()
    assert lines[0] == "| | near AUROC | near FPR95 | shift: error % | NLL | ECE % |", "nobody has far ones"
    assert lines[2] == "| plain + temperature | .800 | .500 | 30.0 | 1.500 | 10.0 |"
    assert lines[4].startswith("| ABNN, not fitted | .800 / .750 | .500 |")


def test_rows_older_than_the_cost_of_a_fit_have_it_where_nothing_was_fitted(tmp_path):
    costs = {
        "a": {"fit seconds": 0.0},
        "b": {"fit seconds": 9.0},
        "c": {"fit seconds": 9.0, "fit in plain epochs": 0.5},
    }
    names = dict(zip(costs, [config.name for config in EXPERIMENTS[TASK]], strict=False))
    written(tmp_path, [{**row(names[a], 1), "measures": {**row(names[a], 1)["measures"], **costs[a]}} for a in costs])
    lines = board(TASK, QUALITY, folder=tmp_path).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == [".00", "", ".50"]


def test_what_is_not_measured_says_how(tmp_path):
    assert board(TASK, QUALITY, folder=tmp_path) == f"Not measured yet: `python -m experiments.run {TASK}`."
    assert "scoreboard_uci_yacht" in uci("nll", folder=tmp_path)
    written(tmp_path, [{**row("plain", 1), "measures": {"failed": "a loss is not finite"}}])
    assert made_rows(TASK, tmp_path) == {}


def test_regression_has_a_column_for_each_table(tmp_path):
    for table, nll in (("energy", 1.0), ("yacht", 2.0)):
        found = [
            row("plain", 1, seed, test={"nll": nll + seed, "rmse": 3.0, "crps": 0.5, "coverage": 0.94})
            for seed in (0, 2)
        ]
        (tmp_path / f"scoreboard_uci_{table}.json").write_text(json.dumps({"rows": found}))
    assert uci("nll", folder=tmp_path).splitlines()[2] == "| plain | 1 | 2.00 ± 1.41 | 3.00 ± 1.41 |"
    assert "Not measured yet" in uci("apart", folder=tmp_path)
    pairs = [{**row("plain", 1, seed), "measures": {"nll": {"difference": 0.1 + seed}}} for seed in (0, 2)]
    (tmp_path / "scoreboard_uci_yacht_pairs.json").write_text(json.dumps({"rows": pairs}))
    apart = uci("apart", folder=tmp_path).splitlines()
    assert apart[0] == "| NLL − the bar's | passes | energy | yacht |"
    assert apart[2] == "| plain | 1 | | 1.10 ± 1.41 |"
    others = uci("others", folder=tmp_path).splitlines()
    assert others[0] == "| RMSE / CRPS / covered % | passes | energy | yacht |"
    assert others[2] == "| plain | 1 | 3.00 / .500 / 94 | 3.00 / .500 / 94 |"


def test_the_front_is_what_nothing_beats():
    found = [Point("a", 1, 5.0), Point("b", 1, 4.0), Point("c", 2, 4.5), Point("d", 4, 3.0), Point("e", 8, 3.0)]
    assert [point.name for point in front(found)] == ["b", "d"]
    for point in found:
        beaten = any(other.passes <= point.passes and other.value <= point.value and other != point for other in found)
        assert (point in front(found)) is not beaten


def test_points_are_means_over_seeds_of_the_last_configuration():
    rows = [row("a", 2, seed, test={"nll": 1.0 + seed}) for seed in (0, 2)]
    rows = [{**row("a", 2, test={"nll": 9.0}), "hash": "old"}, *rows, row("b", 4)]
    assert points(rows, ("test", "nll")) == [Point("a", 2, 2.0)]


@pytest.mark.slow
def test_a_picture_is_drawn(results, capsys):
    pytest.importorskip("matplotlib")
    main([TASK, "--results", str(results)])
    text = (results / f"{TASK}.svg").read_text(encoding="utf-8")
    assert "NLL under shift" in text
    assert "ABNN" in text
    assert draw("scoreboard_fashion", results=results) is None
    assert f"{TASK}.svg" in board(TASK, QUALITY, folder=results, first=True)
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "no experiment 'nonsense'" in capsys.readouterr().err


def test_rows_that_draw_do_so_equally_often():
    for name, configs in EXPERIMENTS.items():
        for config in configs:
            way = config.measures[0].way
            plain = config.name.startswith(("plain", "chosen"))
            assert way.num_draws == (None if plain else DRAWS), (name, config.name)
            assert ("mirror" in config.name) is bool(way.views)
            assert ("widened" in config.name) is way.widened
            assert config.name.startswith("chosen") is (way.passes is not None)
