"""What is known of types of layers: one table, and the gradients of each example in their parameters."""

from bayesify.layers._adapters import adapter_layers, adapter_modules
from bayesify.layers._gradients import (
    AffineGradients,
    ConvolutionGradients,
    EmbeddingGradients,
    ExampleGradients,
    Factors,
    LinearGradients,
    example_gradients,
    normalised,
    padded,
)
from bayesify.layers._operations import Convolution, LinearMap, Operation, is_traced
from bayesify.layers._types import (
    DropoutLayer,
    Family,
    LayerType,
    LinearLayer,
    NormLayer,
    layer_type,
    layer_types,
    register_by_old_name,
    register_type,
)

__all__ = [
    "AffineGradients",
    "Convolution",
    "ConvolutionGradients",
    "DropoutLayer",
    "EmbeddingGradients",
    "ExampleGradients",
    "Factors",
    "Family",
    "LayerType",
    "LinearGradients",
    "LinearLayer",
    "LinearMap",
    "NormLayer",
    "Operation",
    "adapter_layers",
    "adapter_modules",
    "example_gradients",
    "is_traced",
    "layer_type",
    "layer_types",
    "normalised",
    "padded",
    "register_by_old_name",
    "register_type",
]
