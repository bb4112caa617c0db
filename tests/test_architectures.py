"""Published architectures, each with every registered method: converted, predicted with, left alone."""

import pytest
import torch
from torch import nn

from bayesify import ABNN, APD, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, MCDropout, convert, fit, predict
from bayesify.methods import list_methods
from tests.marks import slow_product
from tests.torchvision_stub import import_torchvision

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = {
    "input_ids": torch.randint(1, 30, (3, 7), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 3 + [0] * 4]),  # the first needs no padding
}


def torchvision(name, **options):
    return lambda: getattr(import_torchvision().models, name)(num_classes=3, **options)


def tiny_vit():
    kind = import_torchvision().models.VisionTransformer
    return kind(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3)


def tiny_convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=3)


def timm(name, **options):
    def make():
        import timm as library

        return library.create_model(name, pretrained=False, num_classes=3, **options)

    return make


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=3, max_position_embeddings=16, **sizes))


def gpt2():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=30, num_labels=3, pad_token_id=0, **sizes))


class UNet(nn.Module):
    """Two scales, skip connections, transposed convolution, dropout at the bottom only."""

    def __init__(self):
        super().__init__()
        self.down = self.block(3, 8)
        self.pool = nn.MaxPool2d(2)
        self.bottom = nn.Sequential(self.block(8, 16), nn.Dropout2d(0.5))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge = self.block(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    @staticmethod
    def block(inside, outside):
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))

    def forward(self, x):
        skip = self.down(x)
        h = self.up(self.bottom(self.pool(skip)))
        return self.head(self.merge(torch.cat([skip, h], 1)))


NETWORKS = {
    "torchvision resnet18": (torchvision("resnet18"), IMAGES),
    "torchvision vit": (tiny_vit, IMAGES),
    "torchvision convnext": (tiny_convnext, IMAGES),
    "torchvision mobilenet_v3_small": (torchvision("mobilenet_v3_small"), IMAGES),
    "timm vit": (timm("vit_tiny_patch16_224", img_size=32, depth=2), IMAGES),
    "timm resnet": (timm("resnet10t"), IMAGES),
    "transformers bert": (bert, TOKENS),
    "transformers gpt2": (gpt2, TOKENS),
    "unet": (UNet, IMAGES),
}


@torch.no_grad()
def as_if_trained(network, inputs):
    """Give a network statistics that fit its weights, and a head that is not zero, so that noise can be seen."""
    for module in network.modules():
        if isinstance(module, nn.Linear) and module.out_features == 3:
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    if isinstance(inputs, torch.Tensor):
        network.train()(torch.randn(16, *inputs.shape[1:]))
    return network.eval()


def configuration(name, network):
    """Return a quick configuration of a method that suits a network."""
    if name == "mc-dropout":
        rates = [module.p for module in network.modules() if type(module) in (nn.Dropout, nn.Dropout2d)]
        return MCDropout() if any(rates) else MCDropout(p=0.2, insert_before="linear")
    if name == "swag":
        return SWAG(rank=2, num_bn_draws=3)
    if name == "sgld":
        return SGLD(samples_per_chain=3)
    if name == "apd":
        return APD(samples_per_chain=1, latent=4, hidden=(8,), num_bn_draws=3)
    if name == "deep-ensemble":
        return DeepEnsemble(members=3, start="perturbed")
    if name == "abnn":
        return ABNN(alpha=0.03)  # more would drown networks of random weights
    if name == "bayes-adapter":
        return BayesAdapter()  # as with ABNN, the example's noise is for small networks
    if name == "laplace":
        return Laplace(structure="diagonal", mc_labels=1, prior_precision=1e4)
    return list_methods()[name].example()


def fit_a_little(posterior, inputs):
    """Let SWAG and banks see some snapshots, and a Laplace posterior some data, so that their draws differ."""
    law = posterior.law
    if hasattr(law, "curvature"):
        with torch.no_grad():
            output = posterior.likelihood.classes_last(posterior.outputs(inputs))
        labels = torch.zeros(output.shape[:-1], dtype=torch.long)
        batch = {**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)
        fit(posterior, [batch], num_data=len(labels), progress=False, accuracy_tolerance=1)
        weights = {name: posterior.network.get_parameter(name) for name in law.names if name.endswith("weight")}
        with posterior.mean():
            moved = posterior.outputs(inputs).square().sum()
        grads = torch.autograd.grad(moved, list(weights.values()), allow_unused=True)
        for name, grad in zip(weights, grads, strict=True):  # a scale of zero hides what lies before it
            reached = grad is not None and bool(grad.any())
            assert bool(law.curvature.as_dict()[name].any()) == reached, name
    if hasattr(law, "generator"):
        with torch.no_grad():
            law.generator[-1].weight.normal_(std=0.01)
    if not hasattr(law, "collect") and not hasattr(law, "append"):
        return
    for _ in range(3):
        with torch.no_grad():
            for parameter in posterior.network.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter) * parameter.std(correction=0))
        if hasattr(law, "collect"):
            law.collect()
        else:
            law.append(law.codec.flatten(posterior.network))
    batch = {**inputs, "labels": torch.zeros(3)} if isinstance(inputs, dict) else (torch.randn(16, 3, 32, 32), None)
    posterior.refresh_statistics([batch])


@pytest.mark.parametrize(("architecture", "name"), slow_product(NETWORKS, sorted(list_methods())))
@pytest.mark.slow
def test_convert_and_predict(architecture, name):
    make, inputs = NETWORKS[architecture]
    network = as_if_trained(make(), inputs)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    modules = dict(network.named_modules())

    # Millions of random weights would only take time.
    include = ["conv1", "fc"] if "resnet" in architecture and name in ("swag", "deep-ensemble", "sgld", "apd") else None
    posterior = convert(network, configuration(name, network), include=include)
    fit_a_little(posterior, inputs)
    prediction = predict(posterior, inputs, num_draws=3, seed=4, keep_samples=True)
    one = predict(posterior, inputs, num_draws=3, seed=4, chunk_size=1)

    with torch.no_grad():
        outputs = []
        for key in posterior.keys(3, 4):
            with posterior.drawn(key):
                outputs.append(posterior.likelihood.classes_last(posterior.outputs(inputs)).softmax(-1))
        first = posterior.draw(4)(**inputs) if isinstance(inputs, dict) else posterior.draw(4)(inputs)
    torch.testing.assert_close(prediction.samples, torch.stack(outputs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.probs, prediction.probs, rtol=1e-4, atol=1e-5)
    single = predict(posterior, inputs, num_draws=1, seed=4, keep_samples=True).samples[0]
    first = posterior.likelihood.classes_last(posterior.read(first)).softmax(-1)
    torch.testing.assert_close(single, first, rtol=1e-4, atol=1e-5)
    if name != "map":
        assert (prediction.samples[0] - prediction.samples[1]).abs().max() > 1e-5

    assert dict(network.named_modules()) == modules
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())
    assert not any(module.training for module in network.modules())
