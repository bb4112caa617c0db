"""Import torchvision's architectures beside a PyTorch that its compiled operators do not fit.

The published torchvision is compiled against one build of PyTorch. Beside another build (CPU only,
for instance) its operators do not load, and the import fails, because it gives `nms` and `qnms` a
fake implementation whether or not they exist. Declaring their schemas is all that it asks for; the
classification networks call neither.
"""

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["declare_torchvision_operators", "import_torchvision"]

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_torchvision_operators() -> None:
    """Make `import torchvision` work, also when timm or transformers does it."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    for library in Path(spec.origin).parent.glob("_C*.*"):
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError:
            continue
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", _SCHEMA)


def import_torchvision() -> ModuleType:
    """Return torchvision with `models` ready to use."""
    declare_torchvision_operators()
    import torchvision

    found: ModuleType = torchvision
    return found
