"""What the tests of generations in memory share: a job, its manager, and looks into its slots."""

import pytest

from fshard import checkpoint
from fshard.ext.memory.job_directory import JOB_VARIABLES


def be_job(monkeypatch: pytest.MonkeyPatch, name: str = "1", **variables: str) -> None:
    """Let the processes of this test belong to a job."""
    for variable in (*JOB_VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"FSHARD_JOB_ID": name, **variables}.items():
        monkeypatch.setenv(variable, value)


def manager(directory, **options):
    """A manager that writes to memory alone, unless it is told to write to the disk."""
    return checkpoint.Manager(directory / "disk", memory=directory / "memory", **{"every": 10**9, **options})


def slots_in(directory):
    """The slots that there are, by name."""
    return {path.name: path for path in sorted((directory / "memory").glob("*/rank-*"))}


def save_steps(directory, make, *steps):
    """Save the states that `make` makes of steps."""
    kept = manager(directory)
    for step in steps:
        kept.save(make(step), step)
