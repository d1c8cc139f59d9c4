"""Nodes that the graph says ranks must agree on hold equal bits, and results that ranks share are among them."""

from functools import partial

import pytest
import torch
from torch.fx import Node
from torch.fx.node import map_arg

import fshard as fs
from fshard.ext.replay.repeat import trace_call
from fshard.ext.replay.run import run_nodes
from fshard.ext.replay.shared import find_common_axes
from fshard.extend import all_gather_object, flatten, graph_nodes, hash_of, unflatten
from fshard.testing import spmd
from tests.ext.replay.steps import make_step

ZERO3 = partial(fs.zero3, min_shard_elements=0, bucket_bytes=0)
SHARD = frozenset(["shard"])


def names_shared(f, *args, inputs):
    """The operators whose results ranks agree on."""
    graph = fs.make_graph(f)(*args).module.graph
    placeholders = graph_nodes.find_inputs(graph)
    shared = find_common_axes(graph, SHARD, {placeholders[number]: SHARD for number in inputs}, {})
    operators = [node for node in graph.nodes if node.op == "call_function"]
    return [node.name for node in operators if shared[node]]


def test_results_of_shared_values_alone_are_shared():
    assert names_shared(lambda x, y: (x.sin() * x, y.cos() * x), torch.ones(2), torch.ones(2), inputs=[0]) == [
        "sin",
        "mul",
    ]
    assert names_shared(lambda x: x + torch.zeros(2), torch.ones(2), inputs=[0]) == ["zeros", "add"]
    assert names_shared(lambda x: torch.bernoulli(x), torch.ones(2), inputs=[0]) == []


def test_memory_that_was_written_to_through_a_view_is_no_longer_shared():
    def f(x, y):
        z = x.clone()
        z[0].add_(y)
        z[1].add_(x[0])
        return z.sin()

    assert names_shared(f, torch.ones(2), torch.ones(()), inputs=[0]) == ["clone", "select", "select_2"]
    assert "sin" in names_shared(f, torch.ones(2), torch.ones(()), inputs=[0, 1])


def test_numbers_that_differ_between_ranks_make_results_vary():
    graph = fs.make_graph(lambda x: x[1].sin())(torch.ones(2)).module.graph
    (x,) = graph_nodes.find_inputs(graph)
    (select,) = (node for node in graph.nodes if node.name == "select")
    assert not any(
        find_common_axes(graph, SHARD, {x: SHARD}, {select: SHARD})[node] for node in (select, *select.users)
    )


def compare_ranks(strategy):
    """Run a step; return the nodes that should agree and do not, how many should, and the results that should."""
    call = trace_call("verify", *_step_and_args(strategy))
    graph = call.traced.module.graph
    shared_inputs = {}
    for node in call.inputs:
        leaf = call.leaf_of(node)
        if isinstance(leaf, fs.Sharded) and all(leaf.spec.dim_of(axis) is None for axis in leaf.spec.axes):
            shared_inputs[node] = SHARD
    operators = [node for node in graph.nodes if node.op == "call_function" and not _starts(node)]
    constants = [repr(map_arg((node.args, node.kwargs), lambda source: None)) for node in operators]
    digests = {}

    def watch(node, operands, results):
        if results:
            digests[node] = "".join(map(hash_of, results))

    run_nodes(call.traced, call.tensors, watch)
    told = all_gather_object([constants, [digests.get(node, "") for node in operators]], call.flat.axes, "test")
    apart = [len({rank[0][place] for rank in told}) > 1 for place in range(len(operators))]
    varying = {node: SHARD for node, is_apart in zip(operators, apart, strict=True) if is_apart}
    shared = find_common_axes(graph, SHARD, shared_inputs, varying)
    wrong = []
    for place, node in enumerate(operators):
        if shared[node] and len({rank[1][place] for rank in told}) > 1:
            wrong.append(node.name)
    results = flatten(unflatten(call.traced.treedef, graph_nodes.find_results(graph)))
    pairs = zip(results.paths, results.leaves, strict=True)
    agreed = {path for path, node in pairs if isinstance(node, Node) and shared[node]}
    return wrong, sum(bool(shared[node]) for node in operators), sorted(agreed)


def _step_and_args(strategy):
    step, *args = make_step(strategy)
    return step, args


def _starts(node):
    return any(graph_nodes.find_collective(each) is not None for each in (node, *node.all_input_nodes)) and not (
        graph_nodes.is_wait(node)
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("strategy", [ZERO3, fs.zero1, fs.ddp])
def test_shared_nodes_of_a_step_agree_and_include_what_is_replicated(strategy, world_size):
    wrong, count, agreed = spmd(lambda: compare_ranks(strategy), world_size)[0]
    assert wrong == []
    assert count > 50
    assert "[1]" in agreed
    if strategy is fs.ddp:
        assert "[0].opt_state[0].mean['head.bias']" in agreed
        assert "[0].opt_state[0].square['blocks.0.up.weight']" in agreed
