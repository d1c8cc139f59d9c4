"""trace: what the collectives of real steps did and when, and which rank the others waited for."""

from fshard.trace.report import Report
from fshard.trace.trace import Trace, trace

__all__ = ["Report", "Trace", "trace"]
