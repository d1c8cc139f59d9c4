"""The recorder and its events: one for each operator of this thread, with a label that is text only where printed."""

import pytest
import torch

import fshard as fs
from fshard import comm
from fshard.comm import Label, Verb
from fshard.comm.collective import PACK_BYTES
from fshard.comm.events import WIDTH, encoded
from tests.comm.algorithms import sent_by
from tests.ranks import on_ranks
from tests.trees import one_axis

# A label, and its units and the whole of it as text: separators in names, many leaves, long names, several lines.
LABELS = [
    (Label("psum"), "", "psum"),
    (Label(Verb.GATHER, ("a",), ("['w']",)), "a", "gather | a | ['w']"),
    (Label("scatter", ("a, b", "c | d")), "a, b, c | d", "scatter | a, b, c | d"),
    (Label("gather", (), ("['v']", "['w']")), "['v'], ['w']", "gather | ['v'], ['w']"),
    (Label("gather", ("a",), (*"01234567",)), "a", "gather | a | 0, 1, 2, 3, 4, 5, and 2 more"),
    (Label("scatter", ("a" * WIDTH, "b")), f"{'a' * WIDTH}...", f"scatter | {'a' * WIDTH}..."),
    (Label("scatter", ("a\nb",)), "a", "scatter | a"),
    (Label(Verb.START, ("jit",)), "jit", "start | jit"),
]


def test_labels():
    for label, unit, text in LABELS:
        assert comm.decoded(encoded(label)) == label
        assert (label.unit, str(label)) == (unit, text)


@pytest.mark.parametrize("algorithm, packed", [("direct", 3), ("by the backend", 4)])
@on_ranks(2, "2 processes")
def test_records(algorithm, packed):
    """One entry for each operator with the bytes of the full tensors; a recorder sees this rank's thread alone."""
    line = fs.axis_of(one_axis())
    tensors = [torch.ones(4), torch.ones(4), torch.ones(4).double(), torch.ones(PACK_BYTES // 8).double()]
    stacks = [tensor.view(2, -1) for tensor in tensors]
    with comm.record() as record, sent_by(algorithm):
        comm.all_gather(tensors, line, "mine")
        comm.reduce_scatter(stacks, line, "mine")
        comm.all_reduce(tensors, line, "mine")
        comm.all_reduce([torch.ones((), dtype=torch.float64)], line, "mine")
    with comm.record() as purposes:
        with comm.concerning(["outer"], ["['v']"]):
            with comm.concerning(("inner",), ("['w']",)):
                comm.all_gather([torch.ones(2)], line, "gather")
            comm.all_reduce([torch.ones(2)], line, Label("whole", ("own",)))
            comm.all_reduce([torch.ones(2)], line, "sums")
        comm.all_reduce([torch.ones(2)], line, "sums")
    # The innermost purpose.
    labels = ["gather | inner | ['w']", "whole | own", "sums | outer | ['v']", "sums"]
    assert [str(entry.about) for entry in purposes] == labels
    assert {(entry.axis, entry.size, entry.label) for entry in record} == {("shard", 2, "mine")}
    nbytes = 2 * 4 * 4 + 4 * 8 + PACK_BYTES
    # Packed buffers by dtype and what travels alone; a fused collective needs no packing. Two ranks sum whole tensors.
    assert [(entry.op, entry.bytes, entry.tensors, entry.scalar) for entry in record] == [
        ("all_gather", 2 * nbytes, packed, False),
        ("reduce_scatter", nbytes, packed, False),
        ("all_reduce", nbytes, packed, False),
        ("all_reduce", 8, 1, True),
    ]
