"""The memory of a jitted step by kind, before and after a budget, and what the budget changed, module by module."""

import copy
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import fshard as fs
from fshard import comm
from fshard.ext import _compat
from fshard.ext.fit.picture import draw_curves
from fshard.extend import StepGraph, graph_nodes

# Kinds of memory by the uses of storages, in the order in which a report lists them.
_KINDS = (
    ("parameters", "parameters"),
    ("optimizer_state", "optimizer state"),
    ("inputs", "other arguments"),
    ("gathered", "full units"),
    ("gradients", "full gradients"),
    ("reduced", "reduced gradients"),
    ("saved", "saved for the backward"),
    ("in_flight", "messages in flight"),
    ("activations", "other results"),
)


class GraphMemory:
    """The memory of a rank while one graph runs.

    Attributes:
        arguments: Bytes of the arguments, which are held all the time.
        held: Bytes that are held while each operator runs, arguments included.
        peak: The most of them.
        place: The operator at which most are held, the first of several, and where the program has it; None if there
            are no operators.
        kinds: The bytes that are held then, by kind.
        choices: What is computed or gathered again to fit a budget, module by module, in words.
    """

    def __init__(self, graph: StepGraph, args: Any) -> None:
        """Predict the memory of a graph that was traced with these arguments."""
        uses = _find_uses(graph, args)
        sums = graph.sum_by_use(uses, graph.at_peak)
        self.arguments = sum(graph.memory.always_held.values())
        self.held = [self.arguments + moment.bytes for moment in graph.moments] or [self.arguments]
        self.peak = max(self.held)
        self.place = graph.at_peak and _describe_place(graph.at_peak)
        self.kinds = {kind: sums[use] for use, kind in _KINDS}
        self.choices = list(_list_choices(graph, uses))


class MemoryReport:
    """The memory of a jitted step, as `jitted.memory` predicts it. It prints as a table.

    Attributes:
        before: The memory without a budget.
        after: The memory with it; the same if the step has no budget.
        choices: What is computed or gathered again to fit the budget, module by module, in words.
        budget: The bytes that a rank may hold, arguments included; None if the step has no budget.
    """

    def __init__(self, jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace a call with its passes and without them. Nothing runs and nothing is sent.

        Args:
            jitted: The jitted function.
            args: The arguments of the call.
            kwargs: Its keywords.
        """
        memories = []
        with _compat.noting_origins():
            # Once if it has no passes.
            for passes in dict.fromkeys([(), jitted.passes]):
                function = copy.copy(jitted)
                function.passes = passes
                graph = fs.make_graph(function)(*args, **kwargs)
                memories.append(GraphMemory(graph, (*args, kwargs)))
        self.before = memories[0]
        self.after = memories[-1]
        self.choices = self.after.choices
        budgets = (graph_pass.budget for graph_pass in jitted.passes if hasattr(graph_pass, "budget"))
        self.budget = min(budgets, default=None)

    def draw(self, path: str | Path) -> None:
        """Write a picture: the bytes over the step, before and after the budget, and the budget as a line.

        Args:
            path: Where to write the SVG file.
        """
        curves = {"no budget": self.before.held, "arguments": [self.before.arguments]}
        if self.budget is not None:
            curves |= {"with a budget": self.after.held, "budget": [self.budget]}
        Path(path).write_text(draw_curves(curves))

    def __str__(self) -> str:
        memories = {"no budget": self.before}
        if self.budget is not None:
            memories[f"budget {_write_bytes(self.budget)}"] = self.after
        lines = [_write_row("memory of a rank in one step", memories)]
        rows = {"  most bytes held": [memory.peak for memory in memories.values()]}
        for kind in self.before.kinds:
            rows[f"    {kind}"] = [memory.kinds[kind] for memory in memories.values()]
        rows["  beyond the arguments"] = [memory.peak - memory.arguments for memory in memories.values()]
        lines += [_write_row(title, map(_write_bytes, sizes)) for title, sizes in rows.items() if any(sizes)]
        lines += [f"  {title}: most is held at {memory.place}" for title, memory in memories.items() if memory.place]
        if self.choices:
            lines += ["  run again to fit the budget:", *[f"    {choice}" for choice in self.choices]]
        return "\n".join(lines)

    __repr__ = __str__


def _find_uses(graph: StepGraph, args: Any) -> dict[Hashable, str]:
    """Find the uses of storages, with gradients and results of operators told apart."""
    storages = graph.memory.storages
    uses = graph.find_uses(args)
    for moment in graph.moments:
        node = moment.node
        is_reduced = moment.collective is not None and moment.collective.label == comm.Verb.SCATTER
        for source in node.all_input_nodes:
            is_reduced |= "reduced" in map(uses.get, storages[source])
        for storage in storages[node]:
            phases = [_compat.origin_of(user).phase for user in (node, graph.memory.last_uses[storage])]
            if is_reduced and uses[storage] == "gradients":
                uses[storage] = "reduced"
            elif uses[storage] == "activations" and phases == ["forward", "backward"]:
                uses[storage] = "saved"
    return uses


def _list_choices(graph: StepGraph, uses: Mapping[Hashable, str]) -> Iterator[str]:
    """Say what runs again, block by block; neighbours in which the same runs again have one line."""
    # The parts are the keys of a dict, which keeps their order.
    parts = defaultdict[str, dict[str, None]](dict)
    for moment in graph.moments:
        if "fit" not in moment.node.meta or graph_nodes.is_view(moment.node):
            continue
        # A block, such as "blocks.3", and the submodule in it.
        ((block, part),) = re.findall(r"^(.*?\b\d+\b|.*)\.?(.*)", _compat.origin_of(moment.node).module)
        if moment.collective is not None:
            block, part = moment.collective.unit, "weights gathered again"
        elif "gathered" in map(uses.get, graph.memory.storages[moment.node]):
            continue
        elif not part:
            operator = moment.operator.removeprefix("aten.").split(".")[0]
            part = "attention" if "attention" in operator else operator
        parts[block or "Operators outside of modules"][part] = None
    for names, blocks in groupby(parts, lambda block: ", ".join(parts[block])):
        first, *others = blocks
        yield f"{' to '.join([first, *others[-1:]])}: {names}"


def _write_row(title: str, cells: Any) -> str:
    return f"{title:<30}" + "".join(f"{cell:>20}" for cell in cells)


def _write_bytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.2f} MB"


def _describe_place(moment: Any) -> str:
    """Say where an operator runs: its module, phase and line, as far as the trace noted them."""
    origin = _compat.origin_of(moment.node)
    words = [origin.module, origin.phase]
    for frame in (*origin.frames, *origin.forward)[:1]:
        words.append(f"{Path(frame.file).name}:{frame.line}")
    return f"{moment.operator} ({', '.join(filter(None, words))})"
