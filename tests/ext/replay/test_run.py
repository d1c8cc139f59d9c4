"""Where the nodes of a graph come from, and graphs that run node by node."""

import pytest
import torch

import fshard as fs
from fshard.ext._compat import noting_origins
from fshard.ext.replay.run import run_nodes
from fshard.extend import flatten, fold_views_and_remove_dead_nodes, tensors_of, trace
from tests.ext.replay.steps import FILE, line_of, make_step


def trace_step(step, args):
    flat = flatten((args, {}))
    with noting_origins():
        traced = trace(flat, step)
    fold_views_and_remove_dead_nodes(traced.module.graph)
    return traced, [tensor for tensor in tensors_of(flat.leaves) if isinstance(tensor, torch.Tensor)]


def rows_of(checkpointed, microbatches=1):
    """For each node its operator, phase, module, microbatch, and the innermost lines of itself and its forward."""
    step, state, batch = make_step(checkpointed=checkpointed, microbatches=microbatches)
    traced, _ = trace_step(step, (state, batch))
    rows = set()
    for node in traced.module.graph.nodes:
        origin = node.meta.get("origin")
        assert (origin is not None) == (node.op == "call_function")
        if origin is not None:
            assert all(frame.file == FILE for frame in (*origin.frames, *origin.forward))
            lines = [frames[0].line if frames else 0 for frames in (origin.frames, origin.forward)]
            name = node.target.__name__.split(".")[0]
            rows.add((name, origin.phase, origin.module, origin.microbatch, *lines))
    return rows


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_nodes_know_their_lines_modules_and_phases(world, checkpointed):
    rows = fs.testing.spmd(lambda: rows_of(checkpointed), world)[0]
    assert ("gelu", "forward", "blocks.1", 0, line_of("gelu"), 0) in rows
    assert ("gelu_backward", "backward", "blocks.1", 0, 0, line_of("gelu")) in rows
    assert (("gelu", "recomputed", "blocks.1", 0, line_of("gelu"), 0) in rows) == checkpointed
    # The line of the backward itself, and that of the forward of the Function.
    shifts = [row for row in rows if row[0] == "mul" and row[4] == line_of("shift backward")]
    assert {row[1:4] for row in shifts} == {("backward", "blocks.0", 0), ("backward", "blocks.1", 0)}
    assert ("addmm", "forward", "head", 0, line_of("head"), 0) in rows
    assert ("mean", "forward", "", 0, line_of("loss"), 0) in rows
    assert ("sqrt", "update", "", 0, line_of("update"), 0) in rows


def test_microbatches_are_counted_in_their_forwards_and_backwards():
    rows = rows_of(False, microbatches=2)
    for name, phase in (("gelu", "forward"), ("gelu_backward", "backward")):
        assert {row[3] for row in rows if row[:2] == (name, phase)} == {0, 1}


def test_a_trace_notes_origins_only_where_it_is_asked_to():
    step, state, batch = make_step()
    graph = fs.make_graph(step)(state, batch).module.graph
    assert not any("origin" in node.meta for node in graph.nodes)


def run_and_compare(donated):
    step, state, batch = make_step()
    expected = flatten(step(state, batch))
    args = (state, batch)
    before = [tensor.clone() for tensor in tensors_of(flatten(args).leaves) if tensor is not None]
    if donated:
        jitted = fs.jit(step, donate_argnums=0)
        traced = jitted.trace_call(args, {})
        tensors = [tensor for tensor in tensors_of(flatten((args, {})).leaves) if isinstance(tensor, torch.Tensor)]
    else:
        traced, tensors = trace_step(step, args)
    seen = []
    results = run_nodes(traced, tensors, lambda node, operands, results: seen.append(node))
    assert all(map(torch.equal, before, tensors))
    for result, leaf in zip(results, tensors_of(expected.leaves), strict=True):
        assert leaf is None or torch.equal(result, leaf)
    return len(seen)


@pytest.mark.parametrize("donated", [False, True])
def test_running_the_nodes_gives_the_bits_of_the_step_and_leaves_its_arguments_alone(donated):
    assert all(fs.testing.spmd(lambda: run_and_compare(donated), 2))


def test_operands_are_shown_as_they_were_before_an_operator_wrote_to_them():
    def f(x):
        y = x + 1
        y.mul_(2)
        return y

    traced, tensors = trace_step(f, (torch.ones(2),))
    shown = {}

    def watch(node, operands, results):
        shown[node.name] = [value.tolist() for value in operands.values()], [value.tolist() for value in results]

    run_nodes(traced, tensors, watch)
    assert shown["mul_"] == ([[2.0, 2.0]], [[4.0, 4.0]])
