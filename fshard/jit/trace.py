"""Trace: a function of pytrees written down as one graph, on tensors without values."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from fshard import _compat, random
from fshard.collectives import Uses
from fshard.errors import expect, is_users_file
from fshard.tree import Exact, Flat, Sharded, Treedef, flatten, is_sharded, tensors_of
from fshard.tree.checks import check_tensors, count_writes

# Traces patch what belongs to the process, and so do compilers.
TRACING = threading.Lock()
# Tensors without values have none of these, or others in every call; numbers of tensors that have some would go stale.
_REFUSED = ("storage", "untyped_storage", "storage_offset", "tolist", "numpy")


class Traced(NamedTuple):
    """A function as a graph.

    Attributes:
        graph: A torch.fx.GraphModule: maps the tensors of the arguments, in their order, to those of the result.
        inputs: The leaves of the arguments that hold a tensor.
        treedef: Structure of the result.
        specs: For each leaf of the result its spec where it is Sharded, else None.
        closed: Tensors that the function closes over, as operands or for their values.
    """

    graph: Any
    inputs: list[int]
    treedef: Treedef
    specs: list[Any]
    closed: list[torch.Tensor]


def trace(flat: Flat, f: Callable[..., Any], uses: Uses | None = None) -> Traced:
    """Write a function down.

    Args:
        flat: Its arguments and keywords, taken apart; their tensors become inputs of the graph.
        f: The function.
        uses: What ranks have agreed on, and where it is noted which leaves are used; None where nobody asks.

    Returns:
        The graph, as it was traced.

    Raises:
        ValueError: if the function branches on values, or returns what is no tensor, with the line or the path.
    """
    tensors = tensors_of(flat.leaves)
    inputs = [i for i, tensor in enumerate(tensors) if isinstance(tensor, torch.Tensor)]
    # No part of a graph of autograd, nor views of others.
    examples = {id(x): x.detach() if type(x) is torch.Tensor else x for x in tensors if isinstance(x, torch.Tensor)}
    found: list[Flat] = []

    def run(*given: torch.Tensor) -> list[torch.Tensor | None]:
        leaves = [leaf.value if isinstance(leaf, Exact) else leaf for leaf in flat.leaves]
        wrapped: dict[int, Sharded] = {}
        if uses is not None:
            _compat.trace_notes()["uses"] = uses
        for i, tensor in zip(inputs, given, strict=True):
            leaf = leaves[i]
            # One leaf that is given twice stays one.
            leaves[i] = wrapped.setdefault(id(leaf), Sharded(tensor, leaf.spec)) if is_sharded(leaf) else tensor
        with _Refusing():
            args, kwargs = flat.unflatten(leaves)
            found.append(flatten(f(*args, **kwargs)))
        check_tensors("jit: what the function returns", found[-1])
        return tensors_of(found[-1].leaves)

    with _tracing():
        try:
            graph, read = _compat.make_graph_of(run, [examples[id(tensors[i])] for i in inputs])
        except Exception as error:
            if not _compat.asks_for_values(error):
                raise
            needed = "no look at the value of a tensor, which a trace does not have"
            remedy = "use torch.where in the place of a branch, a tensor in the place of item(), or fs.schedules"
            raise ValueError(f"jit: expected {needed}, got one in the line that torch names above; {remedy}") from error
    out = found[-1]
    specs = [getattr(leaf, "spec", None) for leaf in out.leaves]
    # Before passes take out operators whose values were read, and nothing else.
    constants = [getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")]
    closed = {id(found): found for found in (*constants, *read) if isinstance(found, torch.Tensor)}
    return Traced(graph, inputs, out.treedef, specs, list(closed.values()))


@contextmanager
def _tracing() -> Iterator[None]:
    """Trace alone and outside of modes such as the recorder's and inference mode, which are for what runs.

    torch.utils.checkpoint keeps the generator's state in the graph, so that it draws the same masks again.
    """
    get, put = torch.get_rng_state, torch.set_rng_state
    with (
        TRACING,
        _compat.outside_modes(),
        count_writes(),
        # Other threads may run meanwhile.
        patch.multiple(
            torch,
            get_rng_state=lambda: random.random_state() if _compat.is_tracing() else get(),
            set_rng_state=lambda state: random.set_random_state(state) if _compat.is_tracing() else put(state),
        ),
    ):
        yield


class _Refusing(TorchFunctionMode):
    """Refuses to tell what differs from call to call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _REFUSED:
            caller = sys._getframe(1).f_code.co_filename
            needed, remedy = "no look at what a trace does not have", "ask for shapes and strides, or pass tensors"
            expect(not is_users_file(caller), "jit", needed, f"Tensor.{name}", remedy)
        return func(*args, **(kwargs or {}))
