"""The engine of `value_and_grad` and of models: gathers units just in time, regathers them, reduces gradients."""

from fshard.engine.call import Call as Call
from fshard.engine.call import call_of as call_of
from fshard.engine.gathered_unit import GatheredUnit as GatheredUnit
from fshard.engine.leaf import Leaf as Leaf
from fshard.engine.passes import Pass as Pass
from fshard.engine.plan import ModuleUnit as ModuleUnit
