"""Ranges that torch's profiler shows: which there are, and that they cost nothing where no profiler runs."""

import sys
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import fshard as fs
from fshard import _compat, comm
from fshard.comm.recorder import spread, start
from fshard.jit.trace import trace
from fshard.testing import spmd
from fshard.tree import flatten
from tests.comm.steps import UNITS, make_step
from tests.ranks import on_ranks

CPU = [ProfilerActivity.CPU]


def count_ranges(profiled):
    """Count the ranges of fshard by their names, without the operators, whose names have no unit."""
    names = (event.name for event in profiled.events() if event.is_user_annotation)
    return Counter(name for name in names if name.startswith("fshard::"))


def expected_ranges(record):
    """What a record lets expect: a start and a wait of each collective, which here has one buffer.

    Ranks compare their calls in one range, which sends and waits.
    """
    starts = Counter(f"fshard::{entry.op} ({entry.unit or entry.label})" for entry in record)
    sent = [entry for entry in record if not entry.about.is_comparison]
    waits = Counter(f"fshard::{entry.op} wait ({entry.unit or entry.label})" for entry in sent)
    return starts + waits


@pytest.mark.parametrize("jitted", (False, True), ids=("eager", "jitted"))
@on_ranks("2 processes")
def test_a_profile_names_collectives_and_units(jitted):
    step, state, x = make_step()
    step = fs.jit(step) if jitted else step
    step(state, x)
    with profile(activities=CPU) as profiled, comm.record() as record:
        step(state, x)
    ranges = count_ranges(profiled)
    # The update of a graph is operators among those of the backward.
    assert ranges.pop("fshard::update", 0) == (not jitted)
    assert ranges == expected_ranges(record), (ranges, expected_ranges(record))
    for unit in UNITS:
        assert ranges[f"fshard::all_gather ({unit})"]
        assert ranges[f"fshard::all_gather wait ({unit})"]
        assert ranges[f"fshard::reduce_scatter ({unit})"]


def test_a_trace_for_a_graph_records_no_range():
    def list_namespaces():
        step, state, x = make_step()
        graph = trace(flatten(((state, x), {})), step).module.graph
        return {getattr(node.target, "namespace", None) for node in graph.nodes}

    # torch's profiler fails if two threads of a process start it.
    with patch.object(torch.autograd.profiler, "_is_profiler_enabled", new=True):
        namespaces = spmd(list_namespaces, 2)
    for of_rank in namespaces:
        assert "fshard" in of_rank
        assert "profiler" not in of_rank


@on_ranks(2)
def test_without_a_profiler_no_more_is_called():
    step, state, x = make_step()
    step(state, x)
    calls = Counter()

    def count_calls(frame, event, _):
        if event == "call":
            calls[frame.f_code] += 1

    with comm.record() as record:
        sys.setprofile(count_calls)
        step(state, x)
        sys.setprofile(None)
    assert calls[start.__code__] + calls[spread.__code__] == len(record)
    assert not calls[_compat.show_range.__code__]
    assert not calls[record_function.__init__.__code__]
    calls.clear()
    sys.setprofile(count_calls)
    is_profiling = _compat.is_profiling()
    sys.setprofile(None)
    assert not is_profiling
    assert not calls
