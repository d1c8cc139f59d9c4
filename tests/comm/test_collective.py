"""Every algorithm of the collectives, on ranks and processes: values, order of sums, memory, fakes and graphs."""

from datetime import timedelta
from functools import reduce
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import comm
from fshard.comm.collective import EXCHANGE_BYTES, PACK_BYTES
from fshard.extend import fake_axes
from tests.comm.algorithms import ALGORITHMS, sent_by
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal, one_axis

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
        assert_same_bits(actual, expected)
        return
    # Each of the additions rounds by eps / 2 of at most the sum of magnitudes, in the one order as in the other.
    bound = len(parts) * torch.finfo(expected.dtype).eps * sum(part.double().abs() for part in parts)
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
        found = comm.all_gather(ranks[me], line, "test")
        assert_same_bits(found, list(map(torch.stack, zip(*ranks))))
        ranks = [values([(line.size, *shape) for shape in SHAPES], DTYPES, seed) for seed in range(line.size)]
        for total, *stacks in zip(comm.reduce_scatter(ranks[me], line, "test"), *ranks, strict=True):
            assert_sums(total, [stack[me] for stack in stacks], in_order)
        ranks = [values(SHAPES, DTYPES, seed) for seed in range(line.size)]
        for total, *parts in zip(comm.all_reduce(ranks[me], line, "test"), *ranks, strict=True):
            assert_sums(total, parts, in_order)


@on_ranks(3, 4, "3 processes")
def test_direct_sums_are_in_rank_order():
    """(1e16 + 1) - 1e16 is 0 and (1e16 - 1e16) + 1 is 1: the order shows in every element."""
    line = axis()
    for elements in (1, EXCHANGE_BYTES // 8 + 1, PACK_BYTES // 8):
        value = torch.full((elements,), [1e16, 1.0, -1e16, 1.0][comm.rank(line)], dtype=torch.float64)
        (total,) = comm.all_reduce([value], line, "test")
        (piece,) = comm.reduce_scatter([value.repeat(line.size, 1)], line, "test")
        assert {*total.tolist(), *piece.tolist()} == {1.0 if line.size == 4 else 0.0}


def strided():
    """Views of one shape or another that are not laid out as new tensors are, some of a single element."""
    base = torch.arange(96.0, dtype=torch.float64).view(8, 12)
    turned = torch.complex(base, -base).conj()
    return [base.T[::2, 1:7], base[0, 0].expand(6, 4), base[:6:5, ::3].unsqueeze(-1), turned[:6], turned[:6].imag]


@pytest.mark.rows(2)
@EACH_WAY
@on_ranks(*WORLDS)
def test_strided_inputs_are_left_alone_and_results_are_new(algorithm):
    with sent_by(algorithm):
        line = axis()
        for tensor in (*strided(), torch.arange(8.0)[3:4].as_strided((1,), (5,)), torch.ones(SIZES[-1])):
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


@pytest.mark.rows(2)
@EACH_WAY
@on_ranks(*WORLDS)
def test_collectives_in_flight_finish_in_any_order(algorithm):
    with sent_by(algorithm):
        line = axis()
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


@on_ranks("3 processes", timeout=20.0)
def test_processes_send_up_and_down_in_a_group_each():
    """Both serve all later collectives of the axis, and end with the process; groups of some ranks are others."""
    if my_rank() < 2:
        pair = dist.new_group([0, 1])
        comm.all_reduce([torch.ones(())], fs.Axis("pair", 2, pair.group_name), "test")
    else:
        dist.new_group([0, 1])
    group = dist.new_group(timeout=timedelta(seconds=30))
    line, made = fs.Axis("shard", 3, group.group_name), []
    for number in range(3):
        mine = torch.full((4,), float(comm.rank(line) + number))
        gathering = comm.start_all_gather([mine], line, "test")
        summing = comm.start_reduce_scatter([mine.expand(3, 4).contiguous()], line, "test")
        # Another order of waiting than of starting.
        assert_same_bits(summing()[0], torch.full((4,), 3.0 + 3 * number))
        assert_same_bits(gathering()[0][:, 0], torch.arange(3.0) + number)
        made.append(comm.world().groups[line.group_name].pair)
    assert len(set(made)) == 1
    assert len(set(made[0])) == 2


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
            found = comm.all_to_all(sent, counts[me], [row[me] for row in counts], line, "test")
            assert_same_bits(found, [torch.cat(pieces) for pieces in zip(*(row[me] for row in parts))])


CALLS = [
    (comm.all_gather, [(2, 5), (), (PACK_BYTES,)], [(3, 2, 5), (3,), (3, PACK_BYTES)]),
    (comm.reduce_scatter, [(3, 2, 5), (3,), (3, PACK_BYTES)], [(2, 5), (), (PACK_BYTES,)]),
    (comm.all_reduce, [(2, 5), (), (PACK_BYTES,)], [(2, 5), (), (PACK_BYTES,)]),
]


@on_ranks("3 processes")
def test_fake_tensors_need_no_ranks_and_traced_collectives_are_the_same():
    """A graph holds the operators themselves, each with a wait, and computes what eager code does."""
    line = axis()
    draw = normal(comm.rank(line))
    for algorithm, (collective, shapes, expected) in product(ALGORITHMS[1:], CALLS):

        def f(tensors, on=line, collective=collective):
            return collective(tensors, on, "test")

        with sent_by(algorithm), fake_axes("test", {"shard": 3}, {"shard": 1}, "gloo") as axes, FakeTensorMode():
            outputs = f([torch.ones(shape).bfloat16() for shape in shapes], axes["shard"])
        assert [(tuple(out.shape), out.dtype) for out in outputs] == [(s, torch.bfloat16) for s in expected]
        with sent_by(algorithm):
            tensors = [draw(*shape) for shape in shapes]
            graph = make_fx(lambda tensors: f(tensors), tracing_mode="fake")(tensors)
            targets = [str(node.target) for node in graph.graph.nodes]
            for name in ("fshard.", "_c10d_functional.wait_tensor"):
                assert any(target.startswith(name) for target in targets)
            assert_same_bits(graph(tensors), f(tensors))
