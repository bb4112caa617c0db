"""Networks of torchvision, timm and transformers as programs: torch's own and ONNX Runtime equal `predict` to 1e-5.

They are narrow and shallow, since tracing costs time for each operation; one export takes batches of every size.
EXPORTS=all tries every network at every size, and ResNet-18 with all its blocks, which takes many minutes; else
a ViT's program by torch, and by ONNX Runtime that of a network whose gradients are torch's own operations.
"""

import os

import pytest
import torch
from torch import nn

from bayesify import BayesAdapter, convert, export, predict
from tests.test_architectures import UNet, as_if_trained, timm, tiny_convnext
from tests.torchvision_stub import import_torchvision

pytestmark = pytest.mark.slow
WHOLE = os.environ.get("EXPORTS") == "all"
BLOCKS = 2 if WHOLE else 1


def mlp():
    return nn.Sequential(nn.Flatten(1), nn.Linear(3072, 16), nn.ReLU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3))


def torchvision_resnet():
    models = import_torchvision().models
    return models.ResNet(models.resnet.BasicBlock, [BLOCKS] * 4, num_classes=3)


def timm_resnet():
    return timm("resnet18", channels=(8, 8, 16, 16), layers=[BLOCKS] * 4)()


def torchvision_vit():
    kind = import_torchvision().models.VisionTransformer
    sizes = {"num_layers": BLOCKS, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return kind(image_size=32, patch_size=8, num_classes=3, **sizes)


def distilbert():
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": 16, "hidden_dim": 32, "n_layers": BLOCKS, "n_heads": 2, "max_position_embeddings": 16}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=30, num_labels=3, **sizes))


def images(size):
    return lambda rows: torch.randn(rows, 3, size, size)


def tokens(length):
    def make(rows):
        mask = (torch.arange(length) < torch.randint(2, length + 1, (rows,))[:, None]).long()
        mask[0] = 1  # the first needs no padding
        return {"input_ids": torch.randint(1, 30, (rows, length)), "attention_mask": mask}

    return make


class Fixed(nn.Module):
    """Random at the first convolution alone: the gradients of all others are torch's own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Sequential(nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.Conv2d(4, 4, 3, groups=2))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.ConvTranspose2d(4, 4, 3, 2, 1, 1), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(1), nn.Linear(36, 3))

    def forward(self, x):
        x = self.up(self.down(self.first(x)))
        last = x.contiguous(memory_format=torch.channels_last)  # as ConvNeXt has them, whose pooling is an operation
        return self.head(x + nn.functional.adaptive_avg_pool2d(last, 1))  # of torch's own


NETWORKS = {
    "mlp": (mlp, [images(32)]),
    "u-net": (UNet, [images(16), images(24)]),
    "timm resnet": (timm_resnet, [images(32), images(33), images(64)]),
    "torchvision resnet": (torchvision_resnet, [images(32), images(64)]),
    "timm vit": (timm("vit_tiny_patch16_224", img_size=32, depth=BLOCKS, embed_dim=24), [images(32)]),
    "torchvision vit": (torchvision_vit, [images(32)]),
    "timm convnext": (
        timm("convnext_atto", depths=(BLOCKS,) * 4, dims=(8, 8, 16, 16)),
        [images(32), images(64)],
    ),
    "torchvision convnext": (tiny_convnext, [images(32), images(40)]),
    "distilbert": (distilbert, [tokens(7), tokens(12)]),
    "fixed layers": (Fixed, [images(12)]),
}
QUICKER = ("torchvision vit", "fixed layers")
CASES = [
    (name, index)
    for name, (_, sizes) in NETWORKS.items()
    for index in range(len(sizes))
    if WHOLE or (name in QUICKER and index == 0)
]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_programs_give_what_predict_gives(name, size, tmp_path):
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    runtime = pytest.importorskip("onnxruntime")
    by_onnx = WHOLE or name == "fixed layers"
    torch.manual_seed(0)
    make, sizes = NETWORKS[name]
    inputs = sizes[size]
    include = ["first"] if name == "fixed layers" else None
    posterior = convert(as_if_trained(make(), inputs(2)), BayesAdapter(), include=include)
    module = export(posterior, inputs(2), tmp_path / "it.onnx" if by_onnx else None).module()
    session = runtime.InferenceSession(tmp_path / "it.onnx") if by_onnx else None
    for rows in (1, 8):
        x = inputs(rows)
        named = x if isinstance(x, dict) else {"input": x}
        expected = predict(posterior, x, how="streamlined")
        by_torch = module(**x) if isinstance(x, dict) else module(x)
        for key, value in by_torch.items():
            torch.testing.assert_close(value, getattr(expected, key), rtol=0, atol=1e-5)
        if session is None:
            continue
        by_runtime = session.run(None, {key: value.numpy() for key, value in named.items()})
        for key, value in zip(by_torch, by_runtime, strict=True):
            torch.testing.assert_close(torch.from_numpy(value), getattr(expected, key), rtol=0, atol=1e-5)
