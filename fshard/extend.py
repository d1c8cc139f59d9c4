"""A second tier of names, for libraries on top of fshard that need more than a program does; without promises.

- `annotate_collectives`: says what collectives inside a context are for; ranks that say different things hear of it.
- `bytes_of`: the elements of a tensor as bytes.
- `calling`: lets other ranks hear of an error that ends a call.
- `check_axis`: refuses what is no axis of a mesh of this process.
- `check_rates`: refuses hyperparameters out of the ranges that torch.optim has for them.
- `custom_call`: a differentiable function that communicates in its forward and its backward.
- `describe`: says what a value is, for an error.
- `Entry`: a full tensor of another format, of which an `Exchange` reads boxes.
- `Exchange`: moves leaves to or from another format; every rank makes the same calls.
- `expect`: refuses an argument unless it is as expected.
- `fake_axes`: axes of any sizes whose groups cannot communicate, to trace with.
- `fake_maker`: makes tensors without values, to trace with.
- `find_order`: the `ReductionOrder` of a name: in which order sums are, and arithmetic whose bits that decides.
- `flatten`: the leaves of a tree with their paths and specs, and its `unflatten` of other leaves.
- `FullyShard`: the transform of `fully_shard`, for one that sends otherwise.
- `Jitted`: what `jit` returns; its method `make_program` makes a `Program`, of what was `Traced`, for a signature, and
  `explain_trace` says why.
- `lay_out`: the header of a file of safetensors, and where each of its tensors begins.
- `leaf_means`: means over a dim of whole leaves, however they are split.
- `leafwise`: new trees of old ones, by maths on the tensors of each leaf that has a gradient.
- `local_box`: the box of a leaf that this rank holds: where it starts, its elements, and the leaf's global shape.
- `local_piece`: cuts this rank's shard out of a full tensor.
- `named_modules`: a module's submodules by name, without the checkpoint wrappers of torch around them.
- `named_parameters`: a module's parameters by the names that they have without such wrappers, as in its state dict.
- `process_rank`: the number of this process in the run.
- `record_on_tape`: runs collectives of a graph in one order on every rank, also in its backward.
- `refuse`: refuses the leaves that are wrong, if there are any.
- `run_update`: runs a transformation's update, and refuses what is no pair of a tree like the one given and a state.
- `supports_cpu_messages`: whether the ranks of an axis can send each other tensors of the processor.
- `sum_dtype`: the dtype in which gradients of a leaf are added up.
- `TorchState`: the state of an optimizer that `from_torch` made.
- `walk_graph`: walks through a graph, to each place once.
- `watched`: tells an object with four methods when collectives start, are waited for and land.
- `without_saved_tensor_hooks`: lets autograd save tensors as they are inside a context, where hooks would save others.
- `words_at`: random numbers of 64 bits that depend on a key and an index alone.
"""

from fshard._compat import fake_maker, named_modules, named_parameters, without_saved_tensor_hooks
from fshard.checkpoint.boxes import Entry, local_box
from fshard.checkpoint.exchange import Exchange
from fshard.checkpoint.files import bytes_of, lay_out
from fshard.collectives import custom_call, record_on_tape, walk_graph
from fshard.comm import annotate_collectives, calling, supports_cpu_messages, watched
from fshard.errors import expect, refuse
from fshard.jit import Jitted, Program, Traced
from fshard.mesh import fake_axes, process_rank
from fshard.optim.from_torch import TorchState
from fshard.optim.leaves import leafwise
from fshard.optim.native import check_rates
from fshard.optim.norms import leaf_means
from fshard.random import words_at
from fshard.reduction_order import ReductionOrder, find_order
from fshard.shard import local_piece
from fshard.transforms.axis import _FullyShard as FullyShard
from fshard.transforms.structure import sum_dtype
from fshard.tree import flatten
from fshard.tree.checks import check_axis, describe
from fshard.update import run_update

__all__ = [
    "Entry",
    "Exchange",
    "FullyShard",
    "Jitted",
    "Program",
    "ReductionOrder",
    "TorchState",
    "Traced",
    "annotate_collectives",
    "bytes_of",
    "calling",
    "check_axis",
    "check_rates",
    "custom_call",
    "describe",
    "expect",
    "fake_axes",
    "fake_maker",
    "find_order",
    "flatten",
    "lay_out",
    "leaf_means",
    "leafwise",
    "local_box",
    "local_piece",
    "named_modules",
    "named_parameters",
    "process_rank",
    "record_on_tape",
    "refuse",
    "run_update",
    "sum_dtype",
    "supports_cpu_messages",
    "walk_graph",
    "watched",
    "without_saved_tensor_hooks",
    "words_at",
]
