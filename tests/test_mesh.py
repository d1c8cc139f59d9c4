"""init_mesh and the axes of its meshes, of all ranks and of some: a trainer beside a reference model."""

import gc
import itertools
import json
import os
import resource
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard as fs
from fshard import _compat, checkpoint
from fshard import mesh as meshes
from fshard.comm import Meeting
from fshard.comm.sockets import sockets_of_mesh
from fshard.mesh import _read_number, ranks_of, ranks_on_host
from fshard.rounding import tolerance
from fshard.testing import assert_matches_ddp, assert_trees_close, spmd
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank, on_ranks
from tests.trees import normal, one_axis

TX = fs.sgd(0.1)


def test_a_group_that_another_rank_lacks_is_made_anew():
    one_axis()
    limit = timedelta(seconds=20)
    meeting = Meeting(dist.HashStore(), 0, [0], "after a failure", 20.0)
    (group,) = meshes._make_groups([[0]], limit, [False], meeting)
    (kept,) = meshes._make_groups([[0]], limit, [True], meeting)
    (again,) = meshes._make_groups([[0]], limit, [False], meeting)
    assert kept is group
    assert dist.group.WORLD not in (group, again)
    assert again is not group
    dist.destroy_process_group(again)


@pytest.mark.parametrize("read", [fs.axis_of, fs.zero3, ranks_of])
def test_reading_a_mesh_again_leaves_nothing_behind(read):
    """Programs read an axis in each of millions of steps, and what is left at their mesh stays as long as the mesh."""
    one_axis()
    for mesh in (fs.init_mesh({"shard": -1}, device="cpu"), init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))):
        read(mesh)
        references = weakref.getweakrefcount(mesh)
        read(mesh)
        assert weakref.getweakrefcount(mesh) == references


@pytest.mark.parametrize(
    ("device", "devices", "sends_itself"), [("cpu", 8, False), ("cuda", 8, True), ("cuda", 1, False), ("mps", 8, False)]
)
def test_a_mesh_is_checked_for_the_files_that_its_devices_need(monkeypatch, device, devices, sends_itself):
    """Three times as many if ranks may share a device, or it has no backend of its own."""
    counts = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setattr(meshes, "allow_sockets", lambda count: counts.append(count) or "lacks")
    meeting = SimpleNamespace(store=dist.HashStore(), ranks=range(64))
    assert meshes._find_lack(device, [64], meeting) == "lacks"
    assert counts == [sockets_of_mesh([64], sends_itself=sends_itself)]


@pytest.mark.parametrize(
    ("devices", "shared"), [(["host 0", "host 1"], ""), (["host 0", "host 1", "host 0", ""], "host 0"), (["", ""], "")]
)
def test_a_device_that_several_ranks_compute_on_is_found_by_what_they_bring(devices, shared):
    requests = [json.dumps(meshes._Request("a mesh", device=device)) for device in devices]
    error, *agreed = json.loads(meshes._merge_requests(requests))
    assert (error, meshes._Request(*agreed).device) == ("", shared)


