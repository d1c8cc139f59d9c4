"""Saves beside steps, the Manager, and failures in the background."""

import os
import sys
import threading
import time

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import CheckpointError, directory
from fshard.testing import RankError, spmd
from tests.checkpoint.states import assert_same, refused, refused_everywhere, zeros_like
from tests.ranks import my_rank, on_ranks
from tests.trees import normal, one_axis

TX = fs.adamw(0.1)
SECONDS = 30


def new_state():
    draw = normal(50)
    params = fs.shard({"w": draw(64, 8), "v": draw(7)}, fs.zero2(one_axis(), min_shard_elements=0))
    return fs.TrainState.create(params, TX)


def train_step(state):
    return fs.update(TX, state, fs.tree_map(torch.sin, state.params))


def full(step):
    return {"w": torch.full((64, 8), float(step)), "step": step}


def with_writes(monkeypatch, before):
    """Call something with a file's name before each file is on the disk."""
    inner = os.fsync

    def fsync(descriptor):
        before(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        inner(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def broken(name):
    raise OSError(28, "No space left on device")


@pytest.fixture
def held(monkeypatch):
    """Writes wait until the event is set."""
    event = threading.Event()
    with_writes(monkeypatch, lambda name: event.wait(SECONDS))
    yield event
    event.set()


@on_ranks(1, 2)
def test_a_donated_step_may_overwrite_what_is_being_saved(world_size, tmp_path, held):
    step = fs.jit(train_step, donate_argnums=0)
    state = train_step(new_state())
    expected = fs.tree_map(torch.clone, state)
    keeper = checkpoint.Manager(tmp_path / "manager")
    keeper.save(state)
    waits = keeper.wait, checkpoint.save(tmp_path / "save", state, asynchronous=True).wait
    for _ in range(3):
        state = step(state)
    assert checkpoint.latest(tmp_path / "save") is None
    torch.distributed.barrier() if world_size > 1 else None
    held.set()
    for name, wait in zip(("manager", "save"), waits):
        wait()
        assert_same(checkpoint.restore(tmp_path / name, zeros_like(expected)), expected)
    assert state.step == 4


def test_buffers_of_copies_are_kept_from_one_save_to_the_next(tmp_path):
    def state(value, size=3):
        return {"w": torch.full((size,), float(value)), "c": torch.ones(2) * 1j}

    with checkpoint.Manager(tmp_path) as manager:
        for step, size in enumerate((3, 3, 3, 5)):
            saved = state(step, size)
            manager.save(saved, step)
            saved["w"].fill_(-1)
    for step, size in enumerate((3, 3, 3, 5)):
        assert_same(checkpoint.restore(tmp_path, state(0, size), step=step), state(step, size))


def test_undonated_steps_need_no_copy(held, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["fshard.checkpoint.save"], "_aside", None)
    state = train_step(new_state())
    expected = fs.tree_map(torch.clone, state)
    saving = checkpoint.save(tmp_path, state, asynchronous=True, donated=False)
    later = fs.jit(train_step)(train_step(state))
    held.set()
    assert saving.wait() == saving.wait() == tmp_path / "step-00000001"
    assert_same(checkpoint.restore(tmp_path, zeros_like(expected)), expected)
    assert later.step == 3


def test_a_default_device_without_values_changes_nothing(tmp_path):
    state = {"w": torch.arange(3.0)}
    with torch.device("meta"):
        checkpoint.save(tmp_path, state, 1, asynchronous=True).wait()
    assert_same(checkpoint.restore(tmp_path, zeros_like(state)), state)


def list_steps(root):
    return sorted(int(path.name[5:].partition(".")[0]) for path in root.glob("step-*"))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_second_save_while_one_is_under_way(held, tmp_path):
    """Also where a process that was forked meanwhile has the lock's file open until it ends."""
    saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
    assert refused(lambda: checkpoint.save(tmp_path, full(2), 2), CheckpointError) == (
        f"checkpoint.save: {tmp_path}: expected no other save to be under way there, got one; "
        "wait for it, or save to another directory"
    )
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        held.set()
        saving.wait()
        checkpoint.save(tmp_path, full(2), 2)
    finally:
        os.close(writer)
        os.waitpid(child, 0)
    assert list_steps(tmp_path) == [1, 2]


def test_a_rank_or_a_message_that_is_lost_leaves_the_directory_free(tmp_path, monkeypatch):
    """The first rank does not wait for the part of a lost one for long."""
    event = threading.Event()

    def program():
        saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
        if my_rank():
            raise KeyError("lost")
        saving.wait()

    with monkeypatch.context() as patched:
        with_writes(patched, lambda name: name == "rank-00001.safetensors" and event.wait(SECONDS))
        with pytest.raises(RankError, match="lost"):
            spmd(program, 2)
        deadline = time.monotonic() + SECONDS / 2
        while (tmp_path / ".saving").exists() or any(name.startswith(".saving") for name in names(tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        checkpoint.save(tmp_path, full(2), 2)
        event.set()
    assert list_steps(tmp_path) == [2]
    inner = fs.comm.agree.everyone

    def everyone(said, axes, label):
        if f"{said}".startswith(".saving"):
            raise RuntimeError("lost")
        return inner(said, axes, label)

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["fshard.comm"], "everyone", everyone)
        refused(lambda: checkpoint.save(tmp_path, full(3), 3), RuntimeError)
    checkpoint.save(tmp_path, full(4), 4)


@pytest.mark.parametrize(("world_size", "failing"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_failing_write_is_told_on_every_rank_and_loses_nothing(
    asynchronous, failing, world_size, tmp_path, monkeypatch
):
    spmd(lambda: checkpoint.save(tmp_path, new_state()), world_size)
    part = f"rank-{failing:05d}.safetensors"

    def save():
        checkpoint.save(tmp_path, train_step(new_state()), asynchronous=asynchronous).wait()

    with monkeypatch.context() as patched:
        with_writes(patched, lambda name: name == part and broken(name))
        for _ in range(2):
            text = refused_everywhere(save, world_size, CheckpointError)
            start, _, end = text.replace(str(tmp_path), "").partition("-00000001-")
            assert start == "checkpoint.save: step 1 was not saved: /.saving"
            assert end[16:] == f"/{part}: No space left on device"
    spmd(lambda: assert_same(checkpoint.restore(tmp_path, zeros_like(new_state())), new_state()), world_size)
    spmd(save, world_size)
    assert names(tmp_path) == [".lock", "latest", "step-00000000", "step-00000001"]


@pytest.mark.parametrize("file", ("manifest.json", "latest"))
def test_a_failure_of_the_last_files(file, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, full(1), 1)
    inner = os.replace

    def replace(source, target):
        if str(target).endswith(file):
            raise OSError(5, "Input/output error", str(target))
        inner(source, target)

    with monkeypatch.context() as failing:
        failing.setattr(os, "replace", replace)
        text = refused(lambda: checkpoint.save(tmp_path, full(2), 2), CheckpointError)
        assert text.startswith("checkpoint.save: step 2 ")
        assert text.endswith(f"/{file}: Input/output error")
    assert checkpoint.restore(tmp_path, full(0))["step"] == 1
    checkpoint.save(tmp_path, full(3), 3)
    assert checkpoint.restore(tmp_path, full(0))["step"] == 3
    assert not [name for name in names(tmp_path) if name.startswith(".saving")]


def test_the_first_rank_gives_up_on_one_that_writes_nothing(tmp_path, monkeypatch):
    """As where ranks do not share the directory: a rank says that it has written, and the first one finds nothing."""
    inner = directory.write_bytes
    monkeypatch.setattr(
        directory, "write_bytes", lambda path, data: path.name == "rank-00001.json" or inner(path, data)
    )
    monkeypatch.setattr(sys.modules["fshard.checkpoint.save"], "PATIENCE", 0.1)
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, full(1), 1), 2, CheckpointError)
    remedy = "see that every rank is alive and shares the directory"
    assert text.endswith(f"/rank-00001.json: expected the list of a rank's parts, got nothing; {remedy}")
    assert names(tmp_path) == [".lock"]


def test_files_are_on_the_disk_before_they_have_their_names(synced, tmp_path, monkeypatch):
    events = synced

    def noted(inner):
        def call(source, target):
            inner(source, target)
            events.append((os.path.basename(source).partition("-")[0], os.path.basename(target)))

        return call

    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    checkpoint.save(tmp_path, full(1), 1)
    short = [event if isinstance(event, tuple) else os.path.basename(event)[:8] for event in events]
    assert short == [
        *("rank-000", ".rank-00", (".rank", "rank-00000.json")),
        *(".manifes", (".manifest.json.part", "manifest.json")),
        *(".saving-", (".saving", "step-00000001"), tmp_path.name[:8]),
        *(".latest.", (".latest.part", "latest"), tmp_path.name[:8]),
    ]


def test_a_rank_that_is_slow_to_see_that_it_is_done(tmp_path, monkeypatch):
    """The first rank may have renamed the directory before another one's last call returns."""
    inner = os.replace

    def replace(source, target):
        inner(source, target)
        if target.name == "rank-00001.json":
            deadline = time.monotonic() + SECONDS
            while not (tmp_path / "latest").exists() and time.monotonic() < deadline:
                time.sleep(0.01)

    monkeypatch.setattr(os, "replace", replace)
    spmd(lambda: checkpoint.save(tmp_path, full(1), 1), 2)
    assert checkpoint.restore(tmp_path, full(0))["step"] == 1


def run_manager(directory, steps, world_size=1, **arguments):
    def program():
        with checkpoint.Manager(directory, **arguments) as manager:
            return [manager.save(full(step), step) for step in steps]

    return spmd(program, world_size)[0]


@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("keep", (1, 3, None))
def test_manager_keeps_the_newest(keep, world_size, tmp_path):
    saved = run_manager(tmp_path, range(12), world_size, keep=keep, every=3, asynchronous=world_size == 2)
    assert saved == [step % 3 == 0 for step in range(12)]
    assert list_steps(tmp_path) == [0, 3, 6, 9][-(keep or 4) :]
    assert checkpoint.restore(tmp_path, full(0))["step"] == 9
    assert not [name for name in names(tmp_path) if name.startswith((".old", ".saving"))]


def test_the_last_step_is_saved_when_forced(tmp_path):
    with checkpoint.Manager(tmp_path, every=3) as manager:
        saved = [manager.save(full(step), step, force=step == 4) for step in range(5)]
    assert saved == [True, False, False, True, True]
    assert checkpoint.latest(tmp_path) == 4


def test_pruning_is_last(tmp_path, monkeypatch):
    """When the new one has its name, and `latest` names it, the old ones are there still."""
    seen, inner = [], os.rename

    def rename(source, target):
        if not source.name.startswith(".saving"):
            seen.append((source.name, checkpoint.latest(tmp_path)))
        inner(source, target)

    monkeypatch.setattr(os, "rename", rename)
    run_manager(tmp_path, (1, 2, 3), keep=1)
    assert seen == [("step-00000001", 2), ("step-00000002", 3)]


def test_manager_after_going_back(tmp_path):
    run_manager(tmp_path, (5, 10, 15, 20), keep=4)
    assert checkpoint.restore(tmp_path, full(0), step=10)["step"] == 10
    # What was ahead was given up: it goes first.
    for step, keep, left in ((11, 3, [5, 10, 11]), (3, 2, [3, 5]), (6, 2, [5, 6])):
        run_manager(tmp_path, (step,), keep=keep)
        assert list_steps(tmp_path) == left
        assert checkpoint.latest(tmp_path) == step


def test_the_same_step_again(tmp_path):
    for value in (1, 2, 3):
        checkpoint.save(tmp_path, full(value), 7)
    assert names(tmp_path) == [".lock", "latest", "step-00000007", "step-00000007.1", "step-00000007.2"]
    assert checkpoint.restore(tmp_path, full(0))["step"] == checkpoint.restore(tmp_path, full(0), step=7)["step"] == 3
    run_manager(tmp_path, (7,), keep=1)
    assert names(tmp_path) == [".lock", "latest", "step-00000007.3"]


def test_manager_waits_for_the_save_before_it_restores(held, tmp_path):
    timer = threading.Timer(0.2, held.set)
    with checkpoint.Manager(tmp_path, keep=1) as manager:
        manager.save(full(1), 1)
        timer.start()
        assert manager.restore(full(0))["step"] == 1
    timer.join(SECONDS)


def test_manager_tells_of_a_failure_once_and_goes_on(tmp_path, monkeypatch):
    manager = checkpoint.Manager(tmp_path)
    with monkeypatch.context() as patched:
        with_writes(patched, broken)
        manager.save(full(1), 1)
        with pytest.raises(CheckpointError, match=r"^checkpoint\.save: step 1 was not saved"):
            manager.wait()
        manager.save(full(2), 2)
        with pytest.raises(CheckpointError, match=r"^checkpoint\.save: step 2 was not saved"):
            manager.save(full(3), 3)
    manager.save(full(4), 4)
    manager.close()
    manager.close()
    assert checkpoint.latest(tmp_path) == manager.latest() == 4


def test_leaving_by_an_error_does_not_wait(held, tmp_path):
    manager = checkpoint.Manager(tmp_path)

    def leave():
        with manager:
            manager.save(full(1), 1)
            raise KeyError

    refused(leave, KeyError)
    held.set()
    # It ends by itself.
    manager.wait()
    assert checkpoint.latest(tmp_path) == 1
