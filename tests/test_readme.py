import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"

BLOCK = re.compile(r"^(?P<skip><!-- not executed -->\s*)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_python_blocks_run_in_order(monkeypatch, tmp_path):
    if not README.is_file():
        pytest.fail("README.md does not exist; its python blocks are executed by this test")
    text = README.read_text(encoding="utf-8")
    blocks = [match for match in BLOCK.finditer(text) if not match["skip"]]
    assert blocks, "README.md has no executable python block"

    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks:
        # Blank lines in front make a traceback point at the line of README.md.
        padding = "\n" * text.count("\n", 0, block.start("code"))
        exec(compile(padding + block["code"], str(README), "exec"), namespace)
