from dataclasses import replace

import torch

from bayesify.evaluation.report._summary import summary
from tests.evaluation.report.makers import classification, regression


def with_metrics(evaluation, **metrics):
    return replace(evaluation, metrics={**evaluation.metrics, **metrics})


def test_it_says_what_was_compared():
    first = summary([classification("a"), classification("b", noise=1.0)])[0]
    assert first == ("a and b were compared on 80 test examples of 5 classes, and on OOD inputs: far & wide (40).")


def test_many_names_are_left_to_the_table():
    six, seven = ([classification(f"m{index}") for index in range(number)] for number in (6, 7))
    assert summary(six)[0].startswith("m0, m1, m2, m3, m4 and m5 were compared")
    assert summary(seven)[0].startswith("7 predictions were compared on 80 test examples")


def test_it_is_honest_when_the_plain_network_wins():
    plain = with_metrics(classification("plain"), nll=0.1, ece=0.01, **{"auroc/far & wide": 0.7})
    noisy = with_metrics(classification("noisy", noise=1.0), nll=0.2, ece=0.02, **{"auroc/far & wide": 0.9})
    text = summary([plain, noisy])
    assert "plain gives the best probabilities: the NLL is 0.100." in text
    assert (
        "plain is the best calibrated: the confidence is off by 1.0 percentage points on average (ECE 0.010)." in text
    )
    assert "noisy recognises far & wide as OOD best, by total uncertainty (AUROC 0.900)." in text
    assert text[-1] == (
        "In the quality of probabilities and calibration, no Bayesian method improved on a single network without "
        "randomness."
    )


def test_equals_share_the_praise():
    plain = with_metrics(classification("plain"), ece=0.0501)
    noisy = with_metrics(classification("noisy", noise=1.0), ece=0.0499)
    text = summary([plain, noisy])
    assert any(sentence.startswith("plain and noisy are the best calibrated") for sentence in text)
    assert "calibration" in text[-1]
    assert "no Bayesian method improved" in text[-1]


def test_the_better_of_both_uncertainties_is_named():
    keys = {"auroc/far & wide": 0.8, "auroc-epistemic/far & wide": 0.95}
    text = " ".join(summary([classification("a"), with_metrics(classification("b", noise=1.0), **keys)]))
    assert "b recognises far & wide as OOD best, by epistemic uncertainty (AUROC 0.950)." in text


def test_it_says_when_nothing_detects_the_ood_set():
    keys = {"auroc/far & wide": 0.52, "auroc-epistemic/far & wide": 0.5}
    text = " ".join(summary([with_metrics(classification("a"), **keys)]))
    assert "Nothing here tells far & wide from the test examples: the best AUROC is 0.520" in text


def differing(size):
    """Return a plain network, and a random one whose log-probabilities at the targets differ by mean 0.1."""
    plain = classification("plain")
    steps = 0.1 + size * torch.tensor([1.0, -1.0]).repeat(40)
    log_probs = plain.prediction.log_probs + steps[:, None]
    better = replace(plain.prediction, log_probs=log_probs, epistemic=torch.ones(80))
    return [plain, with_metrics(replace(plain, name="better", prediction=better), nll=plain.metrics["nll"] - 0.1)]


def test_a_difference_within_chance_is_called_so():
    # The standard error of the mean is size / sqrt(79), to compare twice with 0.1.
    assert "too few to be sure" not in " ".join(summary(differing(0.44)))
    assert "80 examples are too few to be sure of this difference" in " ".join(summary(differing(0.45)))


def test_regression_speaks_of_intervals():
    text = summary([regression("right"), regression("narrow", noise_std=0.1)])
    assert text[2].startswith("right is the best calibrated: 95% intervals hold ")
