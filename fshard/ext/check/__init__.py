"""check: the mistakes of a train step, found from its graph on a mesh of any size, without running it."""

from fshard.ext.check.check import check
from fshard.ext.check.report import StepCheck, StepProblem

__all__ = [
    "StepCheck",
    "StepProblem",
    "check",
]
