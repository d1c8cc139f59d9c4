"""Graphs after passes of the caller, in files."""

import json

import pytest
import torch
from torch.fx.node import map_arg

import fshard as fs
from tests.jit.graph_passes import Decide, Recompute, waves
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_alike, copied


def jitted_waves(*passes, **options):
    """A jitted step of layers whose backward reads what `Recompute` computes again, and its arguments."""
    case = waves(rows=64)
    return fs.jit(case.step, donate_argnums=0, passes=passes, **options), (case.state, *case.batches[0])


def operations_of(function):
    """The operators of the one program that a function has, with nodes numbered."""
    (program,) = function._programs.values()
    graph = program.traced.module.graph
    numbers = {node: f"node {n}" for n, node in enumerate(graph.nodes)}
    return [(node.op, str(node.target), map_arg((node.args, node.kwargs), numbers.get)) for node in graph.nodes]


def facts_of(function):
    (program,) = function._programs.values()
    return program.facts


@on_ranks(2)
def test_a_file_keeps_the_graph_after_passes_and_what_they_decided(tmp_path):
    jitted, arguments = jitted_waves(Recompute(), Decide("a"))
    fs.save_graph(tmp_path, jitted, *arguments)
    loaded = fs.load_graph(tmp_path)
    assert_alike(loaded(*copied(arguments)), jitted(*copied(arguments)))
    # The operators of the inputs have other names.
    read, written = ([each for each in operations_of(f) if each[0] != "placeholder"] for f in (loaded, jitted))
    assert read == written
    assert facts_of(loaded) == facts_of(jitted)
    assert all(json.loads(text)["passes"].endswith("\ndecide: a") for text in facts_of(loaded).values())


def test_a_graph_from_a_file_cannot_be_read(tmp_path):
    x = torch.ones(2)
    fs.save_graph(tmp_path, fs.jit(torch.sin, passes=(Recompute(),)), x)
    with pytest.raises(ValueError, match=r"^load_graph: a saved graph has no shapes to read, plan or report\."):
        fs.make_graph(fs.load_graph(tmp_path))(x)


@on_ranks(2)
def test_ranks_whose_files_hold_other_decisions_are_named(tmp_path):
    jitted, arguments = jitted_waves(Decide("ab"[my_rank()]))
    fs.save_graph(tmp_path, jitted, *arguments)
    with pytest.raises(ValueError, match=r"different calls\n  passes: expected decide: a as on .*, got decide: b on"):
        fs.load_graph(tmp_path)(*arguments)
