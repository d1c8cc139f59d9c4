"""Fully sharded data parallelism as pure functions for PyTorch.

The public names by use, as `import fshard as fs` has them. Those of the core:

- **Ranks**: `init_mesh`, `axis_of`, `Axis`.
- **Sharded leaves**: `shard`, `unshard`, `reshard`; `Sharded`, `Spec`, `P`; `tree_map`, `tree_leaves`,
  `register_dataclass`.
- **Models**: `functionalize`, `Model`, `sync_buffers`.
- **The four verbs**: `gather`, `apply`, `scatter_grads`, `update`; `start_gather` begins a gather ahead.
- **Gradients**: `value_and_grad`, `accumulate`, `objective`, `remat`; `microbatches` for the
  same bits at any number of ranks; `fold_in` for random keys.
- **Strategies**: `ddp`, `zero1`, `zero2`, `zero3`, `hsdp`.
- **Transforms**: `fully_shard`, `hybrid_shard`, `replicate`, `split_dim`, `own_dim`; `compose`, `cast`, `offload`;
  `Wrapped`, `ShardTransform`, `Storage` and `LayoutError` for one's own; `transform_state`.
- **Optimizers**: `TrainState`, `from_torch`, `chain`; `GradientTransformation` and `Optimizer` for one's own.
- **jit**: `jit`.
- **Collectives in a loss**: `psum`, `pmean`, `pmax`, `psum_invariant`, `pcast`, `all_gather`, `all_gather_invariant`,
  `reduce_scatter`, `all_to_all`, `ragged_all_to_all`, `ppermute`, `broadcast`, `axis_index`.
- **What is sent**: `fshard.comm`.
- **Checkpoints**: `fshard.checkpoint`.
- **Tests**: `fshard.testing`.
- **Version**: `__version__`.

Those of extensions, which use the core as a program does and are imported when they are first asked for:

- **Other axes**: `pipeline`, `tensor_parallel`, `ring_attention`, `ring_positions`, `ulysses`,
  `vocab_parallel_embedding`, `vocab_parallel_cross_entropy`; `fshard.ext.parallel.moe` as `fs.moe`.
- **Losses**: `chunked_loss`.
- **Graphs**: `make_graph` to read one; `fit` keeps one within a budget of memory; `save_graph`, `load_graph`;
  `graph_cache` keeps them for a program that is started again.
- **Weights for other ranks**: `publish`, `receive`.
- **Parts of a tree**: `masked` chooses the leaves of a transform or an optimizer by name; `partition`, `freeze`.
- **Transforms**: `quantize`.
- **Learning rates**: `fshard.ext.optim.schedules` as `fs.schedules`, `from_torch_scheduler`.
- **Optimizers**: `sgd`, `adam`, `adamw`, `lamb`, `lars`, `adafactor`; `whole`, `ema`, `skip_nonfinite`,
  `dynamic_loss_scale`.
- **Gradient transformations**: `clip_by_global_norm`, `clip_by_norm`, `clip_by_value`, `global_norm`, `leaf_norms`,
  `add_decayed_weights`, `scale_by_adam`, `scale_by_trust_ratio`, `scale_by_factored_rms`.
- **Before and during a step**: `check`, `plan`, `trace`; `sample_ids` for the samples of a step.
- **After a step that went wrong**: `replay`, `verify` and `diff` name the operation.
- **Exchange**: `to_dtensor`, `from_dtensor`; for models of transformers `no_split`, and `with_init_weights`, which
  draws their values.
"""

from typing import TYPE_CHECKING

from fshard import checkpoint, comm, lazy_names, testing
from fshard.apply import Model, apply, functionalize
from fshard.collectives import axis_index, pcast
from fshard.jit import jit
from fshard.mesh import axis_of, init_mesh
from fshard.microbatches import microbatches
from fshard.optim.from_torch import from_torch
from fshard.public import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    broadcast,
    gather,
    objective,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_invariant,
    ragged_all_to_all,
    reduce_scatter,
    reshard,
    scatter_grads,
    shard,
    start_gather,
    sync_buffers,
    unshard,
    update,
)
from fshard.random import fold_in
from fshard.remat import remat
from fshard.transforms import (
    LayoutError,
    ShardTransform,
    Storage,
    Wrapped,
    cast,
    compose,
    fully_shard,
    offload,
    own_dim,
    replicate,
    split_dim,
    transform_state,
)
from fshard.transforms.strategies import ddp, hsdp, hybrid_shard, zero1, zero2, zero3
from fshard.tree import Axis, P, Sharded, Spec, register_dataclass, tree_leaves, tree_map
from fshard.update import GradientTransformation, Optimizer, TrainState, chain
from fshard.value_and_grad import accumulate, value_and_grad

