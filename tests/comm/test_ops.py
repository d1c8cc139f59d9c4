"""The operators on fake tensors, and in graphs."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import comm
from fshard.comm.collective import PACK_BYTES
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

ALGORITHMS = ("direct", "coalesced", "flat")
FAKE_AXIS = fs.Axis("shard", 3, "a group that no process has")
FAKE_CALLS = {
    "all_gather": (comm.all_gather, [(2, 5), (), (PACK_BYTES,)], [(3, 2, 5), (3,), (3, PACK_BYTES)]),
    "reduce_scatter": (comm.reduce_scatter, [(3, 2, 5), (3,), (3, PACK_BYTES)], [(2, 5), (), (PACK_BYTES,)]),
    "all_reduce": (comm.all_reduce, [(2, 5), (), (PACK_BYTES,)], [(2, 5), (), (PACK_BYTES,)]),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", FAKE_CALLS)
def test_fake_tensors_need_no_ranks(name, algorithm):
    collective, shapes, expected = FAKE_CALLS[name]
    with FakeTensorMode():
        outputs = collective([torch.ones(shape).bfloat16() for shape in shapes], FAKE_AXIS, "test", algorithm)
    assert [tuple(output.shape) for output in outputs] == expected
    assert {output.dtype for output in outputs} == {torch.bfloat16}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", FAKE_CALLS)
@on_ranks("3 processes")
def test_traced_collectives_are_the_same(name, algorithm):
    """A graph holds the operators themselves, each with a wait, and computes what eager code does."""
    collective, shapes, _ = FAKE_CALLS[name]
    line = fs.axis_of(one_axis())
    draw = normal(comm.rank(line))
    tensors = [draw(*shape) for shape in shapes]
    graph = make_fx(lambda tensors: collective(tensors, line, "test", algorithm), tracing_mode="fake")(tensors)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert any(target.startswith("fshard.") for target in targets)
    assert any(target.startswith("_c10d_functional.wait_tensor") for target in targets)
    assert_same_bits(graph(tensors), collective(tensors, line, "test", algorithm))


def test_ranks_that_use_groups_of_their_own_before(workers):
    """Two ranks exchange among them before all three do; the third has no such group."""

    def program():
        pair, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
        if dist.get_rank() < 2:
            comm.all_reduce([torch.ones(())], fs.Axis("pair", 2, pair.group_name), "test")
        return comm.all_reduce([torch.ones(())], fs.Axis("all", 3, everyone.group_name), "test")[0].item()

    assert workers(3).run(program, 20.0) == [3.0] * 3
