"""A run that goes wrong says so, and says where."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bayesify
from bayesify import MAP, DeepEnsemble
from bayesify.fitting import NonFiniteError
from bayesify.fitting.health import Measured, _sign_test, warn_if_worse
from bayesify.fitting.idle import Draws

CLASSES = 3


def _data(rows: int = 12) -> TensorDataset:
    torch.manual_seed(0)
    x = torch.randn(rows, 4)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def _network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def _fit(posterior: bayesify.Posterior, loader: Any, **options: Any) -> bayesify.History:
    return bayesify.fit(posterior, loader, **{"epochs": 1, "progress": False, **options})


# -- non-finite values ------------------------------------------------------------------------------------------


class Explode(nn.Module):
    """Divides by zero in training from the given call on."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= self.training
        return x / 0 if self.calls < 0 else x


@pytest.mark.parametrize("method", [MAP(), DeepEnsemble(members=2)])
def test_a_module_that_returns_infinity_is_named(method: bayesify.Method):
    inner = nn.Sequential(nn.Linear(8, 8), Explode(2))
    network = nn.Sequential(nn.Linear(4, 8), inner, nn.Linear(8, CLASSES))
    posterior = bayesify.convert(network, method)
    sentence = r"not finite at step 3 of epoch 1 \(nll=nan\).*'1\.1' \(Explode\).*clip_norm"
    with pytest.raises(NonFiniteError, match=sentence):
        _fit(posterior, DataLoader(_data(), batch_size=4))


def test_a_parameter_that_is_not_a_number_is_named():
    network = _network()
    with torch.no_grad():
        network[2].weight[1, 3] = torch.nan
    with pytest.warns(UserWarning, match=r"The network's '2\.weight' hold NaN"):
        posterior = bayesify.convert(network, MAP())
    with pytest.raises(NonFiniteError, match=r"at step 1 .*The parameter '2\.weight' holds values that are not finite"):
        _fit(posterior, DataLoader(_data(), batch_size=4))


def test_a_chain_that_left_is_told_from_targets():
    posterior = bayesify.convert(_network(), bayesify.APD(chains=2, samples_per_chain=2, steps=2))
    with torch.no_grad():
        for weights in posterior.learning.chains[1].parameters():
            weights.fill_(1e30)  # finite, unlike the network's outputs with them
    with pytest.raises(NonFiniteError, match="A chain has gone where the network's output is not finite"):
        _fit(posterior, DataLoader(_data(), batch_size=4))


def test_targets_that_are_not_numbers_are_told_from_modules():
    x = torch.randn(6, 4)
    posterior = bayesify.convert(nn.Linear(4, 1), MAP(), likelihood=bayesify.Gaussian(noise_std=1.0))
    with pytest.raises(NonFiniteError, match="Every module's output is finite: the targets"):
        _fit(posterior, [(x, torch.full((6, 1), torch.nan))], num_data=6)


def test_a_rate_that_diverges_is_stopped():
    posterior = bayesify.convert(_network(), MAP(lr=1e30))
    with pytest.raises(NonFiniteError, match=r"at step [23] .*Lower the learning rate"):
        _fit(posterior, DataLoader(_data(), batch_size=4), epochs=3)


def test_a_validation_nll_that_is_not_a_number_is_told():
    x, y = _data().tensors
    with pytest.raises(NonFiniteError, match="validation NLL is not a number"):
        _fit(bayesify.convert(_network(), MAP()), DataLoader(_data()), val_loader=[(x * torch.nan, y)], patience=2)


# -- accuracy ---------------------------------------------------------------------------------------------------


def _trained() -> nn.Module:
    """Return a network with an accuracy of one on the data."""
    network = nn.Linear(4, CLASSES)
    with torch.no_grad():
        network.weight.copy_(10 * torch.eye(CLASSES, 4))
        network.bias.zero_()
    return network


def test_accuracy_that_falls_is_told_with_the_figures():
    data = _data(12)
    wrong = TensorDataset(data.tensors[0], torch.zeros(12, dtype=torch.long))
    val_loader = DataLoader(data, batch_size=5)
    posterior = bayesify.convert(_trained(), MAP(lr=10.0))
    with pytest.warns(UserWarning, match="Accuracy fell") as caught:
        history = _fit(posterior, DataLoader(wrong, batch_size=4), val_loader=val_loader, epochs=3)
    after = (data.tensors[1] == 0).double().mean().item()
    assert history.accuracy_before == 1.0
    assert history.accuracy_after == pytest.approx(after)
    text = str(caught[0].message)
    assert f"from 100.00 % (the original network) to {100 * after:.2f} % on 12 examples" in text


