"""kinds: what a graph's memory is held for."""

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fshard import _compat
from fshard.jit.graph import sent_by
from fshard.jit.memory import Lifetimes
from fshard.jit.passes import looks

aten = torch.ops.aten
# They bring numbers elsewhere, or to another dtype.
_MOVES = (
    *(aten.clone.default, aten.cat.default, _compat.TO_COPY, aten.constant_pad_nd.default, aten.copy_.default),
    *(aten.stack.default, aten.slice_scatter.default),
)


class Bytes(NamedTuple):
    """Bytes that one rank holds, by what for.

    Attributes:
        parameters: This rank's shards.
        gradients: Gradients, full or reduced, from where they are sent or were received.
        optimizer_state: The optimizer's state, and that of transforms.
        gathered: Full parameters, and what they were cast or laid out to.
        activations: What else operators return: what the backward needs, what is under way, results.
        in_flight: What collectives work on between their start and the wait for them.
        inputs: Batch, buffers, keys, and tensors that the step closes over.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    gathered: int = 0
    activations: int = 0
    in_flight: int = 0
    inputs: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Memory(NamedTuple):
    """The memory of a graph over its operators.

    Attributes:
        arguments: What is held all the time.
        moments: Each operator, with what is held while it runs, and the units of which something gathered or in flight
            is.
    """

    arguments: Bytes
    moments: list[tuple[Node, Bytes, tuple[str, ...]]]


def memory_of(graph: Graph, life: Lifetimes, paths: Mapping[Node, str], out_paths: Mapping[Node, str]) -> Memory:
    """Walk through a graph.

    Args:
        graph: The graph.
        life: When its memory is taken and freed.
        paths: Paths of the arguments of its inputs.
        out_paths: Paths of its results.
    """
    found = _Kinds(graph, life, paths, out_paths)
    kinds, units = found.names, found.units
    starts: dict[Node, list[Hashable]] = {}
    waits: dict[Node, list[Hashable]] = {}
    for flight in life.flights:
        for name in (flight.buffer, *flight.source):
            if name not in life.given:
                starts.setdefault(flight.start, []).append(name)
                waits.setdefault(flight.wait, []).append(name)
    # While several collectives work on the same memory it is in flight.
    flying: dict[Hashable, int] = {}
    sums = dict.fromkeys(Bytes._fields, 0)
    for name, nbytes in life.given.items():
        sums[kinds[name]] += nbytes
    arguments, moments = Bytes(**sums), []
    held: dict[Hashable, int] = {}
    there: dict[str, int] = {}
    for node in graph.nodes:
        for name, nbytes in life.taken[node].items():
            if name in units and name not in held:
                there[units[name]] = there.get(units[name], 0) + 1
            sums["in_flight" if flying.get(name) else kinds[name]] += nbytes - held.get(name, 0)
            held[name] = nbytes
        for name in starts.get(node, ()):
            flying[name] = flying.get(name, 0) + 1
            if flying[name] == 1:
                sums[kinds[name]] -= held[name]
                sums["in_flight"] += held[name]
        if node.op == "call_function":
            moments.append((node, Bytes(**sums), tuple(unit for unit, count in there.items() if count)))
        for name in waits.get(node, ()):
            flying[name] -= 1
            if not flying[name]:
                sums[kinds[name]] += held[name]
                sums["in_flight"] -= held[name]
        for name in life.freed.get(node, ()):
            if name in units and name in held:
                there[units[name]] -= 1
            sums[kinds[name]] -= held.pop(name, 0)
    return Memory(arguments, moments)


class _Kinds:
    """Finds out what each storage is for.

    Attributes:
        names: Fields of Bytes by the storages' names.
        units: Units by the names of what is gathered or sent for them.
    """

    def __init__(self, graph: Graph, life: Lifetimes, paths: Mapping[Node, str], out_paths: Mapping[Node, str]) -> None:
        """Look at all nodes."""
        self._storages = life.storages
        self.names: dict[Hashable, str] = {}
        self.units: dict[Hashable, str] = {}
        for node, path in paths.items():
            self._set(node, _of_path(path, "inputs"))
        for node, path in out_paths.items():
            self._set(node, _of_path(path, None))
        for node in graph.nodes:
            if _reduces(node) or _is_update(node):
                for given in _gradients_of(node):
                    self._trace_back(given)
        for node in graph.nodes:
            self._set(node, self._of_node(node))
            self._set_names(life.taken[node], "in_flight")

    def _set(self, node: Node, kind: str | None) -> None:
        if kind is not None:
            self._set_names(self._storages[node], kind)

    def _set_names(self, names: Mapping[Hashable, int], kind: str) -> None:
        for name in names:
            self.names.setdefault(name, kind)

    def _trace_back(self, node: Node) -> None:
        """Mark a gradient, and what it is a copy of."""
        while node.op == "call_function" and not _waits(node):
            self._set(node, "gradients")
            given = [a for a in node.all_input_nodes if _numel(a) == _numel(node)]
            if len(given) != 1 or not (looks(node) or node.target in _MOVES):
                break
            node = given[0]

    def _of_node(self, node: Node) -> str:
        if node.op == "get_attr":
            return "inputs"
        sent = sent_by(node) if node.op == "call_function" else None
        if sent is not None:
            self.units |= dict.fromkeys(self._storages[node], sent.unit or sent.label)
            return {"gather": "gathered", "scatter": "gradients"}.get(sent.label, "activations")
        given = [a for a in node.all_input_nodes if _numel(a) > 1]
        kinds = {self.names[name] for a in given for name in self._storages[a]}
        alike = kinds == {"gathered"} or (kinds == {"parameters"} and node.target in _MOVES)
        if alike or (kinds == {"gathered", "parameters"} and node.target in _MOVES):
            of_given = (self.units[name] for a in given for name in self._storages[a] if name in self.units)
            if (unit := next(of_given, None)) is not None:
                for name in self._storages[node]:
                    self.units.setdefault(name, unit)
            return "gathered"
        if kinds == {"gradients"} and all(_numel(a) == _numel(node) for a in given):
            return "gradients"
        return "activations"


def _of_path(path: str, otherwise: str | None) -> str | None:
    """What a tensor of a state is for, by its path."""
    found = re.search(r"\.(params|opt_state|transform_state)(?![a-z_])", path)
    if found is None:
        return otherwise
    return "parameters" if found[1] == "params" else "optimizer_state"


def _reduces(node: Node) -> bool:
    sent = sent_by(node) if node.op == "call_function" else None
    return sent is not None and sent.label == "scatter"


def _is_update(node: Node) -> bool:
    arguments = _compat.arguments_of(node.target) or ()
    return any(argument.name == "grads" for argument in arguments)


def _gradients_of(node: Node) -> Iterator[Node]:
    """The gradients that a reduction or a fused optimizer is given."""
    arguments = _compat.arguments_of(node.target) or []
    for i, argument in enumerate(arguments):
        if argument.name == "grads" or (i == 0 and not _is_update(node)):
            given: Any = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, ())
            for source in given if isinstance(given, list | tuple) else [given]:
                # What is packed for the way is a gradient each.
                packed = source.target is aten.cat.default
                yield from (source, *source.args[0]) if packed else (source,)


def _waits(node: Node) -> bool:
    return node.target is _compat.WAIT_TENSOR


def _numel(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0
