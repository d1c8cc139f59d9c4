"""Every algorithm of the collectives, on ranks and processes: values, order of sums, memory, fakes and graphs."""

from datetime import timedelta
from functools import reduce

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
from tests.trees import as_bytes, assert_same_bits, normal, one_axis

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MORE_DTYPES = (torch.bool, torch.int8, torch.float16, torch.complex64, torch.float8_e4m3fn)

# Elements of float64: none, one, few; summed in one exchange and just not; packed and just not.
SIZES = (0, 1, 5, EXCHANGE_BYTES // 8, EXCHANGE_BYTES // 8 + 1, PACK_BYTES // 8 - 1, PACK_BYTES // 8)

WORLDS = (2, 3, "2 processes", "3 processes")


def axis():
    return fs.axis_of(one_axis())


def values(shapes, dtypes, seed):
    """Tensors of some shapes, as each dtype of some can hold them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype) for dtype in dtypes for tensor in drawn]


def of_ranks(size, shapes, dtypes):
    """The values of every rank, rank by rank."""
    return [values(shapes, dtypes, seed) for seed in range(size)]


def added(tensors):
    """The sum one after another, in rank order."""
    return reduce(torch.add, tensors)


def assert_sums(actual, parts, in_rank_order):
    """Assert that `actual` is the sum of parts: bitwise, or within what another order can round otherwise."""
    expected = added(parts)
    if in_rank_order or not expected.is_floating_point():
        assert_same_bits(actual, expected)
        return
    # Each of the additions rounds by eps / 2 of at most the sum of magnitudes, in the one order as in the other.
    bound = len(parts) * torch.finfo(expected.dtype).eps * added([part.double().abs() for part in parts])
    assert actual.dtype == expected.dtype
    assert bool(((actual.double() - expected.double()).abs() <= bound).all())


@pytest.mark.rows(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(*WORLDS)
def test_all_gather(algorithm):
    with sent_by(algorithm):
        line = axis()
        ranks = of_ranks(line.size, [(n,) for n in SIZES] + [(), (5, 0), (3, 4, 5)], DTYPES + MORE_DTYPES)
        mine = ranks[comm.rank(line)]
        assert_same_bits(comm.all_gather(mine, line, "test"), list(map(torch.stack, zip(*ranks))))


@pytest.mark.rows(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(*WORLDS)
def test_reduce_scatter(algorithm):
    with sent_by(algorithm):
        line = axis()
        shapes = [(line.size, n // line.size) for n in SIZES] + [(line.size,), (line.size, 5, 0), (line.size, 3, 4, 5)]
        ranks = of_ranks(line.size, shapes, DTYPES)
        me = comm.rank(line)
        sums = comm.reduce_scatter(ranks[me], line, "test")
        for total, *stacks in zip(sums, *ranks, strict=True):
            assert_sums(total, [stack[me] for stack in stacks], algorithm in ("auto", "direct"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(*WORLDS)
def test_all_reduce(algorithm):
    with sent_by(algorithm):
        line = axis()
        ranks = of_ranks(line.size, [(n,) for n in SIZES] + [(), (5, 0), (3, 4, 5)], DTYPES)
        sums = comm.all_reduce(ranks[comm.rank(line)], line, "test")
        for total, *parts in zip(sums, *ranks, strict=True):
            assert_sums(total, parts, algorithm in ("auto", "direct"))
        return [as_bytes(total).numpy().tobytes() for total in sums]


@pytest.mark.rows(6)
@pytest.mark.parametrize("elements", (1, EXCHANGE_BYTES // 8 + 1, PACK_BYTES // 8))
@on_ranks(3, 4, "3 processes")
def test_direct_sums_are_in_rank_order(elements):
    """(1e16 + 1) - 1e16 is 0 and (1e16 - 1e16) + 1 is 1: the order shows in every element."""
    line = axis()
    value = torch.full((elements,), [1e16, 1.0, -1e16, 1.0][comm.rank(line)], dtype=torch.float64)
    (total,) = comm.all_reduce([value], line, "test")
    (piece,) = comm.reduce_scatter([value.repeat(line.size, 1)], line, "test")
    assert {*total.tolist(), *piece.tolist()} == {1.0 if line.size == 4 else 0.0}


def strided():
    """Views of one shape or another that are not laid out as new tensors are, some of a single element."""
    base = torch.arange(96.0, dtype=torch.float64).view(8, 12)
    turned = torch.complex(base, -base).conj()
    return [
        base.T[::2, 1:7],
        base[0, 0].expand(6, 4),
        base[:6:5, ::3].unsqueeze(-1),
        turned[:6],
        turned[:6].imag,
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(*WORLDS)
def test_strided_inputs(algorithm):
    with sent_by(algorithm):
        line = axis()
        tensors, one = strided(), torch.arange(8.0)[3:4].as_strided((1,), (5,))
        expected = [torch.stack([tensor] * line.size) for tensor in (*tensors, one)]
        assert_same_bits(comm.all_gather([*tensors, one], line, "test"), expected)
        for tensor in (*tensors, one):
            assert_same_bits(comm.all_gather([tensor], line, "test"), [torch.stack([tensor] * line.size)])
            assert_same_bits(comm.all_reduce([tensor], line, "test"), [tensor * line.size])
        for tensor in tensors:
            stack = tensor[:6].unflatten(0, (line.size, -1)) if len(tensor) == 6 else tensor[:1].expand(line.size, 4, 1)
            expected = stack[comm.rank(line)] * line.size
            assert_same_bits(comm.reduce_scatter([stack], line, "test"), [expected])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(*WORLDS)
def test_inputs_are_left_alone_and_results_are_new(algorithm):
    with sent_by(algorithm):
        line = axis()
        for n in SIZES[1:]:
            tensor, stack = torch.ones(n), torch.ones(line.size, n)
            results = [
                *comm.all_gather([tensor], line, "test"),
                *comm.reduce_scatter([stack], line, "test"),
                *comm.all_reduce([tensor], line, "test"),
            ]
            for result in results:
                result.fill_(7.0)
            assert bool((tensor == 1).all())
            assert bool((stack == 1).all())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(1, 2)
def test_nothing_to_send_is_no_collective(algorithm):
    with sent_by(algorithm):
        line = axis()
        with comm.record() as record:
            for collective in (comm.all_gather, comm.reduce_scatter, comm.all_reduce):
                assert collective([], line, "test") == []
        assert record == []


@on_ranks(1)
def test_one_rank_gets_its_own_tensors_back():
    line, tensor = axis(), torch.ones(1, 3)
    (gathered,), (scattered,), (total,) = (
        collective([tensor], line, "test") for collective in (comm.all_gather, comm.reduce_scatter, comm.all_reduce)
    )
    assert (gathered.shape, scattered.shape, total.shape) == ((1, 1, 3), (3,), (1, 3))
    assert {t.data_ptr() for t in (gathered, scattered, total)} == {tensor.data_ptr()}


@on_ranks(6)
def test_rank_is_the_coordinate_on_the_axis():
    mesh = fs.init_mesh({"a": 2, "b": 3}, device="cpu")
    assert tuple(comm.rank(fs.axis_of(mesh, name)) for name in ("a", "b")) == divmod(my_rank(), 3)


@on_ranks("3 processes")
def test_processes_send_up_and_down_in_a_group_each():
    """Both serve all later collectives of the axis, of any kind, and end with the process."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    line = fs.Axis("shard", 3, group.group_name)
    made = []
    for number in range(3):
        mine = torch.full((4,), float(comm.rank(line) + number))
        gathering = comm.start_all_gather([mine], line, "test")
        summing = comm.start_reduce_scatter([mine.expand(3, 4).contiguous()], line, "test")
        # Another order of waiting than of starting.
        assert_same_bits(summing()[0], torch.full((4,), 3.0 + 3 * number))
        assert_same_bits(gathering()[0][:, 0], torch.arange(3.0) + number)
        made.append(comm.world().groups[line.group_name].pair)
    return len(set(made)) == 1 and len(set(made[0])) == 2


@on_ranks(2)
def test_an_exchange_takes_single_elements_of_any_stride(world_size):
    axis = fs.axis_of(one_axis())
    column, ones = torch.arange(6.0).reshape(3, 2)[:world_size, 1], [1] * world_size
    (received,) = fs.comm.all_to_all([column], ones, ones, axis, "test")
    assert received.tolist() == [column[comm.rank(axis)]] * world_size


@on_ranks("2 processes")
def test_processes_wait_for_what_they_exchange():
    axis = fs.axis_of(one_axis())
    for number in range(20):
        mine = torch.full((1 << 16,), float(comm.rank(axis) + number))
        (received,) = comm.all_to_all([mine.expand(2, -1)], [1, 1], [1, 1], axis, "test")
        assert_same_bits(list(received), [torch.full_like(mine, rank + number) for rank in range(2)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
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
        found = comm.all_to_all(sent, counts[me], [row[me] for row in counts], line, "test")
        assert_same_bits(found, [torch.cat(pieces) for pieces in zip(*(row[me] for row in parts))])


FAKE_CALLS = {
    "all_gather": (comm.all_gather, [(2, 5), (), (PACK_BYTES,)], [(3, 2, 5), (3,), (3, PACK_BYTES)]),
    "reduce_scatter": (comm.reduce_scatter, [(3, 2, 5), (3,), (3, PACK_BYTES)], [(2, 5), (), (PACK_BYTES,)]),
    "all_reduce": (comm.all_reduce, [(2, 5), (), (PACK_BYTES,)], [(2, 5), (), (PACK_BYTES,)]),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
@pytest.mark.parametrize("name", FAKE_CALLS)
def test_fake_tensors_need_no_ranks(name, algorithm):
    with sent_by(algorithm), fake_axes("test", {"shard": 3}, {"shard": 1}, "gloo") as axes:
        collective, shapes, expected = FAKE_CALLS[name]
        with FakeTensorMode():
            outputs = collective([torch.ones(shape).bfloat16() for shape in shapes], axes["shard"], "test")
        assert [tuple(output.shape) for output in outputs] == expected
        assert {output.dtype for output in outputs} == {torch.bfloat16}


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
@pytest.mark.parametrize("name", FAKE_CALLS)
@on_ranks("3 processes")
def test_traced_collectives_are_the_same(name, algorithm):
    """A graph holds the operators themselves, each with a wait, and computes what eager code does."""
    with sent_by(algorithm):
        collective, shapes, _ = FAKE_CALLS[name]
        line = fs.axis_of(one_axis())
        draw = normal(comm.rank(line))
        tensors = [draw(*shape) for shape in shapes]
        graph = make_fx(lambda tensors: collective(tensors, line, "test"), tracing_mode="fake")(tensors)
        targets = [str(node.target) for node in graph.graph.nodes]
        assert any(target.startswith("fshard.") for target in targets)
        assert any(target.startswith("_c10d_functional.wait_tensor") for target in targets)
        assert_same_bits(graph(tensors), collective(tensors, line, "test"))


@on_ranks("3 processes", timeout=20.0)
def test_ranks_that_use_groups_of_their_own_before():
    """Two ranks exchange among them before all three do; the third has no such group."""
    pair, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if my_rank() < 2:
        comm.all_reduce([torch.ones(())], fs.Axis("pair", 2, pair.group_name), "test")
    assert comm.all_reduce([torch.ones(())], fs.Axis("all", 3, everyone.group_name), "test")[0].item() == 3.0
