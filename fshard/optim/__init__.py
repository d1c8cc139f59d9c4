"""Optimizers and gradient transformations: pure pairs of init and update over sharded trees."""

from fshard.optim.adafactor import adafactor
from fshard.optim.clip import clip_by_global_norm, clip_by_norm, clip_by_value
from fshard.optim.decay import add_decayed_weights
from fshard.optim.ema import ema
from fshard.optim.from_torch import from_torch
from fshard.optim.guards import dynamic_loss_scale, every_k, skip_nonfinite
from fshard.optim.layerwise import lamb, lars
from fshard.optim.masks import freeze, masked, partition
from fshard.optim.native import adam, adamw, sgd
from fshard.optim.schedules import from_torch_scheduler
from fshard.optim.whole import whole

__all__ = [
    "adafactor",
    "adam",
    "adamw",
    "add_decayed_weights",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "dynamic_loss_scale",
    "ema",
    "every_k",
    "freeze",
    "from_torch",
    "from_torch_scheduler",
    "lamb",
    "lars",
    "masked",
    "partition",
    "sgd",
    "skip_nonfinite",
    "whole",
]
