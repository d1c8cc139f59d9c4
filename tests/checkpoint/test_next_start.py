"""After a kill of all ranks the next start completes what all of them had written, and nothing that is damaged."""

import os
import shutil
from functools import partial

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import CheckpointError, files, saving, unfinished
from fshard.checkpoint.directory import remove_directory
from fshard.checkpoint.unfinished import Unfinished
from fshard.testing import spmd
from tests.checkpoint.states import (
    assert_same,
    at_once,
    fail_writes,
    names,
    refused,
    split,
    wait_for_threads,
    zeros_like,
)
from tests.checkpoint.test_exits import LOSSES
from tests.checkpoint.test_users_files import contents
from tests.ranks import my_rank

FIRST, SECOND, THIRD = "step-00000001.0", "step-00000002.1", "step-00000003.2"


def leave(directory, ranks, step):
    """Leave what a kill leaves of a save that all ranks have written, before any of them could complete it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Unfinished, "complete", lambda checkpoint: [1])
        patched.setattr(saving, "OTHERS_SECONDS", 0.0)
        # This ends the threads, which a kill would end.
        spmd(lambda: checkpoint.save(directory, split(step), step, asynchronous=True).finish_at_exit(), ranks)
        # One that looks once more when the patches are gone would complete the checkpoint.
        wait_for_threads()
    (leftover,) = directory.glob(".saving-*")
    return leftover


@pytest.fixture
def leftover(tmp_path):
    """The leftover of step 2, beside the complete checkpoint of step 1."""
    save(tmp_path / "run", 1, ranks=2)
    return leave(tmp_path / "run", 2, 2)


def save(directory, step, ranks):
    spmd(lambda: checkpoint.save(directory, split(step), step), ranks)


def start(directory):
    return checkpoint.Manager(directory).latest_step()


def assert_restores(directory, ranks, expected, step=None):
    """Assert that some number of ranks restores, as the latest or as a step, the bits of the expected one."""
    spmd(lambda: assert_same(checkpoint.restore(directory, zeros_like(split(0)), step=step), split(expected)), ranks)


@pytest.mark.parametrize("left_by, ranks", [(2, 1), (2, 4), (4, 2)])
def test_a_manager_of_any_number_of_ranks_completes_it(left_by, ranks, tmp_path):
    save(tmp_path, 1, ranks=2)
    leave(tmp_path, left_by, 2)
    assert spmd(lambda: start(tmp_path), ranks) == [2] * ranks
    assert names(tmp_path) == [FIRST, SECOND]
    assert_restores(tmp_path, ranks, 2)


def test_a_save_completes_it_and_goes_on(leftover):
    """The save of a program that has no manager."""
    save(leftover.parent, 3, ranks=4)
    assert names(leftover.parent) == [FIRST, SECOND, THIRD]
    assert_restores(leftover.parent, 3, 2, step=2)


def test_a_manager_removes_no_older_checkpoint(leftover):
    """The next save does, once it is complete itself."""
    with checkpoint.Manager(leftover.parent, keep=1) as manager:
        assert names(leftover.parent) == [FIRST, SECOND]
        manager.save(split(3), 3)
    assert names(leftover.parent) == [THIRD]


def test_a_query_writes_nothing(leftover):
    before = contents(leftover.parent)
    assert checkpoint.latest_step(leftover.parent) == 1
    assert_restores(leftover.parent, 2, 1)
    assert contents(leftover.parent) == before


REPORT = "rank-00001.json"


def cut_in_half(path):
    os.truncate(path, path.stat().st_size // 2)


# For each damage the file or the folder, and what is done to it.
DAMAGES = {
    "no report of one rank": (REPORT, os.unlink),
    "an empty report": (REPORT, lambda path: os.truncate(path, 0)),
    "half a report": (REPORT, cut_in_half),
    "the report of another rank": (REPORT, lambda path: shutil.copy(path.with_name("rank-00000.json"), path)),
    "no files": ("content", shutil.rmtree),
    **{f"a file that is {loss}": (f"content/{files.file_name(1)}", lose) for loss, (lose, _) in LOSSES.items()},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_leftover_is_not_completed(damage, leftover):
    """A start leaves it as it is, and the next save removes it."""
    name, spoil = DAMAGES[damage]
    spoil(leftover / name)
    before = {path for path in contents(leftover) if not path.startswith("content/manifest")}
    assert spmd(lambda: start(leftover.parent), 3) == [1] * 3
    assert before <= set(contents(leftover))
    save(leftover.parent, 3, ranks=2)
    assert names(leftover.parent) == [FIRST, "step-00000003.1"]
    assert_restores(leftover.parent, 2, 3)


def refuse_to_write(path, data):
    raise OSError(28, "No space left on device")


def test_a_full_disk_loses_no_leftover(leftover, monkeypatch):
    """A later start completes it, before what was saved meanwhile."""
    with monkeypatch.context() as patched:
        fail_writes(patched, "manifest-")
        assert start(leftover.parent) == 1
        text = refused(lambda: checkpoint.save(leftover.parent, {"w": 3}, 3), CheckpointError)
        assert text.endswith("No space left on device")
    assert leftover.is_dir()
    with monkeypatch.context() as patched:
        patched.setattr(unfinished.files, "write_file", refuse_to_write)
        assert unfinished.complete_leftovers(leftover.parent) == []
    assert start(leftover.parent) == 2
    assert names(leftover.parent) == [FIRST, SECOND]


def test_starts_and_saves_of_several_jobs_at_once(leftover, tmp_path):
    """Ranks of two jobs, a rank of the killed one that is left, and a job that saves at once."""
    for number in range(30):
        directory = tmp_path / f"{number}"
        shutil.copytree(leftover.parent, directory)
        survivor = Unfinished(directory / leftover.name)
        starts = [partial(start, directory)] * 6
        *steps, late, last = at_once([*starts, survivor.complete, partial(checkpoint.save, directory, {"w": 3}, 3)])
        # A start may come after the save.
        assert set(steps) <= {2, 3}
        assert late == []
        assert last.wait().name == THIRD
        assert names(directory) == [FIRST, SECOND, THIRD]
        assert checkpoint.restore(directory, {"w": torch.zeros(6)}, step=2)["w"].equal(torch.arange(6.0) + 2)


def test_a_directory_is_removed_while_another_removes_it(leftover, monkeypatch):
    """A rank of a killed run that is left may remove its files at the moment in which a save does."""
    unlink = os.unlink
    taken = []

    def unlink_second(name, **options):
        unlink(name, **options)
        if not taken:
            taken.append(name)
            raise FileNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink_second)
        remove_directory(leftover)
    assert taken
    assert names(leftover.parent) == [FIRST]


def test_one_rank_chooses_what_all_restore(tmp_path, monkeypatch):
    """A checkpoint may be completed between the looks of two ranks."""
    for step in (1, 2):
        save(tmp_path, step, ranks=2)
    listdir = os.listdir

    def listdir_before(path):
        """Let the first rank look before the second checkpoint is complete."""
        return [name for name in listdir(path) if my_rank() or name != SECOND]

    monkeypatch.setattr(os, "listdir", listdir_before)
    assert_restores(tmp_path, 2, 1)
