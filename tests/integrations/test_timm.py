"""Models of timm: what they expect of images, and views that suit them."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import bayesify
from bayesify.integrations.timm import data_config, transform, views
from tests.test_architectures import timm
from tests.torchvision_stub import declare_torchvision_operators

declare_torchvision_operators()  # also for doctests that import timm


@pytest.fixture(scope="module")
def model():
    declare_torchvision_operators()
    torch.manual_seed(0)
    return timm("test_resnet")().eval()


def photo(height, width):
    pixels = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def test_the_configuration_is_timms(model):
    from timm.data import resolve_data_config

    assert data_config(model) == resolve_data_config(model=model)
    posterior = bayesify.convert(model, bayesify.MAP())
    assert data_config(posterior) == data_config(model)
    assert data_config(model, size=32)["input_size"] == (3, 32, 32)
    with pytest.raises(TypeError, match="is no model of timm"):
        data_config(nn.Linear(2, 2))


def test_images_become_what_pillow_and_the_formulas_say(model):
    """Resize the shorter side to size / crop, crop the middle, scale to [0, 1], subtract the mean, divide by std."""
    config = data_config(model, size=48)
    image = photo(80, 100)
    short = int(48 / config["crop_pct"])
    resized = image.resize((int(short * 100 / 80), short), Image.Resampling[config["interpolation"].upper()])
    left, top = round((resized.width - 48) / 2), round((resized.height - 48) / 2)
    pixels = np.asarray(resized.crop((left, top, left + 48, top + 48)), np.float64) / 255
    expected = (pixels - np.array(config["mean"])) / np.array(config["std"])
    found = transform(model, size=48)(image)
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1), rtol=0, atol=1e-5)


def test_views_follow_the_size(model):
    assert views(model, size=224).names == ["identity", "mirror", "shift(7,0)", "mirror+shift(-7,0)"]
    assert views(model, 6, size=32).names[4:] == ["shift(0,1)", "mirror+shift(0,-1)"]
    assert views(model, 1).names == ["identity"]
    with pytest.raises(ValueError, match="1 to 6 views"):
        views(model, 7)


def test_from_a_picture_to_a_prediction(model):
    posterior = bayesify.convert(model, bayesify.MAP())  # the one line
    images = torch.stack([transform(posterior, size=64)(photo(70, 90)), transform(posterior, size=64)(photo(90, 70))])
    seen = views(posterior, 4, size=64)
    found = bayesify.predict(posterior, images, views=seen)
    with torch.no_grad():
        naive = torch.stack([model(view(images)).softmax(-1) for view in seen]).mean(0)
    torch.testing.assert_close(found.probs, naive)
    moved = images[:, :, torch.arange(64).sub(2).clamp(min=0)]
    torch.testing.assert_close(seen[2](images), moved)
