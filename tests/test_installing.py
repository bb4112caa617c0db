"""The wheel and the sdist, and the wheel in an environment that has what it depends on and no more."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.test_packaging import ROOT, SOURCES
from tests.test_readme import BLOCK, README
from tools.release import fresh_environment

pytestmark = pytest.mark.slow

# What an extra brings, and how somebody without it is told.
WITHOUT = """
import contextlib, io, json, pathlib, sys, tempfile, torch, bayesify
from bayesify import cli

def said(call):
    try:
        call()
    except ImportError as error:
        return str(error)
    return "it worked"

def command(*words):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        cli.main(list(words))
    return error.getvalue()

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "a.parquet").write_bytes(b"PAR1")
(folder / "images" / "class").mkdir(parents=True)
(folder / "images" / "class" / "a.png").touch()
posterior = bayesify.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1)), bayesify.MCDropout())
batches = [(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))]
evaluation = bayesify.evaluate(posterior, batches)
found = {
    "cli": command("methods"),
    "demo": said(lambda: bayesify.data.load("digits")),
    "data": said(lambda: bayesify.data.ImageFolder(folder / "images", 8)),
    "files": said(lambda: list(bayesify.data.read_records(folder / "a.parquet"))),
    "timm": said(lambda: bayesify.files.make_network("timm:resnet18", outputs=2)),
    "transformers": said(lambda: bayesify.files.make_network("hf:nobody", outputs=2)),
    "report": said(lambda: bayesify.report.write_report([evaluation], folder / "report.html")),
    "logs": said(lambda: bayesify.fit(posterior, batches, num_data=4, log_dir=folder / "logs", progress=False)),
    "export": said(lambda: bayesify.export(posterior, torch.zeros(4, 2), folder / "model.onnx")),
    "lightning": said(lambda: __import__("bayesify.integrations.lightning")),
    "sklearn": said(lambda: __import__("bayesify.integrations.sklearn")),
}
print(json.dumps([found, bayesify.__file__, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is made from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], check=True)
    (sdist,), (wheel,) = out.glob("bayesify-*.tar.gz"), out.glob("bayesify-*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """An interpreter with the wheel and, by links, all that it requires without extras."""
    return fresh_environment(built[1], tmp_path_factory.mktemp("environment"))


def run(python, code, folder):
    """Run code without this environment's variables and folders."""
    done = subprocess.run([python, "-I", "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_and_sdist_hold_the_package(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert "bayesify/py.typed" in names
    assert {path.relative_to(ROOT / "src").as_posix() for path in SOURCES} <= names
    assert {name.split("/")[0] for name in names} == {"bayesify", f"{wheel.name.split('-py3')[0]}.dist-info"}
    with tarfile.open(sdist) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/bayesify/py.typed"} <= inside


def test_without_extras_whatever_is_missing_is_named(python, tmp_path):
    found, file, modules = json.loads(run(python, WITHOUT, tmp_path).splitlines()[-1])
    assert str(ROOT) not in file
    assert {"matplotlib", "pyarrow", "sklearn", "transformers", "tyro"}.isdisjoint(modules)
    for extra, sentence in found.items():
        assert f"pip install 'bayesify[{extra}]'" in sentence, (extra, sentence)


def test_the_readme_begins_without_extras(python, tmp_path):
    """But for its data, which come with scikit-learn."""
    code = "\n".join(block["code"] for block in BLOCK.finditer(README.read_text(encoding="utf-8")))
    code, first = re.subn(
        r'bayesify\.data\.load\("digits", split\)',
        "bayesify.data.Split(torch.eye(64)[torch.arange(400) % 10].reshape(400, 1, 8, 8), torch.arange(400) % 10)",
        code,
    )
    code, second = re.subn(r"bayesify\.data\.photo_patches\(3\)", "torch.rand(3, 1, 8, 8)", code)
    assert (first, second) == (1, 1)
    assert "plain + temperature" in run(python, f"import warnings; warnings.simplefilter('ignore')\n{code}", tmp_path)
    assert (tmp_path / "my-posterior" / "config.json").is_file()
