"""The files around the code: README on two screens, links that lead somewhere, and what other tools read."""

import re

import pytest

from tests.test_packaging import ROOT

yaml = pytest.importorskip("yaml")

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_has_one_picture_five_rows_and_fits_on_two_screens():
    text = read("README.md")
    assert len(text.splitlines()) < 110
    assert text.count("![") == 1
    table = text[text.index("<!-- table: readme-cifar -->") : text.index("<!-- /table -->")]
    assert len([line for line in table.splitlines() if line.startswith("|")]) == 2 + 5
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in LINK.findall(read(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        assert (ROOT / name).exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", read(name), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}, (
                link
            )


def test_the_citation_is_one():
    found = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["title"] == "bayesify"
    assert f'license = "{found["license"]}"' in read("pyproject.toml")


def test_the_workflow_runs_what_everybody_runs():
    (job,) = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    assert job["steps"][-1] == {"run": "make test"}
    versions = [step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {})]
    assert all(f"Programming Language :: Python :: {version}" in read("pyproject.toml") for version in versions)
    assert versions


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_the_templates_have_a_head(name):
    head = read(f".github/ISSUE_TEMPLATE/{name}.md").split("---")[1]
    assert {"name", "about"} <= set(yaml.safe_load(head))


def test_every_target_of_the_makefile_is_listed():
    text = read("Makefile")
    phony = set(re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)[1].split())
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    assert targets == phony
