"""Networks that nobody here wrote, each through the whole way with every method: fit, predict in every way, save, load.

The classes are those that users download; the weights are random, and the sizes small where a class allows it.
"""

import traceback
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import (
    ABNN,
    APD,
    IBNN,
    IVON,
    MAP,
    SGLD,
    SWAG,
    BayesAdapter,
    DeepEnsemble,
    Laplace,
    MCDropout,
    Streamlined,
)
from bayesify.methods import list_methods
from tests.test_architectures import as_if_trained, timm, tiny_vit, torchvision
from tests.torchvision_stub import import_torchvision

ROWS, CLASSES = 8, 3
SMALL = {"epochs": 1, "lr": 1e-4}
METHODS = {
    "map": MAP(**SMALL),
    "mc-dropout": MCDropout(p=0.1, insert_before="linear", **SMALL),
    "deep-ensemble": DeepEnsemble(members=2, start="perturbed", **SMALL),
    "swag": SWAG(rank=2, num_bn_draws=2, snapshots_per_epoch=2, epochs=1, lr=1e-2),
    "abnn": ABNN(members=2, draws_per_member=1, alpha=0.03, **SMALL),
    "bayes-adapter": BayesAdapter(**SMALL),
    "bayes-adapter, shared": BayesAdapter(estimator="shared", **SMALL),
    "ivon": IVON(start_std=1e-3, **SMALL),
    "ibnn": IBNN(components=2, draws_per_component=1, **SMALL),
    "laplace": Laplace(),
    "laplace, diagonal": Laplace(structure="diagonal", mc_labels=1, prior_precision=1e4),
    "laplace, kronecker": Laplace(structure="kronecker", mc_labels=1, prior_precision=1e4),
    "sgld": SGLD(samples_per_chain=2, lr=1e-4, epochs=1, burn_in=0.0),
    "apd": APD(samples_per_chain=2, lr=1e-4, epochs=1, burn_in=0.0, latent=4, hidden=(8,), steps=2, num_bn_draws=2),
}
WAYS = (
    *("mean", "streamlined", "linearised"),
    *(Streamlined(engine=engine) for engine in ("moments", "margin", "principal")),
)


def resnet():
    models = import_torchvision().models
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def densenet():
    sizes = {"growth_rate": 8, "block_config": (2, 2, 2, 2), "num_init_features": 16}
    return import_torchvision().models.DenseNet(num_classes=CLASSES, **sizes)


def distilbert():
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=30, num_labels=CLASSES, **sizes))


def gpt2():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=30, num_labels=CLASSES, pad_token_id=0, **sizes))


def images():
    labels = torch.arange(ROWS) % CLASSES
    return DataLoader(TensorDataset(torch.randn(ROWS, 3, 32, 32), labels), batch_size=ROWS // 2)


def tokens():
    mask = (torch.arange(7) < torch.arange(ROWS)[:, None].clamp(min=3)).long()
    rows = {
        "input_ids": torch.randint(1, 30, (ROWS, 7)),
        "attention_mask": mask,
        "labels": torch.arange(ROWS) % CLASSES,
    }
    return [{name: tensor[part] for name, tensor in rows.items()} for part in (slice(0, 4), slice(4, 8))]


NETWORKS = {
    "torchvision resnet": (resnet, images),
    "torchvision mobilenet_v3_small": (torchvision("mobilenet_v3_small", width_mult=0.25), images),
    "torchvision densenet": (densenet, images),
    "torchvision vit": (tiny_vit, images),
    "timm resnet18": (timm("resnet18", channels=(8, 16, 32, 32)), images),
    "timm convnext": (timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 16, 32)), images),
    "timm efficientnet": (timm("test_efficientnet"), images),
    "timm vit_tiny": (timm("vit_tiny_patch16_224", img_size=32, depth=2), images),
    "transformers distilbert": (distilbert, tokens),
    "transformers gpt2": (gpt2, tokens),
}
# As they are published, and many times as deep, with what costs passes alone.
DEEP = {
    "torchvision resnet18": (torchvision("resnet18"), images),
    "torchvision densenet121": (torchvision("densenet121"), images),
    "timm efficientnet_b0": (timm("efficientnet_b0"), images),
}
# Its blocks are those of timm's efficientnet, but its last layer is a type of timm's own.
SEEN_BY_TYPE = ("mc-dropout", "laplace")
MOBILE = {"timm mobilenetv3": (timm("mobilenetv3_small_050"), images)}
WAYS_GONE = [
    *((architecture, name) for architecture in MOBILE for name in SEEN_BY_TYPE),
    *((architecture, name) for architecture in NETWORKS for name in METHODS),
    *((architecture, name) for architecture in DEEP for name in ("mc-dropout", "swag")),
]