@on_ranks(6)
def test_sizes_and_axes_of_a_mesh_of_a_part_and_of_an_axis():
    """The outermost axis first; an axis holds no rank: specs made of it are equal on all ranks that share it."""
    for shape, sizes in (({"shard": -1}, (6,)), ({"replicate": -1, "shard": 2}, (3, 2))):
        mesh = fs.init_mesh(shape, device="cpu")
        assert (type(mesh), mesh.mesh_dim_names, tuple(mesh.shape)) == (DeviceMesh, tuple(shape), sizes)
        assert tuple(fs.axis_of(mesh, name).size for name in shape) == sizes
    line, grid = fs.init_mesh({"shard": -1}, device="cpu"), fs.init_mesh({"outer": 2, "inner": 3}, device="cpu")
    axis, rank = fs.axis_of(line), my_rank()
    assert fs.axis_of(line, "shard") == axis == fs.axis_of(axis) == fs.Axis("shard", 6, axis.group_name, "cpu")
    assert fs.axis_of(grid["inner"]) == fs.axis_of(grid, "inner")
    outer, inner = (fs.all_gather(torch.tensor([rank]), fs.axis_of(grid, name)).tolist() for name in ("outer", "inner"))
    assert outer == [rank % 3, rank % 3 + 3]
    assert inner == [rank // 3 * 3 + k for k in range(3)]
    torch_s = fs.axis_of(init_device_mesh("cpu", (6,), mesh_dim_names=("shard",)))
    assert torch_s.size == 6
    return axis, torch_s


def timeouts_of(axis):
    """Read the timeouts in seconds of an axis's process group and of fshard's own two."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.group_name == axis.group_name]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    if axis.group_name in fs.comm.rank_state().groups:
        backends += fs.comm.rank_state().groups[axis.group_name].pair
    return [backend.options._timeout.total_seconds() for backend in backends]


@on_ranks("2 processes")
def test_every_group_of_a_mesh_has_its_timeout():
    """And a rank waits so long, not as long as the default group, which others made and which waits for a day."""
    for shape, options in itertools.product(({"shard": -1}, {"replicate": 2, "shard": -1}), ({}, {"timeout": 1.5})):
        mesh = fs.init_mesh(shape, device="cpu", **options)
        for axis in (fs.axis_of(mesh, name) for name in shape):
            fs.psum(torch.ones(()), axis)
            assert timeouts_of(axis) == [options.get("timeout", 300.0)] * (3 if axis.size > 1 else 1)
    store = dist.distributed_c10d._get_default_store()
    if my_rank() == 0:
        with pytest.raises(fs.comm.CollectiveError, match=r"rank 1 did not join a collective within [12] s"):
            fs.psum(torch.ones(()), fs.axis_of(mesh, "replicate"))
        store.set("waited", "")
    store.wait(["waited"])


@on_ranks("2 processes")
def test_a_group_of_the_users_is_taken_for_no_other_whatever_its_description_says():
    fs.init_mesh({"shard": -1}, device="cpu")
    everyone = ranks_of(None).group_name
    for description in ("rows of mine", "fake nccl"):
        group = dist.new_group(range(2), timedelta(days=2), group_desc=description)
        assert ranks_of(None).group_name == everyone
        assert _compat.group_devices(group.group_name) == _compat.group_devices(everyone)


@on_ranks(2)
def test_timeouts_that_are_refused():
    for timeout in (float("nan"), "1", True, 1e300):
        with pytest.raises(ValueError, match=r"^init_mesh: expected timeout to be a number of seconds above 0"):
            fs.init_mesh({"shard": -1}, device="cpu", timeout=timeout)
    with pytest.raises(ValueError, match=r"expected the same mesh on every rank, .*timeout 1 .*timeout 2 "):
        fs.init_mesh({"shard": -1}, device="cpu", timeout=1 + my_rank())


def batch_of(number, place):
    return normal(10 * number + place)(4, 3)


def network():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def step(model, state, batch):
    loss, grads = fs.value_and_grad(lambda p: model.apply(p, batch).square().mean())(state.params)
    return fs.update(TX, state, grads), loss


def some(*ranks, name="shard"):
    """A mesh of some ranks, made by torch."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=(name,))


def is_member(mesh):
    return mesh.get_coordinate() is not None


def train(mesh):
    """Train on a mesh by three steps."""
    model = fs.functionalize(network(), units=nn.Linear)
    state = fs.TrainState.create(model.init(fs.zero3(mesh, axis=None), seed=0), TX)
    for number in range(3):
        state, _ = step(model, state, batch_of(number, fs.axis_index(fs.axis_of(mesh))))
    return state


def test_trainer_and_reference(tmp_path):
    """Ranks 0 and 1 train, beside which the others train by themselves; then these take the state that was saved."""

    def program():
        everyone = fs.axis_of(fs.init_mesh({"all": -1}, device="cpu"))
        trainer, reference = some(0, 1, name="train"), some(2, 3, name="eval")
        with fs.comm.record() as events:
            params = train(trainer if is_member(trainer) else reference).params
            if is_member(trainer):
                checkpoint.save(tmp_path, params, 3, mesh=trainer)
        fs.psum(torch.zeros(()), everyone)
        if is_member(reference):
            with fs.comm.record() as later:
                params = checkpoint.restore(tmp_path, params, mesh=reference)
            events += later
        return fs.unshard(params), {event.axis for event in events}

    expected, *_ = spmd(lambda: fs.unshard(train(fs.init_mesh({"train": -1}, device="cpu")).params), 2)
    for rank, (params, axes) in enumerate(spmd(program, 4)):
        assert_trees_close(params, expected, exact=True)
        assert axes == ({"train"} if rank < 2 else {"eval"})


@on_ranks(5)
def test_a_mesh_of_two_axes_saves_by_a_mesh_of_one_over_its_ranks(tmp_path):
    """Members save in the background by a Manager, and a rank outside waits for nothing."""
    grid, line = DeviceMesh("cpu", [[0, 1], [3, 4]], mesh_dim_names=("replicate", "shard")), some(0, 1, 3, 4)
    if my_rank() == 2:
        return
    params = fs.shard({"w": torch.arange(6.0)}, fs.hsdp(grid, min_shard_elements=0))
    with checkpoint.Manager(tmp_path, mesh=line) as manager:
        manager.save(params, 1)
        restored = manager.restore(fs.tree_map(torch.zeros_like, params))
    assert fs.unshard(restored)["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ValueError, match=r"one axis or all 5 ranks, got axes .* of 4 ranks; pass"):
        checkpoint.Manager(tmp_path, mesh=grid)


def check_ddp_of_some_processes():
    """Return their mesh, or None to a rank outside."""
    mesh, module = some(0, 2), network()
    if not is_member(mesh):
        return None
    model = fs.functionalize(module, units=nn.Linear)
    state = fs.TrainState.create(model.init(fs.zero3(mesh), seed=0), TX)
    module.load_state_dict(fs.unshard(state.params))
    assert_matches_ddp(
        partial(step, model),
        state,
        [batch_of(number, fs.axis_index(fs.axis_of(mesh))) for number in range(2)],
        module=module,
        loss_fn=lambda ddp, batch: ddp(batch).square().mean(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        mesh=mesh,
        # Sums over two ranks, which a step hands on to the next.
        rtol=0.0,
        atol=tolerance(torch.float64, terms=2, steps=2),
    )
    return mesh


def check_a_foreign_mesh_is_refused_at_once(outside):
    """Only the rank outside calls, so that a collective would never end."""
    shared = {}

    def program():
        everyone, mesh = fs.axis_of(fs.init_mesh({"all": -1}, device="cpu")), some(0, 1)
        if is_member(mesh):
            shared[my_rank()] = fs.shard({"w": torch.ones(4)}, fs.zero3(mesh, min_shard_elements=0)), fs.axis_of(mesh)
        fs.psum(torch.zeros(()), everyone)
        if not is_member(mesh):
            for call in outside(mesh):
                with pytest.raises(ValueError, match=r"mesh's ranks \[0, 1\], got rank 2"):
                    call()
            params, axis = shared[0]
            calls = {
                "gather": lambda: fs.gather(params),
                "value_and_grad": lambda: fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params),
                "objective": lambda: fs.objective(torch.ones(()), like=params),
                "psum": lambda: fs.psum(torch.ones(2), axis),
                "jit": lambda: fs.jit(fs.gather)(params),
            }
            for name, call in calls.items():
                with pytest.raises(ValueError, match=rf"(?s){name}.*'shard' of 2 ranks"):
                    call()
        return fs.psum(torch.ones(()), everyone).item()

    assert spmd(program, 3) == [3.0] * 3


def test_a_foreign_mesh_is_refused_at_once(tmp_path):
    check_a_foreign_mesh_is_refused_at_once(
        lambda mesh: [
            *(partial(make, mesh) for make in (fs.axis_of, fs.zero3, fs.fully_shard)),
            lambda: checkpoint.save(tmp_path, {}, 1, mesh=mesh),
            lambda: checkpoint.Manager(tmp_path, mesh=mesh),
        ]
    )


def make_meshes_of_wrong_ranks():
    """Print what a process says that a launcher numbers beyond the ranks that there are."""
    for rank in ("1", "-1"):
        os.environ["RANK"] = rank
        try:
            fs.init_mesh({"shard": -1}, device="cpu", timeout=1)
        except ValueError as error:
            print(error)


def test_a_rank_beyond_those_that_there_are_is_refused_at_once():
    """It would take part in the start of the others, or wait for a store."""
    (process,) = run_on_ranks(1, make_meshes_of_wrong_ranks)
    beyond, negative = process.output.splitlines()
    expected = "init_mesh: expected the variable RANK to be a whole number from 0 to 0, got "
    assert beyond.startswith(f"{expected}'1'; start the program by torchrun")
    assert negative.startswith(f"{expected}'-1'; ")


def use_destroyed_groups(directory):
    """Print what calls say after the program has ended torch's process groups."""
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(mesh, min_shard_elements=0))
    manager = checkpoint.Manager(directory)
    manager.save(params, step=1)
    dist.destroy_process_group()
    for call in (manager.close, lambda: fs.zero3(mesh), lambda: ranks_of(mesh), lambda: fs.unshard(params)):
        try:
            call()
        except ValueError as error:
            print(str(error).replace("\n", " "))
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    print(fs.unshard(params)["w"].sum().item(), checkpoint.Manager(directory).latest_step())


def test_calls_after_destroy_process_group_say_that_it_was_called(tmp_path):
    """Programs of torch end with it, often before the block of a Manager does."""
    for process in run_on_ranks(2, use_destroyed_groups, tmp_path):
        assert not process.code, process.errors
        manager, strategy, ranks, leaves, afterwards = process.output.splitlines()
        gone = "process groups that exist, got one that destroy_process_group has ended; "
        assert manager.endswith(f"expected {gone}call that after the last save is complete, or fs.init_mesh again")
        assert strategy == ranks == f"mesh: expected {gone}call fs.init_mesh again"
        assert leaves.endswith("on a mesh of this process, and after destroy_process_group call fs.init_mesh again.")
        assert afterwards == "4.0 1"


LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("name", "text", "first"),
    (
        *(("WORLD_SIZE", "two", 1), ("WORLD_SIZE", "-1", 1), ("WORLD_SIZE", "0", 1), ("WORLD_SIZE", "", 1)),
        *(("RANK", "1.5", 0), ("RANK", "", 0), ("MASTER_PORT", "x", 0), ("MASTER_PORT", "99999", 0)),
        *(("WORLD_SIZE", None, 1), ("RANK", None, 0), ("MASTER_PORT", None, 0)),
    ),
)
def test_a_variable_of_the_launcher_that_is_no_number_is_named(name, text, first, monkeypatch):
    """Or that is missing beside others, by None."""
    for variable, number in LAUNCHER.items():
        monkeypatch.setenv(variable, number)
    monkeypatch.delenv(name)
    if text is not None:
        monkeypatch.setenv(name, text)
    expected = rf"the variable {name} to be a whole number from {first} to \d+, got '{text or ''}'; start the program"
    with pytest.raises(ValueError, match=f"^init_mesh: expected {expected}"):
        fs.init_mesh({"shard": -1}, device="cpu", timeout=1)


