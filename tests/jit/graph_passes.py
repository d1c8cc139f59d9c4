"""Passes for tests of `passes=`: one that recomputes, one that watches, and some that break a rule; and a step."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import fshard as fs
from fshard.extend import PassedGraph, Traced
from tests.jit.steps import Case, trained
from tests.ranks import my_rank
from tests.trees import normal, one_axis

WIDTH = 8

aten = torch.ops.aten


@dataclass(frozen=True)
class Recompute:
    """Computes what an operator returned again for all readers but the first, so that the first result is freed."""

    operator: Any = aten.sin.default
    name: str = "recompute"

    def __call__(self, traced: Traced) -> PassedGraph:
        graph = traced.module.graph
        copied = []
        for node in graph.find_nodes(op="call_function", target=self.operator):
            # Nodes compare by their positions.
            first, *later = sorted(node.users)
            if later:
                with graph.inserting_before(later[0]):
                    copy = graph.node_copy(node)
                copy.meta["val"] = node.meta["val"].clone()
                node.replace_all_uses_with(copy, lambda user, first=first: user is not first)
                copied.append(node.name)
        return PassedGraph(traced, f"{' '.join(copied)} before the second reader")


@dataclass(frozen=True)
class Watch:
    """Leaves the graph as it is, decides how many results it has, and notes the operators of each graph."""

    name: str = "watch"
    graphs: list[list[str]] = field(default_factory=list, hash=False, compare=False)

    def __call__(self, traced: Traced) -> PassedGraph:
        self.graphs.append([str(node.target) for node in traced.module.graph.nodes])
        (results,) = traced.module.graph.output_node().args
        return PassedGraph(traced, f"{len(results) - results.count(None)} results")


@dataclass(frozen=True)
class Decide:
    """Leaves the graph as it is, and has decided what it was told."""

    decision: str
    name: str = "decide"

    def __call__(self, traced: Traced) -> PassedGraph:
        return PassedGraph(traced, self.decision)


@dataclass(frozen=True)
class Repeat:
    """Repeats the first collective of a graph, and does not say so."""

    times: int
    name: str = "repeat"

    def __call__(self, traced: Traced) -> PassedGraph:
        graph = traced.module.graph
        node = next(node for node in graph.nodes if str(node.target).startswith("fshard.all_gather"))
        for _ in range(self.times):
            with graph.inserting_after(node):
                graph.node_copy(node).meta["val"] = [value.clone() for value in node.meta["val"]]
        return PassedGraph(traced, "nothing")


@dataclass(frozen=True)
class Fail:
    """Fails, unless the last argument has some rows."""

    smallest_batch: int | None = None
    name: str = "fail"

    def __call__(self, traced: Traced) -> PassedGraph:
        batch = traced.module.graph.find_nodes(op="placeholder")[-1].meta["val"]
        if self.smallest_batch is None or len(batch) < self.smallest_batch:
            raise RuntimeError("there is no such graph")
        return PassedGraph(traced, "nothing")


@dataclass(frozen=True)
class DropResult:
    """Drops the last result."""

    name: str = "drop"

    def __call__(self, traced: Traced) -> PassedGraph:
        output = traced.module.graph.output_node()
        output.args = (output.args[0][:-1],)
        return PassedGraph(traced, "nothing")


@dataclass(frozen=True)
class Disorder:
    """Moves an operator behind one that reads its result."""

    name: str = "disorder"

    def __call__(self, traced: Traced) -> PassedGraph:
        node = next(node for node in traced.module.graph.nodes if node.op == "call_function")
        next(iter(node.users)).append(node)
        return PassedGraph(traced, "nothing")


@dataclass(frozen=True)
class Returns:
    """Returns what is no graph."""

    result: Any
    name: str = "nothing"

    def __call__(self, traced: Traced) -> Any:
        return self.result


@dataclass
class Unhashable:
    """A pass that may change, so that it has no hash."""

    name: str = "unhashable"

    def __call__(self, traced: Traced) -> PassedGraph:
        return PassedGraph(traced, "nothing")


class Wave(nn.Module):
    """A layer whose backward reads the sine and its argument, and is computed from both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).sin()
        return x + y * y


def waves(strategy: Any = fs.zero3, rows: int = 4) -> Case:
    """The case of a step of two such layers."""
    model = fs.functionalize(nn.Sequential(*(Wave() for _ in range(2))), Wave)
    params = model.init(strategy(one_axis(), min_shard_elements=0), seed=0)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, x).square().mean()

    draw = normal(my_rank())
    return trained(loss, params, [(draw(rows, WIDTH, dtype=torch.float32),) for _ in range(2)])
