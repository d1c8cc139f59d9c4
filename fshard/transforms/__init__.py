"""Sharding transforms: pure pairs of gather and scatter, their composition, and their state."""

from fshard.transforms.axis import fully_shard, own_dim, replicate, split_dim
from fshard.transforms.base import LayoutError, ShardTransform, Storage, Wrapped
from fshard.transforms.compose import compose, masked_transform
from fshard.transforms.local import cast, offload
from fshard.transforms.state import transform_state
