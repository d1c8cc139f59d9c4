"""Checkpoints: states on disk that survive kills, are refused by name when damaged, and fit any layout.

Those that read or write another format are of an extension: `from_state_dict`, `to_state_dict`, `load_dcp`,
`save_dcp`, `load_huggingface`, `save_huggingface`, `from_optimizer_state_dict`, `to_optimizer_state_dict`. The
others are the core's.
"""

from typing import TYPE_CHECKING

from fshard import lazy_names
from fshard.checkpoint.errors import CheckpointError
from fshard.checkpoint.manager import Manager
from fshard.checkpoint.restore import latest_step, restore
from fshard.checkpoint.save import save
from fshard.checkpoint.saving import Saving

if TYPE_CHECKING:
    from fshard.ext.interop.dcp import load_dcp, save_dcp
    from fshard.ext.interop.huggingface import load_huggingface, save_huggingface
    from fshard.ext.interop.optimizer_state import from_optimizer_state_dict, to_optimizer_state_dict
    from fshard.ext.interop.state_dict import from_state_dict, to_state_dict

__getattr__ = lazy_names.make_getattr(__name__)
__all__ = [
    "CheckpointError",
    "Manager",
    "Saving",
    "from_optimizer_state_dict",
    "from_state_dict",
    "latest_step",
    "load_dcp",
    "load_huggingface",
    "restore",
    "save",
    "save_dcp",
    "save_huggingface",
    "to_optimizer_state_dict",
    "to_state_dict",
]


def __dir__() -> list[str]:
    return __all__
