"""Initialisation: sharded parameters drawn from a seed, a submodule at a time or only this rank's part."""

from fshard.init.deferred import SKIP_DRAWING, init
from fshard.init.drawing import Reset, copy_module, refuse_blank
