"""The graph of a ZeRO-3 step: what is gathered, reduced and written, and when."""

import operator
from functools import cache

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import _compat
from fshard.comm import ops
from fshard.jit.passes import placeholders, storages_of
from fshard.testing import spmd
from fshard.tree import ReshardPolicy
from tests.jit.steps import collectives, copied, trained
from tests.jit.test_features import Stack, inputs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis, two_axes
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


def most_gathered(nodes):
    """The most gathered buffers that are there at a time, each from its wait to its last use."""
    order, gathers = place(nodes), starts(nodes, ops.all_gather)
    waits = [min(order[wait] for _, found in buffers(start) for wait in found) for start in gathers]
    ends = [max(last_use(item, order) for item, _ in buffers(start)) for start in gathers]
    return max(sum(wait <= n <= end for wait, end in zip(waits, ends)) for n in range(len(nodes)))


def assert_reductions_are_bounded(nodes, cap, computes=computes):
    """Assert that some reductions are under way together, and no more bytes; how much is computed before each."""
    order, found = place(nodes), starts(nodes, ops.reduce_scatter)
    ends = [max(order[wait] for _, waits in buffers(start) for wait in waits) for start in found]
    sizes = [sum(x.meta["val"].nbytes for x in start.args[0]) for start in found]
    spans = [(order[start], end, size) for start, end, size in zip(found, ends, sizes)]
    flying = [sum(size for first, last, size in spans if first <= n < last) for n in range(len(nodes))]
    assert max(sizes) < max(flying) <= cap
    return [sum(map(computes, nodes[: order[start]])) for start in found]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_collectives_are_those_of_the_eager_step_and_all_are_waited_for(prefetch):
    program, record = graph_of(prefetch=prefetch)
    nodes = nodes_of(program)
    names = [node.target.name().removeprefix("fshard::").removesuffix(".default") for node in starts(nodes)]
    assert [name.split(".")[0] for name in names] == [entry.op for entry in record]
    # Each unit is gathered, and again but for the last and those that the backward would gather ahead of it; one
    # reduction for each, and one of the loss.
    gathers = [entry for entry in record if entry.op == "all_gather"]
    assert len(starts(nodes, ops.all_gather)) == len(gathers) >= 2 * UNITS - 1 - prefetch
    assert len(starts(nodes, ops.reduce_scatter)) >= UNITS
    for start in starts(nodes):
        found = buffers(start)
        assert len(found) == len(start.args[0])
        assert all(len(waits) == 1 for _, waits in found)


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_gathered_unit_is_held_between_its_turns():
    """A gathered buffer is last read before the second next gather is waited for, so that few are there at a time."""
    assert most_gathered(nodes_of(graph_of(regather=True)[0])) <= 2
    assert most_gathered(nodes_of(graph_of(regather=False)[0])) >= UNITS


@pytest.mark.slow
def test_reductions_start_with_their_gradients_and_are_bounded(monkeypatch):
    """A unit's start when its gradients are there, and no more bytes are under way than the engine allows."""
    cap = 600 * 1024
    monkeypatch.setattr(ReshardPolicy, "ahead_bytes", cap)
    computed = assert_reductions_are_bounded(nodes_of(graph_of.__wrapped__(prefetch=1)[0]), cap)
    assert computed == sorted(computed)
    assert len(set(computed)) == UNITS


@pytest.mark.parametrize("world_size", (1, 2))
def test_donated_leaves_are_written_right_after_their_update(world_size):
    program, _ = graph_of(world_size)
    graph = program.traced.graph.graph
    nodes, inputs = nodes_of(program), placeholders(graph)
    order, memory = place(nodes), storages_of(nodes)
    outputs = [given for given in nodes[-1].args[0] if given in inputs]
    assert len(set(outputs)) == len(inputs) - 1
    for output in outputs:
        writes = [
            node
            for node in nodes
            if node.op == "call_function"
            and any(
                argument.written and memory[output].keys() & memory[given]
                for argument, value in zip(_compat.arguments_of(node.target) or (), node.args)
                for given in (value if isinstance(value, list | tuple) else [value])
                if isinstance(given, torch.fx.Node)
            )
        ]
        assert writes
        # A copy comes right after what it copies was computed, or what was there was read for the last time.
        for write in (node for node in writes if node.target is torch.ops.aten.copy_.default):
            reads = [user for user in output.users if order[user] < order[write]]
            assert order[write] - max(order[write.args[1]], *map(order.get, reads), 0) <= len(inputs)