def test_spaces_around_a_variable_of_the_launcher_are_left_out(monkeypatch):
    """As by torch: `wc -l` writes them, and a file of variables may have them at the ends of its lines."""
    for variable, number in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(variable, f" {number}\r")
        assert _read_number(variable) == int(number)


@pytest.mark.parametrize("text", ("x", "0"))
def test_a_number_of_ranks_on_a_host_that_is_none_is_named(text, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ValueError, match=rf"LOCAL_WORLD_SIZE to be a whole number from 1 to \d+, got '{text}'"):
        ranks_on_host(2)


def page_faults():
    """Count those of ten steps, each of which makes 40 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        [torch.ones(2**20) for _ in range(10)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def count_page_faults():
    without = page_faults()
    fs.init_mesh({"shard": -1}, device="cpu")
    page_faults()
    print(without, page_faults())


@pytest.mark.parametrize(
    ("given", "expected"),
    [((700, 10, 10), (2000, 10, 200)), ((7000, 5, 1000), (7000, 5, 1000)), ((0, 10, 10), (0, 10, 200))],
)
def test_a_mesh_makes_collections_of_garbage_rare(given, expected):
    """Else thousands of leaves that each step makes anew have Python look at all objects every 15 steps."""
    before = gc.get_threshold()
    try:
        gc.set_threshold(*given)
        fs.init_mesh({"shard": -1}, device="cpu")
        assert gc.get_threshold() == expected
    finally:
        gc.set_threshold(*before)


def test_a_mesh_lets_the_processs_allocator_keep_the_memory_of_a_step():
    """Else glibc takes the pages of 40 MB from the system in each step, and gives them back."""
    (process,) = run_on_ranks(1, count_page_faults)
    without, kept = map(int, process.output.split())
    # However large pages are.
    assert 10 * kept < without


@pytest.mark.parametrize(("chosen", "expected"), [(0, 3), (1, 1)])
def test_a_rank_computes_on_the_device_of_its_local_rank_or_another_that_its_program_has_chosen(
    monkeypatch, chosen, expected
):
    # Before there seems to be an accelerator, so that the process group is one of processors. The module of this type
    # does not tell whether it is initialized.
    fs.init_mesh({"shard": 1}, device="cpu")
    index = [chosen]
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index[-1])
    monkeypatch.setattr(torch.accelerator, "set_device_index", index.append)
    for _ in range(2):
        assert fs.init_mesh({"shard": 1}, device="mps").device_type == "mps"
        assert index[-1] == expected
