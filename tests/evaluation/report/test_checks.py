"""What `check` found, in the report."""

import pytest

from bayesify.evaluation.checking import Check
from bayesify.evaluation.report import write_report
from tests.evaluation.report.makers import NASTY, Page, classification


def found(**changes):
    values = {
        "how": "streamlined",
        "predictor": "streamlined: means and variances in one forward pass",
        "examples": 1280,
        "draws": 200,
        "variance_ratio": 0.934,
        "rank_correlation": 0.976,
        "noise_ceiling": 0.991,
        "epistemic_ratio": 1.042,
        "nll_difference": -0.01234,
        "cost": 2.61,
        "sampling_cost": 203.4,
        "advice": "Trust it here.",
    }
    return Check(**{**values, **changes})


def test_numbers_and_advice_are_shown(tmp_path):
    checks = {"adapter": found(), f"no targets {NASTY}": found(nll_difference=None, advice=f"Do not {NASTY}")}
    path = write_report([classification("plain")], tmp_path / "report.html", checks=checks)
    page = Page(path.read_text(encoding="utf-8"))
    sections = [values["id"] for tag, values in page.tags if tag == "section"]
    assert sections.index("check") == len(sections) - 2
    assert "read-check" in page.ids
    for text in ("0.93", "0.98", "0.99", "1.04", "−0.0123", "2.6×", "203.4×", "no targets", "Trust it here."):
        assert text in page.text
    assert "against 200 draws on 1,280 examples" in page.text
    assert f"Do not {NASTY}" in page.text


def test_without_checks_there_is_no_section(tmp_path):
    path = write_report([classification("plain")], tmp_path / "report.html")
    assert 'id="check"' not in path.read_text(encoding="utf-8")


def test_something_else_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"must come from bayesify\.check"):
        write_report([classification("plain")], tmp_path / "report.html", checks={"adapter": 0.93})
    assert not (tmp_path / "report.html").exists()
