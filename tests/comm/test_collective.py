"""Every algorithm of the collectives, on ranks and processes: values, order of sums, memory; what is recorded."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import pytest
import torch

import fshard as fs
from fshard import _compat, comm
from fshard.comm import Label, Verb, collective, ops
from fshard.comm.collective import EXCHANGE_BYTES, PACK_BYTES
from fshard.comm.events import MAX_UNIT_CHARACTERS, decode_label, encode_label
from fshard.rounding import tolerance
from tests.operators import Operators
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis

ALGORITHMS = ("auto", "direct", "by the backend")

_of_backend, _chosen = collective.is_direct, threading.local()


def _is_direct(*args):
    chosen = getattr(_chosen, "algorithm", "auto")
    return _of_backend(*args) if chosen == "auto" else chosen == "direct"


@contextmanager
def sent_by(algorithm: str) -> Iterator[None]:
    """Let this rank's collectives run by an algorithm; by "auto" the backend chooses."""
    # The same function on every rank, which may be a thread: each chooses for itself.
    collective.is_direct = _is_direct
    _chosen.algorithm = algorithm
    try:
        yield
    finally:
        _chosen.algorithm = "auto"


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MORE_DTYPES = (torch.bool, torch.int8, torch.float16, torch.complex64, torch.float8_e4m3fn)
# Elements of float64: none, one, few; summed in one exchange and just not; packed and just not.
SIZES = (0, 1, 5, EXCHANGE_BYTES // 8, EXCHANGE_BYTES // 8 + 1, PACK_BYTES // 8 - 1, PACK_BYTES // 8)
SHAPES = [*((n,) for n in SIZES), (), (5, 0), (3, 4, 5)]
WORLDS = (2, 3, "2 processes", "3 processes")
EACH_WAY = pytest.mark.parametrize("algorithm", ALGORITHMS)


def axis():
    return fs.axis_of(one_axis())


def values(shapes, dtypes, seed):
    """Tensors of some shapes, as each dtype of some can hold them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype) for dtype in dtypes for tensor in drawn]


def assert_sums(actual, parts, in_rank_order):
    """Assert that `actual` is the sum of parts: bitwise, or within what another order can round otherwise."""
    expected = reduce(torch.add, parts)
    if in_rank_order or not expected.is_floating_point():
        return assert_same_bits(actual, expected)
    bound = tolerance(expected.dtype, len(parts)) * sum(part.double().abs() for part in parts)
    assert actual.dtype == expected.dtype
    assert bool(((actual.double() - expected.double()).abs() <= bound).all())


@pytest.mark.rows(4)
@EACH_WAY
@on_ranks(*WORLDS)
def test_gathers_and_sums(algorithm):
    line = axis()
    me, in_order = comm.rank(line), algorithm in ("auto", "direct")
    with sent_by(algorithm):
        ranks = [values(SHAPES, DTYPES + MORE_DTYPES, seed) for seed in range(line.size)]
        gathered = comm.all_gather(ranks[me], line, "test")
        assert_same_bits(gathered, list(map(torch.stack, zip(*ranks))))
        ranks = [values([(line.size, *shape) for shape in SHAPES], DTYPES, seed) for seed in range(line.size)]
        for total, *stacks in zip(comm.reduce_scatter(ranks[me], line, "test"), *ranks, strict=True):
            assert_sums(total, [stack[me] for stack in stacks], in_order)
        ranks = [values(SHAPES, DTYPES, seed) for seed in range(line.size)]
        for total, *parts in zip(comm.all_reduce(ranks[me], line, "test"), *ranks, strict=True):
            assert_sums(total, parts, in_order)


def strided():
    """Views of one shape or another that are not laid out as new tensors are, some of a single element."""
    base = torch.arange(96.0, dtype=torch.float64).view(8, 12)
    turned = torch.complex(base, -base).conj()
    yield from (base.T[::2, 1:7], base[0, 0].expand(6, 4), base[:6:5, ::3].unsqueeze(-1), turned[:6], turned[:6].imag)
    yield from (torch.arange(8.0)[3:4].as_strided((1,), (5,)), torch.ones(SIZES[-1]))


@on_ranks(3, 4)
def test_direct_sums_are_in_rank_order():
    """(1e16 + 1) - 1e16 is 0 and (1e16 - 1e16) + 1 is 1: the order shows in every element."""
    line = axis()
    for elements in (1, EXCHANGE_BYTES // 8 + 1, PACK_BYTES // 8):
        value = torch.full((elements,), [1e16, 1.0, -1e16, 1.0][comm.rank(line)], dtype=torch.float64)
        (total,) = comm.all_reduce([value], line, "test")
        (piece,) = comm.reduce_scatter([value.repeat(line.size, 1)], line, "test")
        assert {*total.tolist(), *piece.tolist()} == {1.0 if line.size == 4 else 0.0}


@on_ranks(3)
def test_a_sum_pads_only_tensors_that_do_not_divide():
    for elements, pads in ((3 * EXCHANGE_BYTES, 0), (3 * EXCHANGE_BYTES + 1, 1)):
        with sent_by("direct"), Operators() as operators:
            comm.all_reduce([torch.ones(elements)], axis(), "test")
        assert operators.names.count("aten.constant_pad_nd.default") == pads


@pytest.mark.rows(2)
@EACH_WAY
@on_ranks(*WORLDS)
def test_collectives_in_flight_finish_in_any_order(algorithm):
    """Strided inputs are left alone, and results are new."""
    with sent_by(algorithm):
        line = axis()
        for tensor in strided():
            stack, before = tensor.expand(line.size, *tensor.shape), tensor.clone()
            results = [
                *comm.all_gather([tensor], line, "test"),
                *comm.all_reduce([tensor], line, "test"),
                *comm.reduce_scatter([stack], line, "test"),
            ]
            assert_same_bits(results, [torch.stack([tensor] * line.size), tensor * line.size, tensor * line.size])
            for result in results:
                result.fill_(7.0)
            assert_same_bits(tensor, before)
        mine = torch.full((6,), comm.rank(line) + 1.0)
        finish = [
            comm.start_all_gather([mine], line, "first"),
            comm.start_all_reduce([mine], line, "second"),
            comm.start_reduce_scatter([mine.view(line.size, -1)], line, "third"),
        ]
        (scattered,), (total,), (gathered,) = (wait() for wait in reversed(finish))
        ranks = range(1, line.size + 1)
        assert gathered.tolist() == [[float(rank)] * 6 for rank in ranks]
        assert total.tolist() == [float(sum(ranks))] * 6
        assert scattered.tolist() == [float(sum(ranks))] * (6 // line.size)
        with comm.record() as record:
            assert [f([], line, "test") for f in (comm.all_gather, comm.reduce_scatter, comm.all_reduce)] == [[]] * 3
        assert record == []


@pytest.mark.rows(2)
@EACH_WAY
@on_ranks(*WORLDS)
def test_all_to_all_sends_each_rank_rows_of_its_own(algorithm):
    """Of many tensors, of any dtype and memory layout; rank r sends rank s r + 2 s rows, which are none from 0 to 0."""
    with sent_by(algorithm):
        line = axis()
        me, ranks = comm.rank(line), range(line.size)
        counts = [[r + 2 * s for s in ranks] for r in ranks]
        parts = [
            [values([(n,), (n, 0), (n, 3, 2)], DTYPES + MORE_DTYPES, 8 * r + s) for s, n in enumerate(row)]
            for r, row in enumerate(counts)
        ]
        sent = [torch.cat(pieces) for pieces in zip(*parts[me])]
        sent[2] = sent[2].transpose(1, 2).contiguous().transpose(1, 2)
        for _ in range(5):
            received = comm.all_to_all(sent, counts[me], [row[me] for row in counts], line, "test")
            assert_same_bits(received, [torch.cat(pieces) for pieces in zip(*(row[me] for row in parts))])


@pytest.mark.parametrize("counts", ([[1, 1], [1, 1]], [[2, 3], [1, 2]], [[4, 0], [3, 1]], [[0, 2], [1, 0]]))
@on_ranks(2)
def test_what_an_operator_holds_while_rows_are_sent(counts):
    """As plans of memory count it: the tensors themselves, or copies of those that have gaps."""
    line = axis()
    me = comm.rank(line)
    send, receive = counts[me], [row[me] for row in counts]
    dense = torch.ones(sum(send), 4, 3)
    strided = {"dense": dense, "gaps in rows": torch.ones(sum(send), 3, 4).mT, "gaps between rows": dense[:, :2]}
    for name, tensor in strided.items():
        arguments = [tensor], send, receive, True, line.name, line.size, line.group_name, encode_label(Label("test"))
        (buffer,) = ops.all_to_all(*arguments)
        in_flight = buffer.__dict__["under_way"]
        given = {tensor.untyped_storage().data_ptr(), buffer.untyped_storage().data_ptr()}
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in in_flight}
        copied = sum(nbytes for place, nbytes in storages.items() if place not in given)
        assert ops.held_in_flight(ops.all_to_all, arguments) == [copied], name
        ops.wait(buffer)


@on_ranks(3, "3 processes")
def test_a_tree_of_three_ranks_is_refused():
    line = axis()
    text = "comm: sums in a binary tree need a power of two of ranks, and the axis 'shard' has 3. Sum in rank order."
    for start, tensor in ((comm.start_all_reduce, torch.ones(2)), (comm.start_reduce_scatter, torch.ones(3, 2))):
        with comm.record() as record, pytest.raises(ValueError, match=re.escape(text)):
            start([tensor], line, "test", in_tree=True)
        assert record == []


# A label, and its units and the whole of it as text: separators in names, many leaves, long names, several lines.
LABELS = [
    (Label(Verb.GATHER, ("a",), ("['w']",)), "a", "gather | a | ['w']"),
    (Label("scatter", ("a, b", "c | d")), "a, b, c | d", "scatter | a, b, c | d"),
    (Label("gather", (), ("['v']", "['w']")), "['v'], ['w']", "gather | ['v'], ['w']"),
    (Label("gather", ("a",), (*"01234567",)), "a", "gather | a | 0, 1, 2, 3, 4, 5, and 2 more"),
    (
        Label("scatter", ("a" * MAX_UNIT_CHARACTERS, "b")),
        f"{'a' * MAX_UNIT_CHARACTERS}...",
        f"scatter | {'a' * MAX_UNIT_CHARACTERS}...",
    ),
    (Label("scatter", ("a\nb",)), "a", "scatter | a"),
]


def test_labels():
    for label, unit, text in LABELS:
        assert decode_label(encode_label(label)) == label
        assert (label.unit, str(label)) == (unit, text)


@on_ranks(2)
def test_tensors_of_one_dim_are_packed_as_they_are():
    """Without an operator for each, which takes the host longer than their bytes take the link."""
    line, flat, matrices = axis(), [torch.ones(n) for n in (1, 4, 3)], [torch.ones(2, n) for n in (1, 4, 3)]
    for tensors, views in ((flat, 0), (matrices, 2 * len(matrices))):
        with Operators() as operators:
            totals = comm.all_reduce(tensors, line, "mine")
        assert operators.names.count("aten.view.default") == views
        assert_same_bits(totals, [2 * tensor for tensor in tensors])


@pytest.mark.parametrize("algorithm, packed", [("direct", 3), ("by the backend", 4)])
@on_ranks(2, "2 processes")
def test_records(algorithm, packed):
    """One entry for each operator with the bytes of the full tensors; a recorder sees this rank's thread alone."""
    line, scalar = axis(), torch.ones((), dtype=torch.float64)
    tensors = [torch.ones(4), torch.ones(4), torch.ones(4).double(), torch.ones(PACK_BYTES // 8).double()]
    with comm.record() as record, sent_by(algorithm):
        comm.all_gather(tensors, line, "mine")
        comm.reduce_scatter([tensor.view(2, -1) for tensor in tensors], line, "mine")
        comm.all_reduce(tensors, line, "mine")
        comm.all_reduce([scalar], line, "mine")
    assert {(entry.axis, entry.size, entry.label) for entry in record} == {("shard", 2, "mine")}
    nbytes = 2 * 4 * 4 + 4 * 8 + PACK_BYTES
    # Packed buffers by dtype and what travels alone; a fused collective needs no packing. Two ranks sum whole tensors.
    assert [(entry.op, entry.bytes, entry.tensors, entry.scalar) for entry in record] == [
        ("all_gather", 2 * nbytes, packed, False),
        ("reduce_scatter", nbytes, packed, False),
        ("all_reduce", nbytes, packed, False),
        ("all_reduce", 8, 1, True),
    ]
    with comm.record() as purposes:
        with comm.annotate_collectives(["outer"], ["['v']"]):
            with comm.annotate_collectives(("inner",), ("['w']",)):
                comm.all_gather([scalar], line, "gather")
            comm.all_reduce([scalar], line, Label("whole", ("own",)))
            comm.all_reduce([scalar], line, "sums")
        comm.all_reduce([scalar], line, "sums")
    # The innermost purpose.
    labels = ["gather | inner | ['w']", "whole | own", "sums | outer | ['v']", "sums"]
    assert [str(entry.about) for entry in purposes] == labels


@on_ranks("2 processes")
def test_a_backend_sums_complex_tensors_as_real_ones():
    """Lists of complex ones NCCL does not sum. A lazy conjugate has no real view."""
    x = torch.complex(torch.ones(4), torch.arange(4.0))
    dtypes = []

    def start(op, tensors, *others):
        dtypes.extend(tensor.dtype for tensor in tensors)
        return start_by_backend(op, tensors, *others)

    start_by_backend = _compat.start_by_backend
    with pytest.MonkeyPatch.context() as patch, sent_by("by the backend"):
        patch.setattr(_compat, "start_by_backend", start)
        total = fs.psum(x.conj(), axis())
        rows = fs.reduce_scatter(x.conj(), axis())
    assert dtypes == [torch.float32] * 2
    assert total.equal(2 * x.conj())
    assert rows.equal(2 * x.conj().chunk(2)[fs.axis_index(axis())])
