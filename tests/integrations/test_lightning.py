"""Posteriors in a Lightning trainer."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bayesify
from bayesify import SGLD, SWAG, BayesAdapter, Laplace, MCDropout
from tests.conformance.cases import CASES, EXAMPLES, loader
from tests.fitting.ddp import CALM
from tests.fitting.test_learner import plain, train

pl = pytest.importorskip("pytorch_lightning")
from bayesify.integrations.lightning import LightningPosterior, PosteriorCallback  # noqa: E402
from tests.integrations.lightning_ddp import METHODS, run  # noqa: E402

# Lightning's advice: few workers, no validation data, and the like.
pytestmark = pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")
EXAMPLE = EXAMPLES["mlp"]


def trainer(**options):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(**{"max_epochs": 3, "accelerator": "cpu", **dict.fromkeys(off, False), **options})


def assert_same(one, other):
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_trainer_ends_where_a_loop_of_ones_own_does():
    data = loader(EXAMPLE, 12, shuffle=False)
    method = SWAG(rank=2, num_bn_draws=2, snapshots_per_epoch=2, lr=0.1, schedule="cosine")
    one, other = (bayesify.convert(plain(EXAMPLE.network()), method) for _ in range(2))
    train(one, data, epochs=3)
    trainer().fit(LightningPosterior(other), data)
    assert_same(one, other)
    assert other.learned is True


def test_accumulation_and_clipping_are_the_trainers():
    data = loader(EXAMPLE, 16, shuffle=False)
    one, other = (bayesify.convert(plain(EXAMPLE.network()), SWAG(rank=2, lr=0.5)) for _ in range(2))
    options = {"accumulate": 2, "clip_norm": 0.1, "accuracy_tolerance": 1.0, "progress": False}
    bayesify.fit(one, data, epochs=3, **options)
    trainer(accumulate_grad_batches=2, gradient_clip_val=0.1).fit(LightningPosterior(other), data)
    assert int(other.law.snapshots) == 3
    for (name, tensor), found in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, tensor, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_method_is_trained_calibrated_and_saved(case, tmp_path):
    method = replace(case.noisy, prior_precision=1.0) if isinstance(case.noisy, Laplace) else case.noisy
    posterior = bayesify.convert(EXAMPLE.network(), method)
    val = loader(EXAMPLE, 8, shuffle=False)
    callback = PosteriorCallback(tmp_path / "posterior")
    module = LightningPosterior(posterior)
    run = trainer(callbacks=[callback])
    run.fit(module, loader(EXAMPLE), val)
    assert callback.nll == bayesify.evaluate(posterior, val).metrics["nll"]
    loaded = bayesify.load(tmp_path / "posterior", EXAMPLE.network())
    inputs = next(iter(val))[0]
    assert torch.equal(bayesify.predict(loaded, inputs).probs, bayesify.predict(posterior, inputs).probs)
    found = bayesify.Prediction.join(run.predict(module, val))
    torch.testing.assert_close(found.probs, bayesify.predict(posterior, val).probs)


def test_calibration_and_the_validation_nll():
    posterior = bayesify.convert(plain(EXAMPLE.network()), bayesify.MAP(lr=0.5))
    val = loader(EXAMPLE, 10, shuffle=False)  # batches of 4, 4 and 2
    callback, module = PosteriorCallback(), LightningPosterior(posterior)
    run = trainer(max_epochs=1, callbacks=[callback])
    run.fit(module, loader(EXAMPLE), val)
    posterior.eval()
    with torch.no_grad():
        found = [(posterior(x), y) for x, y in val]
    logits, targets = (torch.cat(part) for part in zip(*found, strict=True))
    nll = nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(run.callback_metrics["val_nll"].double(), nll)
    temperature = posterior.likelihood.temperature
    assert temperature != 1
    assert callback.nll == pytest.approx(nn.functional.cross_entropy(logits / temperature, targets).item())
    assert callback.nll < nll


@pytest.mark.filterwarnings("ignore:Be aware that when using")  # the callback that wrote it
def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    data = loader(EXAMPLE, 12, shuffle=False)
    method = SWAG(rank=2, num_bn_draws=2, snapshots_per_epoch=2, lr=0.1, schedule="cosine")
    whole, resumed = (bayesify.convert(plain(EXAMPLE.network()), method) for _ in range(2))
    kept = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    trainer(callbacks=[kept], enable_checkpointing=True).fit(LightningPosterior(whole), data)
    trainer().fit(LightningPosterior(resumed), data, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_same(whole, resumed)


def test_ood_inputs_come_from_a_second_loader():
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)).double()
    posterior = bayesify.convert(network, MCDropout())
    ood = DataLoader(TensorDataset(torch.randn(12, 4, dtype=torch.float64)), batch_size=4)
    module = LightningPosterior(posterior, regularizer=bayesify.OODRegularizer(weight=2.0))
    run = trainer(max_epochs=1)
    run.fit(module, {"data": loader(EXAMPLE), "ood": ood})
    assert "train_uncertainty" in run.callback_metrics
    assert module.learner.objective.num_data == 12


class _Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.randn(4, dtype=torch.float64), 0)] * 8)


@pytest.mark.parametrize(
    ("method", "data", "sentence"),
    [
        (BayesAdapter(prior_gradient="built-in"), None, "prior_gradient='autograd'"),
        (SGLD(chains=2), None, "With together=True they share one"),
        (bayesify.MAP(), DataLoader(_Stream(), batch_size=4), "How long the run is must be known"),
        (bayesify.MAP(), [(torch.randn(4, 4, dtype=torch.float64), torch.zeros(4).long())], "num_data="),
    ],
    ids=["built-in", "chains", "stream", "list"],
)
def test_what_cannot_be_trained_gets_a_sentence(method, data, sentence):
    module = LightningPosterior(bayesify.convert(plain(EXAMPLE.network()), method))
    with pytest.raises(ValueError, match=sentence):
        trainer().fit(module, loader(EXAMPLE) if data is None else data)


def test_other_modules_get_a_sentence():
    with pytest.raises(TypeError, match="convert"):
        LightningPosterior(nn.Linear(4, 3))
    with pytest.raises(TypeError, match="LightningPosterior"):
        PosteriorCallback().on_train_end(None, pl.LightningModule())
    with pytest.raises(ValueError, match="begins one"):
        _ = LightningPosterior(bayesify.convert(nn.Linear(4, 3), bayesify.MAP())).learner


@pytest.mark.slow
def test_two_processes_end_with_one_posterior_which_is_that_of_one_process(tmp_path):
    """Lightning's own strategy: of one process are the numbers, and of each other the bits."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integrations.lightning_ddp", str(tmp_path)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    for method in METHODS:
        ranks = [torch.load(tmp_path / f"{method.name}-{rank}.pt") for rank in range(2)]
        alone = run(method, tmp_path / "alone")
        for name, tensor in alone["state"].items():
            assert torch.equal(ranks[0]["state"][name], ranks[1]["state"][name]), (method.name, name)
            near = 1e-6 if name == "likelihood.temperature" else 1e-8  # a search ends where it is near enough
            torch.testing.assert_close(ranks[0]["state"][name], tensor, rtol=near, atol=1e-11, msg=name)
        assert ranks[0]["nll"] == ranks[1]["nll"] == pytest.approx(alone["nll"])
        loaded = bayesify.load(tmp_path / method.name, CALM.network())
        torch.testing.assert_close(loaded.network.state_dict(), alone["network"])
