"""`make release`, on a package of one file in a repository of its own."""

import subprocess
import sys

import pytest

from tests.test_packaging import ROOT
from tools import release as script
from tools.release import CheckError, Release, main

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "sample"
description = "A package of one file."
readme = "README.md"
requires-python = ">=3.10"
dynamic = ["version"]

[tool.hatch.version]
path = "src/sample/__init__.py"
"""


@pytest.fixture
def release(tmp_path):
    root = tmp_path / "repository"
    files = {
        "pyproject.toml": PYPROJECT,
        "README.md": "Nothing to see.\n",
        ".gitignore": "dist/\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.2.0\n\n- Everything is new.\n\n## 1.1.0\n",
        "src/sample/__init__.py": '__version__ = "1.2.0"\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    found = Release(root, "sample")
    found.git("init", "--quiet")
    for key, value in {"user.name": "Somebody", "user.email": "somebody@example.invalid"}.items():
        found.git("config", key, value)
    found.git("add", ".")
    found.git("commit", "--quiet", "--message", "Begin")
    return found


def test_this_repository_has_what_a_release_reads():
    found = Release(ROOT)
    assert found.tag == f"v{found.version}"
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").startswith("# Changelog\n")
    assert "tools/release.py" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_what_is_not_ready_is_said(release):
    assert release.check_tree().startswith("the tree is clean at ")
    assert release.check_tag() == "v1.2.0 is new"
    assert release.check_changelog() == "the changelog has 1.2.0, in 1 lines"
    (release.root / "new.txt").touch()
    with pytest.raises(CheckError, match=r"1 files are not committed, new\.txt first"):
        release.check_tree()
    release.make_tag()
    with pytest.raises(CheckError, match=r"v1\.2\.0 exists: raise __version__"):
        release.check_tag()
    changes = release.root / "CHANGELOG.md"
    for text, why in {
        "## Next\n\n- New.\n": "begins with 'Next': call what is new '## 1.2.0'",
        "# Changelog\n": "begins with 'nothing'",
        "## 1.2.0\n\n## 1.1.0\n\n- Old.\n": "says nothing of 1.2.0",
    }.items():
        changes.write_text(text)
        with pytest.raises(CheckError, match=why):
            release.check_changelog()
    (release.root / "src" / "sample" / "__init__.py").write_text("")
    with pytest.raises(CheckError, match="names no __version__"):
        release.check_tag()


def test_nothing_is_built_or_tagged_where_a_check_fails(release, capsys, monkeypatch):
    monkeypatch.setattr(script.Release, "build", lambda self: pytest.fail("it was built"))
    (release.root / "new.txt").touch()
    assert main([], release=release) == 1
    assert "tree       FAILED: 1 files are not committed" in capsys.readouterr().out
    assert release.git("tag") == ""


@pytest.mark.slow
def test_a_dry_run_sets_no_tag_and_a_release_does(release, capsys, monkeypatch):
    # The dependencies of a package that is not installed here cannot be linked; it has none.
    monkeypatch.setattr("tools.release.required", lambda name: [])
    assert main(["--dry-run"], release=release) == 0
    said = capsys.readouterr().out
    for line in (
        "metadata   valid, with 1 modules",
        "import     a fresh environment imports 1.2.0",
        "A dry run: v1.2.0",
    ):
        assert line in said
    assert release.git("tag") == ""
    assert main([], release=release) == 0
    assert release.git("tag") == "v1.2.0"
    assert release.git("cat-file", "-t", "v1.2.0") == "tag"
    assert release.git("status", "--porcelain") == ""
    assert main([], release=release) == 1  # it is released


@pytest.mark.slow
def test_a_wheel_that_is_not_whole_or_does_not_import_is_refused(release, monkeypatch):
    monkeypatch.setattr("tools.release.required", lambda name: [])
    source = release.root / "src" / "sample"
    (source / "__init__.py").write_text('import sample_of_nothing\n\n__version__ = "1.2.0"\n')
    release.build()
    with pytest.raises(CheckError, match="sample_of_nothing"):
        release.check_import()
    (source / "late.py").touch()
    with pytest.raises(CheckError, match=r"lacks 1 files, sample/late\.py first"):
        release.check_metadata()
    (release.root / "pyproject.toml").write_text(PYPROJECT.replace("hatchling.build", "nowhere"))
    with pytest.raises(CheckError, match="It does not build"):
        release.build()


@pytest.mark.slow
def test_the_script_runs_by_its_path():
    command = [sys.executable, "tools/release.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--dry-run" in done.stdout
