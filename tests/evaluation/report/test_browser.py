"""Open the report as a reader does, in a browser without a window."""

import html
import json
import re
import shutil
import subprocess

import pytest
import torch

from bayesify.evaluation.evaluation import Cost
from bayesify.evaluation.report import write_report
from tests.evaluation.report.makers import NASTY, classification, regression

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
    "--enable-logging=stderr",
]
WIDTHS = (1280, 390)  # a laptop, a phone
# A window has a least width, a frame has none; the page's own policy forbids scripts, so the frames' owner measures.
OWNER = """<!doctype html><output></output>
<script>
addEventListener("load", () => {
  const results = [...document.querySelectorAll("iframe")].map(frame => {
    const root = frame.contentDocument.documentElement;
    const heights = [...root.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height);
    return {scroll: root.scrollWidth, client: root.clientWidth, text: Math.min(...heights)};
  });
  document.querySelector("output").textContent = JSON.stringify(results);
});
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium found on the PATH: install chromium to run this"),
]


def opened(page, folder):
    """Return what the browser measured at each width, and what it complained about."""
    frame = '<iframe style="border:0;width:{}px;height:800px" srcdoc="{}"></iframe>'
    path = folder / "owner.html"
    path.write_text(OWNER + "".join(frame.format(width, html.escape(page)) for width in WIDTHS), encoding="utf-8")
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(re.search("<output>(.*?)</output>", done.stdout)[1]), complaints


def report(kind, folder):
    long = "a method with a rather long name, and then some"
    if kind == "regression":
        evaluations = [regression("plain"), regression(long, spread=0.1)]
        path = write_report(evaluations, folder / "report.html")
    else:
        evaluations = [
            classification("plain", cost=Cost(0.0, 1.0)),
            classification(f"{long} {NASTY}", noise=1.0, cost=Cost(2.0, 20.0)),
            *(classification(f"method-{index}" * 6, noise=0.3 * index) for index in range(1, 3)),
        ]
        images = {"images": torch.rand(80, 1, 8, 8), "ood_images": {"far & wide": torch.rand(40, 1, 8, 8)}}
        path = write_report(evaluations, folder / "report.html", class_names=[NASTY, "b" * 60, "c", "d", "e"], **images)
    return path.read_text(encoding="utf-8").replace("<details>", "<details open>")


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_it_fits_and_nothing_complains(tmp_path, kind):
    measured, complaints = opened(report(kind, tmp_path), tmp_path)
    assert complaints == []
    for width, frame in zip(WIDTHS, measured, strict=True):
        assert width - 20 < frame["client"] <= width
        assert frame["scroll"] <= frame["client"]
        assert frame["text"] > 8


def test_the_check_would_notice(tmp_path):
    page = report("regression", tmp_path)
    broken = '<div style="width:2000px">wide</div><img src="https://example.invalid/picture.png"></body>'
    measured, complaints = opened(page.replace("</body>", broken), tmp_path)
    assert all(frame["scroll"] > frame["client"] for frame in measured)
    assert any("Content Security Policy" in line for line in complaints)
