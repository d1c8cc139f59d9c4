"""Optimizers and gradient transformations: pure pairs of init and update over sharded trees."""

from fshard.optim.clip import clip_by_global_norm
from fshard.optim.from_torch import from_torch

__all__ = ["clip_by_global_norm", "from_torch"]
