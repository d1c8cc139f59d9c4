"""jit: functions of pytrees as graphs of operators and collectives."""

from fshard.jit.jit import Jitted, Program, jit
from fshard.jit.trace import Traced