def test_fused_updates_of_all_leaves_and_no_copy_of_them():
    nodes = nodes_of(graph_of()[0])
    updated = [leaf for node in nodes if "_fused_adamw_" in str(node.target) for leaf in node.args[0]]
    assert len(updated) == len(set(updated)) == len(list(filled(Deep()).parameters()))
    assert all(leaf.op == "placeholder" for leaf in updated)
    assert not any(str(node.target).startswith("aten.detach") for node in nodes)


def test_one_rank_has_no_collective():
    program, record = graph_of(1)
    assert not record
    assert not starts(nodes_of(program))


def bytes_of(f, *args, **options):
    return fs.make_graph(fs.jit(f, **options) if options else f)(*args).peak_bytes()


def run_as_it_is(graph, inputs):
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("graph", run_as_it_is))
@on_ranks(2)
def test_make_graph_of_a_jitted_step_is_the_graph_that_its_backend_is_given(backend):
    model = fs.functionalize(filled(Deep()), Block)
    case = trained(model.apply, model.init(zero3()(one_axis())), inputs())
    jitted, batch = fs.jit(case.step, donate_argnums=0, backend=backend), case.batches[0]
    graph = fs.make_graph(jitted)(case.state, *batch)
    # Nothing was kept for later calls, and nothing donated.
    assert not jitted.traces
    plain = fs.make_graph(case.step)(case.state, *batch)
    jitted(case.state, *batch)
    (program,) = jitted._programs.values()
    run = nodes_of(program)
    assert [node.name for node in graph.module.graph.nodes] == [node.name for node in run]
    assert graph.bytes_sent() == plain.bytes_sent()
    in_place = [out.op == "placeholder" for out in run[-1].args[0] if out is not None]
    if backend == "graph":
        assert in_place.count(False) == 1
        assert graph.peak_bytes() < plain.peak_bytes()
    else:
        assert not any(in_place)
        assert graph.peak_bytes() == plain.peak_bytes()


def test_make_graph_of_a_jitted_function_takes_static_arguments_and_says_where_results_lie():
    jitted = fs.jit(lambda x, n: (x * n, {"n": x[0] + n}), donate_argnums=0, static_argnums=1)
    graph = fs.make_graph(jitted)(torch.zeros(4), 3)
    first, *code = str(graph).splitlines()
    assert first == "4 operators, 0 collectives, 0 bytes sent, 20 bytes at most"
    assert sum("torch.ops.aten" in line for line in code) == 4
    assert [node.name for node in fs.tree_leaves(graph.results)] == ["arg0_1", "add"]


def test_a_graph_tells_its_results_by_their_nodes_and_when_memory_is_taken_and_freed():
    params = fs.shard({"w": torch.zeros(4)}, fs.zero3(fs.Axis("shard", 1, "")))
    step = fs.make_graph(lambda p, x: (fs.tree_map(lambda w: w + x.sin(), p), None, x))
    graph = step(params, torch.zeros(4))
    _, x, sine, total, _ = graph.module.graph.nodes
    assert [moment.node for moment in graph.moments] == [sine, total]
    assert graph.results == ({"w": total}, None, x)
    assert list(graph.memory.taken[sine].values()) == [16]
    # The sine is freed when the sum has been computed.
    assert list(graph.memory.taken[sine]) == graph.memory.freed[total]


def written(x):
    y = x.clone()
    y.view(2, -1).mul_(2)
    return y


def swapped(tree):
    return tree[::-1]


X = torch.zeros(1000)
HELD = {
    "a result": (lambda x: x.sin(), (X,), {}, X.nbytes),
    "a result of a donated argument": (lambda x: x.sin(), (X,), {"donate_argnums": 0}, X.nbytes),
    "two at a time": (lambda x: x.sin().cos().tan(), (X,), {}, 2 * X.nbytes),
    "views": (lambda x: x.sin().view(10, 100)[1:].t(), (X,), {}, X.nbytes),
    "several views": (lambda x: [part + 1 for part in x.sin().split(500)], (X,), {}, 2 * X.nbytes),
    "what is written in place": (written, (X,), {}, X.nbytes),
    "what is written in an argument": (written, (X,), {"donate_argnums": 0}, 0),
    "copies of arguments that change places": (swapped, ([X, X + 1],), {"donate_argnums": 0}, 2 * X.nbytes),
    "a constant": (lambda x: x + X, (X,), {}, X.nbytes),
}


@pytest.mark.parametrize("name", HELD)
def test_bytes_are_those_of_memory_that_is_new(name):
    f, args, options, expected = HELD[name]
    assert bytes_of(f, *args, **options) == expected


