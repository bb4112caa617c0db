"""Tables of the pages are those of the results."""

import json
import re

import pytest

from experiments.documented import TABLES
from experiments.records import RESULTS
from experiments.tables import Cell, Line, check, main, pages, rows_of, table

MARKER = re.compile(r"<!-- (/?)table(?:: ([\w.-]+))? -->")


def test_pages_are_what_the_results_say():
    assert check(pages(), TABLES) == []


def test_every_table_stands_in_a_page_between_markers():
    found = []
    for path in pages():
        markers = MARKER.findall(path.read_text(encoding="utf-8"))
        assert len(markers) == path.read_text(encoding="utf-8").count("table -->") + sum(
            1 for end, _ in markers if not end
        )
        assert [bool(end) for end, _ in markers] == [False, True] * (len(markers) // 2), path.name
        found += [name for end, name in markers if not end]
    assert sorted(found) == sorted(TABLES)


def test_a_page_that_differs_is_found_and_written_anew(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: a -->\n| 1 |\n<!-- /table -->\nafter\n")
    differing = check([page], {"a": lambda: "| 2 |"})
    assert "-| 1 |" in differing
    assert "+| 2 |" in differing
    assert "| 1 |" in page.read_text(), "looking changes nothing"
    check([page], {"a": lambda: "| 2 |"}, write=True)
    assert page.read_text() == "before\n<!-- table: a -->\n| 2 |\n<!-- /table -->\nafter\n"
    assert check([page], {"a": lambda: "| 2 |"}) == []


def test_the_command_fails_if_a_page_differs(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    monkeypatch.setattr("experiments.tables.pages", lambda: [page])
    page.write_text("<!-- table: abnn-tuning -->\n<!-- /table -->\n")
    assert main(["--check"]) == 1
    assert "python -m experiments.tables" in capsys.readouterr().out
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert "alpha=0.05" in page.read_text()


def test_an_unknown_table_is_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: nonsense -->\n<!-- /table -->\n")
    with pytest.raises(KeyError, match="nonsense"):
        check([page], TABLES)


def row(name, seed, hashed, value):
    return {"name": name, "seed": seed, "hash": hashed, "measures": {"test": {"nll": value}}}


def test_a_mean_is_over_seeds_of_one_configuration(tmp_path):
    rows = [row("a", 0, "x", 1.0), row("a", 1, "x", 3.0), row("a", 0, "y", 5.0), row("a", 1, "y", 8.0)]
    (tmp_path / "f.json").write_text(json.dumps({"rows": rows}))
    found = rows_of("f", "a", folder=tmp_path)
    assert [one["test"]["nll"] for one in found] == [5.0, 8.0], "the configuration that was run last"
    assert Cell(("part", "nll"), digits=2).of(found) == "6.50 ± 2.12"
    with pytest.raises(KeyError, match="no row 'b'"):
        rows_of("f", "b", folder=tmp_path)


def test_a_table_against_its_text():
    lines = [Line("plain", "map"), Line("tempered", "map", "test, calibrated", hidden={"NLL": "-"})]
    columns = {
        "error / NLL": [Cell(("part", "accuracy"), -100, 1, offset=100), Cell(("part", "nll"))],
        "NLL": Cell(("part", "nll")),
    }
    nll = rows_of("laplace_cifar", "map")[0]["test, calibrated"]["nll"]
    assert table("laplace_cifar", columns, lines).splitlines() == [
        "| | error / NLL | NLL |",
        "|---|---|---|",
        "| plain | 8.2 / .3681 | .3681 |",
        f"| tempered | 8.2 / {nll:.4f} | - |".replace("0.", "."),
    ]


def test_every_row_says_what_is_known_of_it():
    for path in sorted(RESULTS.glob("*.json")):
        for one in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            assert set(one) == {"name", "config", "hash", "seed", "provenance", "command", "seconds", "measures"}, path
            assert one["provenance"] == "unknown" or set(one["provenance"]) >= {
                "commit",
                "dirty",
                "versions",
                "processor",
            }
