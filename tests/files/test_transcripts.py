"""The transcripts of docs/files.md and docs/deciding.md: each command is run, and says what the page says."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from bayesify.cli import main

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(?P<language>python|sh|text)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def shown(text):
    """Return the lines that stay on a terminal: what a carriage return hides is gone."""
    lines = (line.rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line) + "\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "least"), [("files.md", 8), ("deciding.md", 3)])
def test_commands_say_what_the_page_says(capsys, monkeypatch, tmp_path, page, least):
    monkeypatch.chdir(tmp_path)
    namespace, said, count = {"__name__": "__main__"}, None, 0
    for block in BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
        if block["language"] == "python":
            exec(block["code"], namespace)
        elif block["language"] == "sh":
            capsys.readouterr()
            program, *words = shlex.split(block["code"].replace("\\\n", " "))
            assert (program, main(words)) == ("bayesify", 0), words
            captured = capsys.readouterr()
            said = shown(captured.err + captured.out)
        else:
            expected = shown(block["code"])
            assert doctest.OutputChecker().check_output(expected, said, doctest.ELLIPSIS), f"{expected}\nbut:\n{said}"
            count += 1
    assert count >= least
