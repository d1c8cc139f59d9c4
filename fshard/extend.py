"""A second tier of names, for libraries on top of fshard that need more than a program does; without promises.

- `all_gather_object`: shows every rank of some axes a value of each of them.
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
- `find_mixed`: finds where a graph, from places that are `Typed`, mixes values that vary between ranks and values that
  agree.
- `find_order`: the `ReductionOrder` of a name: in which order sums are, and arithmetic whose bits that decides.
- `flatten`: the leaves of a tree with their paths and specs, and its `unflatten` of other leaves.
- `FullyShard`: the transform of `fully_shard`, for one that sends otherwise.
- `hash_of`: a checksum of a tensor's values.
- `is_donated`: whether a leaf was donated to an earlier call.
- `is_users_file`: whether a file is of the user's program, and not of fshard or torch.
- `Jitted`: what `jit` returns; its method `make_program` makes a `Program`, of what was `Traced`, for a signature, and
  `explain_trace` says why.
- `lay_out`: the header of a file of safetensors, and where each of its tensors begins.
- `layout_axes`: the axes that a transform places leaves on.
- `leaf_means`: means over a dim of whole leaves, however they are split.
- `leafwise`: new trees of old ones, by maths on the tensors of each leaf that has a gradient.
- `local_piece`: cuts this rank's shard out of a full tensor.
- `LOCATED`: set to True by `setting`, it lets nodes of a graph keep the stack that made them.
- `named_buffers`: a module's buffers by name, as `named_parameters`.
- `named_modules`: a module's submodules by name, without the checkpoint wrappers of torch around them.
- `named_parameters`: a module's parameters by the names that they have without such wrappers, as in its state dict.
- `piece_of`: the box of a leaf that this rank holds.
- `Problem`: one leaf that is wrong, for `refuse`.
- `process_rank`: the number of this process in the run.
- `ranks_of`: all ranks of a mesh as one axis.
- `record_on_tape`: runs collectives of a graph in one order on every rank, also in its backward.
- `reduction_axes`: the axes that gradients of leaves are summed over.
- `refuse`: refuses the leaves that are wrong, if there are any.
- `run_update`: runs a transformation's update, and refuses what is no pair of a tree like the one given and a state.
- `same_structure`: refuses a tree whose structure differs from another's.
- `setting`: sets a variable of a context, such as `LOCATED`, inside a block.
- `start_scatter`: starts the scatter of a transform, with its state if it has one.
- `sum_dtype`: the dtype in which gradients of a leaf are added up.
- `summed_axes`: the axes that a transform sums gradients over.
- `supports_cpu_messages`: whether the ranks of an axis can send each other tensors of the processor.
- `tensor_of`: the tensor that this rank holds of a leaf.
- `tolerance`: how far values may be apart that differ by rounding alone.
- `TorchState`: the state of an optimizer that `from_torch` made.
- `Typed`: an output of a graph's node, and whether it should vary, for `find_mixed`.
- `walk_graph`: walks through a graph, to each place once.
- `watched`: tells an object with four methods when collectives start, are waited for and land.
- `without_padding`: this rank's elements of a Sharded leaf.
- `without_saved_tensor_hooks`: lets autograd save tensors as they are inside a context, where hooks would save others.
- `words_at`: random numbers of 64 bits that depend on a key and an index alone.
"""

from fshard._compat import fake_maker, named_buffers, named_modules, named_parameters, without_saved_tensor_hooks
from fshard.checkpoint.exchange import Entry, Exchange, piece_of
from fshard.checkpoint.files import bytes_of, lay_out
from fshard.collectives import LOCATED, Typed, custom_call, find_mixed, record_on_tape, reduction_axes, walk_graph
from fshard.comm import all_gather_object, annotate_collectives, calling, setting, supports_cpu_messages, watched
from fshard.errors import Problem, expect, is_users_file, refuse
from fshard.jit import Jitted, Program, Traced
from fshard.mesh import fake_axes, process_rank, ranks_of
from fshard.optim.from_torch import TorchState
from fshard.optim.leaves import leafwise
from fshard.optim.native import check_rates
from fshard.optim.norms import leaf_means
from fshard.random import words_at
from fshard.reduction_order import ReductionOrder, find_order
from fshard.rounding import tolerance
from fshard.shard import hash_of, local_piece, without_padding
from fshard.transforms.axis import _FullyShard as FullyShard
from fshard.transforms.run import start_scatter
from fshard.transforms.structure import layout_axes, sum_dtype, summed_axes
from fshard.tree import flatten, tensor_of
from fshard.tree.checks import check_axis, describe, is_donated, same_structure
from fshard.update import run_update

__all__ = [
    "LOCATED",
    "Entry",
    "Exchange",
    "FullyShard",
    "Jitted",
    "Problem",
    "Program",
    "ReductionOrder",
    "TorchState",
    "Traced",
    "Typed",
    "all_gather_object",
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
    "find_mixed",
    "find_order",
    "flatten",
    "hash_of",
    "is_donated",
    "is_users_file",
    "lay_out",
    "layout_axes",
    "leaf_means",
    "leafwise",
    "local_piece",
    "named_buffers",
    "named_modules",
    "named_parameters",
    "piece_of",
    "process_rank",
    "ranks_of",
    "record_on_tape",
    "reduction_axes",
    "refuse",
    "run_update",
    "same_structure",
    "setting",
    "start_scatter",
    "sum_dtype",
    "summed_axes",
    "supports_cpu_messages",
    "tensor_of",
    "tolerance",
    "walk_graph",
    "watched",
    "without_padding",
    "without_saved_tensor_hooks",
    "words_at",
]
