"""Tables of benchmarks and of tasks by methods, and pages that show what their code prints."""

import json

import pytest

from experiments.benchmark_tables import benchmark, information
from experiments.task_tables import tasks
from experiments.tutorial_pictures import executed, shown

MADE = {"commit": "0123456789abcdef", "dirty": False}


def _write(folder, name, rows):
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))


def _row(name, measures, provenance="unknown", command=None, config=None):
    row = {"name": name, "config": config, "hash": "a", "seed": 0, "seconds": 1.0, "measures": measures}
    return {**row, "provenance": provenance, "command": command}


def test_a_benchmark_names_command_and_commit(tmp_path):
    rows = [
        _row("step", {"figures": {"plain": 1.0, "ours": 1.375}}),
        _row("step", {"figures": {"plain": 1.0, "ours": 1.25}}, MADE, "python -m benchmarks.x --repeats 9"),
        _row("draws", {"figures": {"ours": {"1": 20.25, "8": 0.5}, "theirs": {"8": 3}}}, {**MADE, "dirty": True}),
        _row("bald", {"seconds": 0.5, "chosen": 1000, "kind": "text"}, MADE),
        _row("random", {"seconds": 0.25, "chosen": 10, "kind": "text"}, MADE),
    ]
    _write(tmp_path, "x", rows)
    assert benchmark("x", folder=tmp_path).splitlines() == [
        "**Step** (*`python -m benchmarks.x --repeats 9`, commit 01234567*)",  # the last row of the name
        "",
        "| | figure |",
        "|---|---|",
        "| plain | 1.00 |",
        "| ours | 1.25 |",
        "",
        "**Draws** (*`python -m benchmarks.x`, commit 01234567 with changes*)",
        "",
        "| | 1 | 8 |",
        "|---|---|---|",
        "| ours | 20.2 | .500 |",
        "| theirs | | 3 |",
        "",
        "*`python -m benchmarks.x`, commit 01234567*",
        "",
        "| | seconds | chosen |",
        "|---|---|---|",
        "| bald | .500 | 1,000 |",
        "| random | .250 | 10 |",
    ]
    _write(tmp_path, "y", rows[:1])
    assert "commit not recorded" in benchmark("y", folder=tmp_path)


def test_information_has_a_line_for_each_network_width_and_predictor(tmp_path):
    def row(width, ratio):
        found = {"information": ratio, "surer half": 0.5, "other half": 2.0, "variance": 1.0, "rank": 0.9}
        figures = {"the draws' own Gaussian": {"information": 1.0}, "ours": {**found, "low": 0.8, "high": 0.95}}
        config = {"network": "two", "width": width, "how": ["ours"]}
        return _row(f"two, {width} of the default width, 142 inputs, 8 draws", {"figures": figures}, MADE, None, config)

    _write(tmp_path, "information", [row(1.0, 0.75), row(0.5, 1.5), row(1.0, 1.25)])
    assert information(folder=tmp_path).splitlines() == [
        "*`python -m benchmarks.information`, commit 01234567*",
        "",
        "| network | width | inputs | predictor | information | surer half | other half | variance | rank |",
        "|---|---|---|---|---|---|---|---|---|",
        "| two | 0.5 | 142 | ours | 1.50 | .500 | 2.00 | 1.00 | .900 (.800 to .950) |",
        "| two | 1 | 142 | ours | 1.25 | .500 | 2.00 | 1.00 | .900 (.800 to .950) |",
    ]


def test_gains_are_those_over_the_bar_of_the_same_task(tmp_path):
    def row(name, nll, passes=1):
        return _row(name, {"passes": passes, "test": {"nll": nll}, "fit seconds": 0.0})

    names = ("plain", "plain + temperature", "plain + mirror, log-probabilities")
    rows = [row(name, nll, passes) for name, nll, passes in zip(names, (0.75, 0.5, 0.25), (1, 1, 2), strict=True)]
    _write(tmp_path, "scoreboard_cifar_resnet20", rows)
    assert tasks(folder=tmp_path).splitlines() == [
        "| gain in NLL | passes | CIFAR-10, ResNet-20 |",
        "|---|---|---|",
        "| the network as it is | 1 | −.250 |",
        "| a mirrored view | 2 | +.250 |",
    ]


def test_a_page_shows_what_its_code_prints(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nx = 2\nprint(x + 1)\n```\n\n```text\nold\n```\n\n```python\ny = x\n```\n")
    assert executed(page) == page.read_text().replace("old", "3")
    page.write_text("```python\nprint(1)\n```\n\nNothing behind it.\n")
    with pytest.raises(ValueError, match="shows what a block prints behind it"):
        executed(page)
    page.write_text("```python\nx = 1\n```\n\n```text\nnothing\n```\n")
    with pytest.raises(ValueError, match="and only that"):
        executed(page)


def test_pictures_of_a_page_are_named_by_it(tmp_path):
    page = tmp_path / "ood.md"
    page.write_text("![a](../pictures/tutorials/ood-values.svg) ![b](../pictures/tutorials/image-others.svg)")
    assert shown(page) == {"values.svg"}
