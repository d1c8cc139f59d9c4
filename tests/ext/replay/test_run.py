"""Where the nodes of a graph come from, and graphs that run node by node."""

import torch

import fshard as fs
from fshard.ext.replay.observed_run import run_step
from fshard.ext.replay.operations import Operations
from fshard.extend import flatten, graph_nodes, tensors_of
from fshard.testing import spmd
from tests.ext.replay.steps import FILE, line_of, make_step


def rows_of(checkpointed, microbatches):
    """For each node its operator, phase, module, microbatch, and the innermost lines of itself and its forward."""
    step, *args = make_step(checkpointed=checkpointed, microbatches=microbatches)
    rows = set()
    for node in Operations("test", [], step, args).nodes:
        origin = node.meta.get("origin")
        assert (origin is not None) == (node.op == "call_function")
        if origin is not None:
            assert all(frame.file == FILE for frame in (*origin.frames, *origin.forward))
            lines = [frames[0].line if frames else 0 for frames in (origin.frames, origin.forward)]
            name = node.target.__name__.split(".")[0]
            rows.add((name, origin.phase, origin.module, origin.microbatch, *lines))
    return rows


def check_rows(rows, microbatch):
    assert ("gelu", "forward", "blocks.1", microbatch, line_of("gelu"), 0) in rows
    assert ("gelu_backward", "backward", "blocks.1", microbatch, 0, line_of("gelu")) in rows
    # The line of the backward itself, and that of the forward of the Function.
    shifts = {row[1:3] for row in rows if row[0] == "mul" and row[3:5] == (microbatch, line_of("shift backward"))}
    assert shifts == {("backward", "blocks.0"), ("backward", "blocks.1")}
    assert ("addmm", "forward", "head", microbatch, line_of("head"), 0) in rows
    assert ("mean", "forward", "", microbatch, line_of("loss"), 0) in rows
    assert ("sqrt", "update", "", 0, line_of("update"), 0) in rows


def test_nodes_know_their_lines_modules_phases_and_microbatches():
    rows = spmd(lambda: rows_of(checkpointed=True, microbatches=2), 2)[0]
    for microbatch in (0, 1):
        check_rows(rows, microbatch)
        assert ("gelu", "recomputed", "blocks.1", microbatch, line_of("gelu"), 0) in rows


def test_nothing_is_recomputed_without_a_checkpoint():
    rows = rows_of(checkpointed=False, microbatches=1)
    check_rows(rows, 0)
    assert {row[1] for row in rows} == {"forward", "backward", "update"}


def test_a_trace_notes_origins_only_where_it_is_asked_to():
    graph = fs.make_graph(torch.sin)(torch.ones(2)).module.graph
    assert not any("origin" in node.meta for node in graph.nodes)


def run_and_compare():
    step, *args = make_step()
    jitted = fs.jit(step, donate_argnums=0)
    seen = []

    def run(*args):
        for node, operands, _ in run_step(Operations("test", [], jitted, args)):
            seen.append(node.op)
            if node.op == "output":
                return [operands.get(source) for source in graph_nodes.find_results(node.graph)]

    results = fs.testing.check_pure(run, *args)
    for result, leaf in zip(results, tensors_of(flatten(step(*args)).leaves), strict=True):
        assert leaf is None or torch.equal(result, leaf)
    assert {"placeholder", "call_function", "output"} <= set(seen)


def test_running_the_nodes_gives_the_bits_of_the_step_and_leaves_its_arguments_alone():
    spmd(run_and_compare, 2)


def test_operands_are_shown_as_they_were_before_an_operator_wrote_to_them():
    def f(x):
        y = x + 1
        y.mul_(2)
        return y

    shown = {}

    for node, operands, results in run_step(Operations("test", [], f, [torch.ones(2)])):
        shown[node.name] = [value.tolist() for value in operands.values()], [value.tolist() for value in results]
    assert shown["mul_"] == ([[2.0, 2.0]], [[4.0, 4.0]])
