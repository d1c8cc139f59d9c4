"""Sharding transforms: pure pairs of gather and scatter, and their composition."""

from fshard.transforms.base import LayoutError, ShardTransform
from fshard.transforms.bucket import bucket
from fshard.transforms.cast import cast
from fshard.transforms.compose import compose
from fshard.transforms.fully_shard import fully_shard
from fshard.transforms.hybrid_shard import hybrid_shard
from fshard.transforms.masked import masked_transform
from fshard.transforms.offload import offload
from fshard.transforms.quantize import quantize
from fshard.transforms.replicate import replicate
from fshard.transforms.resident import resident
from fshard.transforms.split_dim import split_dim
from fshard.transforms.wrapped import Wrapped

__all__ = [
    "LayoutError",
    "ShardTransform",
    "Wrapped",
    "bucket",
    "cast",
    "compose",
    "fully_shard",
    "hybrid_shard",
    "masked_transform",
    "offload",
    "quantize",
    "replicate",
    "resident",
    "split_dim",
]
