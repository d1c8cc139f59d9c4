"""Trace: a function of pytrees recorded as one graph, on tensors without values."""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from fshard import _compat, random
from fshard.collectives import TracedUsage
from fshard.engine import Started
from fshard.errors import INSTALLED, expect, is_users_file
from fshard.jit.signature import read_modes
from fshard.tree import (
    Exact,
    Flat,
    Sharded,
    Treedef,
    attributes_of,
    device_of,
    flatten,
    is_abstract,
    is_sharded,
    like,
    tensor_of,
)
from fshard.tree.checks import check_tensors, count_writes, describe, refuse_donated

# Tracing and compiling patch global state of the process, so only one thread may do either at a time.
TRACING = threading.Lock()
# Methods whose result a tensor without values does not have, or whose result changes from call to call. The result of a
# tensor that the function closes over would go stale.
_UNTRACEABLE_METHODS = ("storage", "untyped_storage", "storage_offset", "data_ptr", "is_set_to", "tolist", "numpy")


class Traced(NamedTuple):
    """A function as a graph.

    Attributes:
        module: A torch.fx.GraphModule, from the tensors of the arguments, in their order, to those of the result.
        input_leaves: The indices of the arguments' leaves that hold a tensor.
        treedef: Structure of the result.
        specs: For each leaf of the result its spec if it is Sharded, else None.
        captured: Tensors that the function closes over and computes with, or whose values it reads.
    """

    module: Any
    input_leaves: list[int]
    treedef: Treedef
    specs: list[Any]
    captured: list[torch.Tensor]


