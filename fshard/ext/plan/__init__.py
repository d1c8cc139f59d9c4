"""plan: the cost of a train step on a mesh of any size, without running it."""

from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import Rates, StepPlan

__all__ = ["Rates", "StepPlan", "plan"]
