import importlib
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Bernoulli, Categorical, Custom, DeepEnsemble, Gaussian, MCDropout, convert, measure
from bayesify.evaluation.evaluation import IGNORED, Cost, Evaluation, evaluate, measure_cost, table, to_json
from bayesify.likelihoods.prediction import RegressionPrediction

LOGITS = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
LABELS = torch.randint(4, (60,), generator=torch.Generator().manual_seed(2))
OOD = torch.randn(25, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def known(likelihood="classification"):
    """A posterior whose outputs are its inputs, so that every prediction is known."""
    return convert(nn.Identity(), "map", likelihood=likelihood)


def dropout():
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    return convert(network, MCDropout()), network


def pairwise_auroc(inside, outside):
    pairs = list(itertools.product(inside.tolist(), outside.tolist()))
    return sum((b > a) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


def test_classification_metrics_are_the_naive_sums():
    result = evaluate(known(), [(LOGITS[:17], LABELS[:17]), (LOGITS[17:], LABELS[17:])])
    probs = [[math.exp(x) / sum(math.exp(y) for y in row) for x in row] for row in LOGITS.tolist()]
    labels = LABELS.tolist()
    hits = [max(range(4), key=row.__getitem__) == label for row, label in zip(probs, labels, strict=True)]
    doubts = [1 - max(row) for row in probs]
    kept = [hit for _, hit in sorted(zip(doubts, hits, strict=True))]
    risks = [sum(not hit for hit in kept[:k]) / k for k in range(1, 61)]
    assert result.metrics["accuracy"] == pytest.approx(sum(hits) / 60, abs=1e-15)
    assert result.metrics["nll"] == pytest.approx(-sum(math.log(p[y]) for p, y in zip(probs, labels, strict=True)) / 60)
    squares = [sum((p - (c == y)) ** 2 for c, p in enumerate(row)) for row, y in zip(probs, labels, strict=True)]
    assert result.metrics["brier"] == pytest.approx(sum(squares) / 60)
    assert result.metrics["aurc"] == pytest.approx(sum(risks) / 60)
    gaps = [0.0] * 15
    for row, hit in zip(probs, hits, strict=True):
        gaps[math.ceil(max(row) * 15) - 1] += max(row) - hit
    assert result.metrics["ece"] == pytest.approx(sum(map(abs, gaps)) / 60)


@pytest.mark.parametrize("ood", [OOD, [OOD[:9], OOD[9:]], [(OOD, torch.zeros(25))]])
def test_detection_counts_pairs_whatever_holds_the_ood_set(ood):
    result = evaluate(known(), [(LOGITS, LABELS)], ood={"far": ood})
    inside, outside = (torch.distributions.Categorical(logits=x).entropy() for x in (LOGITS, OOD))
    assert result.metrics["auroc/far"] == pytest.approx(pairwise_auroc(inside, outside), abs=1e-12)
    threshold = outside.sort(descending=True).values[math.ceil(0.95 * 25) - 1]
    assert result.metrics["fpr-at-95-ood-recall/far"] == pytest.approx((inside >= threshold).double().mean().item())


def test_a_posterior_without_randomness_knows_nothing_epistemic():
    result = evaluate(known(), [(LOGITS, LABELS)], ood={"far": OOD}, num_draws=7)
    assert result.deterministic
    assert result.metrics["auroc-epistemic/far"] == 0.5


def test_the_score_decides_the_ranking():
    posterior, _ = dropout()
    data = [(LOGITS.float(), LABELS)]
    by_total, by_epistemic = (
        evaluate(posterior, data, ood={"far": OOD.float()}, score=score) for score in ("total", "epistemic")
    )
    correct = by_total.prediction.label == LABELS
    for result in (by_total, by_epistemic):
        scores = result.prediction.score(result.score), result.ood["far"].score(result.score)
        assert result.metrics["auroc/far"] == pairwise_auroc(*scores)
        assert result.metrics["aurc"] == measure.aurc(result.prediction.score("msp"), correct)
        assert result.metrics["auroc-epistemic/far"] == by_epistemic.metrics["auroc/far"]
    assert by_total.metrics["auroc/far"] != by_epistemic.metrics["auroc/far"]
    assert not by_total.deterministic


def test_a_shuffled_loader_keeps_predictions_and_targets_together():
    loader = DataLoader(TensorDataset(9 * torch.eye(40), torch.arange(40)), batch_size=7, shuffle=True)
    result = evaluate(known(), loader)
    assert result.metrics["accuracy"] == 1
    assert result.targets.tolist() != list(range(40))


def test_ignored_positions_do_not_count():
    tokens, labels = LOGITS.reshape(12, 5, 4), LABELS.reshape(12, 5).clone()
    labels[:, 3:] = 9
    result = evaluate(known(Categorical(ignore_index=9)), [(tokens, labels)])
    counted = evaluate(known(), [(tokens[:, :3].reshape(-1, 4), labels[:, :3].reshape(-1))])
    assert result.metrics == pytest.approx(counted.metrics)
    assert (result.targets[:, 3:] == IGNORED).all()


def test_yes_or_no_takes_targets_as_the_likelihood_does():
    logits, answers = LOGITS[:, :1], (LABELS > 1).double()[:, None]
    result = evaluate(known(Bernoulli()), [(logits, answers)])
    p = torch.sigmoid(logits[:, 0])
    assert result.metrics["accuracy"] == ((p > 0.5) == (answers[:, 0] > 0.5)).double().mean()
    expected = nn.functional.binary_cross_entropy_with_logits(logits, answers)
    assert result.metrics["nll"] == pytest.approx(expected.item())


@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_regression_metrics_are_those_of_measure(shape):
    mean, target = LOGITS[:, 0], LOGITS[:, 1]
    result = evaluate(known(Gaussian(0.7)), [(mean[:, None], target.reshape(shape))], ood={"far": OOD[:, :1]})
    variance = torch.full_like(mean, 0.49)
    z = 1.959963984540054 * 0.7
    assert result.metrics["rmse"] == pytest.approx((mean - target).square().mean().sqrt().item())
    assert result.metrics["nll"] == pytest.approx(measure.gaussian_nll(mean, variance, target), rel=1e-6)
    assert result.metrics["crps"] == pytest.approx(measure.crps_gaussian(mean, variance, target), rel=1e-6)
    assert result.metrics["coverage"] == ((mean - target).abs() <= z).double().mean()
    assert result.metrics["width"] == pytest.approx(2 * z, rel=1e-6)
    assert result.metrics["auroc/far"] == 0.5  # one noise for all


def test_a_likelihood_without_noise_has_only_an_error():
    result = evaluate(
        known(Custom(lambda output, target: -(output[:, 0] - target).abs())), [(LOGITS[:, :1], LOGITS[:, 1])]
    )
    assert set(result.metrics) == {"rmse"}


def test_what_cannot_be_evaluated_is_said():
    with pytest.raises(ValueError, match="nothing to predict"):
        evaluate(known(), [])
    with pytest.raises(TypeError, match="maps names to sets"):
        evaluate(known(), [(LOGITS, LABELS)], ood=[OOD])
    with pytest.raises(ValueError, match="no score 'surprise'"):
        evaluate(known(), [(LOGITS, LABELS)], score="surprise")
    with pytest.raises(ValueError, match="labels go from 0 to 7"):
        evaluate(known(), [(LOGITS[:2], torch.tensor([0, 7]))])
    with pytest.raises(ValueError, match="fit_unit"):
        Cost(fit_unit="hour")
    with pytest.raises(ValueError, match="at least 0"):
        Cost(predict=-1.0)


def test_dictionary_is_json_without_tensors():
    posterior, _ = dropout()
    result = evaluate(posterior, [(LOGITS.float(), LABELS)], ood={"far": OOD.float()}, name="ours")
    result = replace(result, cost=Cost(2.0, 20.0, "training"), metrics={**result.metrics, "nll": math.inf})
    (values,) = json.loads(to_json([result]))["evaluations"]
    assert (values["name"], values["examples"], values["ood"]) == ("ours", 60, {"far": 25})
    assert values["cost"] == {"fit": 2.0, "predict": 20.0, "fit_unit": "training"}
    assert values["metrics"].pop("nll") is None
    assert values["metrics"] == {name: value for name, value in result.metrics.items() if name != "nll"}
    assert [row["converted"] for row in values["conversion"]] == [False, True, False]


class Tick(nn.Module):
    """Takes one unit of a false clock for each pass, and much more in one disturbed pass."""

    now = 0.0
    passes = 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def reset_parameters(self):
        pass

    def forward(self, x):
        Tick.passes += 1
        Tick.now += 50.0 if Tick.passes == 17 else 1.0
        return x + self.weight


def test_cost_is_the_median_ratio_of_passes(monkeypatch):
    Tick.now, Tick.passes = 0.0, 0
    clock = importlib.import_module("bayesify.evaluation.evaluation").time
    monkeypatch.setattr(clock, "perf_counter", lambda: Tick.now)
    network = Tick().train()
    posterior = convert(network, DeepEnsemble(members=3))
    assert measure_cost(posterior, network, torch.randn(5, 4)) == 3.0
    assert network.training
    with pytest.raises(ValueError, match="repeats"):
        measure_cost(posterior, network, torch.randn(5, 4), repeats=0)


def made(name, cost=None, **metrics):
    some = evaluate(known(), [(LOGITS, LABELS)], ood={"far": OOD})
    return replace(some, name=name, cost=cost or Cost(), metrics=metrics)


def test_table_marks_the_best_of_each_column():
    text = table(
        [
            made("plain", Cost(0.0, 1.0), accuracy=0.9, nll=0.30004, ece=0.1, **{"auroc/far": 0.7}),
            made("better", Cost(3.0, 20.0), accuracy=0.9, nll=0.29996, ece=0.05, **{"auroc/far": 0.9}),
            made("worse", Cost(12.0), accuracy=0.9, nll=0.4, ece=0.2),
        ]
    )
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["accuracy", "NLL", "ECE", "AUROC", "far", "fit", "predict"]
    assert lines[1] == ["plain", "0.900", "0.300*", "0.100", "0.700", "0.0×*", "1.0×*"]
    assert lines[2] == ["better", "0.900", "0.300*", "0.050*", "0.900*", "3.0×", "20.0×"]
    assert lines[3] == ["worse", "0.900", "0.400", "0.200", "-", "12.0×", "-"]
    assert "one epoch of plain training" in text
    starts = [line.index("0.900") for line in text.splitlines()[1:4]]
    assert len(set(starts)) == 1


def test_coverage_is_best_near_its_level():
    zero = torch.zeros(2)

    def regression(name, coverage):
        return Evaluation(name, {"coverage": coverage, "width": 1.0}, RegressionPrediction(zero, zero + 1, zero), zero)

    text = table([regression("wide", 1.0), regression("right", 0.94), regression("narrow", 0.5)])
    assert "0.94*" in text
    assert text.count("*") == 2  # and the legend's own


def test_what_cannot_stand_in_one_table_is_said():
    one = made("one", Cost(fit=1.0), nll=1.0)
    with pytest.raises(ValueError, match="empty"):
        table([])
    with pytest.raises(ValueError, match=r"called \['one'\]"):
        table([one, one])
    with pytest.raises(ValueError, match="fit_unit"):
        table([one, made("two", Cost(fit=1.0, fit_unit="training"), nll=1.0)])
    other = evaluate(known(Gaussian(1.0)), [(LOGITS[:, :1], LOGITS[:, 1])], name="numbers")
    with pytest.raises(ValueError, match="regression"):
        table([one, other])


def test_the_name_is_the_methods():
    assert evaluate(known(), [(LOGITS, LABELS)]).name == bayesify.MAP.name
