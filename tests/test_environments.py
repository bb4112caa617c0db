"""Environments of other versions: what `make environments` says of those that cannot be had."""

import sys

import pytest

from tools import environments
from tools.environments import ENVIRONMENTS, Environment, find_python, installer, main


def test_every_version_that_the_package_allows_has_an_environment():
    from tests.test_packaging import ROOT

    text = (ROOT / "pyproject.toml").read_text()
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert f"Python :: {version}" in text
    assert [environment.python for environment in ENVIRONMENTS] == ["3.10", "3.11", "3.12", "3.13"]
    assert "torch>=2.6,<3" in text
    assert {environment.torch for environment in ENVIRONMENTS} >= {"torch==2.6.0", "torch>=2.6,<3"}


def test_an_environment_that_cannot_be_had_is_said_and_is_no_failure(capsys, monkeypatch, tmp_path):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    monkeypatch.setattr(environments, "ENVIRONMENTS", (Environment("3.99", "newest"), Environment(version, "newest")))
    assert main(["--folder", str(tmp_path), "--only", "3.99"]) == 0
    assert capsys.readouterr().out.split("not run: ")[1] == "there is no Python 3.99 here\n"


@pytest.mark.parametrize(("code", "word"), [(0, "passed"), (1, "FAILED")])
def test_a_failing_test_is_a_failure(capsys, monkeypatch, tmp_path, code, word):
    monkeypatch.setattr(environments, "ENVIRONMENTS", (Environment("3.99", "newest"),))
    monkeypatch.setattr(environments, "prepare", lambda environment, folder: None)
    monkeypatch.setattr(environments, "test", lambda folder, words: (code == 0, f"said of {words}"))
    (tmp_path / "py399-newest" / "bin").mkdir(parents=True)
    (tmp_path / "py399-newest" / "bin" / "python").symlink_to(sys.executable)
    assert main(["--folder", str(tmp_path), "tests/data"]) == code
    assert f"{word}: said of ['tests/data']" in capsys.readouterr().out


def test_an_interpreter_is_asked_for_its_version(monkeypatch, tmp_path):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    folder = tmp_path / "versions" / f"{version}.0" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_python(version) == str(folder / "python")
    assert find_python("3.99") is None


def test_uv_installs_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    python = tmp_path / "environment" / "bin" / "python"
    assert installer(python)[:3] == [str(python), "-m", "pip"]
    (tmp_path / "uv").write_text("")
    (tmp_path / "uv").chmod(0o755)
    assert installer(python) == [str(tmp_path / "uv"), "pip", "install", "-q", "--python", str(python)]
