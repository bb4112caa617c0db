"""What a report says of a guard is what its verdicts say."""

import pytest
import torch
from torch import nn

import bayesify
from bayesify.decide import Guard, guard_sections, operating_points
from bayesify.evaluation.report import write_report

NAMES = ("dot", "dash")


@pytest.fixture(scope="module")
def found():
    """A guard with errors near a boundary, verdicts of new examples, and their labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1600, 2, generator=generator)
    labels = ((x[:, 0] + 0.3 * torch.randn(1600, generator=generator)) > 0).long()
    network = nn.Linear(2, 2)
    network.weight.data.copy_(torch.tensor([[-3.0, 0.0], [3.0, 0.0]]))
    network.bias.data.zero_()
    guard = Guard.fit(
        bayesify.convert(network, "map"), [(x[:800], labels[:800])], max_risk=0.05, how="mean", class_names=NAMES
    )
    return guard, x[800:], labels[800:]


def test_operating_points_are_those_of_a_search_over_all_thresholds(found):
    guard, x, labels = found
    verdicts = guard(x)
    right = verdicts.label == labels
    passed = torch.tensor([verdict != "ood" for verdict in verdicts.verdict])
    for allowed, share, risk in operating_points(verdicts, right):
        best = (0.0, 0.0)
        for threshold in verdicts.uncertainty[passed].unique().tolist():
            kept = passed & (verdicts.uncertainty <= threshold)
            wrong = float((~right[kept]).double().mean())
            if wrong <= allowed:
                best = max(best, (float(kept.double().mean()), wrong))
        assert (share, risk) == pytest.approx(best)


def test_sections_count_what_the_verdicts_say(found):
    guard, x, labels = found
    verdicts = guard(x)
    answered = [verdict == "answer" for verdict in verdicts.verdict]
    wrong = sum(
        a and int(label) != int(target) for a, label, target in zip(answered, verdicts.label, labels, strict=True)
    )
    (section,) = guard_sections(verdicts, labels)
    said = {name: number for number, name in section.numbers}
    assert said["answers are wrong"] == f"{wrong} of {sum(answered):,}"
    assert said["of the inputs are answered"] == f"{100 * sum(answered) / len(x):.1f}%"
    held = sum(int(target) in one for target, one in zip(labels, verdicts.prediction_set, strict=True))
    assert said["of the sets hold the label"] == f"{100 * held / len(x):.1f}%"
    assert section.tables[0].rows[0][1][0].text == said["of the inputs are answered"]


def test_drift_is_told_where_it_is(found):
    guard, x, labels = found
    stream = guard(torch.cat([x, 0.05 * x]))  # near the boundary, where few known inputs are
    drift = guard_sections(guard(x), labels, stream=stream)[1]
    assert "An alarm was raised after" in drift.findings[0].text
    after = int(drift.findings[0].text.split()[5].replace(",", ""))
    assert 800 < after < 1600
    calm = guard_sections(guard(x), labels, stream=guard(x))[1]
    assert calm.findings[0].text == "No alarm in 800 inputs."
    with pytest.raises(ValueError, match="800 verdicts and 3 targets"):
        guard_sections(guard(x), labels[:3])


def test_a_report_shows_the_sections(found, tmp_path):
    pytest.importorskip("matplotlib")
    guard, x, labels = found
    loader = [(x, labels)]
    sections = guard_sections(guard(x), labels, stream=guard(x))
    page = write_report([bayesify.evaluate(guard.posterior, loader)], tmp_path / "r.html", sections=sections)
    text = page.read_text()
    for words in ("What does the guard answer?", "Have the data left?", "the guard", "allowed", "classes in the set"):
        assert words in text


def test_numbers_have_intervals_and_a_tolerance(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(900, 1, generator=generator)
    y = x + 0.2 * x * torch.randn(900, 1, generator=generator)
    network = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.2))
    network[0].weight.data.fill_(1.0)
    network[0].bias.data.zero_()
    posterior = bayesify.convert(network, bayesify.MCDropout(), likelihood="regression").eval()
    guard = Guard.fit(posterior, [(x[:600], y[:600])], tolerance=0.5, max_risk=0.1, num_draws=16)
    (section,) = guard_sections(guard(x[600:]), y[600:])
    assert [drawing.title for drawing in section.rows[""]] == ["Errors by the share answered", "How wide intervals are"]
    held = float(section.numbers[-1][0].removesuffix("%"))
    assert 88 < held <= 100
