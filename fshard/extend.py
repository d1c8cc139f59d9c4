"""A second tier of names, for libraries on top of fshard that need more than a program does; without promises.

- `all_gather_object`: shows every rank of some axes a value of each of them.
- `annotate_collectives`: says what collectives inside a context are for; ranks that say different things hear of it.
- `any_dual`: whether some tensor has a tangent of forward-mode AD.
- `arguments_of`: the arguments of an operator's schema; None for what is no operator.
- `attributes_of`: an attribute of each of thousands of values, for which no line of Python runs.
- `Box`: a rectangular region of a tensor.
- `bytes_of`: the elements of a tensor as bytes.
- `call_schedule`: the value of a schedule in an update.
- `calling`: lets other ranks hear of an error that ends a call.
- `check_arguments`: refuses arguments that are not of a `Range`.
- `check_axis`: refuses what is no axis of a mesh of this process.
- `check_flags`: refuses flags that are neither True nor False.
- `check_floating`: refuses leaves that should take a gradient and cannot.
- `check_local`: refuses leaves that were donated, that do not fit their spec, or of another mesh.
- `check_matches`: refuses masks that match no leaf.
- `check_numbers`: refuses arguments that are no numbers of a `Range`.
- `check_rates`: refuses what are no `Rates`, or rates by which nothing can be divided.
- `check_results`: refuses results of a transform that are no tensors of the right number and shapes.
- `check_same_shards`: refuses leaves that are split otherwise than others, or have local tensors of other shapes.
- `check_tensors`: refuses leaves that are no tensors.
- `check_transform`: refuses what is no transform, or is on another mesh.
- `choose_boxes`: chooses which boxes of leaves this rank writes, of those that several ranks hold.
- `COUNT`: a `Range`: a whole number, 0 or more, or None.
- `copy_into`: copies tensors of any devices into contiguous ones of the processor.
- `count_updates`: new counts of the updates of each leaf, one more if it has a gradient.
- `custom_call`: a differentiable function that communicates in its forward and its backward.
- `define_operator`: defines an operator of graphs by its schema, with its result for tensors without values.
- `differentiate`: differentiates what was computed on a tape, so that every rank runs the transposes in one order.
- `describe`: says what a value is, for an error.
- `describe_state`: the tensors of a state by path, and a manifest of it without chunks.
- `device_of`: the device of this rank's tensor of a leaf, or the one that it would be on.
- `drawing`: how values of a module are drawn: copies of modules, tensors to draw, the functions that draw them.
- `EngineCall`: one run of `value_and_grad` or of a model: its forwards and backwards.
- `Entry`: a full tensor of another format, of which an `Exchange` reads boxes.
- `Exchange`: moves leaves to or from another format; every rank makes the same calls.
- `estimate_operator`: the seconds of a node of a graph on a device, by `Rates`.
- `read_box`: reads a box of a leaf from the chunks of a manifest that have elements of it.
- `read_environment`: the variables of the environment.
- `expect`: refuses an argument unless it is as expected.
- `expect_file`: refuses a file unless it is as expected.
- `fake_axes`: axes of any sizes whose groups cannot communicate, to trace with.
- `fake_coordinates`: this rank's coordinates on the axes of a trace, by name.
- `fake_maker`: makes tensors without values, to trace with.
- `fake_process_groups`: lets there be process groups that cannot communicate, for traces.
- `files`: the format of the files of a checkpoint: manifests, digests, and where chunks begin.
- `FINITE`: a `Range`: any finite number.
- `FLOATING`: a `Range`: a dtype of floating numbers, or None.
- `find_lifetimes`: when a graph's memory is taken and freed.
- `find_machine`: which machine this is, since it booted.
- `find_misfits`: finds the leaves, and the results of collectives, that a graph uses as what they are not.
- `find_order`: the `ReductionOrder` of a name: in which order sums are, and arithmetic whose bits that decides.
- `fingerprint`: a text of a leaf and its spec, for ranks to compare.
- `flatten`: the leaves of a tree with their paths and specs, and its `unflatten` of other leaves.
- `fold_views_and_remove_dead_nodes`: removes from a graph what repeats or what nobody uses.
- `FRACTION`: a `Range`: 0 or more and below 1.
- `FullyShard`: the transform of `fully_shard`, for one that sends otherwise.
- `GraphPass`: a value of `passes=` of `jit`, which maps a graph to a `PassedGraph`.
- `generators`: the states of torch's generators, as operators of a graph that read and set them.
- `graph_nodes`: what an operator of a graph reads, writes, sends and draws.
- `grouped`: the positions of leaves by a key.
- `hash_of`: a checksum of a tensor's values.
- `held_in_flight`: the bytes that a collective holds of each tensor until somebody waits for it.
- `is_differentiated`: whether a backward may reach a tensor.
- `is_donated`: whether a leaf was donated to an earlier call.
- `is_fake`: whether a tensor has no values, as those of `fake_maker`.
- `is_mask`: whether a value is a mask of leaves.
- `is_tracing`: whether a program is traced, on tensors without values.
- `is_trained`: whether a leaf takes a gradient.
- `is_users_file`: whether a file is of the user's program, and not of fshard or torch.
- `Jitted`: what `jit` returns; its method `make_program` makes a `Program`, of what was `Traced`, for a signature,
  and `trace_call` traces a call without running it.
- `join_ranks`: merges which ranks have what, for `Exchange.merge_objects`.
- `Layouts`: the specs that a transform gives the leaves of a tree.
- `lay_out`: the header of a file of safetensors, and where each of its tensors begins.
- `lay_out_call`: lays the arguments of a step out on a mesh of any size, to trace the step.
- `layout_axes`: the axes that a transform places leaves on.
- `leaves_like`: the leaves of a tree of an update, by the keys of another one; refuses another structure.
- `leaves_of`: the leaves that `flatten` finds.
- `like`: a tensor in the spec of a leaf.
- `links`: connections between two ranks, beside those of collectives.
- `local_box`: the box of a leaf that this rank holds: where it starts, its elements, and the leaf's global shape.
- `local_piece`: cuts this rank's shard out of a full tensor.
- `local_ranges`: where this rank's elements of a full tensor start along each dim, and how many there are.
- `make_aval`: the properties of a tensor without its values.
- `map_leaves`: maps over the leaves that `flatten` finds, Sharded ones kept whole.
- `map_trained_leaves`: maps over the leaves that take a gradient; others become None.
- `MASK`: what a mask of leaves is, in words for an error.
- `masked_transform`: a transform for the leaves that a mask matches, and another for the others.
- `matches`: whether a mask matches a leaf.
- `Misfit`: a leaf, or a result of a collective, that is used as what it is not.
- `name_ranks`: lists ranks in a sentence.
- `name_without_wrappers`: the name that a module's state dict has for a tensor, without torch's checkpoint wrappers.
- `Mesh`: what `init_mesh` makes.
- `named_buffers`: a module's buffers by name, as `named_parameters`.
- `named_modules`: a module's submodules by name, without the checkpoint wrappers of torch around them.
- `named_parameters`: a module's parameters by the names that they have without such wrappers, as in its state dict.
- `next_sequence_number`: the number that the next node of autograd's graph will get, on this thread.
- `no_updates`: a count of no updates for each leaf that takes a gradient.
- `NODE_OBSERVER`: set by `setting` to a function, it is called with the nodes that each operator of a trace adds.
- `NOT_NEGATIVE`: a `Range`: 0 or more, and finite.
- `NUMBER`: a `Range`: a whole number, 1 or more.
- `OBSERVED`: set to a function by `setting`, it lets that see the functions of each differentiation before they run.
- `open_regular`: opens a file for reading, and refuses a pipe or a device; links are followed.
- `padded`: this rank's elements of a leaf with the padding of its shard.
- `PassedGraph`: what a `GraphPass` returns: the function as another graph, and the facts that ranks compare.
- `partition_axes`: the axes whose ranks hold different elements of a leaf.
- `POSITIVE`: a `Range`: above 0.
- `Problem`: one leaf that is wrong, for `refuse`.
- `prepare`: makes a graph ready to run, by a backend of `jit`.
- `process_rank`: the number of this process in the run.
- `Range`: the values that an argument may have; `COUNT`, `FRACTION`, `NOT_NEGATIVE` and `POSITIVE` are some.
- `ranks_of`: all ranks of a mesh as one axis.
- `rank_state`: what this rank is in the run, such as the store by which ranks found each other.
- `ranks_on_host`: how many ranks the launcher has started on each host.
- `Rates`: the speed of a device and its links.
- `record_on_tape`: runs collectives of a graph in one order on every rank, also in its backward.
- `record_numbers`: records the hyperparameters of a step, for ranks to compare with their next collective.
- `refuse`: refuses the leaves that are wrong, if there are any.
- `refuse_donated`: refuses leaves that were donated to an earlier call.
- `refuse_other`: refuses collectives over other axes than those of a trace.
- `resolve_process_group`: the process group of a name.
- `run_on_tape`: calls a function that communicates on the tape of the call that runs.
- `run_update`: runs a transformation's update, and refuses what is no pair of a tree like the one given and a state.
- `same_structure`: refuses a tree whose structure differs from another's.
- `setting`: sets a variable of a context, such as `OBSERVED`, inside a block.
- `sockets_of_mesh`: how many it opens for the first mesh of a run.
- `StepGraph`: the graph of what was `Traced`, with its collectives and its memory, as `make_graph` returns it.
- `start_scatter`: starts the scatter of a transform, with its state if it has one.
- `states_of`: takes the state of transforms apart, one tree for each leaf.
- `storage_key`: a name of a tensor's memory.
- `sum_dtype`: the dtype in which gradients of a leaf are added up.
- `sum_digits`: sums both digits of the elements of a tensor, or of their squares, which is exact in any order.
- `sum_over`: sums over several axes into values that agree between all their ranks.
- `sum_powers`: sums powers of the elements of a tensor, or finds the largest, a block at a time.
- `summed_axes`: the axes that a transform sums gradients over.
- `supports_cpu_messages`: whether the ranks of an axis can send each other tensors of the processor.
- `tensor_of`: the tensor that this rank holds of a leaf.
- `tensors_of`: the `tensor_of` each of many leaves.
- `tolerance`: how far values may be apart that differ by rounding alone.
- `TorchState`: the state of an optimizer that `from_torch` made.
- `trace`: records a function as a graph, of what was `Traced`.
- `transforms_active`: whether code runs under a transform of torch.func.
- `Typed`: an output of a graph's node, and whether it should vary, for `find_misfits`.
- `unflatten`: the tree of some leaves.
- `unsharded`: full tensors of Sharded leaves, without the check that ranks make the same call.
- `Variance`: which operands and results of a collective vary between ranks.
- `variance_of`: the collective of a node of autograd's graph, and what it makes of values that vary.
- `walk_graph`: walks through a graph, to each place once.
- `watched`: tells an object with four methods when collectives start, are waited for and land.
- `widen`: casts values of half precision to float32.
- `without_padding`: this rank's elements of a Sharded leaf.
- `without_saved_tensor_hooks`: lets autograd save tensors as they are inside a context, where hooks would save others.
- `words_at`: random numbers of 64 bits that depend on a key and an index alone.
- `zero`: a count of no updates.
"""

