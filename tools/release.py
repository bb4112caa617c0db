"""Build a release, check it, and tag it: `make release`; `python tools/release.py --dry-run` does all but the tag.

Checked are: a tree without changes, a tag that is new, a changelog whose first version is this one and says something,
the metadata of the wheel and the sdist, what they hold, and that the wheel imports in a fresh environment with this
version. The tests are not run here: release what `make test` has passed. Nothing leaves the machine; the last line says
what to push.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

__all__ = ["CheckError", "Release", "fresh_environment", "main", "required"]

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


class CheckError(Exception):
    """Why it cannot be released as it is, and what to do."""


@dataclass(frozen=True)
class Release:
    """A release in the making.

    Attributes:
        root: The repository.
        package: The name of the package.
    """

    root: Path
    package: str = "bayesify"

    @property
    def version(self) -> str:
        """The version that the package's source names."""
        source = self.root / "src" / self.package / "__init__.py"
        found = re.search(r'^__version__ = "([^"]+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
        if found is None:
            raise CheckError(f"{source} names no __version__.")
        return str(Version(found[1]))

    @property
    def tag(self) -> str:
        """The name of its tag."""
        return f"v{self.version}"

    @property
    def files(self) -> tuple[Path, Path]:
        """The sdist and the wheel."""
        name = f"{self.package}-{self.version}"
        return self.root / "dist" / f"{name}.tar.gz", self.root / "dist" / f"{name}-py3-none-any.whl"

    def check_tree(self) -> str:
        """Require that everything is committed."""
        changed = self.git("status", "--porcelain").splitlines()
        if changed:
            raise CheckError(f"{len(changed)} files are not committed, {changed[0][3:]} first: commit or remove them.")
        return f"the tree is clean at {self.git('rev-parse', '--short', 'HEAD')}"

    def check_tag(self) -> str:
        """Require that the version was not released before."""
        if self.git("tag", "--list", self.tag):
            raise CheckError(f"{self.tag} exists: raise __version__ in src/{self.package}/__init__.py.")
        return f"{self.tag} is new"

    def check_changelog(self) -> str:
        """Require that the changelog begins with this version, and says something about it."""
        text = (self.root / "CHANGELOG.md").read_text(encoding="utf-8")
        headings = list(HEADING.finditer(text))
        if not headings or headings[0][1].split()[0] != self.version:
            first = headings[0][1] if headings else "nothing"
            raise CheckError(f"CHANGELOG.md begins with '{first}': call what is new '## {self.version}'.")
        end = headings[1].start() if len(headings) > 1 else len(text)
        said = text[headings[0].end() : end].strip()
        if not said:
            raise CheckError(f"CHANGELOG.md says nothing of {self.version}.")
        return f"the changelog has {self.version}, in {len(said.splitlines())} lines"

    def build(self) -> str:
        """Build the sdist, and the wheel from it."""
        shutil.rmtree(self.root / "dist", ignore_errors=True)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(self.root / "dist"), str(self.root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CheckError(f"It does not build:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        missing = [file.name for file in self.files if not file.is_file()]
        if missing:
            raise CheckError(f"The build did not make {' and '.join(missing)}.")
        return " and ".join(f"{file.name} ({file.stat().st_size / 1e6:.1f} MB)" for file in self.files)

    def check_metadata(self) -> str:
        """Require valid metadata in both files, of this version, and the whole package in the wheel."""
        sdist, wheel = self.files
        stem = f"{self.package}-{self.version}"
        with zipfile.ZipFile(wheel) as file:
            names = set(file.namelist())
            texts = [file.read(f"{stem}.dist-info/METADATA")]
        with tarfile.open(sdist) as archive:
            info = archive.extractfile(f"{stem}/PKG-INFO")
            texts.append(info.read() if info is not None else b"")
        for text in texts:
            found = Metadata.from_email(text, validate=True)
            if (found.name, str(found.version)) != (self.package, self.version):
                raise CheckError(f"The metadata are of {found.name} {found.version}, not of {stem}.")
            if not found.description:
                raise CheckError("The metadata have no description: is README.md empty?")
        source = self.root / "src"
        wanted = {path.relative_to(source).as_posix() for path in (source / self.package).rglob("*.py")}
        if wanted - names:
            raise CheckError(f"The wheel lacks {len(wanted - names)} files, {min(wanted - names)} first.")
        return f"valid, with {len(wanted)} modules"

    def check_import(self) -> str:
        """Require that the wheel imports where nothing else is."""
        code = f"import {self.package}; print({self.package}.__version__, {self.package}.__file__)"
        with tempfile.TemporaryDirectory() as folder:
            python = fresh_environment(self.files[1], Path(folder))
            done = subprocess.run([python, "-I", "-c", code], cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CheckError(f"It does not import in a fresh environment:\n{done.stderr[-2000:]}")
            found, place = done.stdout.split(maxsplit=1)
            if found != self.version or not place.startswith(folder):
                raise CheckError(f"A fresh environment imports {found} from {place.strip()}.")
        return f"a fresh environment imports {found}"

    def make_tag(self) -> str:
        """Tag the commit."""
        self.git("tag", "--annotate", self.tag, "--message", f"{self.package} {self.version}")
        return f"{self.tag} is set; `git push origin {self.tag}` publishes it"

    def git(self, *words: str) -> str:
        """Return what git says."""
        done = subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CheckError(f"git {words[0]}: {done.stderr.strip()}")
        return done.stdout.strip()


def fresh_environment(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment, whose dependencies are links to those of this one.

    Args:
        wheel: The wheel; a distribution of its name must be installed here, with all that it requires.
        folder: Where the environment goes.

    Returns:
        Its interpreter. Start it with `-I`, so that variables and folders of this environment stay outside.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in required(wheel.name.partition("-")[0]):
        for part in {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(Path(str(metadata.distribution(name).locate_file(part))))
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--no-compile", "--disable-pip-version-check", str(wheel)], check=True)
    return python


def required(name: str) -> list[str]:
    """Return the names of what a distribution requires here without extras, and what that requires."""
    found: set[str] = set()
    left = [name]
    while left:
        for text in metadata.requires(left.pop()) or ():
            one = Requirement(text)
            wanted = one.marker is None or one.marker.evaluate({"extra": ""})
            if wanted and one.name not in found and _installed(one.name):
                found.add(one.name)
                left.append(one.name)
    return sorted(found)


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:  # CUDA's packages, beside a build for the CPU
        return False


def main(argv: Sequence[str] | None = None, *, release: Release | None = None) -> int:
    """Run every step, and tag if none failed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="do everything but the tag")
    dry = parser.parse_args(argv).dry_run
    release = release or Release(ROOT)
    before: list[tuple[str, Callable[[], str]]] = [
        ("tree", release.check_tree),
        ("tag", release.check_tag),
        ("changelog", release.check_changelog),
    ]
    built = [("build", release.build), ("metadata", release.check_metadata), ("import", release.check_import)]
    failed = sum(not _step(*step) for step in before)
    # What is built is checked in turn; a dry run also builds where something before it is not ready.
    if (not failed or dry) and not all(_step(*step) for step in built):
        failed += 1
    if failed:
        print(f"Not tagged: {failed} of the checks failed.")
        return 1
    if dry:
        print(f"A dry run: {release.tag} was not set.")
        return 0
    return 0 if _step("release", release.make_tag) else 1


def _step(name: str, step: Callable[[], str]) -> bool:
    try:
        said, passed = step(), True
    except CheckError as error:
        said, passed = f"FAILED: {error}", False
    print(f"{name:<10} {said}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
