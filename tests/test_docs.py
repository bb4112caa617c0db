"""The python blocks of the pages of docs run, in order; the guide's take a network and data that the reader has."""

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from experiments.tutorial_pictures import PART, PROCESSES, executed, shown
from tests.marks import slow_but
from tests.processes import run_ranks, run_script
from tests.test_readme import BLOCK

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^ *(```+|~~~+) *(?P<language>\w*)", re.MULTILINE)
TRANSCRIPTS = [
    DOCS / "files.md",
    DOCS / "deciding.md",
]  # with commands between the blocks, which tests/files/test_transcripts.py runs too
TOGETHER = DOCS / "integrations" / "processes.md"  # runs in two processes
TUTORIALS = sorted(page for page in (DOCS / "tutorials").glob("*.md") if BLOCK.search(page.read_text(encoding="utf-8")))
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?%?")
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


class _Network(nn.Module):
    """What the guide speaks of: a layer4, norms that are called bn1 inside a block, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.layer4 = nn.Sequential(OrderedDict(fc=nn.Linear(4, 8), bn1=nn.LayerNorm(8), relu=nn.ReLU()))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer4(x + self.words.weight[0]))


def _given() -> dict[str, object]:
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    data = TensorDataset(x, x[:, :3].argmax(1))
    loader, val_loader = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=24)
    return {"bayesify": bayesify, "torch": torch, "network": _Network(), "loader": loader, "val_loader": val_loader}


def test_no_block_of_code_escapes():
    """What is python is called so, and is on a page that is executed, here, in `test_readme` or `test_contributing`."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    assert len(pages) > 15
    for page in pages:
        text = page.read_text(encoding="utf-8")
        languages = [fence["language"] for fence in FENCE.finditer(text)]
        assert not any(languages[1::2]), page  # every second one ends a block
        assert set(languages[::2]) <= {"python", "sh", "text", "json", "toml"}, page
        blocks = list(BLOCK.finditer(text))
        assert len(blocks) == languages.count("python"), page
        assert not any(block["skip"] for block in blocks), page
        assert not blocks or page in PAGES or page.name in ("README.md", "CONTRIBUTING.md"), page
        assert not re.search(r"^ *>>> ", text, re.MULTILINE), page


@pytest.mark.parametrize(
    "page",
    slow_but([DOCS / "guide.md"], [page for page in PAGES if page not in (*TRANSCRIPTS, *TUTORIALS, TOGETHER)]),
    ids=lambda page: page.stem,
)
def test_python_blocks_of_a_page_run_in_order(page, monkeypatch, tmp_path):
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__", **(_given() if page.parent == DOCS else {})}
    for block in BLOCK.finditer(text):
        if not block["skip"]:
            padding = "\n" * text.count("\n", 0, block.start("code"))
            exec(compile(padding + block["code"], str(page), "exec"), namespace)


@pytest.mark.slow
def test_the_page_on_processes_runs_in_two_of_them(tmp_path):
    (block,) = BLOCK.finditer(TOGETHER.read_text(encoding="utf-8"))
    assert block["code"].strip().count("\n") < 40
    assert run_ranks(run_script, block["code"], str(tmp_path)) == [0, 0]
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    for rank in range(2):
        assert said[rank].startswith(f"process {rank}: 100 examples, Evaluation('swag', 100 examples: accuracy 0.")
    assert said[0][10:] == said[1][10:]  # all but the number of the process
    assert (tmp_path / "swag-posterior" / "config.json").exists()


def _assert_said(now: str, page: str) -> None:
    """Compare what is printed with what a page shows: the words exactly, numbers as far as processors agree."""
    assert NUMBER.sub("#", now) == NUMBER.sub("#", page)
    numbers = [[float(one.rstrip("%")) for one in NUMBER.findall(text)] for text in (now, page)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=0.05)


def test_tutorials_are_short_and_show_what_they_draw():
    assert len(TUTORIALS) == 9
    pictures = sorted((DOCS / "pictures" / "tutorials").glob("*.svg"))
    assert [picture.name for picture in pictures] == sorted(
        f"{page.stem}-{one}" for page in TUTORIALS for one in shown(page)
    )
    for page in TUTORIALS:
        code = "".join(part["code"] for part in PART.finditer(page.read_text(encoding="utf-8")))
        assert len([line for line in code.splitlines() if line.strip()]) < 100, page.stem
        assert shown(page), page.stem


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in TUTORIALS if page.stem != PROCESSES], ids=lambda page: page.stem)
def test_a_tutorial_prints_and_draws_what_it_shows(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _assert_said(executed(page), page.read_text(encoding="utf-8"))
    finally:
        torch.set_num_threads(threads)
    assert {picture.name for picture in tmp_path.glob("*.svg")} == shown(page)


@pytest.mark.slow
def test_the_tutorial_on_processes_runs_in_two_of_them(tmp_path):
    page = DOCS / "tutorials" / f"{PROCESSES}.md"
    (part,) = PART.finditer(page.read_text(encoding="utf-8"))
    assert run_ranks(run_script, part["code"], str(tmp_path)) == [0, 0]
    _assert_said("".join((tmp_path / f"{rank}.txt").read_text() for rank in range(2)), part["said"])
    assert {picture.name for picture in tmp_path.glob("*.svg")} == shown(page)
