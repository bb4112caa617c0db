import pytest
import torch

from tests.torchvision_stub import import_torchvision


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet18", {}), ("vit_b_16", {"image_size": 32}), ("convnext_tiny", {})],
)
@pytest.mark.slow
def test_torchvision_networks_run(name, options):
    network = getattr(import_torchvision().models, name)(num_classes=3, **options).eval()
    logits = network(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 3)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet18", {}), ("vit_tiny_patch16_224", {"img_size": 32}), ("convnext_atto", {})],
)
def test_timm_networks_run(name, options):
    import timm

    network = timm.create_model(name, pretrained=False, num_classes=3, **options).eval()
    logits = network(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 3)
    assert logits.isfinite().all()
