"""jit: functions of pytrees as graphs of operators and collectives."""

from fshard.jit.graph import StepGraph, make_graph
from fshard.jit.jit import Jitted, jit

__all__ = ["Jitted", "StepGraph", "jit", "make_graph"]
