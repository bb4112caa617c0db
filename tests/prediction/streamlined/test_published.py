"""Networks of torchvision, timm and transformers by `"moments"`: each runs, or falls back and says so.

They are narrow and untrained. Where every operation has a rule, the pass has the mean network's outputs as the noise
goes to nothing, so that each rule is right about the mean; where one has none, it is named.
"""

import pytest
import torch
from torch import nn

from bayesify import BayesAdapter, Streamlined, convert, predict
from bayesify.prediction.streamlined import NoRuleError
from tests.test_architectures import as_if_trained, timm, tiny_convnext, tiny_vit, torchvision
from tests.test_real_networks import densenet, distilbert, gpt2, resnet
from tests.torchvision_stub import import_torchvision

pytestmark = pytest.mark.slow
FORWARD = "streamlined: means and variances in one forward pass"


def tiny_swin():
    kind = import_torchvision().models.SwinTransformer
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": [4, 4]}
    return kind(num_classes=3, stochastic_depth_prob=0.0, **sizes)


def llama():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=30, num_labels=3, intermediate_size=24, max_position_embeddings=16, pad_token_id=0, **sizes
    )
    return LlamaForSequenceClassification(config)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(3 * 32, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        rows = x.permute(0, 2, 1, 3).flatten(2)  # an image's rows as a sequence
        return self.head(self.recurrent(rows)[0][:, -1])


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = {
    "input_ids": torch.randint(1, 30, (2, 7), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
}


class Odd(nn.Module):
    """A network with an operation that has no rule."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(32, 4)
        self.body = nn.Sequential(nn.Flatten(1), nn.Linear(384, 8), self.Running())
        self.head = nn.Linear(8, 3)

    class Running(nn.Module):
        def forward(self, x):
            return torch.cummax(x, -1).values

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


# What each does: None if every operation has a rule, else the operation without one.
NETWORKS = {
    "torchvision resnet": (resnet, IMAGES, None),
    "torchvision densenet": (densenet, IMAGES, None),
    "torchvision mobilenet_v3_small": (torchvision("mobilenet_v3_small", width_mult=0.25), IMAGES, None),
    "torchvision shufflenet": (torchvision("shufflenet_v2_x0_5"), IMAGES, None),
    "torchvision squeezenet": (torchvision("squeezenet1_1"), IMAGES, None),
    "torchvision vit": (tiny_vit, IMAGES, None),
    "torchvision convnext": (tiny_convnext, IMAGES, None),
    "torchvision swin": (tiny_swin, IMAGES, None),
    "timm resnet": (timm("resnet10t", channels=(8, 8, 16, 16)), IMAGES, None),
    "timm vit": (timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24), IMAGES, None),
    "timm convnext": (timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), IMAGES, None),
    "timm swin": (
        timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2)),
        IMAGES,
        None,
    ),
    "timm eva02": (
        timm("eva02_tiny_patch14_224", img_size=28, depth=1, embed_dim=24, num_heads=2),
        IMAGES[..., :28, :28],
        None,
    ),
    "timm xcit": (timm("xcit_nano_12_p16_224", img_size=32, depth=1, embed_dim=24, num_heads=2), IMAGES, None),
    "timm mobilenetv3": (timm("mobilenetv3_small_050"), IMAGES, None),
    "timm efficientnet": (timm("test_efficientnet"), IMAGES, None),
    "transformers distilbert": (distilbert, TOKENS, None),
    "transformers gpt2": (gpt2, TOKENS, None),
    "transformers llama": (llama, TOKENS, None),
    "lstm": (lambda: Recurrent(nn.LSTM), IMAGES, None),
    "gru": (lambda: Recurrent(nn.GRU), IMAGES, None),
    "odd": (Odd, IMAGES, "cummax"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_runs_by_moments_or_says_what_it_does_instead(name):
    torch.manual_seed(0)
    make, inputs, without = NETWORKS[name]
    posterior = convert(as_if_trained(make(), inputs), BayesAdapter())
    moments = Streamlined(engine="moments")
    if without is not None:
        with pytest.raises(NoRuleError, match=rf"{without} in module '.*' has no rule"):
            predict(posterior, inputs, how=moments)
        found = predict(posterior, inputs, how="streamlined")
        assert found.predictor != FORWARD
        assert "backward pass" in found.predictor
        return
    found = predict(posterior, inputs, how=moments)
    assert found.predictor == FORWARD
    assert bool(torch.isfinite(found.logits_variance).all())
    assert bool((found.logits_variance > 0).any(-1).all())
    with torch.no_grad():
        for log_std in posterior.law.log_std.parameters():
            log_std.fill_(-20.0)
    mean, calm = predict(posterior, inputs, how="mean"), predict(posterior, inputs, how=moments)
    scale = float(mean.logits_mean.abs().max())
    torch.testing.assert_close(calm.logits_mean, mean.logits_mean, rtol=0, atol=1e-4 * max(scale, 1.0))