def trace(flat: Flat, f: Callable[..., Any], usage: TracedUsage | None = None) -> Traced:
    """Record a function as a graph.

    Args:
        flat: Its arguments and keywords, taken apart; their tensors become inputs of the graph.
        f: The function.
        usage: What ranks have agreed on, and where the trace notes which leaves are used; None if nobody asks.

    Returns:
        The graph, as it was traced.

    Raises:
        ValueError: if the function branches on values, or returns what is no tensor, with the line or the path; or if
            another trace runs.
    """
    if _compat.is_tracing():
        # The lock below is held by that trace, which would wait for this one to end.
        raise ValueError(
            "jit: a function cannot be traced inside another trace. Call fs.make_graph outside of functions of fs.jit "
            "and fs.make_graph."
        )
    refuse_donated("jit", flat)
    flat = replace_abstract(flat)
    tensors = flat.tensors
    input_leaves = [i for i, tensor in enumerate(tensors) if torch.is_tensor(tensor)]
    examples = _make_examples([tensors[i] for i in input_leaves])
    # A graph has the tensors of the result; its structure goes by this list.
    results: list[Flat] = []

    def run(*given: torch.Tensor) -> list[Any]:
        results[:] = [_call_with(f, flat, _wrap(flat, input_leaves, given), usage)]
        return results[0].tensors

    try:
        with _trace_alone():
            module, tensors_read = _compat.make_graph_of(run, examples)
    except Exception as error:
        if not _compat.asks_for_values(error):
            raise
        problem = "the function reads the value of a tensor, which is unknown while it is traced (see the line above)"
        remedy = "Use torch.where instead of a branch, keep the tensor instead of calling item(), or use fs.schedules"
        raise ValueError(f"jit: {problem}. {remedy} for learning rates.") from error
    (result,) = results
    specs = attributes_of(result.leaves, "spec")
    # The constants are listed before passes remove operators whose result was only read for its value.
    constants = [getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
    captured = list({id(x): x for x in (*constants, *tensors_read) if torch.is_tensor(x)}.values())
    _refuse_captures(captured, result)
    return Traced(module, input_leaves, result.treedef, specs, captured)


def _call_with(f: Callable[..., Any], flat: Flat, leaves: list[Any], usage: TracedUsage | None) -> Flat:
    """Call a function of pytrees in a trace, with the arguments' leaves that hold its tensors."""
    if usage is not None:
        _compat.trace_notes()["usage"] = usage
    modes = read_modes().items()
    with _RefuseReads():
        args, kwargs = flat.unflatten(leaves)
        result = flatten(f(*args, **kwargs))
    changes = dict(read_modes().items() - modes)
    remedy = "Later calls would not set it. Set it outside of the function, or put it back before the end."
    expect(
        not changes, "jit", "a function that leaves modes of torch as they are", f"one that leaves {changes}", remedy
    )
    check_tensors("jit: the result of the function", result)
    if any(isinstance(leaf, Started) for leaf in result.leaves):
        raise ValueError(
            "jit: the function returns leaves whose gather it has started, but a graph cannot return a gather. "
            "Use the result of fs.start_gather inside the function, or start the gather outside of it."
        )
    return result


def _wrap(flat: Flat, input_leaves: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Put tensors of a trace into the arguments' leaves."""
    leaves = [leaf.value if isinstance(leaf, Exact) else leaf for leaf in flat.leaves]
    # A leaf that is given twice stays one object, because the function may ask whether `a is b`.
    wrapped: dict[int, Sharded] = {}
    for i, tensor in zip(input_leaves, tensors, strict=True):
        leaf = leaves[i]
        leaves[i] = wrapped.setdefault(id(leaf), Sharded(tensor, leaf.spec)) if is_sharded(leaf) else tensor
    return leaves


def _make_examples(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors to trace with: no part of autograd's graph, no views of others, and one for each object.

    What lies around the arguments in their memory, such as the rows of other ranks, is left out. Without values, torch
    forgets it in tangents, and forward mode would fail on some ranks only.
    """
    examples = {id(x): x.detach() if type(x) is torch.Tensor else x for x in tensors}
    # By the memory that they lie in; where it is empty or freed, nothing is left out.
    neighbors = defaultdict[int, list[torch.Tensor]](list)
    for x in tensors:
        if type(x) is torch.Tensor and x.layout is torch.strided and x.numel() and x.untyped_storage().nbytes():
            neighbors[_compat.storage_key(x)].append(x)
    for group in neighbors.values():
        # In bytes: they may have several dtypes.
        widest = max(x.itemsize for x in group)
        start = min(int(x.storage_offset()) * x.itemsize for x in group) // widest * widest
        end = max((int(x.storage_offset()) + _measure_span(x)) * x.itemsize for x in group)
        memory = group[0].untyped_storage()[start:end]
        for x in group:
            offset = int(x.storage_offset()) - start // x.itemsize
            # In a tensor of its own: a write to x would be counted otherwise.
            examples[id(x)] = x.data.set_(memory, offset, x.shape, x.stride())
    return [examples[id(x)] for x in tensors]


def _measure_span(tensor: torch.Tensor) -> int:
    """Count the elements of memory from the first one of a tensor to its last one."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _refuse_captures(captured: Sequence[torch.Tensor], result: Flat) -> None:
    """Refuse tensors that a function closes over and that an eager call would use otherwise than a graph."""
    is_differentiated = True in attributes_of(result.tensors, "requires_grad")
    for tensor in captured:
        problem = ""
        if _compat.is_fake(tensor):
            problem = "has no values: an earlier trace left it in a cache, a list or an attribute. Compute it outside"
        elif tensor.is_leaf and _compat.is_fake(tensor.grad):
            tensor.grad = None
            problem = "gets its .grad from backward(). Return gradients of fs.value_and_grad or torch.autograd.grad"
        elif is_differentiated and tensor.requires_grad:
            problem = "requires a gradient, which a graph does not pass on. Detach the result, or use torch.no_grad()"
        if problem:
            raise ValueError(f"jit: the function closes over {describe(tensor)}, which {problem}.")


def replace_abstract(flat: Flat) -> Flat:
    """Put tensors without values, but on the device that values would be on, in the place of abstract leaves.

    Operators, their kernels and donation depend on the device. Plain tensors on the meta device go along.
    """
    if not any(map(is_abstract, flat.leaves)):
        return flat
    make_fake = _compat.fake_maker(symbols=True)
    fakes: dict[int, Any] = {}
    for leaf in flat.leaves:
        tensor = tensor_of(leaf)
        if getattr(tensor, "is_meta", False):
            fakes[id(leaf)] = like(leaf, make_fake(tensor, device_of(leaf)))
    return flat._replace(leaves=[fakes.get(id(leaf), leaf) for leaf in flat.leaves])


def _replace_in_traces(name: str, eager: Callable[..., Any], f: Callable[..., Any] | None) -> Callable[..., Any]:
    """Let a function, or a refusal, take the place of another one in this trace; other threads may call that one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _compat.is_tracing():
            return eager(*args, **kwargs)
        if f is not None:
            return f(*args, **kwargs)
        # A library may draw what it does not use, such as a probability to drop a layer in evaluation.
        if not name.startswith("torch") and sys._getframe(1).f_code.co_filename.startswith(INSTALLED):
            return eager(*args, **kwargs)
        raise ValueError(
            f"jit: later calls would not run {name}. Call it outside of the function. For random numbers, give "
            "model.apply(..., key=...) a key."
        )

    return run


@contextmanager
def _trace_alone() -> Iterator[None]:
    """Trace in one thread at a time, outside of modes that observe real execution: the recorder, and inference mode.

    torch.utils.checkpoint reads and sets the state of torch's generator, to draw the same masks again. In a trace both
    become operators of the graph. A seed or a mode would be set in the trace alone.
    """
    # Of each module the functions that a trace replaces or refuses: a graph does not have their effect, or would keep
    # their result. A mode that is put back before the end would not be missed there.
    names_by_module = {
        "torch": "get_rng_state initial_seed manual_seed seed set_default_dtype set_deterministic_debug_mode "
        "set_float32_matmul_precision set_rng_state use_deterministic_algorithms",
        "torch.random": "initial_seed manual_seed seed",
        "random": "betavariate choice choices expovariate gammavariate gauss getrandbits lognormvariate normalvariate "
        "paretovariate randbytes randint random randrange sample seed shuffle triangular uniform vonmisesvariate",
        "numpy.random": "beta binomial bytes choice exponential gamma geometric laplace lognormal multinomial "
        "multivariate_normal normal permutation poisson rand randint randn random random_sample seed shuffle "
        "standard_normal uniform",
    }
    states = {"get_rng_state": random.random_state, "set_rng_state": random.set_random_state}
    with TRACING, _compat.outside_modes(), count_writes(), ExitStack() as patches:
        for module_name, names in names_by_module.items():
            module = import_module(module_name)
            for name in names.split():
                run = _replace_in_traces(f"{module_name}.{name}", getattr(module, name), states.get(name))
                patches.enter_context(patch.object(module, name, run))
        yield


class _RefuseReads(TorchFunctionMode):
    """Refuses to read what a tensor of a trace does not have, or what differs from call to call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise ValueError("jit: a trace does not see that Tensor.data is assigned. Make a new tensor, or use copy_.")
        if name in _UNTRACEABLE_METHODS and is_users_file(sys._getframe(1).f_code.co_filename):
            raise ValueError(
                f"jit: Tensor.{name} needs the data or the memory of a tensor, which a trace does not have. Compute "
                "with tensors, or use their shapes and strides."
            )
        return func(*args, **(kwargs or {}))
