"""Who holds which full tensor when: units gathered just in time and again in the backward, gradients reduced early."""

from fshard.residency.call import Call
from fshard.residency.lending import call_of, forward_only, settled
from fshard.residency.saved import FunctionTransform
from fshard.residency.slots import Slot
from fshard.residency.units import Unit, Use
from fshard.residency.walk import Walk

__all__ = ["Call", "FunctionTransform", "Slot", "Unit", "Use", "Walk", "call_of", "forward_only", "settled"]
