"""The report under its public name: `bayesify.report` is `bayesify.evaluation.report`."""

from bayesify.evaluation import report
from bayesify.evaluation.report import *  # noqa: F403

__all__ = report.__all__
__getattr__ = report.__getattr__  # where names went that left the package
