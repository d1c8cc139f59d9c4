"""trace: the collectives of real steps over time, and the stragglers among the ranks."""

from fshard.ext.trace.report import Report
from fshard.ext.trace.trace import Trace, trace

__all__ = ["Report", "Trace", "trace"]
