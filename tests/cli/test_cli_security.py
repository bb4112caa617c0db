"""What the command line must not run: files that happen to lie in the present folder, and pickles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bayesify as package
from bayesify.cli._network import load_weights
from bayesify.cli._output import JobError
from tests.cli.nets import make_network

# As the installed `bayesify` command starts: Python then looks into the script's folder, not into the present one.
LAUNCHER = "import sys\nfrom bayesify.cli import main\nsys.exit(main())\n"
EVIL = "import pathlib\npathlib.Path({mark!r}).touch()\nraise ImportError('this is not the real one')\n"
NETWORK = """
from sibling import SIZE
from torch import nn

def make():
    import sibling_of_a_function
    return nn.Sequential(nn.Flatten(), nn.Linear(SIZE, 10))
"""


def _command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    launcher = folder.parent / "bin" / "launcher.py"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(LAUNCHER)
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, str(launcher), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_packages_in_the_present_folder_are_not_run_in_place_of_installed_ones(tmp_path: Path):
    """A folder that was downloaded may hold anything; modules that only it has are the user's own."""
    folder, mark = tmp_path / "downloaded", tmp_path / "ran"
    installed = ("json", "torch", "numpy/__init__", "tqdm", "safetensors", "tyro", "docstring_parser", "typeguard")
    for name in (*installed, "sklearn/__init__", "bayesify/__init__"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    (folder / "own_network.py").write_text(NETWORK)
    (folder / "sibling.py").write_text("SIZE = 64\n")
    (folder / "sibling_of_a_function.py").write_text("")
    # The embedded digits come with scikit-learn, which is imported after --model.
    done = _command(
        folder, "predict", "--method", "map", "--epochs", "0", "--model", "own_network:make", "--data", "digits",
        "--out", str(tmp_path / "predictions.jsonl"), "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "predictions.jsonl").stat().st_size > 0
    assert not mark.exists()


@pytest.mark.parametrize(
    ("version", "read"),
    [
        ("2.4.0", False), ("2.5.1+cu121", False), ("2.9.1", False), ("2.9.1+cpu", False), ("2.10.0a0+git1", False),
        ("2.10.0", True), ("2.10.0+cpu", True), ("2.13.0+cpu", True), ("3.0.0", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["pt", "pth"])
def test_pickles_are_read_where_torch_can_do_so_safely(
    version: str, read: bool, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, network = tmp_path / f"weights.{suffix}", make_network()
    torch.save(make_network().state_dict(), path)
    monkeypatch.setattr(torch, "__version__", version)
    if read:
        load_weights(network, path)
        assert torch.equal(network[1].weight, torch.load(path)["1.weight"])
        return
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the file was opened"))
    with pytest.raises(JobError, match=r"can run code before torch 2\.10; here is torch .*or.*save_file"):
        load_weights(network, path)
