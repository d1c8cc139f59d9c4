"""Saves beside steps, the Manager, and failures in the background."""

import os
import sys
import threading
import time

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import directory, files
from fshard.testing import RankError, spmd
from tests.checkpoint.states import assert_same, message, refused, sampler, zeros_like
from tests.ranks import on_ranks
from tests.trees import normal, one_axis

TX = fs.adamw(0.1)
SECONDS = 30


def new_state(size=64):
    draw = normal(50)
    params = fs.shard({"w": draw(size, 8), "v": draw(7)}, fs.zero2(one_axis(), min_shard_elements=0))
    return fs.TrainState.create(params, TX)


def train_step(state):
    return fs.update(TX, state, fs.tree_map(torch.sin, state.params))


def full(step):
    return {"w": torch.full((64, 8), float(step)), "step": step}


@pytest.fixture
def held(monkeypatch):
    """Writes wait until the event is set."""
    event = threading.Event()
    inner = files.write_all

    def write_all(descriptor, data):
        assert event.wait(SECONDS)
        inner(descriptor, data)

    monkeypatch.setattr(files, "write_all", write_all)
    yield event
    event.set()


@pytest.mark.parametrize("manager", (False, True))
@on_ranks(1, 2)
def test_a_donated_step_may_overwrite_what_is_being_saved(world_size, manager, held, tmp_path):
    step = fs.jit(train_step, donate_argnums=0)
    state = train_step(new_state())
    expected = fs.tree_map(torch.clone, state)
    if manager:
        keeper = checkpoint.Manager(tmp_path)
        keeper.save(state)
        wait = keeper.wait
    else:
        wait = checkpoint.save(tmp_path, state, asynchronous=True).wait
    for _ in range(3):
        state = step(state)
    assert checkpoint.latest(tmp_path) is None
    torch.distributed.barrier() if world_size > 1 else None
    held.set()
    wait()
    assert_same(checkpoint.restore(tmp_path, zeros_like(expected)), expected)
    assert state.step == 4


def test_buffers_of_copies_are_kept_from_one_save_to_the_next(tmp_path):
    with checkpoint.Manager(tmp_path) as manager:
        states = [{"w": torch.full((3,), float(step)), "c": torch.ones(2) * 1j} for step in range(4)]
        for step, state in enumerate(states):
            manager.save(state, step)
            state["w"].fill_(-1)
        manager.save({"w": torch.ones(5), "c": torch.ones(2) * 1j}, 4)
    for step in range(4):
        like = {"w": torch.ones(3), "c": torch.ones(2) * 1j}
        assert checkpoint.restore(tmp_path, like, step=step)["w"].tolist() == [step] * 3
    assert checkpoint.restore(tmp_path, {"w": torch.ones(5), "c": torch.ones(2) * 1j})["w"].tolist() == [1] * 5


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


def test_a_second_save_while_one_is_under_way(held, tmp_path):
    saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
    assert refused(lambda: checkpoint.save(tmp_path, full(2), 2), checkpoint.CheckpointError) == (
        f"checkpoint.save: {tmp_path}: expected no other save to be under way there, got one; "
        "wait for it, or save to another directory"
    )
    held.set()
    saving.wait()
    checkpoint.save(tmp_path, full(2), 2)
    assert list_steps(tmp_path) == [1, 2]


