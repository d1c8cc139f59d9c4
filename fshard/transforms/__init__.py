"""Sharding transforms: pure pairs of gather and scatter, and their composition."""

from fshard.transforms.base import LayoutError, ShardTransform, compose
from fshard.transforms.cast import cast
from fshard.transforms.fully_shard import fully_shard
from fshard.transforms.replicate import replicate
from fshard.transforms.resident import resident

__all__ = ["LayoutError", "ShardTransform", "cast", "compose", "fully_shard", "replicate", "resident"]
