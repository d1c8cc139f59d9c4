"""The directory of checkpoints: names, a lock, and changes that a kill leaves whole or undone."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fshard.checkpoint.errors import CheckpointError
from fshard.checkpoint.files import MANIFEST
from fshard.errors import shorten

# The step, in the one spelling that saves write, and the number of the save, which counts on in a directory.
_SAVED = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.(0|[1-9][0-9]*)")
# Directories that are being made or removed. The number of ranks that write and the mark of a save follow its name.
_SAVING = ".saving-"
_OLD = ".old-"
_RANKS_AND_MARK = r"\.([1-9][0-9]{0,8})\.[0-9a-f]{16}"
UNFINISHED = re.compile(rf"\.saving-({_SAVED.pattern}){_RANKS_AND_MARK}")
_LEFTOVER = re.compile(rf"\.(?:saving|old)-{_SAVED.pattern}(?:{_RANKS_AND_MARK})?")


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint; the one that was saved last is the largest.

    Attributes:
        number: The number of the save, which counts on in a directory.
        step: The step of its state.
        path: Its directory.
    """

    number: int
    step: int
    path: Path


def list_checkpoints(directory: Path) -> list[SavedCheckpoint]:
    """List complete checkpoints in the order of their saves. A directory has its name only once it is complete."""
    checkpoints = []
    for name in os.listdir(directory) if directory.exists() else ():
        if match := _SAVED.fullmatch(name):
            checkpoints.append(SavedCheckpoint(int(match[2]), int(match[1]), directory / name))
    return sorted(checkpoints)


def find_checkpoint(directory: Path, step: int | None) -> SavedCheckpoint:
    """Return the checkpoint that was saved last, in all or of a step.

    Raises:
        CheckpointError: if there is none.
    """
    checkpoints = list_checkpoints(directory)
    candidates = [checkpoint for checkpoint in checkpoints if step in (None, checkpoint.step)]
    if candidates:
        return candidates[-1]
    if not checkpoints:
        raise CheckpointError(f"{directory}: holds no checkpoint that fs.checkpoint.save wrote")
    names = ", ".join(checkpoint.path.name for checkpoint in checkpoints)
    raise CheckpointError(f"{directory}: holds no checkpoint of step {step}, but {shorten(names)}")


@contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Be the only one that saves to a directory, which is made where there is none, inside a context.

    Raises:
        CheckpointError: if another process, or another save of this one, is writing there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Writing follows no link.
    lock_file = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with os.fdopen(lock_file):
        try:
            # The kernel gives the lock back when a process is killed.
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for it, or save to another directory"
            raise CheckpointError(f"{directory}: another save there is not complete; {remedy}") from None
        try:
            yield
        finally:
            # Also where a process forked meanwhile has the file open still.
            fcntl.flock(lock_file, fcntl.LOCK_UN)


def list_leftovers(directory: Path) -> list[Path]:
    """List the directories of checkpoints that are being made or removed; links are none of ours."""
    names = os.listdir(directory) if directory.is_dir() else ()
    paths = [directory / name for name in sorted(filter(_LEFTOVER.fullmatch, names))]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def choose_name(directory: Path, step: int, ranks: int) -> Path:
    """Return the directory of the next checkpoint until it is complete.

    Its mark tells this save from every other one, so that a rank of a killed run never writes to the files of a later
    run that saves under the same name.

    Args:
        directory: The directory of checkpoints.
        step: The step of the state.
        ranks: How many ranks write.
    """
    numbers = [checkpoint.number for checkpoint in list_checkpoints(directory)]
    # A later start may complete a leftover that is still there.
    numbers += [int(leftover.name.split(".")[2]) for leftover in list_leftovers(directory)]
    number = max(numbers, default=-1) + 1
    return directory / f"{_SAVING}step-{step:08d}.{number}.{ranks}.{secrets.token_hex(8)}"


def remove_directory(path: Path) -> None:
    """Remove a directory. One that cannot be removed stays, and so does a link.

    The directory loses its name first, so that nobody takes half of it for a checkpoint, or completes it.
    """
    if path.is_symlink() or not path.is_dir():
        return
    doomed = path.with_name(f"{_OLD}{path.name.removeprefix(_SAVING).removeprefix(_OLD)}")
    with suppress(OSError):
        if doomed != path:
            os.rename(path, doomed)
        # Goes on where another that removes the same files at once was faster with one of them.
        shutil.rmtree(doomed, ignore_errors=True)


def keep_newest(directory: Path, count: int | None) -> None:
    """Remove all checkpoints but those saved last; None keeps all."""
    if count is None:
        return
    # Directories without a manifest, and links, are none of ours.
    paths = [checkpoint.path for checkpoint in list_checkpoints(directory)]
    removable = [path for path in paths if not path.is_symlink() and (path / MANIFEST).is_file()]
    for path in removable[:-count]:
        remove_directory(path)


def sync_directory(path: Path) -> None:
    """Have the content of a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
