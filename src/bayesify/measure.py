"""The measures under their public name: `bayesify.measure` is `bayesify.evaluation.measures`."""

from bayesify.evaluation import measures
from bayesify.evaluation.measures import *  # noqa: F403

__all__ = measures.__all__
__getattr__ = measures.__getattr__  # where names went that left the package
