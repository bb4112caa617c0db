"""Posteriors on the hub, offline: folders, the hub's cache, and pushes that reach no server."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from torch import nn

import bayesify
from bayesify import MAP, SWAG, Custom, DeepEnsemble, Laplace, MCDropout
from bayesify._core.files import digest
from bayesify.integrations import hub
from bayesify.integrations.hub import SharedPosterior
from tests.test_architectures import timm

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
LOADER = [(X, X[:, :3].argmax(1))]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3)).eval()


def fitted(method, plain=None):
    posterior = bayesify.convert(plain or network(), method)
    bayesify.fit(posterior, LOADER, num_data=24, progress=False, accuracy_tolerance=1)
    return posterior


def same(one, other, inputs=X):
    found = [bayesify.predict(posterior, inputs, num_draws=3).probs for posterior in (one, other)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "method",
    [MAP(), MCDropout(), Laplace(prior_precision=1.0), SWAG(rank=2, epochs=3), DeepEnsemble(members=2, epochs=1)],
)
def test_a_folder_gives_the_posterior_back(method, tmp_path):
    posterior = fitted(method)
    SharedPosterior(posterior).save_pretrained(tmp_path)
    shared = SharedPosterior.from_pretrained(tmp_path, network=network(seed=1))  # its weights do not matter
    same(posterior, shared.posterior)
    shared.save_pretrained(tmp_path / "again")
    same(posterior, SharedPosterior.from_pretrained(str(tmp_path / "again"), network=network(seed=2)).posterior)
    kinds = {path.suffix for path in tmp_path.iterdir() if path.is_file()}
    assert kinds == {".json", ".safetensors", ".md"}


def test_differences_alone_need_the_same_weights(tmp_path):
    posterior = fitted(MCDropout())
    SharedPosterior(posterior, whole=False).save_pretrained(tmp_path / "small")
    SharedPosterior(posterior).save_pretrained(tmp_path / "whole")
    sizes = [sum(p.stat().st_size for p in (tmp_path / n).glob("*.safetensors")) for n in ("small", "whole")]
    assert sizes[0] < sizes[1] / 2
    same(posterior, SharedPosterior.from_pretrained(tmp_path / "small", network=network()).posterior)
    with pytest.raises(ValueError, match="not the one that"):
        SharedPosterior.from_pretrained(tmp_path / "small", network=network(seed=1))


def test_the_card_has_measures_and_the_command(tmp_path):
    posterior = fitted(MCDropout())
    evaluation = bayesify.evaluate(posterior, LOADER, num_draws=3)
    with pytest.raises(ValueError, match="the command that made them"):
        SharedPosterior(posterior, evaluation=evaluation)
    shared = SharedPosterior(posterior, evaluation=evaluation, command="python train.py --seed 0")
    shared.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "bayesify"
    assert card.data.tags == ["bayesian", "uncertainty", "mc-dropout"]
    assert "```sh\npython train.py --seed 0\n```" in card.text
    rows = dict(line.strip("| ").split(" | ", 1) for line in card.text.splitlines() if line.startswith("| "))
    for name, value in evaluation.metrics.items():
        found = evaluation.interval(name)
        assert rows[name] == f"{value:.4g} | {found.low:.4g} | {found.high:.4g}", name
    loaded = SharedPosterior.from_pretrained(tmp_path, network=network())
    assert loaded.measures == shared.measures
    assert loaded.command == shared.command


def test_words_of_ones_own_stay_in_the_card(tmp_path):
    posterior = bayesify.convert(network(), MCDropout())
    SharedPosterior(posterior).save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    path.write_text(path.read_text().replace("# A Bayesian network", "# Birds\n\nOf my garden.") + "\nThanks.\n")
    evaluation = bayesify.evaluate(posterior, LOADER, num_draws=3)
    SharedPosterior(posterior, evaluation=evaluation, command="make birds").save_pretrained(tmp_path)
    text = path.read_text()
    assert "Of my garden." in text
    assert text.endswith("Thanks.\n")
    assert "make birds" in text
    assert text.count("SharedPosterior.from_pretrained") == 1
    path.write_text("# Mine\n")
    SharedPosterior(posterior).save_pretrained(tmp_path)
    assert path.read_text().startswith("# Mine\n\n<!-- bayesify -->")


def test_a_push_uploads_the_folder(monkeypatch, tmp_path):
    pushed = {}

    class Created:
        repo_id = "me/birds"

    def upload_folder(self, *, folder_path, repo_id, **options):
        shutil.copytree(folder_path, tmp_path / "remote")
        pushed.update(repo_id=repo_id, **options)
        return "https://example.org/commit"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, **options: Created())
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    posterior = fitted(SWAG(rank=2, epochs=3))
    assert SharedPosterior(posterior).push_to_hub("birds", private=True) == "https://example.org/commit"
    assert pushed["repo_id"] == "me/birds"
    assert pushed["repo_type"] == "model"
    same(posterior, SharedPosterior.from_pretrained(tmp_path / "remote", network=network()).posterior)
    shutil.rmtree(tmp_path / "remote")
    assert SharedPosterior(posterior).save_pretrained(tmp_path / "here", push_to_hub=True, repo_id="birds")


def test_the_hubs_cache_of_links_is_read(monkeypatch, tmp_path):
    posterior = fitted(Laplace(prior_precision=1.0))
    SharedPosterior(posterior).save_pretrained(tmp_path / "blobs")
    snapshot = tmp_path / "models--me--birds" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        os.symlink(path, snapshot / path.name)
    asked = {}

    def downloaded(name, **options):
        asked.update(options, name=name)
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", downloaded)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", lambda **_: str(snapshot / "config.json"))
    shared = SharedPosterior.from_pretrained("me/birds", network=network(), revision="v2")
    same(posterior, shared.posterior)
    assert asked["name"] == "me/birds"
    assert asked["revision"] == "v2"
    assert not any(pattern.endswith(("py", "bin", "pt", "pkl")) for pattern in asked["allow_patterns"])


def test_timm_makes_the_network_that_a_folder_names(tmp_path):
    model = timm("test_efficientnet")().eval()
    posterior = bayesify.convert(model, MCDropout(p=0.1, insert_before="linear"))
    images = torch.randn(2, 3, 32, 32)
    expected = bayesify.predict(posterior, images, num_draws=3).probs
    with pytest.raises(ValueError, match="another network"):
        SharedPosterior(posterior, architecture={"timm": "test_efficientnet"})  # of a thousand classes
    SharedPosterior(posterior, architecture={"timm": "test_efficientnet", "num_classes": 3}).save_pretrained(tmp_path)
    loaded = SharedPosterior.from_pretrained(tmp_path)
    assert torch.equal(bayesify.predict(loaded.posterior, images, num_draws=3).probs, expected)
    assert "made by timm" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"timm": "hf-hub:me/evil"}, "no model"),
        ({"timm": "resnet18", "checkpoint_path": "/etc/passwd"}, "would read files"),
        ({"timm": "resnet18", "pretrained": True}, "would read files"),
        ({"transformers": "x"}, "An architecture is"),
    ],
)
def test_a_folder_cannot_ask_for_more_than_a_registered_model(architecture, message, tmp_path):
    timm("test_efficientnet")  # torchvision's operators are declared with it
    SharedPosterior(bayesify.convert(network(), MAP())).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["notes"]["hub"]["architecture"] = architecture
    del config["digest"]
    path.write_text(json.dumps({**config, "digest": digest(config)}))
    with pytest.raises(ValueError, match=message):
        SharedPosterior.from_pretrained(tmp_path)


def test_what_is_missing_is_said(tmp_path):
    posterior = bayesify.convert(network(), MAP())
    SharedPosterior(posterior).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not say how its network is made"):
        SharedPosterior.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="knows no"):
        SharedPosterior.from_pretrained(tmp_path, netwrok=network())
    with pytest.raises(TypeError):
        SharedPosterior(network())
    custom = bayesify.convert(network(), MAP(), likelihood=Custom(lambda output, target: -((output - target) ** 2)))
    with pytest.raises(ValueError, match="cannot be saved"):
        SharedPosterior(custom).save_pretrained(tmp_path / "custom")
    assert not Path(tmp_path / "custom" / "README.md").exists()
