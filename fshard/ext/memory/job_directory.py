"""The directory of a job in the host's memory: found again by a restart, and by no other job or user."""

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from fshard.extend import expect_file, files, find_machine, read_environment

# What launchers call a job. Restarts keep the name, and a new launch changes it. The first variable that is set counts.
JOB_VARIABLES = (
    "FSHARD_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "RAY_JOB_ID",
)


def find_job() -> str | None:
    """Return the name of the job that this process belongs to; None if no launcher says one."""
    environment = read_environment()
    for variable in JOB_VARIABLES:
        name = environment.get(variable)
        # torchrun calls every run "none" that has a port and no id.
        if name not in (None, "", "none"):
            return name
    return None


def find_directory(root: Path, checkpoints: Path) -> Path | None:
    """Return where this job keeps generations of a directory of checkpoints; None if no launcher names the job.

    Args:
        root: A directory of this user.
        checkpoints: The directory of checkpoints.
    """
    job = find_job()
    if job is None:
        return None
    # A host that starts again after a loss of power reads nothing that it may have written half.
    boot = find_machine().partition(" ")[0]
    names = os.path.abspath(checkpoints), f"{job} {boot}"
    return root / "-".join(files.digest(os.fsencode(name))[:16] for name in names)


def make_private(path: Path) -> None:
    """Make the directory of a job, and remove those of ended jobs that saved to the same checkpoints before.

    Raises:
        CheckpointError: if another user could read or write there.
    """
    for directory in (path.parent, path):
        directory.mkdir(0o700, parents=True, exist_ok=True)
    check_private(path)
    for stale in path.parent.glob(f"{path.name.partition('-')[0]}-*"):
        if stale != path:
            remove_unlocked_slots(stale)


def remove_unlocked_slots(path: Path) -> None:
    """Remove the directory of a job, unless somebody still saves there."""
    with suppress(OSError):
        for slot in path.glob("rank-*"):
            with open(slot) as file:
                # Whoever writes to it has a lock on it.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)


def check_private(path: Path) -> None:
    """Refuse the directory of a job if another user could read or write there, or it is a link."""
    for directory in (path.parent, path):
        status = directory.lstat()
        expected = f"a directory of user {os.geteuid()} with mode 700"
        got = f"one of user {status.st_uid}, {stat.filemode(status.st_mode)}"
        is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        remedy = "remove it, or pass another directory as memory="
        expect_file(is_private and status.st_uid == os.geteuid(), f"{directory}", expected, got, remedy)