def saved_within(root, step):
    """Save as soon as the directory is free."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return checkpoint.save(root, full(step), step)
        except checkpoint.CheckpointError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_rank_that_is_lost_leaves_the_directory_free(tmp_path, monkeypatch):
    """The first rank does not wait for its part until the time is over."""
    inner, event = files.write_all, threading.Event()

    def write_all(descriptor, data):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("rank-00001.safetensors"):
            event.wait(SECONDS)
        inner(descriptor, data)

    def program():
        saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
        if torch.distributed.get_rank():
            raise KeyError("lost")
        saving.wait()

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_all", write_all)
        with pytest.raises(RankError, match="lost"):
            spmd(program, 2)
        saved_within(tmp_path, 2)
        event.set()
    assert list_steps(tmp_path) == [2]


def test_a_message_that_fails_leaves_the_directory_free(tmp_path, monkeypatch):
    inner = fs.comm.agree.everyone

    def everyone(said, axes, label):
        if f"{said}".startswith(".saving"):
            raise RuntimeError("lost")
        return inner(said, axes, label)

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["fshard.comm"], "everyone", everyone)
        refused(lambda: checkpoint.save(tmp_path, full(1), 1), RuntimeError)
    checkpoint.save(tmp_path, full(2), 2)


def test_a_process_forked_meanwhile_does_not_keep_the_directory(held, tmp_path):
    saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        # It has the lock's file open until it ends.
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


def list_steps(root):
    return sorted(int(path.name[5:].partition(".")[0]) for path in root.glob("step-*"))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("world_size", (1, 3))
@pytest.mark.parametrize("failing", (0, -1))
@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_failing_write_is_told_on_every_rank_and_loses_nothing(
    asynchronous, failing, world_size, tmp_path, monkeypatch
):
    inner = files.write_all
    name = f"rank-{failing % world_size:05d}.safetensors"
    broken = threading.Event()

    def write_all(descriptor, data):
        if broken.is_set() and os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
            raise OSError(28, "No space left on device")
        inner(descriptor, data)

    monkeypatch.setattr(files, "write_all", write_all)

    def program():
        state = new_state()
        checkpoint.save(tmp_path, state)
        torch.distributed.barrier() if world_size > 1 else None
        broken.set()
        told = []
        for _ in range(2):
            try:
                saving = checkpoint.save(tmp_path, train_step(state), asynchronous=asynchronous)
                assert asynchronous
                saving.wait()
            except checkpoint.CheckpointError as error:
                told.append(str(error).replace(str(tmp_path), "").partition("-00000001-"))
        torch.distributed.barrier() if world_size > 1 else None
        broken.clear()
        torch.distributed.barrier() if world_size > 1 else None
        assert_same(checkpoint.restore(tmp_path, zeros_like(state)), state)
        checkpoint.save(tmp_path, train_step(state))
        return told

    for told in spmd(program, world_size):
        assert len(told) == 2
        for start, _, end in told:
            assert start == "checkpoint.save: step 1 was not saved: /.saving"
            assert end[16:] == f"/{name}: No space left on device"
    assert names(tmp_path) == [".lock", "latest", "step-00000000", "step-00000001"]


def test_waiting_twice_fails_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "write_all", lambda *_: 1 / 0)
    saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
    for _ in range(2):
        text = refused(saving.wait, checkpoint.CheckpointError)
        assert text.startswith("checkpoint.save: step 1 was not saved: division by zero")
    assert names(tmp_path) == [".lock"]


@pytest.mark.parametrize("file", ("manifest.json", "latest"))
def test_a_failure_of_the_last_files(file, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, full(1), 1)
    inner = os.replace

    def replace(source, target):
        if str(target).endswith(file):
            raise OSError(5, "Input/output error", str(target))
        inner(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", replace)
        text = refused(lambda: checkpoint.save(tmp_path, full(2), 2), checkpoint.CheckpointError)
        assert text.startswith("checkpoint.save: step 2 ")
        assert text.endswith(f"/{file}: Input/output error")
    assert checkpoint.restore(tmp_path, full(0))["step"] == 1
    checkpoint.save(tmp_path, full(3), 3)
    assert checkpoint.restore(tmp_path, full(0))["step"] == 3
    assert not [name for name in names(tmp_path) if name.startswith(".saving")]


@pytest.mark.parametrize("manager", (False, True))
def test_the_first_rank_gives_up_on_one_that_writes_nothing(manager, tmp_path, monkeypatch):
    inner = directory.write_bytes

    def write_bytes(path, data):
        if path.name != "rank-00001.json":
            inner(path, data)

    def program():
        if not manager:
            return checkpoint.save(tmp_path, full(1), 1, timeout=0.1)
        return checkpoint.Manager(tmp_path, asynchronous=False, timeout=0.1).save(full(1), 1)

    monkeypatch.setattr(directory, "write_bytes", write_bytes)
    with pytest.raises(RankError) as error:
        spmd(program, 2)
    remedy = "see that every rank is alive and shares the directory"
    text = f"expected the list of a rank's parts, got nothing after 0 s; {remedy}"
    assert message(error).endswith(f"/rank-00001.json: {text}")
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


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("keep", (1, 2, 3, None))
def test_manager_keeps_the_newest(keep, world_size, asynchronous, tmp_path):
    steps = range(0, 12)
    saved = run_manager(tmp_path, steps, world_size, keep=keep, every=3, asynchronous=asynchronous)
    assert saved == [step % 3 == 0 for step in steps]
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
    seen = []
    inner = directory.remove

    def remove(path):
        seen.append((path.name, checkpoint.latest(tmp_path)))
        inner(path)

    monkeypatch.setattr(directory, "remove", remove)
    run_manager(tmp_path, (1, 2, 3), keep=1)
    assert seen == [("step-00000001", 2), ("step-00000002", 3)]


def test_manager_after_going_back(tmp_path):
    run_manager(tmp_path, (5, 10, 15, 20), keep=4)
    assert checkpoint.restore(tmp_path, full(0), step=10)["step"] == 10
    run_manager(tmp_path, (11,), keep=3)
    # What was ahead was given up: it goes first.
    assert list_steps(tmp_path) == [5, 10, 11]
    assert checkpoint.latest(tmp_path) == 11
    run_manager(tmp_path, (3,), keep=2)
    assert list_steps(tmp_path) == [3, 5]
    assert checkpoint.latest(tmp_path) == 3
    run_manager(tmp_path, (6,), keep=2)
    assert list_steps(tmp_path) == [5, 6]
    assert checkpoint.latest(tmp_path) == 6


def test_the_same_step_again(tmp_path):
    for value in (1, 2, 3):
        checkpoint.save(tmp_path, full(value), 7)
    assert names(tmp_path) == [".lock", "latest", "step-00000007", "step-00000007.1", "step-00000007.2"]
    assert checkpoint.restore(tmp_path, full(0))["step"] == checkpoint.restore(tmp_path, full(0), step=7)["step"] == 3
    with checkpoint.Manager(tmp_path, keep=1) as manager:
        manager.save(full(4), 7)
        assert manager.restore(full(0))["step"] == 4
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
    with monkeypatch.context() as broken:
        broken.setattr(files, "write_all", lambda *_: 1 / 0)
        manager.save(full(1), 1)
        with pytest.raises(checkpoint.CheckpointError, match=r"^checkpoint\.save: step 1 was not saved"):
            manager.wait()
        manager.save(full(2), 2)
        with pytest.raises(checkpoint.CheckpointError, match=r"^checkpoint\.save: step 2 was not saved"):
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


@pytest.mark.parametrize(("name", "value"), [("keep", 0), ("keep", True), ("every", -1), ("every", 1.5)])
def test_bad_arguments_of_manager(name, value, tmp_path):
    text = f"checkpoint.Manager: expected {name} to be a whole number from 1, got {value}"
    assert refused(lambda: checkpoint.Manager(tmp_path, **{name: value})) == text


def test_states_of_random_runs(tmp_path):
    """Whatever is saved in whatever order, each checkpoint that is kept is the one that was saved."""
    draw = sampler(3)
    for run in range(6):
        saved = {}
        directory = tmp_path / str(run)
        keep = draw.choice((1, 2, 4))
        with checkpoint.Manager(directory, keep=keep) as manager:
            for value in range(12):
                step = draw.randrange(9)
                manager.save(full(value), step)
                saved[step] = value
                manager.wait()
                there = set(list_steps(directory))
                assert checkpoint.restore(directory, full(0))["step"] == value
                assert 1 <= len(names(directory)) - 2 <= keep
                for step in there:
                    assert checkpoint.restore(directory, full(0), step=step)["step"] == saved[step]
