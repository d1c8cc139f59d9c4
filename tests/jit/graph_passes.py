"""Passes for tests of `passes=`: one that recomputes, one that watches, and some that break a rule; and a step."""

from collections.abc import Callable
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
class Change:
    """Changes a graph by a function, and does not say so."""

    change: Callable[[Traced], None]

    @property
    def name(self) -> str:
        return self.change.__name__

    def __call__(self, traced: Traced) -> PassedGraph:
        self.change(traced)
        return PassedGraph(traced, "nothing")


class Unhashable(Change):
    """A pass that may change, so that it has no hash."""

    __hash__ = None


def repeat(traced: Traced) -> None:
    """Repeat the first collective as many times as the rank has a number."""
    graph = traced.module.graph
    node = next(node for node in graph.nodes if str(node.target).startswith("fshard.all_gather"))
    for _ in range(my_rank()):
        with graph.inserting_after(node):
            graph.node_copy(node).meta["val"] = [value.clone() for value in node.meta["val"]]


def fail(traced: Traced) -> None:
    raise RuntimeError("there is no such graph")


def fail_for_few_rows(traced: Traced) -> None:
    """Fail on rank 1 if the last argument has three rows."""
    rows = len(traced.module.graph.find_nodes(op="placeholder")[-1].meta["val"])
    if rows < 3 + my_rank():
        fail(traced)


def drop(traced: Traced) -> None:
    """Drop the last result."""
    output = traced.module.graph.output_node()
    output.args = (output.args[0][:-1],)


def disorder(traced: Traced) -> None:
    """Move an operator behind one that reads its result."""
    node = next(node for node in traced.module.graph.nodes if node.op == "call_function")
    next(iter(node.users)).append(node)


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
