"""fshard: fully sharded data parallelism as pure functions for PyTorch."""

from fshard import checkpoint, comm, testing
from fshard.apply import Model, apply, functionalize, sync_buffers
from fshard.collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    objective,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_invariant,
    pvary,
    ragged_all_to_all,
    reduce_scatter,
)
from fshard.gather import gather
from fshard.interop.dtensor import from_dtensor, to_dtensor
from fshard.jit import jit, make_graph
from fshard.links import Link, measure
from fshard.mesh import axis_of, init_mesh
from fshard.microbatches import microbatches, reduce_microbatches
from fshard.optim import schedules
from fshard.optim.from_torch import from_torch
from fshard.optim.native import adafactor, adam, adamw, lamb, lars, sgd
from fshard.optim.norms import global_norm
from fshard.optim.scale import (
    add_decayed_weights,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    scale_by_adam,
    scale_by_factored_rms,
    scale_by_trust_ratio,
)
from fshard.optim.schedules import from_torch_scheduler
from fshard.optim.whole import whole
from fshard.optim.wrappers import dynamic_loss_scale, ema, every_k, freeze, masked, partition, skip_nonfinite
from fshard.parallel import moe
from fshard.parallel.attention import ring_attention, ring_positions
from fshard.parallel.pipeline import pipeline
from fshard.parallel.tensor import tensor_parallel
from fshard.parallel.ulysses import ulysses
from fshard.parallel.vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding
from fshard.plan import plan
from fshard.random import fold_in
from fshard.remat import remat
from fshard.sample_ids import sample_ids
from fshard.scatter_grads import scatter_grads
from fshard.shard import reshard, shard, unshard
from fshard.strategies import ddp, hsdp, hybrid_shard, zero1, zero2, zero3
from fshard.trace import trace
from fshard.train_state import TrainState
from fshard.transforms import (
    LayoutError,
    ShardTransform,
    Storage,
    Wrapped,
    bucket,
    cast,
    compose,
    fully_shard,
    independent,
    offload,
    own_dim,
    quantize,
    replicate,
    split_dim,
    transform_state,
)
from fshard.tree import Axis, P, Sharded, Spec, tree_leaves, tree_map
from fshard.update import GradientTransformation, Optimizer, chain, update
from fshard.value_and_grad import accumulate, value_and_grad

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "GradientTransformation",
    "LayoutError",
    "Link",
    "Model",
    "Optimizer",
    "P",
    "ShardTransform",
    "Sharded",
    "Spec",
    "Storage",
    "TrainState",
    "Wrapped",
    "accumulate",
    "adafactor",
    "adam",
    "adamw",
    "add_decayed_weights",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "apply",
    "axis_index",
    "axis_of",
    "axis_size",
    "broadcast",
    "bucket",
    "cast",
    "chain",
    "checkpoint",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "comm",
    "compose",
    "ddp",
    "dynamic_loss_scale",
    "ema",
    "every_k",
    "fold_in",
    "freeze",
    "from_dtensor",
    "from_torch",
    "from_torch_scheduler",
    "fully_shard",
    "functionalize",
    "gather",
    "global_norm",
    "hsdp",
    "hybrid_shard",
    "independent",
    "init_mesh",
    "jit",
    "lamb",
    "lars",
    "make_graph",
    "masked",
    "measure",
    "microbatches",
    "moe",
    "objective",
    "offload",
    "own_dim",
    "partition",
    "pipeline",
    "plan",
    "pmax",
    "pmean",
    "ppermute",
    "psum",
    "psum_invariant",
    "pvary",
    "quantize",
    "ragged_all_to_all",
    "reduce_microbatches",
    "reduce_scatter",
    "remat",
    "replicate",
    "reshard",
    "ring_attention",
    "ring_positions",
    "sample_ids",
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_trust_ratio",
    "scatter_grads",
    "schedules",
    "sgd",
    "shard",
    "skip_nonfinite",
    "split_dim",
    "sync_buffers",
    "tensor_parallel",
    "testing",
    "to_dtensor",
    "trace",
    "transform_state",
    "tree_leaves",
    "tree_map",
    "ulysses",
    "unshard",
    "update",
    "value_and_grad",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "whole",
    "zero1",
    "zero2",
    "zero3",
]
