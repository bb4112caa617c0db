"""Mean and variance in one pass: the pair type, a file of rules for each kind of operation, and the pass."""

# The files of rules register them when they are imported.
from bayesify.predict.streamlined import _activations as _activations
from bayesify.predict.streamlined import _attention as _attention
from bayesify.predict.streamlined import _linear as _linear
from bayesify.predict.streamlined import _normalisation as _normalisation
from bayesify.predict.streamlined import _piecewise as _piecewise
from bayesify.predict.streamlined import _pooling as _pooling
from bayesify.predict.streamlined import _products as _products
from bayesify.predict.streamlined import _shapes as _shapes
from bayesify.predict.streamlined._engine import MomentsPass
from bayesify.predict.streamlined._moments import Moments, NoRuleError, moment_rule

__all__ = ["Moments", "MomentsPass", "NoRuleError", "moment_rule"]
