"""The graph of a ZeRO-3 step: what is gathered, reduced and written, and when; views that it does without."""

import operator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard import _compat
from fshard.comm import ops
from fshard.jit.nodes import find_inputs, find_storages, is_view
from fshard.testing import spmd
from tests.jit.steps import collectives, trained
from tests.jit.test_steps import Stack, inputs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, copied, normal, one_axis
from tests.unit_models import HIDDEN, Block, filled, zero3

STARTS = (ops.all_gather, ops.reduce_scatter, ops.all_reduce)
UNITS = 4


class Deep(Stack):
    """Units alike in a row, whose matrices are large enough to be reduced by themselves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(HIDDEN) for _ in range(UNITS))


@cache
def graph_of(world_size=2, backend="graph", **options):
    """The graph of a step on rank 0, and the eager collectives."""
    module = filled(Deep())

    def program():
        model = fs.functionalize(module, Block)
        case = trained(model.apply, model.init(zero3(**options)(one_axis())), inputs())
        with fs.comm.record() as record:
            case.step(case.state, *case.batches[0])
        jitted = fs.jit(case.step, donate_argnums=0, backend=backend)
        jitted(copied(case.state), *case.batches[0])
        (program,) = jitted._programs.values()
        return program, collectives(record)

    return spmd(program, world_size)[0]


def nodes_of(program):
    return list(program.traced.module.graph.nodes)


def starts(nodes, *targets):
    return [node for node in nodes if node.target in (targets or STARTS)]


def is_wait(node):
    return node.target in (ops.wait, _compat.WAIT_TENSOR)


def buffers(start):
    """The buffers of a collective, each with the node that waits for it."""
    items = [user for user in start.users if user.target is operator.getitem]
    return [(item, [user for user in item.users if is_wait(user)]) for item in items]


def test_collectives_are_those_of_the_eager_step_and_all_are_waited_for():
    program, record = graph_of(prefetch=1)
    nodes = nodes_of(program)
    names = [node.target.name().removeprefix("fshard::").split(".")[0] for node in starts(nodes)]
    assert names == [entry.op for entry in record]
    # Each unit is gathered, and again but for the last and the one that the backward would gather ahead of it.
    assert names.count("all_gather") == 2 * UNITS - 2
    for start in starts(nodes):
        assert [len(waits) for _, waits in buffers(start)] == [1] * len(start.args[0])
    # No gathered unit is held between its turns: at most two at a time, from a wait to the last use of its views.
    order = {node: n for n, node in enumerate(nodes)}

    def end(node):
        follow = lambda user: user.target is operator.getitem or is_wait(user) or is_view(user)  # noqa: E731
        users = [user for user in node.users if user.op != "output"]
        return max([order[node], *(end(user) if follow(user) else order[user] for user in users)])

    held = []
    for start in starts(nodes, ops.all_gather):
        held.append((min(order[wait] for _, waits in buffers(start) for wait in waits), end(start)))
    assert max(sum(begin <= n <= last for begin, last in held) for n in range(len(nodes))) <= 2


def test_donated_leaves_are_written_right_after_their_update():
    program, _ = graph_of(prefetch=1)
    nodes, inputs = nodes_of(program), find_inputs(program.traced.module.graph)
    order, memory = {node: n for n, node in enumerate(nodes)}, find_storages(nodes)
    outputs = [given for given in nodes[-1].args[0] if given in inputs]
    assert len(set(outputs)) == len(inputs) - 1
    copies = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
    # A copy comes right after what it copies was computed, or what was there was read for the last time.
    for write in [node for node in copies if any(memory[node.args[0]].keys() & memory[out] for out in outputs)]:
        reads = [user for user in write.args[0].users if order[user] < order[write]]
        assert order[write] - max(order[write.args[1]], *map(order.get, reads), 0) <= len(inputs)
    updated = [leaf for node in nodes if "_fused_adamw_" in str(node.target) for leaf in node.args[0]]
    assert len(updated) == len(set(updated)) == len(list(filled(Deep()).parameters()))
    assert all(leaf.op == "placeholder" for leaf in updated)
    assert not any(str(node.target).startswith("aten.detach") for node in nodes)


def test_make_graph_of_a_jitted_function_is_the_graph_that_its_backend_is_given():
    seen, options = [], {"donate_argnums": 0, "static_argnums": 1}

    def f(x, n):
        return x * n, {"n": x[0] + n}

    def backend(graph, inputs):
        seen.append([node.name for node in graph.graph.nodes])
        return graph

    jitted = fs.jit(f, backend=backend, **options)
    graph = fs.make_graph(jitted)(torch.zeros(4), 3)
    assert (jitted.traces, seen) == ([], [])
    jitted(torch.zeros(4), 3)
    assert seen == [[node.name for node in graph.module.graph.nodes]]
    graph = fs.make_graph(fs.jit(f, **options))(torch.zeros(4), 3)
    assert str(graph).startswith("4 operators, 0 collectives, 0 bytes sent, 20 bytes at most\n")
    assert str(graph).count("= torch.ops.aten") == 4
    assert [node.name for node in fs.tree_leaves(graph.results)] == ["arg0_1", "add"]


def written(x):
    y = x.clone()
    y.view(2, -1).mul_(2)
    return y


X = torch.zeros(1000)
# Functions, and how many tensors they take beyond their arguments.
HELD = [
    (lambda x: x.sin().cos().tan(), X, {"donate_argnums": 0}, 2),
    (lambda x: x.sin().view(10, 100)[1:].t(), X, {}, 1),
    (lambda x: [part + 1 for part in x.sin().split(500)], X, {}, 2),
    (written, X, {}, 1),
    (written, X, {"donate_argnums": 0}, 0),
    (lambda tree: tree[::-1], [X, X + 1], {"donate_argnums": 0}, 2),
    (lambda x: x + X, X, {}, 1),
]


def test_bytes_are_those_of_memory_that_is_new():
    for f, arg, options, expected in HELD:
        assert fs.make_graph(fs.jit(f, **options))(arg).peak_bytes() == expected * X.nbytes


@on_ranks(2)
def test_what_a_collective_holds_is_in_flight_until_somebody_has_waited_for_it():
    """What is received from two ranks; what is sent is copied when the collective starts."""
    axis = fs.axis_of(one_axis())

    def gather(x):
        return fs.comm.all_gather([2 * x], axis, "test")[0]

    for f, expected in ((gather, {"activations": 1, "in_flight": 2}), (lambda x: gather(x) + 1, {"activations": 4})):
        graph = fs.make_graph(f)(X)
        uses = graph.find_uses((X,))
        assert graph.sum_by_use(uses) == {"inputs": X.nbytes}
        sums = {use: count * X.nbytes for use, count in expected.items()}
        assert graph.sum_by_use(uses, graph.at_peak) == {"inputs": X.nbytes} | sums
        assert graph.peak_bytes() == sum(sums.values())


@on_ranks(2)
def test_what_a_collective_sends_is_held_until_somebody_has_waited_for_it():
    axis = fs.axis_of(one_axis())
    graph = fs.make_graph(lambda x: fs.all_to_all(2 * x, axis, 0, 0))(X)
    (pending,) = graph.memory.pending_buffers
    (sent,) = pending.held_storages
    assert graph.memory.taken[pending.taken].keys() == {sent, pending.buffer}
    assert graph.memory.last_uses[sent] is pending.wait is not pending.start


@on_ranks(2)
def test_a_collective_whose_result_this_rank_does_not_use_stays_and_is_waited_for():
    """Other ranks may use it, and its buffers must not go before it has ended."""
    axis = fs.axis_of(one_axis())
    step = fs.jit(lambda x: (fs.all_gather(2 * x, axis), x + 1)[1])
    graph = fs.make_graph(step)(torch.ones(3))
    waits = [node for node in graph.module.graph.nodes if node.target is _compat.WAIT_TENSOR]
    assert ([entry.op for entry in graph.collectives()], len(waits)) == (["all_gather"], 1)
    assert graph.bytes_sent() == 12.0
    with fs.comm.record() as record:
        assert step(torch.ones(3)).equal(torch.full((3,), 2.0))
    assert [entry.op for entry in record if not entry.about.is_comparison] == ["all_gather"]
    # A trace runs none by itself, such as those of constants: one rank alone may have to trace anew.
    graph = fs.make_graph(lambda x: fs.psum(torch.tensor(3.0), axis) * x)(torch.ones(3))
    assert [entry.op for entry in graph.collectives()] == ["all_reduce"]


# Programs, and the operators that are left of them.
FOLDED = [
    (lambda x: x.t().t() + 1, ["add"]),
    (lambda x: x.t().as_strided((4, 6), (6, 1)) + 1, ["add"]),
    (lambda x: x.view(24).view(2, 12).view(3, 8) + 1, ["reshape", "add"]),
    (lambda x: (x * 2).t().t().add_(1), ["mul", "add_"]),
    (lambda x: (x.view(24), x.view(24).view(4, 6)), ["reshape"]),
    (lambda x: x.view(24)[3:9].view(2, 3) + 1, ["reshape", "slice", "reshape", "add"]),
]


def test_views_are_folded_and_bits_and_strides_and_aliases_stay():
    given = normal(1)(4, 6)
    for f, expected in FOLDED:
        jitted = fs.jit(f)
        results, eager = fs.tree_leaves(jitted(given)), fs.tree_leaves(f(given))
        assert_same_bits(results, eager)
        assert [tensor.stride() for tensor in results] == [tensor.stride() for tensor in eager]
        assert len({id(tensor) for tensor in results}) == len(results)
        (program,) = jitted._programs.values()
        calls = [node for node in program.run.graph.nodes if node.op.startswith("call")]
        assert [str(node.target.__name__).split(".")[0] for node in calls] == expected


def write_beside_what_out_returns(y):
    row = y[0]
    result = torch.add(y, 1, out=y).reshape(48)
    row.add_(1)
    return result


# Writes that reach a tensor by what a trace takes for views of it.
WRITES = {
    "one reshape": lambda y: (y.reshape(48).add_(1), y),
    "reshapes that end where they began": lambda y: (y.reshape(8, 6).reshape(2, 4, 6).add_(1), y),
    "reshapes in a chain": lambda y: (y.reshape(2, 24).reshape(8, 6).add_(1), y),
    "what out= returns": write_beside_what_out_returns,
    "a row": lambda y: (y.unbind()[0].reshape(24), y.add_(1)),
}


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_what_a_trace_takes_for_a_view_is_not_lost(name, tmp_path):
    """A trace knows no copy that contiguous makes, so a reshape that a write goes through has to be a view."""

    def written(x):
        return WRITES[name](F.logsigmoid(x.reshape(2, 4, 6).mT).mT.contiguous())

    x = normal()(8, 6)
    fs.save_graph(tmp_path / "graph", fs.jit(written), x)
    for f in (fs.jit(written), fs.load_graph(tmp_path / "graph")):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            f(x)
