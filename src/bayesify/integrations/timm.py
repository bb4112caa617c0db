"""timm: what its models expect of images, and views that suit them.

`bayesify.convert(timm.create_model("resnet18", pretrained=True), bayesify.Laplace())` is all it takes, since
types of layers are known by timm's names. This module reads what timm knows of a model beside its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bayesify._core.optional import require
from bayesify.laws import Posterior
from bayesify.prediction import Views

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["data_config", "transform", "views"]

STRIDE = 32  # of most image networks; a shift by less shows them another phase of the image


def data_config(model: nn.Module, *, size: int | None = None) -> dict[str, Any]:
    """Return what a model expects of images, by `timm.data.resolve_data_config`: size, mean, std, crop, interpolation.

    Args:
        model: A model of timm, or a posterior of one.
        size: Height and width of the images, where it differs from that of the pretrained weights: models that were
            made with `img_size=` do not tell.
    """
    network: Any = model.network if isinstance(model, Posterior) else model
    given = getattr(network, "pretrained_cfg", None)
    if given is None:
        raise TypeError(
            f"A {type(network).__name__} is no model of timm, and does not say which images it expects. torchvision's "
            "weights do, weights.transforms(), and Views('identity', 'mirror') need no size."
        )
    config: dict[str, Any] = require("timm.data", extra="timm", purpose="This").resolve_data_config(model=network)
    if size is not None:
        config["input_size"] = (config["input_size"][0], size, size)
    return config


def transform(model: nn.Module, *, size: int | None = None) -> Callable[[Image], Tensor]:
    """Return what makes an input, (C, H, W), of an image of PIL, as the model was evaluated by timm.

    timm's own transform, which needs torchvision, as timm does.

    Args:
        model: A model of timm, or a posterior of one.
        size: As in `data_config`.
    """
    made: Callable[[Image], Tensor] = require("timm.data", extra="timm", purpose="This").create_transform(
        **data_config(model, size=size), is_training=False
    )
    return made


def views(model: nn.Module, passes: int = 4, *, size: int | None = None) -> Views:
    """Return views for a model's images: as it is and mirrored, then both moved by a 32nd of the height.

    The shift moves the image by a part of the stride of 32 that most networks have. Whether views help on your data,
    `bayesify.choose` tells: a network that never saw mirrored images is harmed by them.

    Args:
        model: A model of timm, or a posterior of one.
        passes: How many views, 1 to 6.
        size: As in `data_config`.

    Example:
        >>> model = nn.Identity()
        >>> model.pretrained_cfg = {"input_size": (3, 224, 224)}  # timm.create_model("resnet18") has one
        >>> views(model)
        Views('identity', 'mirror', 'shift(7,0)', 'mirror+shift(-7,0)')
    """
    by = max(1, round(data_config(model, size=size)["input_size"][1] / STRIDE))
    names = ["identity", "mirror"]
    for down, right in ((by, 0), (0, by)):
        names += [f"shift({down},{right})", f"mirror+shift({-down},{-right})"]
    if not 1 <= passes <= len(names):
        raise ValueError(f"There are 1 to {len(names)} views here, but passes={passes}. Give Views(...) of your own.")
    return Views(*names[:passes])
