"""jit: functions of pytrees as graphs of operators and collectives."""

from fshard.jit.jit import Jitted, jit

__all__ = ["Jitted", "jit"]