if TYPE_CHECKING:
    from fshard.ext.check.check import check
    from fshard.ext.chunked_loss import chunked_loss
    from fshard.ext.fit.fit import fit
    from fshard.ext.interop.dtensor import from_dtensor, to_dtensor
    from fshard.ext.interop.init_weights import with_init_weights
    from fshard.ext.interop.no_split import no_split
    from fshard.ext.jit.graph import make_graph
    from fshard.ext.optim import schedules
    from fshard.ext.optim.adafactor import adafactor, scale_by_factored_rms
    from fshard.ext.optim.native import (
        adam,
        adamw,
        add_decayed_weights,
        clip_by_global_norm,
        clip_by_norm,
        clip_by_value,
        scale_by_adam,
        sgd,
    )
    from fshard.ext.optim.norms import global_norm, leaf_norms
    from fshard.ext.optim.schedules import from_torch_scheduler
    from fshard.ext.optim.trust import lamb, lars, scale_by_trust_ratio
    from fshard.ext.optim.whole import whole
    from fshard.ext.optim.wrappers import dynamic_loss_scale, ema, freeze, masked, partition, skip_nonfinite
    from fshard.ext.parallel import moe
    from fshard.ext.parallel.attention import ring_attention, ring_positions, ulysses
    from fshard.ext.parallel.pipeline import pipeline
    from fshard.ext.parallel.tensor import tensor_parallel
    from fshard.ext.parallel.vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding
    from fshard.ext.plan.plan import plan
    from fshard.ext.publish import publish, receive
    from fshard.ext.quantize import quantize
    from fshard.ext.replay.diff import diff
    from fshard.ext.replay.replay import replay
    from fshard.ext.replay.verify import verify
    from fshard.ext.sample_ids import sample_ids
    from fshard.ext.saved_graph import load_graph, save_graph
    from fshard.ext.saved_graph.cache import graph_cache
    from fshard.ext.trace.trace import trace

__version__ = "0.1.0"
__getattr__ = lazy_names.make_getattr(__name__)

__all__ = [
    "Axis",
    "GradientTransformation",
    "LayoutError",
    "Model",
    "Optimizer",
    "P",
    "ShardTransform",
    "Sharded",
    "Spec",
    "Storage",
    "TrainState",
    "Wrapped",
    "__version__",
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
    "broadcast",
    "cast",
    "chain",
    "check",
    "checkpoint",
    "chunked_loss",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "comm",
    "compose",
    "ddp",
    "diff",
    "dynamic_loss_scale",
    "ema",
    "fit",
    "fold_in",
    "freeze",
    "from_dtensor",
    "from_torch",
    "from_torch_scheduler",
    "fully_shard",
    "functionalize",
    "gather",
    "global_norm",
    "graph_cache",
    "hsdp",
    "hybrid_shard",
    "init_mesh",
    "jit",
    "lamb",
    "lars",
    "leaf_norms",
    "load_graph",
    "make_graph",
    "masked",
    "microbatches",
    "moe",
    "no_split",
    "objective",
    "offload",
    "own_dim",
    "partition",
    "pcast",
    "pipeline",
    "plan",
    "pmax",
    "pmean",
    "ppermute",
    "psum",
    "psum_invariant",
    "publish",
    "quantize",
    "ragged_all_to_all",
    "receive",
    "reduce_scatter",
    "register_dataclass",
    "remat",
    "replay",
    "replicate",
    "reshard",
    "ring_attention",
    "ring_positions",
    "sample_ids",
    "save_graph",
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_trust_ratio",
    "scatter_grads",
    "schedules",
    "sgd",
    "shard",
    "skip_nonfinite",
    "split_dim",
    "start_gather",
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
    "verify",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "whole",
    "with_init_weights",
    "zero1",
    "zero2",
    "zero3",
]


def __dir__() -> list[str]:
    return __all__
