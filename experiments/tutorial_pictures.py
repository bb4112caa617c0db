"""The tutorials' pictures and printed lines: each page is executed, and what it prints and draws is put onto it.

`python -m experiments.tutorial_pictures [image ood ...]` runs the python blocks of the pages in docs/tutorials in
order. What a block prints replaces the text block behind it; an SVG that it saves becomes
docs/pictures/tutorials/PAGE-NAME.svg. The tests run the same, and compare. Data come with scikit-learn; a few seconds
each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.records import PICTURES, ROOT

__all__ = ["PAGES", "PROCESSES", "executed", "main", "shown"]

PAGES = ROOT / "docs" / "tutorials"
PROCESSES = "processes"  # the page whose one block is a script for torchrun
PART = re.compile(r"^```python\n(?P<code>.*?)^```$(?P<gap>\n\n^```text\n(?P<said>.*?)^```$)?", re.MULTILINE | re.DOTALL)


def executed(page: Path) -> str:
    """Run the blocks of a page in the present folder, and return its text with what they print behind each.

    Args:
        page: The page. A block that prints must have a text block behind it, and one that does not must have none.
    """
    text, namespace = page.read_text(encoding="utf-8"), {"__name__": "__main__"}

    def run(part: re.Match[str]) -> str:
        padding = "\n" * text.count("\n", 0, part.start("code"))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(padding + part["code"], str(page), "exec"), namespace)
        return _with(part, said.getvalue(), page)

    return PART.sub(run, text)


def _with(part: re.Match[str], said: str, page: Path) -> str:
    if bool(said) != bool(part["gap"]):
        raise ValueError(f"{page.name} shows what a block prints behind it, and only that: {said[:80]!r}")
    block = f"```python\n{part['code']}```"
    lines = "".join(f"{line.rstrip()}\n" for line in said.splitlines())
    return f"{block}\n\n```text\n{lines}```" if said else block


def in_processes(page: Path, folder: Path) -> str:
    """Run the one block of a page under torchrun in two processes, and show what each prints."""
    text = page.read_text(encoding="utf-8")
    (part,) = PART.finditer(text)
    (folder / "train.py").write_text(part["code"], encoding="utf-8")
    # In files of their own, since lines of two processes mix on one output.
    options = ["--nproc-per-node", "2", "--redirects", "1", "--log-dir", str(folder / "logs")]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run(command, cwd=folder, env=environment, check=True)
    said = "".join(log.read_text(encoding="utf-8") for log in sorted((folder / "logs").rglob("stdout.log")))
    return text[: part.start()] + _with(part, said, page) + text[part.end() :]


def shown(page: Path) -> set[str]:
    """Return the names of the pictures that a page shows, as its code saves them."""
    found = re.findall(rf"\.\./pictures/tutorials/{page.stem}-([\w-]+\.svg)", page.read_text(encoding="utf-8"))
    return set(found)


def _keep(page: Path, folder: Path) -> None:
    target = PICTURES / "tutorials"
    target.mkdir(exist_ok=True)
    for old in target.glob(f"{page.stem}-*.svg"):
        old.unlink()
    for picture in folder.glob("*.svg"):
        text = re.sub(r"\s*<dc:date>.*?</dc:date>", "", picture.read_text(encoding="utf-8"))
        (target / f"{page.stem}-{picture.name}").write_text(re.sub(r" +\n", "\n", text), encoding="utf-8")


def main() -> None:
    """Run the pages that are named, or all."""
    import matplotlib

    from tests.torchvision_stub import declare_torchvision_operators

    declare_torchvision_operators()  # transformers imports torchvision, which may not fit this torch
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*")
    names = parser.parse_args().pages or [
        page.stem for page in sorted(PAGES.glob("*.md")) if "```python" in page.read_text()
    ]
    style: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "tutorials", "font.size": 10}
    for name in names:
        page = PAGES / f"{name}.md"
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), matplotlib.rc_context(style):
            text = in_processes(page, Path(folder)) if name == PROCESSES else executed(page)
            page.write_text(text, encoding="utf-8")
            _keep(page, Path(folder))
        print(name)


if __name__ == "__main__":
    main()
