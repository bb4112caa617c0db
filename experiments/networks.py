"""The networks of the experiments: He et al.'s CIFAR ResNets, and their public weights.

``python -m experiments.networks`` prints the error and the negative log-likelihood of each on all
10,000 test images (two minutes on two cores).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy, pad, relu
from torch.utils.data import DataLoader

from experiments.data import File, load, locate

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "CifarResNet", "cifar_inputs", "pretrained"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

BLOCKS = {"resnet20": 3, "resnet32": 5, "resnet44": 7}
WEIGHTS = {
    "resnet20": File(
        "weights/cifar10_resnet20-12fca82f.safetensors",
        "sha256:0a37c4bacc67f04fecdab62dbbf763cc7140ecbd18b7b0ba51431f2aa2d46443",
    ),
    "resnet32": File(
        "weights/cifar10_resnet32-d509ac18.safetensors",
        "sha256:ae84295d8da6555d5e1b1df90d90f2794c46fb1ca3aac4e5316ae96ba8e75a96",
    ),
    "resnet44": File(
        "weights/cifar10_resnet44-014dd654.safetensors",
        "sha256:3e9aa9835c80bea02f815ecb07349d3087249c0b5415944b57cc3ff57887a27a",
    ),
}


class Block(nn.Module):
    """Add two 3x3 convolutions to a shortcut without parameters (option A of He et al.)."""

    def __init__(self, in_channels: int, channels: int, *, stride: int = 1) -> None:
        """Make a block that halves the image if ``stride`` is 2."""
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.extra = channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, in_channels, H, W)`` to ``(B, channels, H/stride, W/stride)``."""
        h = relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        if self.stride != 1 or self.extra:
            side = self.extra // 2
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, side, self.extra - side))
        return relu(h + x)


class CifarResNet(nn.Module):
    """Build the ResNet of 6n+2 layers for 32x32 images (He et al. 2016, section 4.2).

    Args:
        n: blocks per stage: 3, 5, 7 for ResNet-20, 32, 44.
        num_classes: number of outputs.

    >>> sum(p.numel() for p in CifarResNet(3).parameters())
    269722
    """

    def __init__(self, n: int, *, num_classes: int = 10) -> None:
        """Initialise convolutions and the last layer as He et al. (2015)."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, n, stride=1)
        self.layer2 = _stage(16, 32, n, stride=2)
        self.layer3 = _stage(32, 64, n, stride=2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map normalised images ``(B, 3, 32, 32)`` to logits ``(B, num_classes)``."""
        h = relu(self.bn1(self.conv1(x)))
        h = self.layer3(self.layer2(self.layer1(h)))
        logits: Tensor = self.linear(adaptive_avg_pool2d(h, 1).flatten(1))
        return logits


def _stage(in_channels: int, channels: int, n: int, *, stride: int) -> nn.Sequential:
    first = Block(in_channels, channels, stride=stride)
    return nn.Sequential(first, *(Block(channels, channels) for _ in range(n - 1)))


def pretrained(name: str, root: str | Path | None = None) -> CifarResNet:
    """Load a public CIFAR-10 network, in evaluation mode.

    Args:
        name: ``"resnet20"``, ``"resnet32"`` or ``"resnet44"``.
        root: folder of the data, by default BAYESIFY_DATA; the file is in its ``weights``.
    """
    if name not in WEIGHTS:
        raise ValueError(f"there are weights for {list(WEIGHTS)}, not {name!r}")
    network = CifarResNet(BLOCKS[name])
    # strict still accepts these files: they lack only num_batches_tracked, which torch fills in.
    network.load_state_dict(load_file(locate(WEIGHTS[name], root)))
    return network.eval()


def cifar_inputs(images: Tensor) -> Tensor:
    """Normalise images as the public networks were trained.

    Args:
        images: ``(B, 3, 32, 32)`` or ``(B, 32, 32, 3)``, uint8 or floats in [0, 1].

    Returns:
        ``(B, 3, 32, 32)`` floats with ImageNet's mean and standard deviation removed.

    >>> white = cifar_inputs(torch.full((1, 32, 32, 3), 255, dtype=torch.uint8))
    >>> white.shape, round(white[0, 0, 0, 0].item(), 4) == round((1 - 0.485) / 0.229, 4)
    (torch.Size([1, 3, 32, 32]), True)
    """
    if images.ndim == 4 and images.shape[1] != 3 and images.shape[3] == 3:
        images = images.permute(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"expected (B, 3, H, W) or (B, H, W, 3), got {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        images = images.float() / 255
    elif not images.is_floating_point():
        raise ValueError(f"expected uint8 or floats in [0, 1], got {images.dtype}")
    mean = images.new_tensor(IMAGENET_MEAN)[:, None, None]
    std = images.new_tensor(IMAGENET_STD)[:, None, None]
    return ((images - mean) / std).contiguous()


def main() -> None:
    """Print the test error and negative log-likelihood of the public networks."""
    test = load("cifar10", "all-test")
    for name in WEIGHTS:
        network = pretrained(name)
        with torch.no_grad():
            batches = DataLoader(test, batch_size=500)
            logits = torch.cat([network(cifar_inputs(x)) for x, _ in batches])
        error = (logits.argmax(1) != test.targets).double().mean().item()
        nll = cross_entropy(logits, test.targets).item()
        print(f"{name}: error {100 * error:.2f} %, NLL {nll:.4f}")


if __name__ == "__main__":
    main()
