import base64
import builtins
import io
import re
from dataclasses import replace

import matplotlib
import pytest
import torch
from PIL import Image

from bayesify import compare
from bayesify.evaluation.evaluation import Cost
from bayesify.evaluation.report import write_report
from tests.evaluation.report.makers import NASTY, Page, classification, regression


def comparison():
    return [
        classification("plain", cost=Cost(0.0, 1.0)),
        classification(f"noisy {NASTY} $x$", noise=1.0, cost=Cost(2.0, 20.0)),
        classification("sharp", sharpness=2.0),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = write_report(
        comparison(),
        tmp_path_factory.mktemp("report") / "new" / "report.html",
        title=f"Title {NASTY}",
        images=torch.rand(80, 3, 8, 8),
        class_names=["a", "b", NASTY, "d", "e"],
        ood_images={"far & wide": torch.rand(40, 3, 8, 8)},
        notes=["First note.", f"Second {NASTY}"],
    )
    return Page(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_section_is_there(page):
    sections = [values["id"] for tag, values in page.tags if tag == "section"]
    assert sections == [
        "mistakes", "comparison", "reliability", "histograms", "risk-coverage", "cost", "images", "conversion"
    ]  # fmt: skip
    assert all(f"read-{section}" in page.ids for section in sections)
    assert "bayesify 0.1" in page.text


def test_nothing_is_loaded_and_nothing_runs(page):
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not {"script", "iframe", "object", "embed", "oodobject"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, values in page.tags for name in values)
    style = [values.get("style") or "" for _, values in page.tags]
    assert not any("url(" in text.replace("url(#", "") for text in style)


def test_ids_are_unique_and_every_reference_has_its_target(page):
    assert len(page.ids) == len(set(page.ids))
    referred = {link[1:] for link in page.links if link.startswith("#")}
    referred |= set(re.findall(r"url\(#([^)]+)\)", str([values for _, values in page.tags])))
    assert len(referred) > 20
    assert referred <= set(page.ids)


def test_names_from_outside_are_text(page):
    assert page.text.count(f"noisy {NASTY} $x$") > 5
    assert f"Title {NASTY}" in page.text
    assert f"why {NASTY}" in page.text
    assert f"Second {NASTY}" in page.text
    images = [values for tag, values in page.tags if tag == "img"]
    assert any(NASTY in values["alt"] for values in images)


def test_the_best_value_is_marked(page):
    best = [values for tag, values in page.tags if tag == "td" and values.get("class") == "best"]
    marks = page.text.count("★") - 1  # the legend's own
    assert marks == len(best) > 3


@pytest.mark.slow
def test_images_are_the_ranked_ones(tmp_path):
    evaluation = classification("noisy", noise=1.0)
    shades = torch.arange(80)[:, None, None, None].expand(80, 1, 4, 4) / 100
    page = Page(write_report([evaluation], tmp_path / "r.html", images=shades).read_text(encoding="utf-8"))
    sources = [values["src"] for tag, values in page.tags if tag == "img"]
    rows = []
    for source in sources:
        picture = Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,"))))
        assert picture.size == (4, 4)
        rows.append(round(picture.getpixel((0, 0)) / 2.55))
    order = evaluation.prediction.total.argsort(stable=True).tolist()
    assert rows == order[:8] + order[::-1][:8]
    row = order[-1]
    split = f"{evaluation.prediction.aleatoric[row]:.2f} + {evaluation.prediction.epistemic[row]:.2f}"
    assert split in page.text


@pytest.mark.slow
def test_normalised_and_large_images_are_put_in_range(tmp_path):
    images = torch.linspace(-3, 5, 80)[:, None, None, None].expand(80, 1, 200, 100)
    text = write_report([classification()], tmp_path / "r.html", images=images).read_text(encoding="utf-8")
    sources = [values["src"] for tag, values in Page(text).tags if tag == "img"]
    pictures = [Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) for source in sources]
    assert {picture.size for picture in pictures} == {(48, 96)}
    values = {picture.getpixel((0, 0)) for picture in pictures}
    assert max(values) - min(values) > 100


@pytest.mark.slow
def test_the_same_evaluations_give_the_same_bytes(tmp_path):
    first, second = (write_report(comparison()[1:], tmp_path / f"{name}.html").read_bytes() for name in "ab")
    assert first == second


def test_settings_of_figures_stay_inside(tmp_path):
    before = dict(matplotlib.rcParams)
    write_report([classification()], tmp_path / "r.html")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_without_ood_sets_and_costs_right_and_wrong_are_told_apart(tmp_path):
    evaluations = [replace(e, ood={}, cost=Cost(), conversion=None) for e in comparison()]
    page = Page(write_report(evaluations, tmp_path / "r.html").read_text(encoding="utf-8"))
    sections = [values["id"] for tag, values in page.tags if tag == "section"]
    assert sections == ["mistakes", "comparison", "reliability", "histograms", "risk-coverage", "conversion"]
    assert "Is it unsure where it is wrong?" in page.text
    assert "Not recorded: " in page.text


@pytest.mark.slow
def test_a_ood_set_keeps_its_look_where_others_are_missing(tmp_path):
    full = classification("full", noise=1.0)
    (ood,) = full.ood.values()
    both = replace(full, ood={"test": ood, "far": ood})
    page = Page(write_report([both, replace(full, name="half", ood={"far": ood})], tmp_path / "r.html").read_text())
    # Outlines of histograms have sharp corners; "far" has the second colour of the OOD sets in all of them.
    styles = [values.get("style", "") for tag, values in page.tags if tag == "path"]
    assert sum("#e69f00" in style and "miter" in style for style in styles) == 1 + 2 + 2  # legend, total, epistemic


@pytest.mark.slow
def test_regression_has_its_own_figures(tmp_path):
    evaluations = [regression("plain"), regression("narrow", noise_std=0.1), regression("spread", spread=0.1)]
    page = Page(write_report(evaluations, tmp_path / "r.html").read_text(encoding="utf-8"))
    sections = [values["id"] for tag, values in page.tags if tag == "section"]
    assert sections == ["comparison", "intervals", "residuals", "histograms", "cost", "conversion"]
    assert "CRPS" in page.text
    assert "ECE" not in page.text


@pytest.mark.slow
def test_infinite_nll_and_many_methods_can_be_drawn(tmp_path):
    many = [classification(f"method {index}", noise=0.1 * index, cost=Cost(1.0, 1.0 + index)) for index in range(8)]
    many[3] = replace(many[3], metrics={**many[3].metrics, "nll": float("inf")})
    page = Page(write_report(many, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert "inf" in page.text


def test_bad_input_gets_a_sentence(tmp_path):
    one = classification()
    path = tmp_path / "r.html"
    with pytest.raises(ValueError, match="empty"):
        write_report([], path)
    with pytest.raises(ValueError, match="is a folder"):
        write_report([one], tmp_path)
    with pytest.raises(ValueError, match="holds 3 images and the evaluation 80"):
        write_report([one], path, images=torch.rand(3, 1, 8, 8))
    with pytest.raises(ValueError, match=r"\(N, C, H, W\)"):
        write_report([one], path, images=torch.rand(80, 8, 8))
    with pytest.raises(ValueError, match="OOD sets are"):
        write_report([one], path, ood_images={"near": torch.rand(40, 1, 8, 8)})
    with pytest.raises(ValueError, match="5 classes and 2 class_names"):
        write_report([one], path, class_names=["a", "b"])
    assert not path.exists()


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, module):
    real = builtins.__import__
    monkeypatch.setattr("importlib.import_module", lambda name: real("nowhere" if name == module else name))
    with pytest.raises(ImportError, match=rf"{module}.*bayesify\[report\]"):
        write_report([classification()], tmp_path / "r.html")


def test_intervals_and_differences_are_shown_on_request(tmp_path):
    plain, flat = classification("plain", examples=200), classification("flat", sharpness=0.3, examples=200)
    other = classification("other", seed=1, examples=200)
    without = write_report([plain, flat, other], tmp_path / "without.html").read_text()
    assert 'id="differences"' not in without
    assert 'class="span"' not in without
    page = write_report([plain, flat, other], tmp_path / "with.html", intervals=0.9).read_text()
    found = plain.interval("nll", 0.9)
    assert f'<small class="span">[{found.low:.3f}, {found.high:.3f}]</small>' in page
    assert "90% bootstrap intervals" in page
    difference = compare([plain, flat], level=0.9)["flat"]["nll"]
    assert difference.low > 0
    text = f'<td class="worse">{difference.value:+.4f}<span class="mark" title="worse" aria-label="worse">✗</span>'
    assert f'{text}<small class="span">[{difference.low:+.4f}, {difference.high:+.4f}]</small></td>' in page
    assert "Not of the same examples in the same order, and therefore not here: other." in page
    alone = write_report([plain], tmp_path / "alone.html", intervals=0.9).read_text()
    assert 'id="differences"' not in alone


def test_differences_of_regression_say_which_are_better_only_where_that_is_known(tmp_path):
    first, second = regression("plain"), regression("wide", noise_std=1.5)
    page = write_report([first, second], tmp_path / "report.html", intervals=0.95).read_text()
    rows = page[page.index('id="differences"') :]
    assert 'aria-label="different">≠</span>' in rows  # the width
    assert 'aria-label="worse">✗</span>' in rows  # the NLL
    assert "≠ different" in rows
