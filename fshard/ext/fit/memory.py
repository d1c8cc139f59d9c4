"""The memory of a jitted step by kind, before and after a budget, and what the budget changed, module by module."""

import copy
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.fx import Node

import fshard as fs
from fshard import comm
from fshard.ext import _compat
from fshard.ext.fit.picture import draw_memory
from fshard.extend import PassedGraph, StepGraph, Traced, graph_nodes

# Kinds of memory by the uses of storages, in the order in which a report lists them.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "parameters",
        "optimizer_state": "optimizer state",
        "inputs": "other arguments",
        "gathered": "full units",
        "gradients": "full gradients",
        "reduced": "reduced gradients",
        "saved": "saved for the backward",
        "in_flight": "messages in flight",
        "activations": "other results",
    }
)


class GraphMemory(NamedTuple):
    """The memory of a rank while one graph runs.

    Attributes:
        arguments: Bytes of the arguments, which are held all the time.
        held: Bytes that are held while each operator runs, arguments included.
        backward: The number of the first operator of the backward in `held`; 0 if the step has none.
        place: The operator at which most are held, the first of several, and where the program has it.
        kinds: The bytes that are held then, by kind.
    """

    arguments: int
    held: list[int]
    backward: int
    place: str
    kinds: dict[str, int]

    @property
    def peak(self) -> int:
        """The most bytes that are held at a time, arguments included."""
        return max(self.held)


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """The memory of a jitted step, as `jitted.memory` predicts it. It prints as a table.

    Attributes:
        before: The memory without a budget.
        after: The memory with it; the same if the step has no budget.
        budget: The bytes that a rank may hold, arguments included; None if the step has no budget.
        choices: What is computed or gathered again to fit the budget, module by module, in words.
    """

    before: GraphMemory
    after: GraphMemory
    budget: int | None
    choices: list[str]

    def draw(self, path: str | Path) -> None:
        """Write a picture: the bytes over the step, before and after the budget, and the budget as a line.

        A mark on the lower edge, in the color of its curve, is where the backward begins.

        Args:
            path: Where to write the SVG file.
        """
        Path(path).write_text(draw_memory(self.before, self.after, self.budget))

    def __str__(self) -> str:
        return "\n".join(self._write_lines())

    __repr__ = __str__

    def _write_lines(self) -> Iterator[str]:
        columns = {"no budget": self.before}
        if self.budget is not None:
            columns[f"budget {_write_bytes(self.budget)}"] = self.after
        yield _write_row("memory of a rank in one step", columns)
        rows = {"most bytes held": [memory.peak for memory in columns.values()]}
        for kind in self.after.kinds:
            sizes = [memory.kinds[kind] for memory in columns.values()]
            if any(sizes):
                rows[f"  {kind}"] = sizes
        rows["beyond the arguments"] = [memory.peak - memory.arguments for memory in columns.values()]
        for title, sizes in rows.items():
            yield _write_row(f"  {title}", map(_write_bytes, sizes))
        for title, memory in columns.items():
            yield f"  {title}: most is held at {memory.place}"
        if self.choices:
            yield "  to fit the budget:"
        for choice in self.choices:
            yield f"    {choice}"


class _MeasuringPass:
    """A pass that leaves the graph as it is, and measures what those behind it will change."""

    name = "memory"

    def __init__(self, args: Any) -> None:
        self._args = args
        self.memory: GraphMemory | None = None

    def __call__(self, traced: Traced) -> PassedGraph:
        graph = StepGraph(traced)
        self.memory = _measure(graph, _find_uses(graph, self._args))
        return PassedGraph(traced, "")


