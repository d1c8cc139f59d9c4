"""Saves beside steps, the Manager, and failures in the background."""

import gc
import os
import threading

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import CheckpointError, files
from fshard.testing import spmd
from tests.checkpoint.states import (
    SECONDS,
    assert_same,
    fail_writes,
    full,
    names,
    refused,
    refused_everywhere,
    step_of,
    wait_for_threads,
    zeros_like,
)
from tests.ranks import on_ranks
from tests.trees import normal, one_axis

TX = fs.adamw(0.1)


def new_state():
    draw = normal(50)
    params = fs.shard({"w": draw(64, 8), "v": draw(7)}, fs.zero2(one_axis(), min_shard_elements=0))
    return fs.TrainState.create(params, TX)


def train_step(state):
    return fs.update(TX, state, fs.tree_map(torch.sin, state.params))


@on_ranks(1, 2)
def test_a_donated_step_may_overwrite_what_is_being_saved(world_size, tmp_path, held):
    step = fs.jit(train_step, donate_argnums=0)
    state = train_step(new_state())
    expected = fs.tree_map(torch.clone, state)
    saving = checkpoint.save(tmp_path, state, asynchronous=True)
    for _ in range(3):
        state = step(state)
    assert checkpoint.latest_step(tmp_path) is None
    torch.distributed.barrier() if world_size > 1 else None
    held.set()
    assert saving.wait() == saving.wait() == tmp_path / "step-00000001.0"
    assert_same(checkpoint.restore(tmp_path, zeros_like(expected)), expected)
    assert state.step == 4


def test_writes_in_place_and_a_default_device_without_values_change_nothing(tmp_path, held):
    state = {"w": torch.arange(3.0)}
    with torch.device("meta"):
        saving = checkpoint.save(tmp_path, state, 1, asynchronous=True)
    state["w"].fill_(-1)
    held.set()
    saving.wait()
    assert checkpoint.restore(tmp_path, state)["w"].tolist() == [0, 1, 2]


