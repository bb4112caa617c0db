"""The whole path on real data, small: chains on digits, a generator from their samples, and OOD inputs."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import SGLD, distill, measure
from bayesify.data import photo_patches, read_digits, to_scale
from experiments.protocols import anomaly_table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made() -> dict[str, bayesify.Posterior]:
    train, val = read_digits("train"), read_digits("val")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))
    # The prior relaxes in 2 n prior_std^2/lr = 290 steps, of which the burn-in has 330.
    method = SGLD(epochs=60, lr=0.3, prior_std=0.2, samples_per_chain=150, start="reset")
    bank = bayesify.convert(network, method)
    data = DataLoader(TensorDataset(flat(train.inputs), train.targets), 100, shuffle=True)
    bayesify.fit(bank, data, progress=False, accuracy_tolerance=1)
    held_out = flat(val.inputs)[:100]
    options = {"hidden": (20, 20), "lr": 1e-3, "steps": 500, "check_steps": 100}
    small = distill(bank, inputs=held_out, progress=False, **options)
    return {"SGLD": bank.eval(), "APD": small, "PCA": distill(bank, "pca", latent=20, progress=False)}


def flat(images: torch.Tensor) -> torch.Tensor:
    return to_scale(images, -1.0, 1.0, source=(0.0, 1.0)).flatten(1)


def figures(posterior: bayesify.Posterior) -> tuple[float, float]:
    """Return accuracy, and the AUROC by mutual information of photographs multiplied by five."""
    test = read_digits("test")
    prediction = bayesify.predict(posterior, flat(test.inputs), num_draws=100, seed=0)
    ood = {"photos": flat(photo_patches(200, seed=0))}
    table = anomaly_table(posterior, flat(test.inputs), ood, factor=5.0, bounds=(-1.0, 1.0), num_draws=100)
    return measure.accuracy(prediction.probs, test.targets), table["photos"]["BALD"].auroc


def test_chains_learn_digits_and_find_photographs(made: dict[str, bayesify.Posterior]):
    accuracy, auroc = figures(made["SGLD"])
    assert accuracy > 0.9
    assert auroc > 0.85


@pytest.mark.parametrize("name", ["APD", "PCA"])
def test_a_distillation_keeps_both(made: dict[str, bayesify.Posterior], name: str):
    (accuracy, auroc), (own, kept) = figures(made["SGLD"]), figures(made[name])
    assert own > accuracy - 0.03
    assert kept > 0.95 * auroc
