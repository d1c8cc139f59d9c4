"""Optimizers and gradient transformations: pure pairs of init and update over sharded trees."""

from fshard.optim.adafactor import adafactor, scale_by_factored_rms
from fshard.optim.from_torch import from_torch
from fshard.optim.masks import freeze, masked, partition
from fshard.optim.native import adam, adamw, lamb, lars, sgd
from fshard.optim.norms import clip_by_global_norm, clip_by_norm, clip_by_value
from fshard.optim.scale import add_decayed_weights, scale_by_adam, scale_by_trust_ratio
from fshard.optim.schedules import from_torch_scheduler
from fshard.optim.whole import whole
from fshard.optim.wrappers import dynamic_loss_scale, ema, every_k, skip_nonfinite

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
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_trust_ratio",
    "sgd",
    "skip_nonfinite",
    "whole",
]
