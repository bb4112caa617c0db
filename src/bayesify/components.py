"""The components of a mixture under their public name: `bayesify.components` is `bayesify.evaluation.components`."""

from bayesify.evaluation import components
from bayesify.evaluation.components import *  # noqa: F403

__all__ = components.__all__
