"""Run the quick tests with other versions of Python and torch: `make environments`.

Each environment is a folder that is made once. One that cannot be had here (no such Python, nothing to install) is
said to be so, and is no failure; a test that fails is one. Only Python 3.11 takes the pins of constraints.txt: the
others are installed within the bounds of pyproject.toml. The lowest torch is the first that transformers 5 takes.
Outside of Python 3.11 torch is that of PyPI, which does not start without CUDA's libraries: about 6 GB each. Where `uv`
is on the path it installs, which takes a small part of pip's time and shares files between environments.

    python tools/environments.py --only 3.10 --folder ~/environments -n 2 tests/data
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENVIRONMENTS", "Environment", "main"]

ROOT = Path(__file__).parents[1]
READY = ".ready"


@dataclass(frozen=True)
class Environment:
    """A Python with a torch.

    Attributes:
        python: Its version.
        name: What is special about it.
        torch: The torch that is asked for.
        torchvision: The torchvision that belongs to it; tests take architectures from it.
        pinned: Whether constraints.txt is read.
    """

    python: str
    name: str
    torch: str = "torch>=2.6,<3"
    torchvision: str = "torchvision"
    pinned: bool = False

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"py{self.python.replace('.', '')}-{self.name}"

    @property
    def installs(self) -> list[list[str]]:
        """What pip is asked for, one after another: torch first, so that nothing else chooses it."""
        pins = ["-c", "constraints.txt"] if self.pinned else []
        rest = [".[test]"] if self.pinned else [self.torch, ".[test]"]
        return [[*pins, self.torch], [*pins, *rest], [*pins, "--no-deps", self.torchvision, "timm"]]


ENVIRONMENTS = (
    Environment("3.10", "lowest", "torch==2.6.0", "torchvision==0.21.0"),
    Environment("3.11", "pinned", "torch", pinned=True),
    Environment("3.12", "newest"),
    Environment("3.13", "newest"),
)


def find_python(version: str) -> str | None:
    """Return an interpreter of a version: on the path, or one of pyenv's."""
    found = shutil.which(f"python{version}")
    own = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for candidate in [*([found] if found else []), *map(str, own)]:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:  # a shim of pyenv may answer for nobody
            return candidate
    return None


def installer(python: Path) -> list[str]:
    """Return the words that install into an interpreter's environment: uv's where there is one, or pip's."""
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "-q", "--python", str(python)]
    return [str(python), "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]


def prepare(environment: Environment, folder: Path) -> str | None:
    """Install an environment; return why it cannot be had, or None."""
    python = folder / "bin" / "python"
    wanted = str(environment.installs)
    if (folder / READY).is_file() and (folder / READY).read_text() == wanted:
        return None
    interpreter = find_python(environment.python)
    if interpreter is None:
        return f"there is no Python {environment.python} here"
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    for words in environment.installs:
        command = [*installer(python), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip().lower().startswith("error")]
            return f"it cannot be installed: {(lines or done.stderr.splitlines() or ['?'])[0]}"
    (folder / READY).write_text(wanted)
    return None


def test(folder: Path, words: list[str]) -> tuple[bool, str]:
    """Run the quick tests; return whether they passed, and what pytest says of them last."""
    python = str((folder / "bin" / "python").absolute())
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}  # before what is installed, whose metadata are read
    command = [python, "-m", "pytest", "-q", "-n", "logical", "--maxprocesses", "8", "-m", "not slow", *words]
    log = folder / "tests.log"
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, check=False)
    last = (log.read_text().strip().splitlines() or ["?"])[-1].strip("= ")
    return done.returncode == 0, f"{last} ({log})"


def main(argv: list[str] | None = None) -> int:
    """Run the quick tests in each environment that can be had, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="VERSION", help="a version of Python, as 3.10")
    parser.add_argument("--folder", type=Path, default=ROOT / ".environments", help="where the environments are")
    options, words = parser.parse_known_args(argv)
    failed = False
    for environment in ENVIRONMENTS:
        if options.only and environment.python not in options.only:
            continue
        folder = options.folder.absolute() / environment.folder
        reason = prepare(environment, folder)
        if reason is None:
            code = "import torch; print(torch.__version__)"
            version = subprocess.run(
                [folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=False
            )
            passed, said = test(folder, words)
            failed |= not passed
            title = f"Python {environment.python}, torch {version.stdout.strip()}"
            print(f"{title:<36}  {'passed' if passed else 'FAILED'}: {said}", flush=True)
        else:
            print(f"{f'Python {environment.python}, {environment.name}':<36}  not run: {reason}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
