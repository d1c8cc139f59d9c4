"""The graph of a ZeRO-3 step: what is gathered, reduced and written, and when."""

import operator
from functools import cache

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import _compat
from fshard.comm import ops
from fshard.jit.passes import placeholders, roots
from fshard.residency import backward
from fshard.testing import spmd
from tests.jit.steps import collectives, copied, slow, trained
from tests.jit.test_features import Stack, inputs
from tests.trees import one_axis
from tests.unit_models import HIDDEN, Block, filled, zero3

STARTS = (ops.all_gather, ops.reduce_scatter, ops.all_reduce)
UNITS = 4
COMPUTES = ("aten.mm", "aten.addmm", "aten.bmm", "aten.gelu", "aten.tanh", "aten.native_layer_norm")


class Deep(Stack):
    """Units alike in a row, whose matrices are large enough to be reduced by themselves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(HIDDEN) for _ in range(UNITS))


@cache
def graph_of(world_size=2, **options):
    """The graph of a step on rank 0 as the "graph" backend runs it, and the eager collectives."""
    module = filled(Deep())

    def program():
        model = fs.functionalize(module, Block)
        case = trained(model.apply, model.init(zero3(**options)(one_axis())), inputs())
        with fs.comm.record() as record:
            case.step(case.state, *case.batches[0])
        jitted = fs.jit(case.step, donate_argnums=0)
        jitted(copied(case.state), *case.batches[0])
        (program,) = jitted._programs.values()
        return program, collectives(record)

    return spmd(program, world_size)[0]


def nodes_of(program):
    return list(program.traced.graph.graph.nodes)


def starts(nodes, *targets):
    return [node for node in nodes if node.target in (targets or STARTS)]


def buffers(start):
    """The buffers of a collective, each with the node that waits for it."""
    items = [user for user in start.users if user.target is operator.getitem]
    return [(item, [user for user in item.users if user.target in (ops.wait, _compat.WAIT_TENSOR)]) for item in items]


def place(nodes):
    return {node: n for n, node in enumerate(nodes)}


def computes(node):
    return str(node.target).startswith(COMPUTES)


def last_use(node, order):
    """Where the last node stands that reads a buffer, views of it included."""
    last = order[node]
    for user in node.users:
        if user.op == "output":
            continue
        view = user.target is operator.getitem or any(a.aliased for a in _compat.arguments_of(user.target) or ())
        waits = user.target in (ops.wait, _compat.WAIT_TENSOR)
        last = max(last, last_use(user, order) if view or waits else order[user])
    return last


@pytest.mark.parametrize("prefetch", slow((0, 1, 2), [0, 1]))
def test_collectives_are_those_of_the_eager_step_and_all_are_waited_for(prefetch):
    program, record = graph_of(prefetch=prefetch)
    nodes = nodes_of(program)
    names = [node.target.name().removeprefix("fshard::").removesuffix(".default") for node in starts(nodes)]
    assert [name.split(".")[0] for name in names] == [entry.op for entry in record]
    # Each unit is gathered, and all but the last again; one reduction for each, and one of the loss.
    gathers = [entry for entry in record if entry.op == "all_gather"]
    assert len(starts(nodes, ops.all_gather)) == len(gathers) >= 2 * UNITS - 1
    assert len(starts(nodes, ops.reduce_scatter)) >= UNITS
    for start in starts(nodes):
        found = buffers(start)
        assert len(found) == len(start.args[0])
        assert all(len(waits) == 1 for _, waits in found)


def test_gathers_start_ahead_of_their_use():
    """Something is computed between a gather's start and the wait for it, but for the very first."""
    for prefetch, ahead in ((1, True), (0, False)):
        nodes = nodes_of(graph_of(prefetch=prefetch)[0])
        order, between = place(nodes), []
        for start in starts(nodes, ops.all_gather):
            wait = min(order[wait] for _, waits in buffers(start) for wait in waits)
            between.append(sum(map(computes, nodes[order[start] : wait])))
        assert between[0] == 0
        assert [count > 0 for count in between[1:]].count(ahead) >= len(between) - 3
        if not ahead:
            assert not any(between)


def test_no_gathered_unit_is_held_between_its_turns():
    """A gathered buffer is last read before the second next gather is waited for, so that few are there at a time."""
    for regather in (True, False):
        nodes = nodes_of(graph_of(regather=regather)[0])
        order = place(nodes)
        gathers = starts(nodes, ops.all_gather)
        waits = [min(order[wait] for _, found in buffers(start) for wait in found) for start in gathers]
        ends = [max(last_use(item, order) for item, _ in buffers(start)) for start in gathers]
        alive = max(sum(wait <= n <= end for wait, end in zip(waits, ends)) for n in range(len(nodes)))
        assert alive <= 2 if regather else alive >= UNITS


def test_reductions_start_with_their_gradients_and_are_bounded(monkeypatch):
    """Each starts as soon as its gradient is there, and no more bytes are under way than the engine allows."""
    cap = 600 * 1024
    monkeypatch.setattr(backward, "IN_FLIGHT_BYTES", cap)
    nodes = nodes_of(graph_of.__wrapped__()[0])
    order, found = place(nodes), starts(nodes, ops.reduce_scatter)
    ends = [max(order[wait] for _, waits in buffers(start) for wait in waits) for start in found]
    sizes = [sum(x.meta["val"].nbytes for x in start.args[0]) for start in found]
    spans = [(order[start], end, size) for start, end, size in zip(found, ends, sizes)]
    flying = [sum(size for first, last, size in spans if first <= n < last) for n in range(len(nodes))]
    assert max(sizes) < max(flying) <= cap
    computed = [sum(map(computes, nodes[: order[start]])) for start in found]
    assert computed == sorted(computed)
    assert len(set(computed)) >= 2 * UNITS


@pytest.mark.parametrize("world_size", (1, 2))
def test_donated_leaves_are_written_right_after_their_update(world_size):
    program, _ = graph_of(world_size)
    graph = program.traced.graph.graph
    nodes, inputs = nodes_of(program), placeholders(graph)
    order, memory = place(nodes), roots(graph)
    outputs = nodes[-1].args[0]
    assert len(program.pairs) == len(inputs) - 1
    for i, k in program.pairs.items():
        assert outputs[k] is inputs[i]
        writes = [
            node
            for node in nodes
            if node.op == "call_function"
            and any(
                argument.written and inputs[i] in memory.get(given, ())
                for argument, value in zip(_compat.arguments_of(node.target) or (), node.args)
                for given in (value if isinstance(value, list | tuple) else [value])
                if isinstance(given, torch.fx.Node)
            )
        ]
        assert writes
        # A copy comes right after what it copies was computed, or what was there was read for the last time.
        for write in (node for node in writes if node.target is torch.ops.aten.copy_.default):
            reads = [user for user in inputs[i].users if order[user] < order[write]]
            assert order[write] - max(order[write.args[1]], *map(order.get, reads), 0) <= len(inputs)


def test_one_fused_update_for_all_leaves_and_no_copy_of_them():
    nodes = nodes_of(graph_of()[0])
    fused = [node for node in nodes if "_fused_adamw_" in str(node.target)]
    assert len(fused) == 1
    assert all(leaf.op == "placeholder" for leaf in fused[0].args[0])
    assert not any(str(node.target).startswith("aten.detach") for node in nodes)


def test_one_rank_has_no_collective():
    program, record = graph_of(1)
    assert not record
    assert not starts(nodes_of(program))
