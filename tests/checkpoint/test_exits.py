"""However a program ends, a checkpoint that all ranks have written is there, and one that is not is said so."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError, background, directory, files
from fshard.checkpoint.unfinished import RankReport, Unfinished, complete_leftovers
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
    step_of,
    wait_for_threads,
    zeros_like,
)
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank, on_ranks


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("ending", exiting_process.ENDINGS)
def test_an_exit_waits_for_a_save(ending, ranks, tmp_path):
    """Each file takes some time to be on the disk, on the second rank more than on the first."""
    for program in run_on_ranks(ranks, exiting_process.run, tmp_path, ending, "slow"):
        assert program.code == exiting_process.ENDINGS[ending][2], program.errors
        assert "is not complete" not in program.errors
    assert names(tmp_path) == ["step-00000002.1"]
    restored = checkpoint.restore(tmp_path, zeros_like(exiting_process.state(0)))
    assert_same(restored, exiting_process.state(2))


LATE = "rank {} has not written its file within 0.3 s"
# What breaks the disk, and for each rank why the checkpoint is not complete.
INCOMPLETE = [
    ("hang", [LATE.format(0)]),
    ("hang", [f"{LATE.format(1)} of this one", LATE.format(1)]),
    ("full disk", ["{path}: No space left on device"]),
]


@pytest.mark.parametrize("patch, reasons", INCOMPLETE)
@pytest.mark.parametrize("ending", ("in_block, fail", "without_close, end"))
def test_an_exit_says_why_a_save_is_not_complete(ending, patch, reasons, tmp_path):
    path = tmp_path / "step-00000002.1"
    programs = run_on_ranks(len(reasons), exiting_process.run, tmp_path, ending, patch)
    for program, reason in zip(programs, reasons, strict=True):
        assert f"checkpoint.save: {path} is not complete: {reason.format(path=path)}\n" in program.errors
        assert patch == "full disk" or program.errors.count("checkpoint.save: ") == 1
    assert checkpoint.latest_step(tmp_path) == 1
    # The next start removes what is left.
    checkpoint.save(tmp_path, exiting_process.state(3), 3)
    assert names(tmp_path) == ["step-00000001.0", "step-00000003.1"]


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


@on_ranks(1, 3)
def test_a_block_that_fails_keeps_the_save_before(tmp_path, held):
    manager = checkpoint.Manager(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fail_in_block(manager, held)
    assert manager.latest_step() == 4


@pytest.fixture
def make(tmp_path):
    """Makes the unfinished checkpoint that each rank of a save sees; nothing but the directory connects them."""

    def unfinished(ranks, step=1, mark="0" * 16, keep=None):
        for leftover in complete_leftovers(tmp_path):
            directory.remove(leftover)
        path = tmp_path / directory.new_name(tmp_path, step)
        manifest = files.Manifest(step, {}, {})
        temporary = directory.temporary_path(path, mark)
        views = [Unfinished(path, temporary, ranks, manifest, keep) for _ in range(ranks)]
        views[0].make()
        return views

    return unfinished


def write_file(view, rank):
    """Write the file of a rank, and return what it has to report."""
    data = b"some bytes"
    (view.content / files.file_name(rank)).write_bytes(data)
    return RankReport(len(data), {})


def write(view, rank):
    view.report(rank, write_file(view, rank))


def save_in_background(view):
    """Save the part of the first rank, which then looks for the other."""
    return background.BackgroundSave("checkpoint.save", view, 0, lambda: write_file(view, 0), lambda: None)


@pytest.mark.rows(2)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_last_rank_to_write_completes_the_checkpoint(order, make):
    """Whichever it is, and whether or not the others are still alive."""
    views = make(3)
    *earlier_ranks, last_rank = order
    for rank in earlier_ranks:
        write(views[rank], rank)
        assert not views[rank].complete()
    last = views[last_rank]
    assert views[0].missing() == [last_rank]
    write(last, last_rank)
    assert last.complete()
    assert all(view.is_complete() and view.is_over() for view in views)
    assert not list(last.path.parent.glob(".*"))
    assert last.complete()


def test_ranks_that_end_at_once_rename_once(make, monkeypatch):
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
        assert at_once([view.complete for view in views]) == [True] * ranks
    assert [path for path in renamed if not path.name.startswith(".old")] == paths
    assert names(paths[0].parent) == sorted(path.name for path in paths[-2:])


def watch_looks(monkeypatch, look):
    """Call something with the ranks that are late, each time that a rank looks for them."""
    missing = Unfinished.missing

    def watched(view):
        late = missing(view)
        look(late)
        return late

    monkeypatch.setattr(Unfinished, "missing", watched)


def test_an_exit_waits_for_others_after_its_own_part(make, monkeypatch, capsys):
    """However long its own part took."""
    first, second = make(2)
    looks = []

    def look(late):
        looks.append(late)
        if len(looks) == 3:
            write(second, 1)

    watch_looks(monkeypatch, look)
    monkeypatch.setattr(background, "EXIT_SECONDS", 0.0)
    save = save_in_background(first)
    save.written.result(SECONDS)
    save.finish_at_exit()
    assert first.is_complete()
    assert capsys.readouterr().err == ""


def test_a_rank_looks_once_more_when_it_hears_of_an_error(make, monkeypatch):
    """Another rank may have written since the last look, and have been killed."""
    first, second = make(2)
    looks = threading.Semaphore(0)
    watch_looks(monkeypatch, lambda late: looks.release())
    monkeypatch.setattr(background, "FIRST_LOOK", SECONDS)
    save = save_in_background(first)
    # One look when its own part is written, and one more before it waits.
    for _ in range(2):
        assert looks.acquire(timeout=SECONDS)
    write(second, 1)
    save.settle()
    assert first.is_complete()


def test_a_rank_of_a_killed_run_writes_nothing_to_a_later_one(make, tmp_path):
    """The later run saves under the same name, while the rank is still about to write."""
    _, survivor = make(2, step=1)
    first, second = make(2, step=1, mark="1" * 16)
    assert survivor.path == first.path
    assert f"{survivor.content}" in refused(lambda: write(survivor, 1), FileNotFoundError)
    write(first, 0)
    text = refused(survivor.complete, CheckpointError)
    assert text == f"{survivor.path}: its files were removed before it was complete"
    assert not first.complete()
    write(second, 1)
    assert second.complete()


def cut_last_byte(path):
    os.truncate(path, path.stat().st_size - 1)


def replace_by_link(path):
    shutil.move(path, path.with_name("aside"))
    path.symlink_to("aside")


LOSSES = {
    "gone": (os.unlink, "no file"),
    "cut": (cut_last_byte, "bytes"),
    "a link": (replace_by_link, "no regular file"),
}


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("loss", LOSSES)
def test_a_file_that_is_lost_before_the_end_keeps_the_checkpoint_before(loss, asynchronous, tmp_path, monkeypatch):
    """The file of the last rank, as soon as it is on the disk."""
    root, fsync = tmp_path / "run", os.fsync
    lose, remains = LOSSES[loss]
    spmd(lambda: checkpoint.save(root, split(1), 1), 2)

    def fsync_and_lose(descriptor):
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(files.file_name(1)):
            lose(Path(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync_and_lose)
        text = refused_everywhere(
            lambda: checkpoint.save(root, split(2), 2, keep=1, asynchronous=asynchronous).wait(), 2, CheckpointError
        )
    assert f"{files.file_name(1)}: expected " in text
    assert " bytes, as they were written, got " in text
    assert text.endswith(remains)
    assert names(root) == ["step-00000001.0"]
    spmd(lambda: assert_same(checkpoint.restore(root, zeros_like(split(0))), split(1)), 2)


def test_nothing_is_removed_before_the_new_manifest_was_read(tmp_path, monkeypatch):
    rename = os.rename

    def rename_and_damage(source, target):
        rename(source, target)
        (target / files.MANIFEST).write_bytes(b"")

    checkpoint.save(tmp_path, full(1), 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename_and_damage)
        text = refused(lambda: checkpoint.save(tmp_path, full(2), 2, keep=1), CheckpointError)
    path = tmp_path / "step-00000002.1" / files.MANIFEST
    assert text == f"checkpoint.save: {path}: expected the manifest as it was written, got another one"
    assert step_of(tmp_path, step=1) == 1


@on_ranks(2)
def test_a_file_that_is_lost_before_wait_is_named(tmp_path):
    saving = checkpoint.save(tmp_path, split(1), 1, asynchronous=True)
    wait_for_threads()
    torch.distributed.barrier()
    path = tmp_path / "step-00000001.0" / files.file_name(1)
    if my_rank():
        path.unlink()
    text = refused(saving.wait, CheckpointError)
    assert text.startswith(f"checkpoint.save: {path}: expected ")
    assert text.endswith(" bytes, as they were written, got no file")


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
    monkeypatch.setattr(background.Future, "result", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, state, 1)
    state["w"].zero_()
    held.set()
    wait_for_threads()
    assert names(tmp_path)[-1].startswith(".saving-")
    assert checkpoint.latest_step(tmp_path) is None
