"""Mean and variance in one pass: the pair type, a file of rules for each kind of operation, and the pass."""

# The files of rules register them when they are imported.
from bayesify.prediction.streamlined import activations as activations
from bayesify.prediction.streamlined import attention as attention
from bayesify.prediction.streamlined import decisions as decisions
from bayesify.prediction.streamlined import einsum as einsum
from bayesify.prediction.streamlined import linear as linear
from bayesify.prediction.streamlined import normalisation as normalisation
from bayesify.prediction.streamlined import piecewise as piecewise
from bayesify.prediction.streamlined import pooling as pooling
from bayesify.prediction.streamlined import products as products
from bayesify.prediction.streamlined import recurrent as recurrent
from bayesify.prediction.streamlined import reductions as reductions
from bayesify.prediction.streamlined import resampling as resampling
from bayesify.prediction.streamlined import shapes as shapes
from bayesify.prediction.streamlined import writing as writing
from bayesify.prediction.streamlined.moments import Moments, NoRuleError, moment_rule, rule_kinds
from bayesify.prediction.streamlined.propagation import MomentsPass

__all__ = ["Moments", "MomentsPass", "NoRuleError", "moment_rule", "rule_kinds"]
