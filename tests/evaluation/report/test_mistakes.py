"""The section that a report opens with: what the network gets wrong and is sure of, and what the posterior says."""

from dataclasses import replace

import pytest
import torch

from bayesify import Categorical
from bayesify.evaluation.mistakes import find_mistakes
from bayesify.evaluation.report import write_report
from bayesify.evaluation.report.content import Section
from tests.evaluation.report.makers import NASTY, Page, classification

TARGETS = torch.tensor([0, 1, 2, 0, -100])
# Wrong are the second (sure), the third (less so) and the last, which does not count.
PLAIN = torch.tensor([[0.9, 0.05, 0.05], [0.995, 0.003, 0.002], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.0, 1.0, 0.0]])
OURS = torch.tensor([[0.8, 0.1, 0.1], [0.4, 0.5, 0.1], [0.3, 0.4, 0.3], [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]])


def known(name, probs, spread=0.0):
    """Return an evaluation with these probabilities, the average of two draws if they differ by a spread."""
    one = classification(name)
    lean = spread * torch.tensor([1.0, -1.0, 0.0]).expand_as(probs)
    draws = (torch.stack([probs + lean, probs - lean]) if spread else probs[None]).clamp(min=1e-9)
    prediction = Categorical().from_samples((draws / draws.sum(-1, keepdim=True)).log())
    return replace(one, prediction=prediction, targets=TARGETS, ood={})


def test_mistakes_are_found_and_the_surest_comes_first():
    found = find_mistakes(known("plain", PLAIN), known("ours", OURS, 0.05))
    assert found.rows.tolist() == [1, 2]
    assert found.targets.tolist() == [1, 2]
    assert found.labels.tolist() == [0, 1]
    torch.testing.assert_close(found.before, torch.tensor([0.995, 0.7]))
    torch.testing.assert_close(found.after, torch.tensor([0.4, 0.4]))
    assert found.sure() == (1, 0)
    assert found.sure(0.7) == (2, 0)
    assert found.prediction.label.tolist() == [1, 1]
    assert bool((found.prediction.epistemic > 0).all())


def test_there_are_none_where_there_is_nothing_to_compare():
    plain = known("plain", PLAIN)
    assert find_mistakes(plain, replace(plain, targets=TARGETS.flip(0))) is None
    right = known("right", torch.eye(3)[[0, 1, 2, 0, 0]])
    assert find_mistakes(right, right) is None


@pytest.mark.parametrize("with_images", [False, True])
def test_the_page_opens_with_them(tmp_path, with_images):
    evaluations = [known("plain", PLAIN), known("ours", OURS, 0.05), known("better", torch.eye(3)[TARGETS % 3], 0.05)]
    verdicts = ["answer", "ask", "ood", "answer", "answer"]
    images = torch.rand(5, 1, 4, 4) if with_images else None
    names = ["zero", NASTY, "two"]
    path = write_report(
        evaluations, tmp_path / "r.html", images=images, class_names=names, shown="ours", verdicts=verdicts
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert next(values["id"] for tag, values in page.tags if tag == "section") == "mistakes"
    assert "Of 5 test examples plain gets 2 wrong, and is at least 99% sure of 1 of these answers; ours" in page.text
    first, second = page.text.index("99.50%"), page.text.index("70%")
    assert first < second
    assert first < page.text.index(" ask ") < page.text.index(" ood ", second)
    total = evaluations[1].prediction
    split = f"= {total.aleatoric[1]:.2f} + {total.epistemic[1]:.2f}"
    shown = f"{total.total[1]:.2f} {split}" if with_images else f"{total.total[1]:.2f}"
    assert shown in page.text
    assert sum("plain" in values.get("class", "") for tag, values in page.tags if tag == "i") == (
        3 if images is not None else 0
    )


def test_sections_of_others_have_their_places(tmp_path):
    one = [classification("plain"), classification("ours", noise=1.0)]
    path = write_report(
        one, tmp_path / "r.html", opening=[Section("first", "Mine?")], sections=[Section("last", "Also mine?")]
    )
    page = Page(path.read_text(encoding="utf-8"))
    sections = [values["id"] for tag, values in page.tags if tag == "section"]
    assert sections == [
        "mistakes", "first", "comparison", "reliability", "histograms", "risk-coverage", "last", "conversion"
    ]  # fmt: skip
    assert "read-first" not in page.ids  # nothing to be said


def test_what_does_not_fit_gets_a_sentence(tmp_path):
    one = [classification("plain"), classification("ours", noise=1.0)]
    with pytest.raises(ValueError, match="shown='other' must be one of"):
        write_report(one, tmp_path / "r.html", shown="other")
    with pytest.raises(ValueError, match="There are 1 verdicts and 80 test examples"):
        write_report(one, tmp_path / "r.html", verdicts=["ask"])
    with pytest.raises(ValueError, match="Several sections have the keys"):
        write_report(one, tmp_path / "r.html", sections=[Section("comparison", "Mine?")])
    assert not (tmp_path / "r.html").exists()
