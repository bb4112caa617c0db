"""The python blocks of the pages of docs run, in order; the guide's take a network and data that the reader has."""

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
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
    slow_but([DOCS / "guide.md"], [page for page in PAGES if page not in (*TRANSCRIPTS, TOGETHER)]),
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