# Its head sees every token, and its output is one of them: no closed form for the last layer, and the fit says so.
REFUSED = {("transformers gpt2", "laplace"): "take Laplace\\(structure='diagonal'\\)"}


def test_every_method_goes_the_whole_way():
    assert {name.partition(",")[0] for name in METHODS} == set(list_methods())


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name"), WAYS_GONE)
def test_fit_predict_save_and_load(architecture, name, tmp_path):
    make, batches = {**NETWORKS, **MOBILE, **DEEP}[architecture]
    torch.manual_seed(0)
    loader = batches()
    batch = next(iter(loader))
    inputs = {k: v for k, v in batch.items() if k != "labels"} if isinstance(batch, dict) else batch[0]
    network = as_if_trained(make(), inputs)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}

    posterior = bayesify.convert(network, METHODS[name], include=_small(network) if "kronecker" in name else None)
    if (architecture, name) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[architecture, name]):
            bayesify.fit(posterior, loader, num_data=ROWS, progress=False)
        return
    bayesify.fit(posterior, loader, num_data=ROWS, progress=False, accuracy_tolerance=1)
    if name not in ("map", "laplace", "laplace, diagonal", "laplace, kronecker"):
        assert _moved(posterior, network), "nothing was learned"

    predictions = {"sampling": bayesify.predict(posterior, inputs, num_draws=2, seed=0)}
    for how in WAYS:
        found = _predicted(posterior, inputs, how)
        if found is not None:
            predictions[how] = found
    for how, prediction in predictions.items():
        assert torch.isfinite(prediction.probs).all(), how
        torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(prediction.probs.shape[:-1]), msg=how)
        assert (prediction.epistemic >= -1e-6).all(), how
    if name != "map":
        assert predictions["sampling"].logits_variance.max() > 1e-9

    bayesify.save(posterior, tmp_path / "saved")
    loaded = bayesify.load(tmp_path / "saved", network)
    for how, prediction in predictions.items():
        again = bayesify.predict(loaded, inputs, how=how, num_draws=2 if how == "sampling" else None, seed=0)
        torch.testing.assert_close(again.probs, prediction.probs, rtol=1e-6, atol=1e-7, msg=how)
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())


def _small(network):
    """Return the layers whose Kronecker factors are quickly made: those of a wide convolution have 4,608 rows."""
    owners = [(key, module) for key, module in network.named_modules() if getattr(module, "weight", None) is not None]
    return [key for key, module in owners if max(module.weight.shape[0], module.weight[0].numel()) <= 256]


def _moved(posterior, network):
    own = network.state_dict()
    return any(
        not torch.equal(tensor, own[key.removeprefix("network.")]) if key.removeprefix("network.") in own else True
        for key, tensor in posterior.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    )


def _predicted(posterior, inputs, how):
    """Predict, or return None where bayesify itself says, in a sentence, that this has no meaning."""
    try:
        return bayesify.predict(posterior, inputs, how=how, seed=0)
    except (ValueError, NotImplementedError) as error:
        refused = error
    frame = traceback.extract_tb(refused.__traceback__)[-1]
    assert "bayesify" in Path(frame.filename).parts, f"{how}: {refused!r} was raised in {frame.filename}"
    assert str(refused).endswith("."), f"{how}: {refused}"
    return None
