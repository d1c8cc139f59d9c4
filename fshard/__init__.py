"""fshard: fully sharded data parallelism as pure functions for PyTorch."""

from fshard import comm, testing
from fshard.accumulate import accumulate
from fshard.apply import Model, apply, functionalize
from fshard.buffers import sync_buffers
from fshard.collectives import all_gather, objective, pmean, psum, psum_invariant, pvary, reduce_scatter
from fshard.dtensor import from_dtensor, to_dtensor
from fshard.gather import gather
from fshard.mesh import axis_of, init_mesh
from fshard.optim import clip_by_global_norm, from_torch
from fshard.random import fold_in
from fshard.remat import remat
from fshard.scatter_grads import scatter_grads
from fshard.shard import reshard, shard, unshard
from fshard.strategies import ddp, zero1, zero2, zero3
from fshard.train_state import TrainState
from fshard.transforms import ShardTransform, cast, compose, fully_shard, replicate
from fshard.tree import Axis, P, Sharded, Spec, tree_leaves, tree_map
from fshard.update import GradientTransformation, Optimizer, chain, update
from fshard.value_and_grad import value_and_grad

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "GradientTransformation",
    "Model",
    "Optimizer",
    "P",
    "ShardTransform",
    "Sharded",
    "Spec",
    "TrainState",
    "accumulate",
    "all_gather",
    "apply",
    "axis_of",
    "cast",
    "chain",
    "clip_by_global_norm",
    "comm",
    "compose",
    "ddp",
    "fold_in",
    "from_dtensor",
    "from_torch",
    "fully_shard",
    "functionalize",
    "gather",
    "init_mesh",
    "objective",
    "pmean",
    "psum",
    "psum_invariant",
    "pvary",
    "reduce_scatter",
    "remat",
    "replicate",
    "reshard",
    "scatter_grads",
    "shard",
    "sync_buffers",
    "testing",
    "to_dtensor",
    "tree_leaves",
    "tree_map",
    "unshard",
    "update",
    "value_and_grad",
    "zero1",
    "zero2",
    "zero3",
]
