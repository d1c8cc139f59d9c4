"""However a program ends, a checkpoint that all ranks have written is there, and one that is not is said so."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError, Saving, directory, files, saving
from fshard.checkpoint.boxes import LocalBox
from fshard.checkpoint.save import _write_file
from fshard.checkpoint.unfinished import Unfinished, complete_leftovers
from fshard.testing import spmd
from tests.checkpoint import exiting_process
from tests.checkpoint.states import (
    SECONDS,
    assert_same,
    at_once,
    fail_writes,
    full,
    names,
    refused,
    refused_everywhere,
    split,
    wait_for_threads,
    zeros_like,
)
from tests.forked_programs import run_on_ranks
from tests.ranks import on_ranks

# Each ending once, with one rank or two.
ENDINGS = [(ending, 1 + number % 2) for number, ending in enumerate(exiting_process.ENDINGS)]


@pytest.mark.parametrize("ending, ranks", ENDINGS)
def test_an_exit_waits_for_a_save(ending, ranks, tmp_path):
    """Each file takes some time to be on the disk, on the second rank more than on the first."""
    for program in run_on_ranks(ranks, exiting_process.run, tmp_path, ending, "slow", interpreter_ends=True):
        assert program.code == exiting_process.ENDINGS[ending][2], program.errors
        assert "is not complete" not in program.errors
    assert names(tmp_path) == ["step-00000002.1"]
    restored = checkpoint.restore(tmp_path, zeros_like(exiting_process.state(0)))
    assert_same(restored, exiting_process.state(2))


LATE = "rank {} has not written its file within 0.3 s"
# The ending, what breaks the disk, and for each rank why the checkpoint is not complete.
INCOMPLETE = [
    ("without_close, end", "hang", [f"{LATE.format(1)} of this one", LATE.format(1)]),
    ("in_block, fail", "full disk", ["{path}: No space left on device"]),
]


@pytest.mark.parametrize("ending, patch, reasons", INCOMPLETE)
def test_an_exit_says_why_a_save_is_not_complete(ending, patch, reasons, tmp_path):
    path = tmp_path / "step-00000002.1"
    programs = run_on_ranks(len(reasons), exiting_process.run, tmp_path, ending, patch, interpreter_ends=True)
    for program, reason in zip(programs, reasons, strict=True):
        assert f"checkpoint.save: {path} is not complete: {reason.format(path=path)}\n" in program.errors
        assert patch == "full disk" or program.errors.count("checkpoint.save: ") == 1
    assert checkpoint.latest_step(tmp_path) == 1
    # The next start removes what is left.
    checkpoint.save(tmp_path, exiting_process.state(3), 3)
    assert names(tmp_path) == ["step-00000001.0", "step-00000003.1"]


def test_the_first_rank_says_why_before_its_launcher_kills_it():
    """torchrun and Slurm kill a rank 30 s after they have told it to end; what it says later is lost, its error too."""
    assert saving.OTHERS_SECONDS <= 20.0


def test_a_save_that_was_waited_for_is_not_spoken_of(tmp_path, capsys, monkeypatch):
    """The error that `wait` raised is enough."""
    fail_writes(monkeypatch)
    saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
    refused(saving.wait, CheckpointError)
    saving.finish_at_exit()
    assert capsys.readouterr().err == ""


def fail_in_block(manager, release):
    with manager:
        manager.save(full(4), 4)
        release.set()
        raise ZeroDivisionError


@on_ranks(3)
def test_a_block_that_fails_keeps_the_save_before(tmp_path, held):
    manager = checkpoint.Manager(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fail_in_block(manager, held)
    if torch.distributed.get_rank() == 0:
        assert manager.latest_step() == 4


@pytest.fixture
def make(tmp_path):
    """Makes the unfinished checkpoint that each rank of a save sees; nothing but the directory connects them."""

    def unfinished(ranks, step=1, keep=None):
        for leftover in complete_leftovers(tmp_path):
            directory.remove_directory(leftover)
        temporary = directory.choose_name(tmp_path, step, ranks)
        views = [Unfinished(temporary, keep) for _ in range(ranks)]
        views[0].content.mkdir(parents=True)
        return views

    return unfinished


def write_file(view, rank):
    """Write the file of a rank, which has one element of a leaf, and return what it has to report."""
    ranks = view._ranks
    boxes = {"['w']": LocalBox((rank,), torch.ones(1))}
    manifest = files.Manifest(view.step, {"['w']": files.StoredLeaf("float32", (ranks,), ())}, {})
    return _write_file(view.content / files.file_name(rank), rank, boxes, manifest)


def write(view, rank):
    view.report(rank, write_file(view, rank))


def begin_first(view):
    """Begin the save of the first rank of several, which then looks for the others."""
    exchange = SimpleNamespace(rank=0, label="checkpoint.save")
    return Saving(exchange, view, lambda: write_file(view, 0), lambda: None)


def test_any_rank_can_complete_what_all_have_written(make):
    """The first rank does, or a later start if it was killed."""
    views = make(3)
    for rank in (1, 0, 2):
        assert rank in views[rank].complete()
        write(views[rank], rank)
    path = views[0].path
    assert [view.complete() for view in views] == [[]] * 3
    assert names(path.parent) == [path.name]
    assert checkpoint.restore(path.parent, {"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]


def test_those_that_complete_a_checkpoint_at_once_rename_once(make, monkeypatch):
    ranks, paths, renamed, rename = 8, [], [], os.rename

    def recorded_rename(source, target):
        rename(source, target)
        renamed.append(target)

    monkeypatch.setattr(os, "rename", recorded_rename)
    for step in range(40):
        views = make(ranks, step, keep=2)
        paths.append(views[0].path)
        for rank, view in enumerate(views):
            write(view, rank)
        assert at_once([view.complete for view in views]) == [[]] * ranks
    assert [path for path in renamed if not path.name.startswith(".old")] == paths
    assert names(paths[0].parent) == sorted(path.name for path in paths[-2:])


def watch_looks(monkeypatch, look):
    """Call something with the ranks that are late, each time that a rank looks for them."""
    complete = Unfinished.complete

    def watched(view):
        late = complete(view)
        look(late)
        return late

    monkeypatch.setattr(Unfinished, "complete", watched)


def test_an_exit_waits_for_others_after_its_own_part(make, monkeypatch, capsys):
    """However long its own part took."""
    first, second = make(2)
    looks = []

    def look(late):
        looks.append(late)
        if len(looks) == 3:
            write(second, 1)

    watch_looks(monkeypatch, look)
    monkeypatch.setattr(saving, "EXIT_SECONDS", 0.0)
    save = begin_first(first)
    save._written.result(SECONDS)
    save.finish_at_exit()
    assert first.path.is_dir()
    assert capsys.readouterr().err == ""


def test_the_first_rank_looks_once_more_when_it_hears_of_an_error(make, monkeypatch):
    """Another rank may have written since the last look, and have been killed."""
    first, second = make(2)
    looks = threading.Semaphore(0)
    watch_looks(monkeypatch, lambda late: looks.release())
    monkeypatch.setattr(saving, "FIRST_LOOK", SECONDS)
    save = begin_first(first)
    assert looks.acquire(timeout=SECONDS)
    write(second, 1)
    save._settle()
    assert first.path.is_dir()


def test_a_rank_of_a_killed_run_writes_nothing_to_a_later_one(make):
    """The later run saves under the same name, while the rank is still about to write."""
    _, survivor = make(2, step=1)
    first, second = make(2, step=1)
    assert survivor.path == first.path
    assert f"{survivor.content}" in refused(lambda: write(survivor, 1), FileNotFoundError)
    write(first, 0)
    refused(survivor.complete, FileNotFoundError)
    assert first.complete() == [1]
    write(second, 1)
    assert second.complete() == []


def cut_last_byte(path):
    os.truncate(path, path.stat().st_size - 1)


LOSSES = {"gone": (os.unlink, ": No such file or directory"), "cut": (cut_last_byte, ": expected 140 bytes, got 139")}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_file_that_is_lost_before_the_end_keeps_the_checkpoint_before(loss, tmp_path, monkeypatch):
    """The file of the last rank, as soon as it is on the disk."""
    root, fsync = tmp_path / "run", os.fsync
    lose, reason = LOSSES[loss]
    spmd(lambda: checkpoint.save(root, split(1), 1), 2)

    def fsync_and_lose(descriptor):
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(files.file_name(1)):
            lose(Path(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync_and_lose)
        text = refused_everywhere(lambda: checkpoint.save(root, split(2), 2, keep=1), 2, CheckpointError)
    assert text.endswith(files.file_name(1) + reason)
    assert names(root) == ["step-00000001.0"]
    spmd(lambda: assert_same(checkpoint.restore(root, zeros_like(split(0))), split(1)), 2)


def test_a_save_that_a_later_one_has_removed_was_complete(tmp_path):
    saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
    wait_for_threads()
    checkpoint.save(tmp_path, full(2), 2, keep=1)
    assert saving.wait().name == "step-00000001.0"
    assert names(tmp_path) == ["step-00000002.1"]


def raise_interrupt(future):
    raise KeyboardInterrupt


def test_a_save_that_was_interrupted_is_never_completed(tmp_path, held, monkeypatch):
    """The program goes on and changes the state, which is not copied."""
    state = {"w": torch.ones(5)}
    monkeypatch.setattr(saving.Future, "result", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, state, 1)
    state["w"].zero_()
    held.set()
    wait_for_threads()
    assert names(tmp_path) == []
