"""However a program ends, a checkpoint that all ranks have written is there, and one that is not is said so."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import CheckpointError, background, directory, files
from fshard.checkpoint.unfinished import RankReport, Unfinished, complete_leftovers
from fshard.testing import spmd
from tests.checkpoint import exiting_process
from tests.checkpoint.states import assert_same, at_once, refused, refused_everywhere, zeros_like
from tests.checkpoint.test_save_asynchronous import SECONDS, full, held, names, step_of, wait_for_threads, with_writes  # noqa: F401
from tests.ranks import my_rank, on_ranks
from tests.test_processes import ROOT
from tests.trees import one_axis


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Runs a program that ends: returns its directory, exit codes and what ranks wrote to standard error."""
    root = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-m", "tests.checkpoint.exiting_process", str(root)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(ending, ranks, patch):
            name = f"{len(list(root.iterdir()))}"
            print(json.dumps([name, ending, ranks, patch]), file=process.stdin, flush=True)
            codes, told = json.loads(process.stdout.readline())
            return root / name, codes, told

        yield run
        process.stdin.close()


EXIT_CODES = {"leave": 3, "interrupt": -2, "fail": 1, "end": 0}


@pytest.mark.rows(5)
@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("ending", exiting_process.ENDINGS)
def test_an_exit_waits_for_a_save(ending, ranks, programs):
    """Each file takes some time to be on the disk, on the second rank more than on the first."""
    place, codes, told = programs(ending, ranks, "slow")
    code = EXIT_CODES[ending.partition(", ")[2]]
    assert all(got == code for got in codes), told
    assert not [text for text in told if "is not complete" in text]
    assert names(place) == ["step-00000002.1"]
    assert_same(checkpoint.restore(place, zeros_like(exiting_process.state(0))), exiting_process.state(2))


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("ending", ("in_block, fail", "without_close, end"))
def test_an_exit_says_that_it_has_waited_long_enough(ending, ranks, programs):
    place, _, told = programs(ending, ranks, "hang")
    path = place / "step-00000002.1"
    late = f"checkpoint.save: {path} is not complete: rank {ranks - 1} has not written its file within 0.3 s\n"
    others = f"checkpoint.save: {path} is not complete: rank 1 has not written its file within 0.3 s of this one\n"
    for text, expected in zip(told, [late] if ranks == 1 else [others, late]):
        assert expected in text
        assert text.count("checkpoint.save: ") == 1
    assert checkpoint.latest_step(place) == 1
    # The next start removes what is left.
    checkpoint.save(place, exiting_process.state(3), 3)
    assert names(place) == ["step-00000001.0", "step-00000003.1"]


@pytest.mark.parametrize("ending", ("in_block, fail", "without_close, end"))
def test_an_exit_says_that_a_save_has_failed(ending, programs):
    place, _, (text,) = programs(ending, 1, "full_disk")
    path = place / "step-00000002.1"
    start, end = f"checkpoint.save: {path} is not complete: {path}", ": No space left on device\n"
    assert f"{start}{end}" in text
    assert checkpoint.latest_step(place) == 1


def test_a_save_that_was_waited_for_is_not_spoken_of(tmp_path, capsys, monkeypatch):
    """The error that `wait` raised is enough."""
    with_writes(monkeypatch, lambda name: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    saving = checkpoint.save(tmp_path, full(1), 1, asynchronous=True)
    refused(saving.wait, CheckpointError)
    saving.finish_at_exit()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("world_size", (1, 3))
def test_a_block_that_fails_keeps_the_save_before(world_size, tmp_path, held):  # noqa: F811
    def fail(manager):
        with manager:
            manager.save(full(4), 4)
            held.set()
            raise ZeroDivisionError

    def program():
        manager = checkpoint.Manager(tmp_path)
        with pytest.raises(ZeroDivisionError):
            fail(manager)
        return manager.latest_step()

    assert spmd(program, world_size) == [4] * world_size


def split(step):
    """A leaf that each rank writes a part of."""
    return fs.shard({"w": torch.arange(6.0) + step}, fs.zero2(one_axis(), min_shard_elements=0))


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


def written(view, rank):
    """Write the file of a rank, and return what it has to report."""
    data = b"some bytes"
    (view.content / files.file_name(rank)).write_bytes(data)
    return RankReport(len(data), {})


def write(view, rank):
    view.report(rank, written(view, rank))


def test_the_last_rank_to_write_completes_the_checkpoint(make):
    """Whichever it is, and whether or not the others are still alive."""
    for step, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0)]):
        views = make(3, step)
        for rank in order[:-1]:
            write(views[rank], rank)
            assert not views[rank].complete()
        last = views[order[-1]]
        assert views[0].missing() == [order[-1]]
        write(last, order[-1])
        assert last.complete()
        assert all(view.is_complete() and view.is_over() for view in views)
        assert not list(last.path.parent.glob(".*"))
        assert last.complete()


