"""Checkpoints: states on disk that survive kills, name what is damaged and fit any layout; and those of others."""

from fshard.checkpoint.dcp import load_dcp, save_dcp
from fshard.checkpoint.format import CheckpointError
from fshard.checkpoint.huggingface import load_huggingface, save_huggingface
from fshard.checkpoint.manager import Manager
from fshard.checkpoint.optimizer_state import from_optimizer_state_dict, to_optimizer_state_dict
from fshard.checkpoint.restore import latest, restore
from fshard.checkpoint.save import Saving, save
from fshard.checkpoint.state_dict import from_state_dict, load_torch, to_state_dict

__all__ = [
    "CheckpointError",
    "Manager",
    "Saving",
    "from_optimizer_state_dict",
    "from_state_dict",
    "latest",
    "load_dcp",
    "load_huggingface",
    "load_torch",
    "restore",
    "save",
    "save_dcp",
    "save_huggingface",
    "to_optimizer_state_dict",
    "to_state_dict",
]