from typing import TYPE_CHECKING

from fshard import lazy_names
from fshard import random as generators
from fshard._compat import (
    NODE_OBSERVER,
    any_dual,
    arguments_of,
    fake_maker,
    fake_process_groups,
    is_differentiated,
    is_fake,
    is_tracing,
    name_without_wrappers,
    named_buffers,
    named_modules,
    named_parameters,
    next_sequence_number,
    resolve_process_group,
    storage_key,
    transforms_active,
    without_saved_tensor_hooks,
)
from fshard.checkpoint import files
from fshard.checkpoint.boxes import Box, Entry, local_box
from fshard.checkpoint.errors import expect_file
from fshard.checkpoint.exchange import Exchange, join_ranks
from fshard.checkpoint.files import lay_out, open_regular
from fshard.checkpoint.host_copies import copy_into
from fshard.checkpoint.restore import read_box
from fshard.checkpoint.save import choose_boxes, describe_state
from fshard.collectives import (
    OBSERVED,
    Misfit,
    Typed,
    Variance,
    find_misfits,
    record_on_tape,
    run_on_tape,
    sum_over,
    variance_of,
    walk_graph,
    widen,
)
from fshard.comm import (
    all_gather_object,
    annotate_collectives,
    calling,
    links,
    rank_state,
    setting,
    supports_cpu_messages,
    watched,
)
from fshard.comm.collective import fake_coordinates, refuse_other
from fshard.comm.ops import held_in_flight
from fshard.comm.ops import operator as define_operator
from fshard.comm.processes import find_machine, name_ranks
from fshard.comm.sockets import sockets_of_mesh
from fshard.engine import EngineCall
from fshard.errors import Problem, expect, is_users_file, refuse
from fshard.init import drawing
from fshard.jit import Jitted, Program, Traced
from fshard.jit import nodes as graph_nodes
from fshard.jit.backends import prepare
from fshard.jit.graph_pass import GraphPass, PassedGraph
from fshard.jit.passes import fold_views_and_remove_dead_nodes
from fshard.jit.signature import make_aval
from fshard.jit.trace import trace
from fshard.mesh import Mesh, process_rank, ranks_of, ranks_on_host, read_environment
from fshard.optim.from_torch import TorchState
from fshard.optim.leaves import (
    call_schedule,
    count_updates,
    map_trained_leaves,
    no_updates,
    partition_axes,
    zero,
)
from fshard.random import words_at
from fshard.reduction_order import ReductionOrder, find_order
from fshard.rounding import tolerance
from fshard.shard import (
    Layouts,
    bytes_of,
    check_transform,
    fingerprint,
    hash_of,
    local_piece,
    local_ranges,
    padded,
    unsharded,
    without_padding,
)
from fshard.transforms import masked_transform
from fshard.transforms.axis import _FullyShard as FullyShard
from fshard.transforms.run import check_results, start_scatter
from fshard.transforms.state import states_of
from fshard.transforms.structure import layout_axes, sum_dtype, summed_axes
from fshard.tree import (
    MASK,
    attributes_of,
    device_of,
    flatten,
    grouped,
    is_mask,
    is_trained,
    leaves_like,
    leaves_of,
    like,
    map_leaves,
    matches,
    tensor_of,
    tensors_of,
    unflatten,
)
from fshard.tree.checks import (
    COUNT,
    FINITE,
    FLOATING,
    FRACTION,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    Range,
    check_arguments,
    check_axis,
    check_flags,
    check_floating,
    check_local,
    check_matches,
    check_numbers,
    check_tensors,
    describe,
    is_donated,
    refuse_donated,
    same_structure,
)
from fshard.update import check_same_shards, record_numbers, run_update

