"""Initialisation: sharded parameters drawn from a seed, one at a time or only this rank's part."""

from fshard.init.calls import copied, refuse_blank
from fshard.init.deferred import init
