"""Whose generations are read, and what is refused: jobs, users, memory that is full."""

import os
from pathlib import Path

import pytest

from fshard import checkpoint
from fshard.ext.memory import slots
from fshard.ext.memory.job_directory import JOB_VARIABLES
from fshard.testing import spmd
from tests.checkpoint.states import assert_same, full, refused, refused_everywhere, split, zeros_like
from tests.ext.memory.jobs import be_job, manager, save_steps, slots_in
from tests.ranks import my_rank

NO_JOB = "checkpoint.Manager: memory= has no effect, because a restart could not be told from a new run"


@pytest.fixture(autouse=True)
def job(monkeypatch):
    be_job(monkeypatch)


@pytest.mark.parametrize("variable", JOB_VARIABLES)
def test_a_restart_keeps_the_job_and_a_new_launch_changes_it(variable, tmp_path, monkeypatch):
    """After a new launch the disk counts, and its first save removes what the job before has left."""
    be_job(monkeypatch, "", **{variable: "1"})
    save_steps(tmp_path, full, 3)
    assert manager(tmp_path).latest_step() == 3
    be_job(monkeypatch, "", **{variable: "2"})
    restarted = manager(tmp_path)
    assert restarted.latest_step() is None
    restarted.save(full(1), 1)
    assert len(slots_in(tmp_path)) == 1
    assert restarted.latest_step() == 1


def test_a_job_that_runs_keeps_its_generations_when_another_saves_to_its_checkpoints(tmp_path, monkeypatch):
    """As where a program is launched twice by mistake; what the ended one has left is removed by the next job."""
    running = manager(tmp_path)
    running.save(full(3), 3)
    be_job(monkeypatch, "2")
    save_steps(tmp_path, full, 1)
    be_job(monkeypatch, "1")
    assert manager(tmp_path).latest_step() == 3
    del running
    be_job(monkeypatch, "3")
    save_steps(tmp_path, full, 2)
    assert len(slots_in(tmp_path)) == 1


def test_a_manager_that_closes_keeps_what_another_one_still_saves(tmp_path):
    """As one that evaluates beside the training, in the same process or in another one."""

    def program():
        kept = manager(tmp_path)
        for step in (1, 2):
            kept.save(split(step), step)
            with manager(tmp_path) as other:
                assert_same(other.restore(zeros_like(split(0))), split(step))
            assert manager(tmp_path).latest_step() == step
        kept.close()

    spmd(program, 2)
    assert list((tmp_path / "memory").iterdir()) == []


def test_other_directories_of_one_job_are_apart(tmp_path):
    save_steps(tmp_path / "a", full, 3)
    for directory in (tmp_path / "a", tmp_path / "b"):
        with checkpoint.Manager(directory, memory=tmp_path / "a/memory") as other:
            assert other.latest_step() is None
    assert manager(tmp_path / "a").latest_step() == 3


@pytest.mark.parametrize("name", ("", "none"))
def test_without_a_job_nothing_is_kept(name, tmp_path, monkeypatch):
    """torchrun with a port and without an id says none, which would be the same for the next run."""
    be_job(monkeypatch, "", TORCHELASTIC_RUN_ID=name)
    with pytest.warns(UserWarning, match=NO_JOB) as warned:
        spmd(lambda: manager(tmp_path).save(full(1), 1), 2)
    assert len(warned) == 1
    assert not (tmp_path / "memory").exists()


def test_ranks_of_different_jobs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fshard.ext.memory.generations.find_job", lambda: f"{my_rank()}")
    text = refused_everywhere(lambda: manager(tmp_path).save(full(1), 1))
    assert text.startswith("checkpoint.save: ranks hold different leaves\n  (job): expected '")


def test_the_directory_is_of_this_user_alone(tmp_path):
    save_steps(tmp_path, full, 1)
    (job,) = (tmp_path / "memory").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (job, job.parent)] == [0o700, 0o700]
    text = f"expected a directory of user {os.geteuid()} with mode 700, got one of user {os.geteuid()}"
    for path in (job.parent, job):
        path.chmod(0o750)
        for call in (lambda: manager(tmp_path).latest_step(), lambda: manager(tmp_path).save(full(2), 2)):
            error = refused(call, checkpoint.CheckpointError)
            assert f"{path}: {text}, drwxr-x---; remove it, or pass another directory as memory=" in error
        path.chmod(0o700)
    assert manager(tmp_path).latest_step() == 1


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    save_steps(tmp_path, full, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    error = refused(lambda: manager(tmp_path).latest_step(), checkpoint.CheckpointError)
    assert "expected a directory of user 12345 with mode 700" in error


def test_a_link_is_not_followed(tmp_path):
    save_steps(tmp_path, full, 1)
    (job,) = (tmp_path / "memory").iterdir()
    job.rename(tmp_path / "elsewhere")
    job.symlink_to(tmp_path / "elsewhere")
    for call in (lambda: manager(tmp_path).latest_step(), lambda: manager(tmp_path).save(full(2), 2)):
        assert f"{job}: expected a directory of user" in refused(call, checkpoint.CheckpointError)


@pytest.mark.parametrize("failing_rank", (0, 1))
def test_memory_that_is_full(failing_rank, tmp_path, monkeypatch):
    """Every rank says so, whichever has no room; what was whole stays, and so does the next save when there is room."""
    spmd(lambda: save_steps(tmp_path, split, 1, 2), 2)
    fallocate = os.posix_fallocate

    def fail(descriptor, offset, size):
        if my_rank() == failing_rank:
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, size)

    with monkeypatch.context() as patches:
        patches.setattr(os, "posix_fallocate", fail)
        text = refused_everywhere(lambda: manager(tmp_path).save(split(3), 3), kind=checkpoint.CheckpointError)
    remedy = "Each rank keeps two such files: make room there, or pass another directory as memory="
    assert f"/rank-0000{failing_rank}.1: cannot set 4" in text
    assert text.endswith(f" bytes aside (No space left on device). {remedy}")
    assert spmd(lambda: manager(tmp_path).latest_step(), 2) == [2, 2]

    def save_again():
        kept = manager(tmp_path)
        kept.save(split(3), 3)
        assert_same(kept.restore(split(0)), split(3))

    spmd(save_again, 2)


def test_a_file_system_that_is_really_full():
    """More than /dev/shm can ever hold is refused before anything is written, and nothing of it stays."""
    size = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    file = Path(f"/dev/shm/fshard-test-{os.getpid()}")
    error = refused(lambda: slots._allocate(file, 2 * size), checkpoint.CheckpointError)
    assert error.startswith(f"{file}: cannot set {2 * size} bytes aside (")
    assert not file.exists()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"memory": 3}, "checkpoint.Manager: expected memory to be a path, got 3"),
        ({"memory": None}, "checkpoint.Manager: expected memory to be a path, got None"),
        ({"memory": ""}, "checkpoint.Manager: expected memory to be a path, got ''"),
        ({"memory_every": 0}, "checkpoint.Manager: expected memory_every to be a whole number from 1, got 0"),
    ],
)
def test_wrong_arguments(options, text, tmp_path):
    assert refused(lambda: checkpoint.Manager(tmp_path, **options)) == text