@pytest.mark.parametrize(
    "world_size, contiguous, expected",
    [
        # Both rows, the one that arrives, and a sine with its cosine.
        (2, True, 2 + 1 + 2),
        # And a copy of the row that is sent, while this rank's own stays where it is.
        (2, False, 2 + 1 + 2 + 1),
        # All rows, those that arrive, and a sine with its cosine.
        (3, True, 3 + 2 + 2),
        # All rows and a copy of them, which alone is held from then on, and those that arrive.
        (3, False, 3 + 3 + 3),
    ],
)
@on_ranks()
def test_what_collectives_work_on_is_held_until_they_are_waited_for(world_size, contiguous, expected):
    axis = fs.axis_of(one_axis())

    def f(x):
        rows = x.expand(world_size, -1) + 1
        finish = fs.comm.start_reduce_scatter([rows if contiguous else rows.t().contiguous().t()], axis, "test")
        y = x.sin().cos()
        return finish()[0] + y

    assert bytes_of(f, X) == expected * X.nbytes


@on_ranks(2)
def test_a_collective_whose_result_this_rank_does_not_use_stays_and_is_waited_for():
    """Other ranks may use it, and its buffers must not go before it has ended."""
    axis = fs.axis_of(one_axis())
    graph = fs.make_graph(lambda x: (fs.all_gather(2 * x, axis), x + 1)[1])(torch.ones(3))
    waits = [node for node in graph.module.graph.nodes if node.target is _compat.WAIT_TENSOR]
    assert ([entry.op for entry in graph.collectives()], len(waits)) == (["all_gather"], 1)


@on_ranks(2)
def test_a_collective_runs_where_this_rank_does_not_use_its_result():
    axis = fs.axis_of(one_axis())
    step = fs.jit(lambda x: (fs.all_gather(2 * x, axis), x + 1)[1])
    with fs.comm.record() as record:
        assert step(torch.ones(3)).equal(torch.full((3,), 2.0))
    assert [entry.op for entry in record if not entry.about.is_comparison] == ["all_gather"]


def test_gradients_that_arrive_together_are_divided_by_one_operator():
    nodes = nodes_of(graph_of()[0])
    divisions = [node for node in nodes if str(node.target).startswith(("aten._foreach_div_", "aten.div_"))]
    reductions = starts(nodes, ops.reduce_scatter, ops.all_reduce)
    divided = [given.meta["val"] for node in divisions for given in node.args[0]]
    parameters = list(filled(Deep()).parameters())
    # The objective is a reduction of its own, and divided by itself.
    assert 0 < len(divisions) < len(reductions)
    # This rank's halves, and small leaves, which both ranks have whole.
    elements = sum(map(torch.numel, parameters))
    assert elements / 2 < sum(tensor.numel() for tensor in divided) < 0.51 * elements
    # Those of one message together, and small leaves as the buffer that they came in.
    assert len(divisions) < len(divided) < len(parameters)


@pytest.mark.parametrize("divisor", (3, 1.7, torch.tensor(3.3, dtype=torch.float64)), ids=str)
def test_dividing_together_has_the_bits_of_dividing_one_by_one(divisor):
    real = [torch.randn(5, 3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    tensors = [*real, torch.randn(6, 4).t(), torch.randn(4, dtype=torch.complex64).conj(), torch.zeros(0)]
    whole, part, other = torch.randn(3, 10), torch.randn(10), torch.randn(9)
    tensors += [*whole.view(-1).split([7, 12, 11]), part.split([4, 6])[0], *other.view(3, 3).unbind()]
    expected = [tensor.clone().div_(divisor) for tensor in tensors]
    rest = part[4:].clone()
    _compat.divide_in_place(tensors, divisor)
    assert_same_bits(tensors, expected)
    assert_same_bits(part[4:], rest)


@on_ranks(4)
def test_ranks_of_an_axis_compare_its_own_collectives():
    """Stages of a pipeline differ in what they send over other axes, and in when."""
    rows, columns = (fs.axis_of(two_axes(4), name) for name in ("replicate", "shard"))
    told = []
    for order in ((rows, columns), (columns, rows)):
        jitted = fs.jit(lambda x, order: sum(fs.psum(x, axis) for axis in order), static_argnums=1)
        jitted(torch.ones(3), order)
        (program,) = jitted._programs.values()
        told.append(program.facts)
    assert told[0] == told[1]
    assert [axis.name in text for axis in (rows, columns) for text in map(told[0].get, (rows, columns))] == [
        *(True, False),
        *(False, True),
    ]
