"""plan: what a train step takes on a mesh of any size, without running it."""

from fshard.plan.kinds import Bytes
from fshard.plan.models import gpt, workload_of
from fshard.plan.plan import plan
from fshard.plan.rates import Rates
from fshard.plan.report import Moment, Plan, Traffic
from fshard.plan.sweep import Estimate, cheapest, estimate, sweep
from fshard.plan.workload import Options, Workload

__all__ = [
    "Bytes",
    "Estimate",
    "Moment",
    "Options",
    "Plan",
    "Rates",
    "Traffic",
    "Workload",
    "cheapest",
    "estimate",
    "gpt",
    "plan",
    "sweep",
    "workload_of",
]
