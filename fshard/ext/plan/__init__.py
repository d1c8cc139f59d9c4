"""plan: the cost of a train step on a mesh of any size, without running it."""

from fshard.ext.plan.models import Workload, workload_of
from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import Bytes, Moment, Rates, StepPlan, Traffic
from fshard.ext.plan.sweep import Estimate, Options, cheapest, estimate, sweep

__all__ = [
    "Bytes",
    "Estimate",
    "Moment",
    "Options",
    "Rates",
    "StepPlan",
    "Traffic",
    "Workload",
    "cheapest",
    "estimate",
    "plan",
    "sweep",
    "workload_of",
]
