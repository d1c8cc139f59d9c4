"""Runs of a graph that give the same bits each time, unless something is wrong."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

import fshard as fs
from fshard.ext._compat import noting_origins
from fshard.ext.replay.run import Watch, run_nodes
from fshard.extend import (
    DispatchMode,
    Jitted,
    Traced,
    describe,
    expect,
    flatten,
    generators,
    graph_nodes,
    is_donated,
    refuse,
    tensor_of,
)

_GENERATORS = (generators.random_state, generators.set_random_state, generators.seed)
# Simulated ranks are threads, which share the generators of the process.
_SHARED_GENERATORS = threading.Lock()
_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


class TracedCall(NamedTuple):
    """A step as a graph, and its arguments.

    Attributes:
        flat: The arguments, taken apart.
        traced: The graph, whose nodes know their origins.
        inputs: The inputs of the graph, each with the index of its leaf.
    """

    flat: Any
    traced: Traced
    inputs: dict[Node, int]

    def leaf_of(self, node: Node) -> Any:
        """Return the leaf that an input stands for; None of other nodes."""
        return self.flat.leaves[self.inputs[node]] if node in self.inputs else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The inputs' values."""
        return [tensor_of(self.flat.leaves[index]) for index in self.inputs.values()]


def trace_call(
    api_name: str, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> TracedCall:
    """Trace a call of a step. Ranks compare their graphs.

    Args:
        api_name: The function that asks, for errors.
        step: The step. Of a function of `jit` it is the function inside, which writes to no argument.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The call.

    Raises:
        ValueError: if an argument was donated, or the step cannot be one graph.
    """
    expect(callable(step), api_name, "the step to be a function", describe(step))
    _refuse_empty_arguments(api_name, args, kwargs or {})
    function: Any = getattr(step, "__wrapped__", step) if isinstance(step, Jitted) else step
    try:
        with noting_origins():
            _, program, flat = fs.jit(function).find_call(args, kwargs or {})
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"{api_name}: {name} cannot be made one graph, which {api_name} runs. {error}") from error
    traced = program.traced
    inputs = dict(zip(graph_nodes.find_inputs(traced.module.graph), traced.input_leaves, strict=True))
    return TracedCall(flat, traced, inputs)


def _refuse_empty_arguments(api_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    def misfit(leaf: Any) -> str | None:
        return "was donated to an earlier call, so it is empty now" if is_donated(leaf) else None

    remedy = (
        "keep the argument of the step that went wrong, as fs.tree_map(torch.clone, state), or leave out "
        "donate_argnums and donate=True while you search; or restore the last checkpoint and go on from there"
    )
    headline = f"{api_name}: arguments were donated, and a step cannot run again without them"
    refuse(headline, flatten((args, kwargs)).problems(misfit), remedy)


def read_generators() -> torch.Tensor:
    """Read the states of this process's generators."""
    with _SHARED_GENERATORS:
        states: torch.Tensor = generators.random_state()
        return states


def run_repeatably(call: TracedCall, generator_states: torch.Tensor, watch: Watch) -> list[Any]:
    """Run a graph, with zeros in empty memory and with states of torch's generators that nothing else moves.

    Args:
        call: The graph and its arguments.
        generator_states: The states of torch's generators that it begins with.
        watch: As for `run_nodes`; not called for empty memory.

    Returns:
        The results of the graph.
    """

    def fill_and_watch(node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        if is_empty(node):
            results[0].zero_()
        else:
            watch(node, operands, results)

    with _PrivateGenerators(generator_states):
        return run_nodes(call.traced, call.tensors, fill_and_watch)


def is_empty(node: Node) -> bool:
    """Whether a node makes memory that nothing has been written to."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "") in _EMPTY


class _PrivateGenerators(DispatchMode):
    """Lets operators of this thread draw from states of torch's generators that belong to the context."""

    # Branches of torch.cond run under the mode too.
    supports_higher_order_operators = True

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self._states = states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _uses_generators(func):
            return func(*args, **kwargs)
        with _SHARED_GENERATORS:
            states_of_process = generators.random_state()
            generators.set_random_state(self._states)
            try:
                return func(*args, **kwargs)
            finally:
                self._states = generators.random_state()
                generators.set_random_state(states_of_process)


def _uses_generators(func: Any) -> bool:
    """Whether an operator reads, sets or draws from torch's generators."""
    # Collectives have the tag too, and wait for other ranks.
    if func in _GENERATORS:
        return True
    is_seeded = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return is_seeded and func.namespace != "fshard"
