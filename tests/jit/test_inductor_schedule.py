"""What Inductor makes of a ZeRO-3 step: its kernels hold no collective, and lie between those of the graph."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import fshard as fs
from fshard import _compat
from fshard.comm import ops
from fshard.jit.passes import is_view, placeholders
from fshard.testing import spmd
from fshard.tree import ReshardPolicy
from tests.jit.steps import collectives, copied, trained
from tests.jit.test_features import inputs
from tests.jit.test_graph import (
    STARTS,
    UNITS,
    Deep,
    assert_reductions_are_bounded,
    buffers,
    computes,
    most_gathered,
    nodes_of,
    place,
    starts,
)
from tests.trees import one_axis
from tests.unit_models import Block, filled, zero3

# Inductor and what it imports warn of their own.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CAP = 600 * 1024


class Found(NamedTuple):
    """What was run on rank 0, by both backends, and the code that Inductor wrote for both ranks."""

    graph: Any
    inductor: Any
    code: list[str]
    eager_record: list[fs.comm.Collective]
    record: list[fs.comm.Collective]


@cache
def found() -> Found:
    module = filled(Deep())

    def program():
        model = fs.functionalize(module, Block)
        case = trained(model.apply, model.init(zero3(prefetch=1)(one_axis())), inputs())
        programs = []
        with fs.comm.record() as eager:
            case.step(case.state, *case.batches[0])
        for backend in ("graph", "inductor"):
            jitted = fs.jit(case.step, donate_argnums=0, backend=backend)
            # Else there is no code where an earlier run has left its kernels.
            with fs.comm.record() as record, config.patch(fx_graph_cache=False):
                jitted(copied(case.state), *case.batches[0])
            programs += jitted._programs.values()
        return *programs, collectives(eager), collectives(record)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ReshardPolicy, "ahead_bytes", CAP)
        ((graph, inductor, eager, record), _), code = run_and_get_code(lambda: spmd(program, 2))
    return Found(graph, inductor, code, eager, record)


def is_piece(node):
    return (
        node.op == "call_function" and getattr(node.target, "__module__", "") == _compat.compile_by_inductor.__module__
    )


def is_wait(node):
    return node.target in (ops.wait, _compat.WAIT_TENSOR)


def events(nodes):
    """Starts and waits in their order, and between each two whether something is computed."""
    names = {item: (n, k) for n, start in enumerate(starts(nodes)) for k, (item, _) in enumerate(buffers(start))}
    order, between = [], [False]
    for node in nodes:
        if node.target in STARTS or is_wait(node):
            order.append(names[node.args[0]] if is_wait(node) else str(node.target))
            between.append(False)
        elif node.op == "call_function":
            between[-1] |= not is_view(node)
    return order, between


def test_kernels_hold_no_collective_and_write_to_no_input():
    code = found().code
    assert code
    for text in code:
        assert not any(word in text for word in ("fshard", "_c10d_functional", "wait_tensor", "copy_(", "_fused_adamw"))


def test_collectives_waits_and_what_lies_between_are_those_of_the_graph():
    case = found()
    assert events(nodes_of(case.inductor)) == events(nodes_of(case.graph))
    assert case.record == case.eager_record
    assert len(starts(nodes_of(case.inductor))) == len(case.record)


def test_gathers_are_ahead_and_again_in_the_backward():
    nodes = nodes_of(found().inductor)
    order, gathers = place(nodes), starts(nodes, ops.all_gather)
    # The last unit stays, and the one that the backward would gather ahead of it.
    assert len(gathers) == 2 * UNITS - 2
    waits = [min(order[wait] for _, found in buffers(start) for wait in found) for start in gathers]
    ahead = [any(map(is_piece, nodes[order[start] : wait])) for start, wait in zip(gathers, waits)]
    assert not ahead[0]
    assert all(ahead[2:])


def test_no_gathered_unit_is_held_between_its_turns():
    assert most_gathered(nodes_of(found().inductor)) <= 2


def test_no_result_of_a_kernel_is_memory_it_was_given():
    """Else a gathered buffer would live on in what was computed from it."""
    jitted, held = found().inductor, []

    class Watching(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            results = super().call_function(target, args, kwargs)
            if getattr(target, "__module__", "") == _compat.compile_by_inductor.__module__:
                given = {tensor.untyped_storage().data_ptr() for tensor in args}
                places = [result.untyped_storage().data_ptr() for result in results if result.numel()]
                held.append(not given.isdisjoint(places) or len(set(places)) < len(places))
            return results

    def program():
        module = jitted.traced.graph
        examples = [node.meta["val"] for node in placeholders(module.graph)]
        Watching(module).run(*(torch.ones(x.shape, dtype=x.dtype) for x in examples))

    spmd(program, 2)
    assert held
    assert not any(held)


def test_reductions_start_with_their_gradients_and_are_bounded():
    nodes = nodes_of(found().inductor)
    computed = assert_reductions_are_bounded(nodes, CAP, lambda node: is_piece(node) or computes(node))
    assert len(set(computed)) == UNITS


def test_units_alike_share_their_kernels():
    pieces = [node for node in nodes_of(found().inductor) if is_piece(node)]
    distinct = {node.target for node in pieces}
    assert len(pieces) >= 2 * UNITS
    assert len(distinct) <= len(pieces) - (UNITS - 2)


def test_donated_leaves_are_written_in_their_place():
    nodes = nodes_of(found().inductor)
    given, outputs = placeholders(found().inductor.traced.graph.graph), nodes[-1].args[0]
    assert len({out for out in outputs if out in given}) == len(given) - 1
    updated = [leaf for node in nodes if "_fused_adamw_" in str(node.target) for leaf in node.args[0]]
    assert len(updated) == len(set(updated)) == len(list(filled(Deep()).parameters()))
    assert all(leaf.op == "placeholder" for leaf in updated)
