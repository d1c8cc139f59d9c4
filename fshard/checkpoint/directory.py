"""The directory of checkpoints: names, a lock, and changes that a kill leaves whole or undone."""

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from fshard.checkpoint.errors import CheckpointError, expect_file
from fshard.checkpoint.files import MANIFEST
from fshard.errors import short

# The step, in the one spelling that saves write, and the number of the save, which counts on in a directory.
_SAVED = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.(0|[1-9][0-9]*)")
# Directories that are being made, or removed.
_LEFTOVER = re.compile(rf"\.(?:saving|old)-{_SAVED.pattern}")


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it, but no pipe or device, which might never end; links are followed."""
    expect_file(stat.S_ISREG(path.stat().st_mode), f"{path}", "a regular file", "something else")
    return open(path, "rb")


def saved(directory: Path) -> list[tuple[int, int, Path]]:
    """List complete checkpoints in the order of their saves: the number of the save, the step and the path.

    A directory has its name only once it is complete.
    """
    matches = map(_SAVED.fullmatch, os.listdir(directory) if directory.exists() else ())
    return sorted((int(match[2]), int(match[1]), directory / match[0]) for match in matches if match)


def find(directory: Path, step: int | None) -> tuple[int, Path]:
    """Return the step and the path of the checkpoint that was saved last, in all or of a step.

    Raises:
        CheckpointError: if there is none.
    """
    there = saved(directory)
    found = [(number, path) for _, number, path in there if step in (None, number)]
    needed = "a checkpoint that fs.checkpoint.save wrote" if step is None else f"a checkpoint of step {step}"
    expect_file(found, f"{directory}", needed, short(", ".join(path.name for *_, path in there)) or "none")
    return found[-1]


@contextmanager
def begun(directory: Path, step: int) -> Iterator[str]:
    """Be the only one that saves to a directory, and make the directory of a new checkpoint in it.

    Returns:
        A context with the name that the checkpoint gets; a part left of it is removed when the context ends.

    Raises:
        CheckpointError: if another process, or another save of this one, is writing there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Writing follows no link.
    lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            # The kernel gives the lock back when a process is killed.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{directory}: another save there is not complete; wait for it, or save to another directory"
            raise CheckpointError(text) from None
        # Also where a process forked meanwhile has the file open still.
        stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        for name in filter(_LEFTOVER.fullmatch, os.listdir(directory)):
            # One that cannot be removed stays, and so does a link.
            shutil.rmtree(directory / name, ignore_errors=True)
        number = max((number for number, *_ in saved(directory)), default=-1) + 1
        path = directory / f"step-{step:08d}.{number}"
        unfinished(path).mkdir()
        stack.callback(shutil.rmtree, unfinished(path), ignore_errors=True)
        yield path.name


def unfinished(path: Path) -> Path:
    """The directory of a checkpoint until it is complete."""
    return path.with_name(f".saving-{path.name}")


def publish(path: Path, keep: int | None) -> None:
    """Give a complete checkpoint its name, which makes it the latest, and then keep so many."""
    directory, temporary = path.parent, unfinished(path)
    _sync(temporary)
    os.rename(temporary, path)
    _sync(directory)
    # Directories without a manifest, and links, are none of ours.
    paths = [each for *_, each in saved(directory) if keep and not each.is_symlink() and (each / MANIFEST).is_file()]
    for old in paths[: -(keep or 1)]:
        # One that cannot be removed stays, and nothing is lost.
        with suppress(OSError):
            # It loses its name first, so that no half of one is ever taken for one.
            os.rename(old, doomed := directory / f".old-{old.name}")
            shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    """Have the content of a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