if TYPE_CHECKING:
    from fshard.ext.jit.graph import StepGraph, find_lifetimes
    from fshard.ext.optim.block_sums import sum_digits, sum_powers
    from fshard.ext.parallel.custom_call import custom_call, differentiate
    from fshard.ext.plan.plan import fake_axes, lay_out_call
    from fshard.ext.plan.report import Rates, check_rates
    from fshard.ext.plan.timeline import estimate_operator

__all__ = [
    "COUNT",
    "FINITE",
    "FLOATING",
    "FRACTION",
    "MASK",
    "NODE_OBSERVER",
    "NOT_NEGATIVE",
    "NUMBER",
    "OBSERVED",
    "POSITIVE",
    "Box",
    "EngineCall",
    "Entry",
    "Exchange",
    "FullyShard",
    "GraphPass",
    "Jitted",
    "Layouts",
    "Mesh",
    "Misfit",
    "PassedGraph",
    "Problem",
    "Program",
    "Range",
    "Rates",
    "ReductionOrder",
    "StepGraph",
    "TorchState",
    "Traced",
    "Typed",
    "Variance",
    "all_gather_object",
    "annotate_collectives",
    "any_dual",
    "arguments_of",
    "attributes_of",
    "bytes_of",
    "call_schedule",
    "calling",
    "check_arguments",
    "check_axis",
    "check_flags",
    "check_floating",
    "check_local",
    "check_matches",
    "check_numbers",
    "check_rates",
    "check_results",
    "check_same_shards",
    "check_tensors",
    "check_transform",
    "choose_boxes",
    "copy_into",
    "count_updates",
    "custom_call",
    "define_operator",
    "describe",
    "describe_state",
    "device_of",
    "differentiate",
    "drawing",
    "estimate_operator",
    "expect",
    "expect_file",
    "fake_axes",
    "fake_coordinates",
    "fake_maker",
    "fake_process_groups",
    "files",
    "find_lifetimes",
    "find_machine",
    "find_misfits",
    "find_order",
    "fingerprint",
    "flatten",
    "fold_views_and_remove_dead_nodes",
    "generators",
    "graph_nodes",
    "grouped",
    "hash_of",
    "held_in_flight",
    "is_differentiated",
    "is_donated",
    "is_fake",
    "is_mask",
    "is_tracing",
    "is_trained",
    "is_users_file",
    "join_ranks",
    "lay_out",
    "lay_out_call",
    "layout_axes",
    "leaves_like",
    "leaves_of",
    "like",
    "links",
    "local_box",
    "local_piece",
    "local_ranges",
    "make_aval",
    "map_leaves",
    "map_trained_leaves",
    "masked_transform",
    "matches",
    "name_ranks",
    "name_without_wrappers",
    "named_buffers",
    "named_modules",
    "named_parameters",
    "next_sequence_number",
    "no_updates",
    "open_regular",
    "padded",
    "partition_axes",
    "prepare",
    "process_rank",
    "rank_state",
    "ranks_of",
    "ranks_on_host",
    "read_box",
    "read_environment",
    "record_numbers",
    "record_on_tape",
    "refuse",
    "refuse_donated",
    "refuse_other",
    "resolve_process_group",
    "run_on_tape",
    "run_update",
    "same_structure",
    "setting",
    "sockets_of_mesh",
    "start_scatter",
    "states_of",
    "storage_key",
    "sum_digits",
    "sum_dtype",
    "sum_over",
    "sum_powers",
    "summed_axes",
    "supports_cpu_messages",
    "tensor_of",
    "tensors_of",
    "tolerance",
    "trace",
    "transforms_active",
    "unflatten",
    "unsharded",
    "variance_of",
    "walk_graph",
    "watched",
    "widen",
    "without_padding",
    "without_saved_tensor_hooks",
    "words_at",
    "zero",
]

# Some names are of extensions. They are imported when they are first asked for.
__getattr__ = lazy_names.make_getattr("fshard.extend")
