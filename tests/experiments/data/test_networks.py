from __future__ import annotations

import pytest
import torch

from experiments.networks import IMAGENET_MEAN, IMAGENET_STD, Block, CifarResNet, cifar_inputs
from experiments.networks import pretrained as load_pretrained


@pytest.mark.parametrize(("n", "parameters"), [(3, 269722), (5, 464154), (7, 658586)])
def test_the_networks_have_the_published_number_of_parameters(n, parameters):
    network = CifarResNet(n)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert not any("shortcut" in name or "relu" in name for name, _ in network.named_modules())


def test_the_shortcut_subsamples_and_pads_equally_on_both_sides():
    block = Block(2, 6, stride=2).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 2, 4, 4)
    out = block(x)
    assert torch.equal(out[:, 2:4], x[:, :, ::2, ::2])
    assert out[:, [0, 1, 4, 5]].abs().max() == 0


def test_inputs_are_normalised_in_either_order():
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    done = cifar_inputs(images)
    for c in range(3):
        expected = (images[:, c] / 255 - IMAGENET_MEAN[c]) / IMAGENET_STD[c]
        assert torch.allclose(done[:, c], expected, atol=1e-6)
    assert torch.equal(cifar_inputs(images.permute(0, 2, 3, 1)), done)
    assert torch.allclose(cifar_inputs(images.double() / 255).float(), done, atol=1e-6)
    with pytest.raises(ValueError, match="uint8 or floats"):
        cifar_inputs(images.long())
    with pytest.raises(ValueError, match=r"expected \(B, 3, H, W\)"):
        cifar_inputs(images[0])


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"weights/cifar10_resnet20-12fca82f\.safetensors"):
        load_pretrained("resnet20", tmp_path)
    with pytest.raises(ValueError, match="not 'resnet18'"):
        load_pretrained("resnet18", tmp_path)
