import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.testing import RankError, Workers, spmd
from tests.ranks import my_rank, on_ranks, world_of

pytestmark = [
    pytest.mark.timeout(60),
    # torch's forward-mode AD scripts functions when it is first used.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


def process_state():
    with forward_ad.dual_level() as level:
        return sys.excepthook, dist.is_initialized(), torch.get_default_dtype(), torch.get_num_threads(), level


@pytest.fixture(autouse=True)
def process_stays_usable():
    before = process_state()
    yield
    assert process_state() == before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")] == []
    assert spmd(ranks_summed, 3) == [3.0, 3.0, 3.0]


def ranks_summed(group=None):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=group)
    return total.item()


def failure(f, world, timeout=60.0):
    """The error of a run, which must come long before the timeout."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        spmd(f, world, timeout)
    assert time.monotonic() - start < 20
    return caught.value


@pytest.mark.parametrize("world", [1, 2, 5, "2 processes"])
def test_results_come_in_rank_order(world, workers):
    size, offset = int(str(world)[0]), torch.arange(3)
    ranks = spmd(lambda: (dist.get_world_size(), (offset + dist.get_rank()).tolist()), world_of(world, workers))
    assert ranks == [(size, [rank, rank + 1, rank + 2]) for rank in range(size)]


def test_world_size_must_be_positive():
    with pytest.raises(ValueError, match="spmd: expected world to be Workers, or a whole number from 1 to 4096, got 0"):
        spmd(dist.get_rank, 0)
    with pytest.raises(ValueError, match="expected world_size to be at least 1, got 0"):
        Workers(0)


@on_ranks(1, 2, 3)
def test_collectives(world_size):
    rank, ranks, found = my_rank(), torch.arange(float(world_size)), {}
    mine, total = torch.tensor([float(rank)]), ranks.sum().item()
    for name in ("SUM", "MAX", "PRODUCT"):
        found[name] = mine.clone()
        dist.all_reduce(found[name], getattr(dist.ReduceOp, name))
    found["all_gather"] = torch.empty(world_size)
    dist.all_gather(list(found["all_gather"].split(1)), mine)
    found["reduce_scatter"] = torch.empty(1)
    dist.reduce_scatter(found["reduce_scatter"], list((ranks + rank).split(1)))
    found["all_to_all"] = torch.empty(world_size)
    dist.all_to_all_single(found["all_to_all"], ranks + 10 * rank)
    found["broadcast"] = mine.clone()
    dist.broadcast(found["broadcast"], src=world_size - 1)
    found["scatter"] = torch.empty(1)
    dist.scatter(found["scatter"], list(ranks.split(1)) if rank == 0 else None, src=0)
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    assert {name: value.tolist() for name, value in found.items()} == {
        "SUM": [total],
        "MAX": [world_size - 1.0],
        "PRODUCT": [0.0],
        "all_gather": ranks.tolist(),
        "reduce_scatter": [world_size * rank + total],
        "all_to_all": (10 * ranks + rank).tolist(),
        "broadcast": [world_size - 1.0],
        "scatter": [float(rank)],
    }
    assert objects == [{"rank": other} for other in range(world_size)]


@on_ranks(2)
def test_functional_collectives():
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    rank = torch.full((2,), float(my_rank()))
    gathered = ops.all_gather_into_tensor_coalesced([rank, rank[:1]], 2, group)
    scattered = ops.reduce_scatter_tensor_coalesced([rank], "sum", 2, group)
    found = [*gathered, *scattered, ops.all_reduce(rank, "sum", group)]
    assert [ops.wait_tensor(tensor).tolist() for tensor in found] == [[0, 0, 1, 1], [0, 1], [1], [1, 1]]


@on_ranks(6, "4 processes")
def test_device_mesh_with_subgroups(world_size):
    inner = world_size // 2
    mesh = init_device_mesh("cpu", (2, inner), mesh_dim_names=("replicate", "shard"))
    row, column = divmod(my_rank(), inner)
    assert ranks_summed(mesh["replicate"].get_group()) == 2 * column + inner
    assert ranks_summed(mesh["shard"].get_group()) == inner * (inner - 1) / 2 + row * inner**2


@pytest.mark.parametrize("world", [4, "2 processes"])
def test_failing_rank_ends_its_waiting_peers(world, workers):
    error, last = ValueError("bad batch"), int(str(world)[0]) - 1

    def program():
        if dist.get_rank() == last:
            raise error
        ranks_summed()

    caught = failure(program, world_of(world, workers))
    assert str(caught).startswith(f"rank {last} of {last + 1} failed:\nTraceback (most recent call last):\n")
    assert str(caught).endswith("ValueError: bad batch\n")
    assert "in program" in str(caught)
    assert caught.__cause__ is error or world != 4


@pytest.mark.parametrize("world", [4, "2 processes"])
def test_lowest_failing_rank_is_reported(world, workers):
    def program():
        if dist.get_rank() == 0 and world == 4:
            return ranks_summed()
        raise ValueError(f"from rank {dist.get_rank()}")

    assert str(failure(program, world_of(world, workers))).endswith(f"ValueError: from rank {int(world == 4)}\n")


def test_exit_of_a_rank_is_a_failure():
    assert "rank 0 of 2 failed:" in str(failure(lambda: sys.exit(3), 2))


def test_released_rank_cannot_go_on():
    went_on = []

    def program():
        if dist.get_rank() == 0:
            raise ValueError("bad batch")
        try:
            ranks_summed()
        except Exception:
            went_on.append(dist.get_rank())

    assert "rank 0 of 2 failed:" in str(failure(program, 2))
    assert went_on == []


def test_rank_that_ends_late_leaves_the_process_its_own_group():
    own, hook = not dist.is_initialized(), sys.excepthook
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    release = threading.Event()
    failure(release.wait, 2, timeout=0.1)
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(timeout=20)
    try:
        assert dist.get_world_size() == 1
    finally:
        if own:
            dist.destroy_process_group()
        sys.excepthook = hook


def test_skipped_collective_is_a_deadlock():
    def program():
        if dist.get_rank() != 1:
            ranks_summed()

    text = str(failure(program, 3))
    assert text.startswith("deadlock: ranks [1] of 3 finished, ranks [0, 2] did not\n")
    assert "rank 2 waits in AllReduce(op=RedOpType.SUM) of torch.float32 () with ranks [0, 1, 2]:\n" in text
    assert "in ranks_summed\n" in text
    assert "rank 1 waits" not in text


def test_crossed_groups_are_a_deadlock():
    def program():
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        ranks_summed(groups[dist.get_rank()])

    assert str(failure(program, 2)).startswith("deadlock: ranks [] of 2 finished, ranks [0, 1] did not\n")


@pytest.mark.parametrize("endless", ["computing", "waiting"])
def test_stuck_rank_is_reported_at_the_timeout(endless):
    release, went_on = threading.Event(), []

    def computing():
        while True:
            pass

    def program():
        if dist.get_rank() == 1:
            computing() if endless == "computing" else release.wait()
            went_on.append(True)
        if dist.get_rank() == 2:
            ranks_summed()

    text = str(failure(program, 3, timeout=0.5))
    assert text.startswith("timed out after 0.5 s: ranks [0] of 3 finished, ranks [1, 2] did not\n")
    assert "rank 1 runs:\n" in text
    assert ("in computing\n" if endless == "computing" else "release.wait()\n") in text
    assert "rank 2 waits in AllReduce" in text
    # A rank that waits outside of collectives ends when its wait does, and does nothing more.
    release.set()
    for thread in threading.enumerate():
        if thread.name == "rank 1":
            thread.join(timeout=20)
    assert went_on == []


def reduce_scatter_of(dtype):
    ones = torch.ones(1, dtype=dtype)
    dist.reduce_scatter(torch.empty_like(ones), [ones, ones])


# What two ranks do at once, and how their collectives are told.
MISMATCHED = [
    (
        (ranks_summed, lambda: dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1))),
        ("AllReduce(op=RedOpType.SUM) of torch.float32 ()", "AllGather()"),
    ),
    (
        [partial(dist.all_reduce, torch.ones(1), op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)],
        ("AllReduce(op=RedOpType.SUM)", "AllReduce(op=RedOpType.MAX)"),
    ),
    (
        [partial(dist.broadcast, torch.ones(1), src=source) for source in (0, 1)],
        ("Broadcast(src=0)", "Broadcast(src=1)"),
    ),
    (
        [partial(dist.broadcast, torch.ones(size), src=0) for size in (1, 2)],
        ("Broadcast(src=0) of torch.float32 (1,)", "Broadcast(src=0) of torch.float32 (2,)"),
    ),
    (
        [partial(reduce_scatter_of, dtype) for dtype in (torch.float32, torch.float64)],
        ("ReduceScatter(op=RedOpType.SUM) of torch.float32", "of torch.float64 (1,), torch.float64 (1,)"),
    ),
]


@pytest.mark.parametrize("calls, told", MISMATCHED, ids=("kinds", "operations", "sources", "shapes", "dtypes"))
def test_mismatched_collectives(calls, told):
    text = str(failure(lambda: calls[my_rank()](), 2))
    assert text.startswith(
        "different collectives at once: ranks [] of 2 finished, ranks [0, 1] did not\nrank 0 waits in "
    )
    assert f"rank 0 waits in {told[0]}" in text
    assert told[1] in text[text.index("rank 1 waits in ") :]


def test_failing_collective_names_itself():
    text = str(failure(lambda: dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(3)), 2))
    assert text.startswith("AllGather() failed: ")


def test_nested_simulation_is_refused():
    error = failure(lambda: spmd(dist.get_rank, 2), 2).__cause__
    assert isinstance(error, RuntimeError)
    assert "simulated ranks are already running in this process" in str(error)


def test_thread_of_a_rank_is_no_rank():
    caught = []

    def program():
        group = dist.group.WORLD

        def helper():
            try:
                group.allreduce([torch.ones(1)])
            except Exception as error:
                caught.append(str(error))

        thread = threading.Thread(target=helper)
        thread.start()
        thread.join()

    spmd(program, 1)
    operation = "AllReduce(op=RedOpType.SUM) of torch.float32 (1,)"
    assert caught == [f"{operation} was called on a thread that is no rank of the running simulation"]


def test_real_process_group_is_restored(tmp_path):
    excepthook = sys.excepthook
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert spmd(ranks_summed, 3) == [3.0] * 3
        with pytest.raises(RankError):
            spmd(lambda: 1 / 0, 2)
        assert dist.group.WORLD is group
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "gloo"
        assert ranks_summed() == 0.0
    finally:
        dist.destroy_process_group()
        # torch puts its own there and leaves it.
        sys.excepthook = excepthook


def test_program_may_destroy_its_process_group():
    spmd(dist.destroy_process_group, 2)


@on_ranks(4)
def test_forward_mode_derivatives_on_all_ranks_at_once():
    def cubes(x):
        return (x**3).sum()

    dist.barrier()
    generator = torch.Generator().manual_seed(my_rank())
    for _ in range(40):
        x, t = torch.randn(2, 4, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(torch.func.jvp(torch.sin, (x,), (t,)), (x.sin(), x.cos() * t))
        hvp = torch.func.jvp(torch.func.grad(cubes), (x,), (t,))[1]
        torch.testing.assert_close(hvp, 6 * x * t)
        torch.testing.assert_close(torch.func.jacfwd(torch.exp)(x), x.exp().diag())
        torch.testing.assert_close(torch.func.hessian(cubes)(x), (6 * x).diag())
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, t)
            torch.testing.assert_close(forward_ad.unpack_dual(dual * dual).tangent, 2 * x * t)


@on_ranks(4)
def test_forward_mode_with_collectives():
    def f(x):
        dist.barrier()
        return x**2

    assert torch.func.jvp(f, (torch.tensor(3.0),), (torch.tensor(float(my_rank())),))[1].item() == 6.0 * my_rank()


@on_ranks(2, "2 processes")
def test_collectives_of_tangents():
    x, t = torch.tensor([3.0]), torch.tensor([my_rank() + 1.0])
    tangent = torch.func.jvp(torch.square, (x,), (t,))[1]
    dist.all_reduce(tangent)
    assert tangent.item() == 18.0


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@on_ranks(3)
def test_dispatch_modes_see_the_rank_only():
    x = torch.ones(3)
    with Seen() as seen:
        for _ in range(my_rank()):
            x = x + 1
        dist.all_reduce(x)
    found = [name for name in seen.names if "add" in name or "copy" in name or "stack" in name]
    assert found == ["aten.add.Tensor"] * my_rank()


@on_ranks(3)
def test_collectives_on_inference_tensors():
    with torch.inference_mode():
        assert ranks_summed() == 3.0


@on_ranks(3)
def test_collectives_inside_torch_func():
    total = torch.tensor(float(my_rank()))

    def loss(x):
        dist.all_reduce(total)
        return x * total

    assert torch.func.grad(loss)(torch.tensor(1.0)).item() == 3.0


@on_ranks(2)
def test_backward_of_a_sharded_program():
    x = torch.tensor([my_rank() + 1.0], requires_grad=True)
    (x**2).sum().backward()
    dist.all_reduce(x.grad)
    assert (x.grad.item(), x.grad._version) == (6.0, 1)


ENDS = """
import sys, time, torch
import torch.distributed as dist
from fshard.testing import RankError, spmd

sys.modules["fshard.testing.spmd"].GRACE = 0.05

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if dist.get_rank() == 0:
            raise ValueError("bad batch")
        time.sleep(0.02 * dist.get_rank())
        return grad

def program():
    Slow.apply(torch.ones(3, requires_grad=True)).sum().backward()

try:
    spmd(program, 40)
except RankError as error:
    print(str(error).splitlines()[-1])
sys.exit(3)
"""


def test_ranks_that_are_slow_to_end_leave_the_exit_code_alone():
    """A thread that came back into Python from C++ while the interpreter ends would abort the process."""
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=50, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (3, "ValueError: bad batch\n", "")
