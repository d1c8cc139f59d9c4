"""After a kill of all ranks the next start completes what all of them had written, and nothing that is damaged."""

import json
import os
import shutil
import threading
from functools import partial

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError, background, files, unfinished
from fshard.checkpoint.directory import remove
from fshard.checkpoint.unfinished import Unfinished
from fshard.testing import spmd
from tests.checkpoint.states import assert_same, at_once, refused, zeros_like
from tests.checkpoint.test_exits import LOSSES, split
from tests.checkpoint.test_save_asynchronous import broken, names, with_writes
from tests.checkpoint.test_users_files import contents
from tests.ranks import my_rank


def leave(directory, ranks, step):
    """Leave what a kill leaves of a save that all ranks have written, before any of them could complete it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Unfinished, "complete", lambda checkpoint: False)
        patched.setattr(background, "OTHERS_SECONDS", 0.0)
        # This ends the threads, which a kill would end.
        spmd(lambda: checkpoint.save(directory, split(step), step, asynchronous=True).finish_at_exit(), ranks)
        # One that looks once more when the patches are gone would complete the checkpoint.
        for thread in threading.enumerate():
            if thread.name.startswith("checkpoint.save"):
                thread.join(60)
                assert not thread.is_alive(), thread.name
    (left,) = directory.glob(".saving-*")
    return left


@pytest.fixture
def left(tmp_path):
    """The leftover of step 2, beside the complete checkpoint of step 1."""
    directory = tmp_path / "run"
    spmd(lambda: checkpoint.save(directory, split(1), 1), 2)
    return leave(directory, 2, 2)


def start(directory):
    return checkpoint.Manager(directory).latest_step()


def restored(directory, ranks, step):
    """Assert that some number of ranks restores the bits of a step."""
    spmd(lambda: assert_same(checkpoint.restore(directory, zeros_like(split(0))), split(step)), ranks)


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_a_manager_of_any_number_of_ranks_completes_it(ranks, left):
    assert spmd(lambda: start(left.parent), ranks) == [2] * ranks
    assert names(left.parent) == ["step-00000001.0", "step-00000002.1"]
    restored(left.parent, ranks, 2)


def test_a_save_completes_it_and_goes_on(left):
    """The save of a program that has no manager."""
    spmd(lambda: checkpoint.save(left.parent, split(3), 3), 4)
    assert names(left.parent) == ["step-00000001.0", "step-00000002.1", "step-00000003.2"]
    spmd(lambda: assert_same(checkpoint.restore(left.parent, zeros_like(split(0)), step=2), split(2)), 3)


def test_an_exit_says_that_the_next_start_completes_it(tmp_path, capfd):
    """The last rank to write finds the parts of all others, and no rank that is late."""
    leave(tmp_path, 2, 1)
    assert "all ranks have written their files, and the next start completes it" in capfd.readouterr().err


def test_a_leftover_of_more_ranks_is_completed(tmp_path):
    left = leave(tmp_path, 4, 5)
    assert spmd(lambda: start(left.parent), 2) == [5, 5]
    restored(left.parent, 2, 5)


def test_a_manager_removes_no_older_checkpoint(left):
    """The next save does, once it is complete itself."""
    manager = checkpoint.Manager(left.parent, keep=1)
    assert names(left.parent) == ["step-00000001.0", "step-00000002.1"]
    manager.save(split(3), 3)
    manager.close()
    assert names(left.parent) == ["step-00000003.2"]


def test_a_query_writes_nothing(left):
    before = contents(left.parent)
    assert checkpoint.latest_step(left.parent) == 1
    restored(left.parent, 2, 1)
    assert contents(left.parent) == before


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def move_chunk(path):
    """Let the chunks of a leaf leave a gap."""
    size, chunks = json.loads(path.read_bytes())
    chunks["['w']"][1] = [4]
    path.write_text(json.dumps([size, chunks]))


DAMAGES = {
    "no report of one rank": lambda left: (left / "rank-00001.json").unlink(),
    "an empty report": lambda left: os.truncate(left / "rank-00001.json", 0),
    "half a report": lambda left: cut(left / "rank-00001.json"),
    "a report of another kind": lambda left: (left / "rank-00001.json").write_text("[7, 8]"),
    "chunks with a gap": lambda left: move_chunk(left / "rank-00001.json"),
    "no outline": lambda left: (left / "outline.json").unlink(),
    "half an outline": lambda left: cut(left / "outline.json"),
    "an outline of another kind": lambda left: (left / "outline.json").write_text("[7, 8]"),
    "no files": lambda left: shutil.rmtree(left / "content"),
} | {
    f"a file that is {loss}": lambda left, lose=lose: lose(left / "content" / files.file_name(1))
    for loss, (lose, _) in LOSSES.items()
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_leftover_is_not_completed(damage, left):
    """A start leaves it as it is, and the next save removes it."""
    DAMAGES[damage](left)
    before = {path for path in contents(left) if not path.startswith("content/manifest")}
    assert spmd(lambda: start(left.parent), 3) == [1] * 3
    assert before <= set(contents(left))
    spmd(lambda: checkpoint.save(left.parent, split(3), 3), 2)
    assert names(left.parent) == ["step-00000001.0", "step-00000003.1"]
    restored(left.parent, 2, 3)


def test_a_full_disk_loses_no_leftover(left, monkeypatch):
    """A later start completes it, before what was saved meanwhile."""
    with monkeypatch.context() as patched:
        with_writes(patched, lambda name: name.startswith("manifest-") and broken(name))
        assert start(left.parent) == 1
        text = refused(lambda: checkpoint.save(left.parent, {"w": 3}, 3), CheckpointError)
        assert text.endswith("No space left on device")
    assert left.is_dir()
    with monkeypatch.context() as patched:
        patched.setattr(unfinished.files, "write_file", lambda path, data: broken(path))
        assert unfinished.complete_leftovers(left.parent) == []
    assert start(left.parent) == 2
    assert names(left.parent) == ["step-00000001.0", "step-00000002.1"]


def test_starts_and_saves_of_several_jobs_at_once(left, tmp_path):
    """Ranks of two jobs, a rank of the killed one that is left, and a job that saves at once."""
    for number in range(30):
        directory = tmp_path / f"{number}"
        shutil.copytree(left.parent, directory)
        rank_left = Unfinished.reopen(directory / left.name, directory / "step-00000002.1")
        programs = [partial(start, directory)] * 6
        programs += [rank_left.complete, partial(checkpoint.save, directory, {"w": 3}, 3)]
        *steps, is_complete, saving = at_once(programs)
        # A start may come after the save.
        assert set(steps) <= {2, 3}
        assert is_complete
        assert saving.wait().name == "step-00000003.2"
        assert names(directory) == ["step-00000001.0", "step-00000002.1", "step-00000003.2"]
        assert checkpoint.restore(directory, {"w": torch.zeros(6)}, step=2)["w"].equal(torch.arange(6.0) + 2)


def test_a_directory_is_removed_while_another_removes_it(left, monkeypatch):
    """A rank of a killed run that is left may remove its files at the moment in which a save does."""
    unlink = os.unlink
    names_taken = []

    def unlink_second(name, **at):
        unlink(name, **at)
        if not names_taken:
            names_taken.append(name)
            raise FileNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink_second)
        remove(left)
    assert names_taken
    assert names(left.parent) == ["step-00000001.0"]


def test_one_rank_chooses_what_all_restore(tmp_path, monkeypatch):
    """A checkpoint may be completed between the looks of two ranks."""
    for step in (1, 2):
        spmd(lambda: checkpoint.save(tmp_path, split(step), step), 2)  # noqa: B023
    late, inner = tmp_path / "step-00000002.1", os.listdir

    def listdir(path):
        """Let the first rank look before the second checkpoint is complete."""
        return [name for name in inner(path) if my_rank() or name != late.name]

    monkeypatch.setattr(os, "listdir", listdir)
    restored(tmp_path, 2, 1)


def test_a_manager_of_what_is_no_path():
    text = refused(lambda: checkpoint.Manager(3))
    assert text == "checkpoint.Manager: expected directory to be a path, got 3"