def test_ranks_that_end_at_once_rename_once(make, monkeypatch):
    renamed, inner = [], os.rename

    def rename(source, target):
        inner(source, target)
        renamed.append(target)

    monkeypatch.setattr(os, "rename", rename)
    ranks, paths = 8, []
    for step in range(40):
        views = make(ranks, step, keep=2)
        paths.append(views[0].path)
        for rank, view in enumerate(views):
            write(view, rank)
        assert at_once([view.complete for view in views]) == [True] * ranks
    assert [path for path in renamed if not path.name.startswith(".old")] == paths
    root = paths[0].parent
    assert sorted(path.name for path in root.iterdir()) == sorted(path.name for path in paths[-2:])


def test_an_exit_waits_for_others_after_its_own_part(make, monkeypatch, capsys):
    """However long its own part took."""
    looks, inner = [], Unfinished.missing

    def missing(view):
        looks.append(view)
        if len(looks) == 4:
            write(second, 1)
        return inner(view)

    monkeypatch.setattr(Unfinished, "missing", missing)
    monkeypatch.setattr(background, "EXIT_SECONDS", 0.0)
    first, second = make(2)
    save = background.BackgroundSave("checkpoint.save", first, 0, lambda: written(first, 0), lambda: None)
    save.written.result(SECONDS)
    save.finish_at_exit()
    assert first.is_complete()
    assert capsys.readouterr().err == ""


def test_a_rank_looks_once_more_when_it_hears_of_an_error(make, monkeypatch):
    """Another rank may have written since the last look, and have been killed."""
    looks, inner = threading.Semaphore(0), Unfinished.missing

    def missing(view):
        late = inner(view)
        looks.release()
        return late

    monkeypatch.setattr(Unfinished, "missing", missing)
    monkeypatch.setattr(background, "FIRST_LOOK", SECONDS)
    first, second = make(2)
    save = background.BackgroundSave("checkpoint.save", first, 0, lambda: written(first, 0), lambda: None)
    # One look when its own part is written, and one more before it waits.
    assert looks.acquire(timeout=SECONDS)
    assert looks.acquire(timeout=SECONDS)
    write(second, 1)
    save.settle()
    assert first.is_complete()


def test_a_rank_that_dies_before_it_has_written_leaves_what_the_next_start_removes(make, tmp_path):
    first, second = make(2)
    write(first, 0)
    (second.content / files.file_name(1)).write_bytes(b"half of")
    assert not first.complete()
    assert checkpoint.latest_step(tmp_path) is None
    checkpoint.save(tmp_path, full(5), 5)
    assert names(tmp_path) == ["step-00000005.0"]


def test_a_rank_of_a_killed_run_writes_nothing_to_a_later_one(make, tmp_path):
    """The later run saves under the same name, while the rank is still about to write."""
    _, survivor = make(2, step=1)
    first, second = make(2, step=1, mark="1" * 16)
    assert survivor.path == first.path
    text = refused(lambda: write(survivor, 1), FileNotFoundError)
    assert f"{survivor.content}" in text
    write(first, 0)
    text = refused(survivor.complete, CheckpointError)
    assert text == f"{survivor.path}: its files were removed before it was complete"
    assert not first.complete()
    write(second, 1)
    assert second.complete()


def unlink(path):
    path.unlink()


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def replace_by_link(path):
    shutil.move(path, path.with_name("aside"))
    path.symlink_to("aside")


LOSSES = {"gone": (unlink, "no file"), "cut": (cut, "bytes"), "a link": (replace_by_link, "no regular file")}


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("loss", LOSSES)
def test_a_file_that_is_lost_before_the_end_keeps_the_checkpoint_before(loss, asynchronous, tmp_path, monkeypatch):
    """The file of the last rank, as soon as it is on the disk."""
    place, (lose, got) = tmp_path / "run", LOSSES[loss]
    spmd(lambda: checkpoint.save(place, split(1), 1), 2)
    inner = os.fsync

    def fsync(descriptor):
        inner(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(files.file_name(1)):
            lose(Path(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        save = lambda: checkpoint.save(place, split(2), 2, keep=1, asynchronous=asynchronous).wait()  # noqa: E731
        text = refused_everywhere(save, 2, CheckpointError)
    assert files.file_name(1) in text
    assert " bytes, as they were written, got " in text
    assert text.endswith(got)
    assert names(place) == ["step-00000001.0"]
    spmd(lambda: assert_same(checkpoint.restore(place, zeros_like(split(0))), split(1)), 2)


def test_nothing_is_removed_before_the_new_manifest_was_read(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, full(1), 1)
    inner = os.rename

    def rename(source, target):
        inner(source, target)
        (target / files.MANIFEST).write_bytes(b"")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
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


def test_a_save_that_was_interrupted_is_never_completed(tmp_path, held, monkeypatch):  # noqa: F811
    """The program goes on and changes the state, which is not copied."""
    state = {"w": torch.ones(5)}
    monkeypatch.setattr(background.Future, "result", lambda future: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, state, 1)
    state["w"].zero_()
    held.set()
    wait_for_threads()
    assert names(tmp_path)[-1].startswith(".saving-")
    assert checkpoint.latest_step(tmp_path) is None