def report_memory(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MemoryReport:
    """Predict the memory of a jitted step, and say what its budget changed. Nothing runs and nothing is sent.

    Args:
        jitted: The jitted function.
        args: The arguments of a call.
        kwargs: Its keywords.
    """
    arguments = (*args, kwargs)
    measuring = _MeasuringPass(arguments)
    measured = copy.copy(jitted)
    measured.passes = (measuring, *jitted.passes)
    with _compat.noting_origins():
        graph = fs.make_graph(measured)(*args, **kwargs)
    assert measuring.memory is not None
    uses = _find_uses(graph, arguments)
    budgets = [graph_pass.budget for graph_pass in jitted.passes if hasattr(graph_pass, "budget")]
    choices = list(_describe_choices(graph, uses))
    return MemoryReport(measuring.memory, _measure(graph, uses), min(budgets, default=None), choices)


def _measure(graph: Any, uses: Mapping[Hashable, str]) -> GraphMemory:
    """Predict the memory of a rank while a graph runs."""
    memory = graph.memory
    arguments = sum(memory.always_held.values())
    peak = max(graph.moments, key=lambda moment: moment.bytes)
    held_then = next(dict(held) for node, held in memory.walk() if node is peak.node)
    uses_then = {**uses, **dict.fromkeys(_find_sent(memory, peak.node), "in_flight")}
    kinds = dict.fromkeys(_KINDS.values(), 0)
    for storage, nbytes in (memory.always_held | held_then).items():
        kinds[_KINDS[uses_then[storage]]] += nbytes
    held_bytes = [arguments + moment.bytes for moment in graph.moments]
    is_backward = [_get_phase(moment.node) == "backward" for moment in graph.moments]
    backward = is_backward.index(True) if any(is_backward) else 0
    return GraphMemory(arguments, held_bytes, backward, _describe_place(peak), kinds)


def _find_uses(graph: Any, args: Any) -> dict[Hashable, str]:
    """Find the uses of storages, with gradients and results of operators told apart."""
    memory = graph.memory
    uses = graph.find_uses(args)
    last = {storage: node for node, storages in memory.freed.items() for storage in storages}
    collectives = {moment.node: moment.collective for moment in graph.moments}
    for node, created in memory.storages.items():
        collective = collectives.get(node)
        is_reduction = collective is not None and collective.label == comm.Verb.SCATTER
        sources = {uses[storage] for source in node.all_input_nodes for storage in memory.storages[source]}
        for storage in created:
            if uses[storage] == "gradients" and (is_reduction or "reduced" in sources):
                uses[storage] = "reduced"
            is_kept = storage in last and _get_phase(last[storage]) == "backward"
            if uses[storage] == "activations" and _get_phase(node) == "forward" and is_kept:
                uses[storage] = "saved"
    return uses


def _find_sent(memory: Any, at: Node) -> Iterator[Hashable]:
    """Find the storages of messages that have been started and not been waited for."""
    numbers = {node: number for number, node in enumerate(memory.storages)}
    for pending in memory.pending_buffers:
        if numbers[pending.start] <= numbers[at] <= numbers[pending.wait]:
            yield from {pending.buffer, *pending.held_storages} - memory.always_held.keys()


def _describe_choices(graph: Any, uses: Mapping[Hashable, str]) -> Iterator[str]:
    """Say what runs again, block by block; neighbours in which the same runs again have one line."""
    storages = graph.memory.storages
    # For each block its parts in their order, each with whether it is computed again.
    parts = defaultdict[str, dict[str, bool]](dict)
    gathered_again = set[Hashable]()
    regathering = set[str]()
    for moment in graph.moments:
        node = moment.node
        block, part = _name_part(moment)
        is_weight = any(uses[storage] == "gathered" for storage in storages[node])
        is_copy = "fit" in node.meta
        if is_copy and is_weight:
            gathered_again.update(storages[node])
        elif not graph_nodes.is_view(node) and (is_copy or _get_phase(node) == "forward"):
            parts[block][part] = is_copy or parts[block].get(part, False)
        if not is_weight and any(gathered_again & storages[source].keys() for source in node.all_input_nodes):
            regathering.add(block)
    texts = {}
    for block, again in parts.items():
        weights = "weights gathered again" if block in regathering else ""
        texts[block] = "; ".join(filter(None, (_list_parts(again), weights)))
    for (_, text), blocks in groupby(texts, lambda block: (block.rstrip("0123456789"), texts[block])):
        first, *others = blocks
        if text:
            yield f"{' to '.join([first, *others[-1:]])}: {text}"


def _write_row(title: str, cells: Any) -> str:
    return f"{title:<30}" + "".join(f"{cell:>20}" for cell in cells)


def _write_bytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.2f} MB"


def _get_origin(node: Node) -> _compat.Origin:
    """Return where the program has a node; a default for nodes of passes, of which the trace has noted nothing."""
    return node.meta.get("origin", _compat.Origin(phase=""))


def _get_phase(node: Node) -> str:
    return _get_origin(node).phase


def _name_part(moment: Any) -> tuple[str, str]:
    """Name the block that an operator belongs to, such as "blocks.3", and the submodule in it or the operator."""
    module = _get_origin(moment.node).module
    numbered = re.match(r"(.*?\b\d+)\b\.?(.*)", module)
    block, part = numbered.groups() if numbered else (module or "Operators outside of modules", "")
    operator = moment.operator.removeprefix("aten.").split(".")[0]
    return block, part or ("attention" if "attention" in operator else operator)


def _describe_place(moment: Any) -> str:
    """Say where an operator runs: its module, phase and line, as far as the trace noted them."""
    origin = _get_origin(moment.node)
    words = [origin.module, origin.phase]
    for frame in (*origin.frames, *origin.forward)[:1]:
        words.append(f"{Path(frame.file).name}:{frame.line}")
    return f"{moment.operator} ({', '.join(filter(None, words))})"


def _list_parts(again: Mapping[str, bool]) -> str:
    """List the parts of a block that run again, or say up to which one if these are its first ones."""
    names = list(again)
    chosen = [name for name in names if again[name]]
    if not chosen:
        return ""
    if len(chosen) > 3 and chosen == names[: len(chosen)]:
        return f"recomputed up to {chosen[-1]}"
    return f"recomputed {', '.join(chosen)}"