def test_accuracy_within_the_tolerance_is_no_warning():
    data = _data(12)
    wrong = TensorDataset(data.tensors[0], torch.zeros(12, dtype=torch.long))
    posterior = bayesify.convert(_trained(), MAP(lr=10.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _fit(posterior, DataLoader(wrong, 4), val_loader=DataLoader(data, 5), epochs=3, accuracy_tolerance=0.9)
        _fit(bayesify.convert(_trained(), MAP()), DataLoader(data, 4))


def test_both_accuracies_are_of_the_same_examples():
    """Of a shuffled loader with more batches than are looked at."""
    data = _data(60)
    loader = DataLoader(data, batch_size=1, shuffle=True, generator=torch.Generator())
    posterior = bayesify.convert(nn.Linear(4, CLASSES), MAP(lr=0.0))
    seen: list[float] = []
    for seed in range(4):
        history = _fit(posterior, loader, seed=seed)
        assert history.accuracy_before == history.accuracy_after
        seen.append(history.accuracy_before)
    assert len(set(seen)) > 1, "the same twenty examples for every seed prove nothing"


def test_one_example_of_many_is_chance():
    """A posterior that loses one of 32 examples is not worse: the warning came for that."""
    then = Measured(1.0, torch.ones(32), torch.zeros(32))
    for lost, warned in ((1, False), (6, False), (7, True)):  # 2^-7 < 1 %
        right = (torch.arange(32) >= lost).float()
        now = Measured(1 - lost / 32, right, torch.zeros(32))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_if_worse(1.0, now, then, 0.01, "Advice.")
        assert bool(caught) == warned, lost
    assert "by chance has a probability of 0.008. Advice." in str(caught[0].message)


def test_false_alarms_are_as_rare_as_is_said():
    """Of 4,000 fits that change one answer in five by chance: 40 are expected, and the test is discrete, so fewer."""
    random = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(4000):
        then = (torch.rand(100, generator=random) < 0.5).double()
        now = then.where(torch.rand(100, generator=random) < 0.8, 1 - then)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            measured = (Measured(float(right.mean()), right, torch.zeros(100)) for right in (now, then))
            after, before = measured
            warn_if_worse(before.accuracy, after, before, 0.01, "")
        alarms += bool(caught)
    assert 5 < alarms < 60


def test_the_sign_test_is_the_binomials():
    for worse, better in ((0, 0), (3, 0), (5, 9), (40, 20)):
        number = worse + better
        expected = sum(math.comb(number, k) for k in range(worse, number + 1)) / 2**number
        assert _sign_test(worse, better) == pytest.approx(expected, rel=1e-9)


def test_soft_targets_count_as_the_nearer_answer():
    """A target of .7 is yes: fit's accuracy took it for no."""
    x = torch.linspace(-1, 1, 20)[:, None]
    network = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        network.weight.fill_(1.0)
    soft = torch.where(x[:, 0] > 0, 0.7, 0.3)
    posterior = bayesify.convert(network, MAP(lr=0.0), likelihood="binary")
    history = _fit(posterior, [(x, soft)], num_data=20)
    assert history.accuracy_before == history.accuracy_after == 1.0
    assert bayesify.evaluate(posterior, [(x, soft)]).metrics["accuracy"] == 1.0


def test_the_advice_is_the_methods():
    """Laplace has no learning rate to lower."""
    assert "learning rate" in MAP.if_worse
    assert "learning rate" not in bayesify.Laplace.if_worse
    torch.manual_seed(0)
    y = torch.arange(200) % CLASSES
    x = torch.eye(CLASSES, 4)[y] + 0.01 * torch.randn(200, 4)
    wide = bayesify.Laplace(prior_precision=1e-6)
    network = _trained()
    with torch.no_grad():
        network.weight.mul_(10)  # trained until there is no curvature left
    posterior = bayesify.convert(network, wide)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(posterior, DataLoader(TensorDataset(x, y), batch_size=50), epochs=0)
    texts = [str(warning.message) for warning in caught]
    assert any("Accuracy fell" in text for text in texts)
    assert any("The NLL of 200 training examples rose" in text for text in texts)
    assert not any("learning rate" in text for text in texts)


def test_regression_has_no_accuracy():
    x = torch.randn(8, 4)
    posterior = bayesify.convert(nn.Linear(4, 1), MAP(), likelihood="regression")
    history = _fit(posterior, [(x, x[:, :1])], num_data=8)
    assert history.accuracy_before is history.accuracy_after is None


# -- bad input --------------------------------------------------------------------------------------------------


def test_an_empty_loader():
    with pytest.raises(ValueError, match=r"The loader is empty\. Check its data set, batch size and drop_last"):
        _fit(bayesify.convert(_network(), MAP()), DataLoader(_data(3), batch_size=4, drop_last=True))
    with pytest.raises(ValueError, match="The loader is empty"):
        _fit(bayesify.convert(_network(), MAP()), [], num_data=3)


def test_an_empty_validation_loader():
    with pytest.raises(ValueError, match="validation loader gave no example"):
        _fit(bayesify.convert(_network(), MAP()), DataLoader(_data()), val_loader=[])


@pytest.mark.parametrize("label", [CLASSES, -1, 255])
def test_labels_out_of_range(label: int):
    x, y = _data().tensors
    y[5] = label
    with pytest.raises(ValueError, match=rf"Labels run from {min(label, 0)} to .*the network has 3 outputs.*0 to 2"):
        _fit(bayesify.convert(_network(), MAP()), DataLoader(TensorDataset(x, y), batch_size=12))


@pytest.mark.parametrize(
    ("network", "target", "sentence"),
    [
        (nn.Flatten(0), torch.zeros(12, dtype=torch.long), r"classification needs logits \(B, C\)"),
        (_network(), torch.zeros(12), "classification needs integer labels"),
        (_network(), torch.zeros(12, 2, dtype=torch.long), r"targets must be \(12,\)"),
    ],
)
def test_outputs_that_do_not_fit_the_likelihood(network: nn.Module, target: Tensor, sentence: str):
    whole = nn.Sequential(nn.Linear(4, 4), network)
    with pytest.raises(ValueError, match=sentence):
        _fit(bayesify.convert(whole, MAP()), [(torch.randn(12, 4), target)], num_data=12)


class _Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Any:
        return iter(_data())


def test_a_loader_without_length():
    posterior = bayesify.convert(_network(), MAP())
    with pytest.raises(TypeError, match="Give the DataLoader itself"):
        _fit(posterior, iter(DataLoader(_data())), num_data=12)
    with pytest.raises(TypeError, match="has no length"):
        _fit(posterior, DataLoader(_Stream(), batch_size=4), num_data=12)


def test_a_list_needs_the_number_of_data():
    with pytest.raises(ValueError, match="pass num_data="):
        _fit(bayesify.convert(_network(), MAP()), [_data()[:]])


def test_dict_batches():
    x, y = _data().tensors
    batches = [{"input": x, "labels": y}]
    one, other = (bayesify.convert(_network(), MAP(lr=0.1)) for _ in range(2))
    _fit(one, batches, num_data=12)
    _fit(other, [(x, y)], num_data=12)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    with pytest.raises(ValueError, match=r"has the keys \['input', 'mood'\] and none of"):
        _fit(one, [{"input": x, "mood": y}], num_data=12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"patience": 2}, "patience needs a val_loader"),
        ({"epochs": -1}, "epochs must be at least 0"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"precision": "fp16"}, "needs a GPU"),
        ({"likelihood": "beta"}, "There is no likelihood 'beta'"),
        ({"num_data": 0}, "num_data must be at least 1"),
        ({"checkpoint_steps": 0}, "checkpoint_steps must be at least 1"),
        ({"clip_norm": 0.0}, "clip_norm must be greater than 0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        _fit(bayesify.convert(_network(), MAP()), DataLoader(_data()), **options)


def test_nothing_to_train():
    with pytest.raises(ValueError, match="nothing to train"):
        _fit(bayesify.convert(_network().requires_grad_(False), MAP()), DataLoader(_data()))


# -- logs -------------------------------------------------------------------------------------------------------


def test_tensorboard_files_hold_the_history(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    data = _data()
    loader = DataLoader(data, batch_size=4)
    posterior = bayesify.convert(_network(), DeepEnsemble(members=2))
    history = _fit(posterior, loader, epochs=3, val_loader=loader, log_dir=tmp_path, accuracy_tolerance=1)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    for stage in ("member 1/2", "member 2/2"):
        records = [record for record in history.epochs if record.stage == stage]
        for name, values in {
            "nll": [record.terms["nll"] for record in records],
            "total": [record.terms["total"] for record in records],
            "val_nll": [record.val_nll for record in records],
            "lr": [record.lr for record in records],
        }.items():
            found = events.Scalars(f"{stage}/{name}")
            assert [scalar.step for scalar in found] == [1, 2, 3]
            assert [scalar.value for scalar in found] == pytest.approx(values, rel=1e-6)


def test_the_log_is_closed_when_a_run_fails(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    posterior = bayesify.convert(nn.Sequential(nn.Linear(4, CLASSES), Explode(4)), MAP())
    with pytest.raises(NonFiniteError):
        _fit(posterior, DataLoader(_data(), batch_size=4), epochs=2, log_dir=tmp_path)
    assert len(accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("map/nll")) == 1


def test_progress_bars_show_the_terms(capsys: pytest.CaptureFixture[str]):
    _fit(bayesify.convert(_network(), MAP()), DataLoader(_data(), batch_size=4), epochs=2, progress=True)
    shown = capsys.readouterr().err
    assert "map epoch 1/2" in shown
    assert "map epoch 2/2" in shown
    _fit(bayesify.convert(_network(), MAP()), DataLoader(_data(), batch_size=4), epochs=2, progress=False)
    assert capsys.readouterr().err == ""


# -- members that learned nothing -------------------------------------------------------------------------------


def _three_classes(rows: int = 120) -> tuple[Tensor, Tensor]:
    labels = torch.arange(rows) % CLASSES
    return labels, 4 * torch.eye(CLASSES, dtype=torch.float64)[labels]


def test_the_constant_answer_is_that_of_the_frequencies():
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    draws, outputs = Draws(), torch.randn(2, 10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for rows in (slice(0, 7), slice(7, 10)):  # the first batch has no third class
        draws.add(bayesify.Categorical().double(), list(outputs[:, rows]), labels[rows])
    nll, accuracy = draws._constant()
    assert nll == pytest.approx(-(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1)), rel=1e-12)
    assert accuracy == pytest.approx(0.6, rel=1e-12)
    expected = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.repeat(2), reduction="none").view(2, 10)
    torch.testing.assert_close(draws.nll, expected.sum(1), rtol=1e-12, atol=0)
    assert draws.right.tolist() == (outputs.argmax(-1) == labels).sum(1).tolist()


def test_who_is_idle():
    labels, sure = _three_classes()
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(labels), generator=generator) < 0.3
    overconfident = 50 * sure.where(~wrong[:, None], sure.roll(1, 1))  # 70 % right, NLL far above ln 3
    noise, constant = torch.randn(sure.shape, generator=generator, dtype=sure.dtype), torch.zeros_like(sure)

    def idle(*outputs: Tensor) -> list[int]:
        draws = Draws()
        draws.add(bayesify.Categorical().double(), outputs, labels)
        return draws.idle()

    assert idle(sure, noise, overconfident, constant) == [1, 3]
    assert idle(noise, constant) == []  # labels that nobody knows
    few = Draws()
    few.add(bayesify.Categorical().double(), [sure[:48], constant[:48]], labels[:48])
    assert few.idle() == []  # too few to tell
    assert idle(constant) == []  # a single network is measured by its accuracy
    draws = Draws()
    draws.add(bayesify.Gaussian(), [sure.float(), noise.float()], sure.float())
    assert draws.idle() == []


class Dying(nn.Linear):
    """A layer whose third start is one that no ReLU lives through."""

    made = 0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        Dying.made += 1
        if Dying.made == 3:  # the first was the network's own
            nn.init.constant_(self.bias, -100.0)


def test_fit_warns_of_a_member_that_did_not_learn():
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    network = nn.Sequential(Dying(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    posterior = bayesify.convert(network, DeepEnsemble(members=3, lr=0.1))
    with pytest.warns(UserWarning, match=r"Of 3 draws, counted from 0, draw 1 answers no better.*NLL alone is 1\.\d+"):
        _fit(posterior, [(x, x[:, :CLASSES].argmax(1))], num_data=200, epochs=40, accuracy_tolerance=1.0)
