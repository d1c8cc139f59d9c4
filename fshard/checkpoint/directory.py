"""The directory of checkpoints: names, a lock, and changes that a kill leaves whole or undone."""

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from io import BufferedReader
from pathlib import Path

from fshard.checkpoint.errors import CheckpointError, expect_file
from fshard.checkpoint.files import MANIFEST
from fshard.errors import shorten

# The step, in the one spelling that saves write, and the number of the save, which counts on in a directory.
_SAVED = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.(0|[1-9][0-9]*)")
# Directories that are being made or removed. The mark of a save follows its name, where there is one.
_SAVING = ".saving-"
_OLD = ".old-"
_MARK = "[0-9a-f]{16}"
_UNFINISHED = re.compile(rf"\.saving-({_SAVED.pattern})\.{_MARK}")
_LEFTOVER = re.compile(rf"\.(?:saving|old)-{_SAVED.pattern}(?:\.{_MARK})?")


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
    expect_file(found, f"{directory}", needed, shorten(", ".join(path.name for *_, path in there)) or "none")
    return found[-1]


def lock(directory: Path) -> Callable[[], None]:
    """Be the only one that saves to a directory, which is made where there is none.

    Returns:
        A function that lets others save there. Further calls of it do nothing.

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
        return stack.pop_all().close


def leftovers(directory: Path) -> list[Path]:
    """List the directories of checkpoints that are being made or removed; links are none of ours."""
    names = os.listdir(directory) if directory.is_dir() else ()
    paths = [directory / name for name in sorted(filter(_LEFTOVER.fullmatch, names))]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def new_name(directory: Path, step: int) -> str:
    """Return the name of the next checkpoint in a directory."""
    numbers = [number for number, *_ in saved(directory)]
    # A later start may complete a leftover that is still there.
    matches = (_LEFTOVER.fullmatch(path.name) for path in leftovers(directory))
    numbers += [int(match[2]) for match in matches if match]
    return f"step-{step:08d}.{max(numbers, default=-1) + 1}"


def unfinished(path: Path, mark: str) -> Path:
    """The directory of a checkpoint until it is complete.

    Args:
        path: The checkpoint.
        mark: Tells this save from every other one, so that a rank of a killed run never writes to the files of a later
            run that saves under the same name.
    """
    return path.with_name(f"{_SAVING}{path.name}.{mark}")


def checkpoint_of(leftover: Path) -> Path | None:
    """The checkpoint that an unfinished directory was to become; None of a directory that is being removed."""
    match = _UNFINISHED.fullmatch(leftover.name)
    return leftover.with_name(match[1]) if match else None


def remove(path: Path) -> None:
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
    ours = [path for *_, path in saved(directory) if not path.is_symlink() and (path / MANIFEST).is_file()]
    for path in ours[:-count]:
        remove(path)


def sync(path: Path) -> None:
    """Have the content of a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
