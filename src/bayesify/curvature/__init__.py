"""Second derivatives of the loss: of the outputs, and from these of every layer's parameters."""

from bayesify.curvature._factors import has_factors, position_gradients, position_inputs
from bayesify.curvature._layers import Call, add_squares, add_squares_alone, calls_kept, gradients, ready
from bayesify.curvature._outputs import Curvature, columns, output_hessian

__all__ = [
    "Call",
    "Curvature",
    "add_squares",
    "add_squares_alone",
    "calls_kept",
    "columns",
    "gradients",
    "has_factors",
    "output_hessian",
    "position_gradients",
    "position_inputs",
    "ready",
]
