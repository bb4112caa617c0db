"""The python blocks of CONTRIBUTING.md run: a first method, from its class to a file."""

import pytest

from bayesify.methods import list_methods, method
from tests.test_packaging import ROOT
from tests.test_readme import BLOCK

PAGE = ROOT / "CONTRIBUTING.md"


@pytest.mark.slow
def test_the_first_method_runs(monkeypatch, tmp_path, capsys):
    # What the page registers is not for other tests.
    monkeypatch.setattr(method, "_METHODS", list_methods())
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        padding = "\n" * text.count("\n", 0, block.start("code"))
        exec(compile(padding + block["code"], str(PAGE), "exec"), namespace)
    assert namespace["posterior"].method.name == "relative-noise"
    assert namespace["posterior"].conversion.converted == ("1", "3")
    assert float(namespace["prediction"].epistemic.mean()) > 0
    said = capsys.readouterr().out
    assert "accuracy 0.9" in said
    assert "streamlined" in said


def test_the_map_names_what_there_is():
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("## The map") : text.index("## What the checks expect")]
    names = {word for word in table.split("`") if word.endswith((".py", "/")) and " " not in word}
    assert len(names) > 20
    missing = [name for name in names if not (ROOT / "src" / "bayesify" / name).exists()]
    assert [name for name in missing if name != "src/bayesify"] == []