def test_a_program_that_changes_its_folder(held, tmp_path, monkeypatch):
    """A relative path means the same directory from the manager's first line to its last."""
    monkeypatch.chdir(tmp_path)
    manager = checkpoint.Manager("run")
    (tmp_path / "elsewhere").mkdir()
    manager.save(full(1), 1)
    saving = checkpoint.save("other run", full(1), 1, asynchronous=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    held.set()
    assert saving.wait() == tmp_path / "other run/step-00000001.0"
    manager.save(full(2), 2)
    assert manager.restore(full(0))["step"] == manager.latest_step() == 2
    assert names(tmp_path / "run") == ["step-00000001.0", "step-00000002.1"]
    assert names(tmp_path / "elsewhere") == []


@pytest.fixture
def forked_child():
    """A child that was forked when the function was called, and lives until the test ends."""
    reader, writer = os.pipe()
    children = []

    def fork():
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        children.append(child)

    yield fork
    os.close(writer)
    os.close(reader)
    for child in children:
        os.waitpid(child, 0)


def test_a_second_save_while_one_is_under_way(held, tmp_path, forked_child):
    """One that nobody waits for leaves the directory free when it is complete, also where a fork has its lock open."""
    saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
    assert refused(lambda: checkpoint.save(tmp_path, full(2), 2), CheckpointError) == (
        f"checkpoint.save: {tmp_path}: another save there is not complete; wait for it, or save to another directory"
    )
    forked_child()
    held.set()
    saving.wait()
    saving = checkpoint.save(tmp_path, full(2), 2, asynchronous=True)
    del saving
    gc.collect()
    wait_for_threads()
    checkpoint.save(tmp_path, full(3), 3)
    assert names(tmp_path) == ["step-00000001.0", "step-00000002.1", "step-00000003.2"]


@pytest.mark.parametrize(
    "world_size, file", [(1, files.file_name(0)), (3, files.file_name(2)), (1, "manifest-"), (1, "content"), (1, "run")]
)
@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_failing_write_is_told_on_every_rank_and_loses_nothing(asynchronous, file, world_size, tmp_path, monkeypatch):
    directory = tmp_path / "run"
    spmd(lambda: checkpoint.save(directory, new_state()), world_size)

    def save():
        checkpoint.save(directory, train_step(new_state()), asynchronous=asynchronous).wait()

    with monkeypatch.context() as patched:
        fail_writes(patched, file)
        for _ in range(2):
            text = refused_everywhere(save, world_size, CheckpointError)
            assert text.startswith(f"checkpoint.save: {directory}")
            assert text.endswith("No space left on device")
    spmd(lambda: assert_same(checkpoint.restore(directory, zeros_like(new_state()), step=0), new_state()), world_size)
    spmd(save, world_size)
    assert checkpoint.latest_step(directory) == 1
    assert not [name for name in names(directory) if name.startswith(".saving")]


def test_files_are_on_the_disk_before_they_have_their_names(synced, tmp_path, monkeypatch):
    rename = os.rename

    def recorded_rename(source, target):
        synced.append(f"{source.name} -> {target.name}")
        # When the new one has its name the old ones are there still.
        assert source.name == "content" or checkpoint.latest_step(tmp_path) == 2
        rename(source, target)

    monkeypatch.setattr(os, "rename", recorded_rename)
    checkpoint.save(tmp_path, full(1), 1, keep=1)
    events = [event if "->" in event else os.path.basename(event) for event in synced]
    checkpoint.save(tmp_path, full(2), 2, keep=1)
    assert names(tmp_path) == ["step-00000002.1"]
    manifest = events.pop(1)
    assert manifest.startswith("manifest-")
    assert events == ["rank-00000.safetensors", "content", "content -> step-00000001.0", tmp_path.name]


def run_manager(directory, steps, **arguments):
    with checkpoint.Manager(directory, **arguments) as manager:
        return [manager.save(full(step), step, force=step == 10) for step in steps]


@pytest.mark.parametrize(("keep", "world_size"), [(1, 1), (3, 2), (None, 2)])
def test_manager_keeps_the_newest(keep, world_size, tmp_path):
    """Those of the last saves, also where a run went back; the last step is saved when it is forced."""
    saved = spmd(lambda: run_manager(tmp_path, range(11), keep=keep, every=3, asynchronous=world_size == 2), world_size)
    assert saved == [[step % 3 == 0 or step == 10 for step in range(11)]] * world_size
    made = ["step-00000000.0", "step-00000003.1", "step-00000006.2", "step-00000009.3", "step-00000010.4"]
    assert names(tmp_path) == made[-(keep or 5) :]
    assert step_of(tmp_path) == checkpoint.latest_step(tmp_path) == 10
    # A run that goes back, and then saves a step once more.
    run_manager(tmp_path, (9, 9), keep=keep)
    assert names(tmp_path) == sorted([*made, "step-00000009.5", "step-00000009.6"][-(keep or 7) :])
    assert step_of(tmp_path) == step_of(tmp_path, step=9) == checkpoint.latest_step(tmp_path) == 9


def test_manager_waits_for_the_save_before_it_restores(held, tmp_path):
    timer = threading.Timer(0.1, held.set)
    with checkpoint.Manager(tmp_path, keep=1) as manager:
        manager.save(full(1), 1)
        timer.start()
        assert manager.restore(full(0))["step"] == 1
    timer.join(SECONDS)


@on_ranks(2)
def test_a_checkpoint_is_complete_without_a_further_call(tmp_path, held):
    """Not before all ranks have written, whatever steps the manager sees meanwhile."""
    manager = checkpoint.Manager(tmp_path, every=100)
    assert manager.save(full(0), 0)
    assert not manager.save(full(1), 1)
    assert manager.latest_step() is None
    torch.distributed.barrier()
    held.set()
    wait_for_threads()
    assert manager.latest_step() == 0
    # Both ranks are done with their looks before one of them goes on.
    torch.distributed.barrier()
    assert step_of(tmp_path) == 0
    assert not manager.save(full(2), 2)


def test_manager_tells_of_a_failure_once_and_goes_on(tmp_path, monkeypatch):
    manager = checkpoint.Manager(tmp_path)
    with monkeypatch.context() as patched:
        fail_writes(patched)
        manager.save(full(1), 1)
        with pytest.raises(CheckpointError, match="step-00000001"):
            manager.wait()
        manager.save(full(2), 2)
        with pytest.raises(CheckpointError, match="step-00000002"):
            manager.save(full(3), 3)
    manager.save(full(4), 4)
    manager.close()
    manager.close()
    assert checkpoint.latest_step(tmp_path) == manager.latest_step() == 4
