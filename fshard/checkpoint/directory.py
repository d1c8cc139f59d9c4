"""The directory of checkpoints: names, a lock, and changes that a kill leaves whole or undone."""

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from fshard.checkpoint.errors import expect_file
from fshard.checkpoint.files import MANIFEST, digest, write_file

# The step, in the one spelling that saves write, and which of several saves of it.
_SAVED = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(?:\.([1-9][0-9]{0,8}))?")
# Directories that are being made, or removed.
_LEFTOVER = re.compile(r"\.(?:saving|old)-.*-[0-9a-f]{16}")
LATEST, LOCK = "latest", ".lock"


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it, but no pipe or device, which might never end; links are followed."""
    expect_file(stat.S_ISREG(path.stat().st_mode), f"{path}", "a regular file", "something else")
    return open(path, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file of at most so many bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        expect_file(size <= limit, f"{path}", f"at most {limit} bytes", f"{size}")
        # A read of the limit would take memory for all of it.
        return file.read(size)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or not at all; `sync` of its directory has it stay when power fails."""
    beside = path.with_name(f".{path.name}.part")
    # A kill may have left one, and writing follows no link.
    beside.unlink(missing_ok=True)
    write_file(beside, data)
    os.replace(beside, path)


def sync(path: Path) -> None:
    """Have the content of a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def saved(directory: Path) -> dict[tuple[int, int], Path]:
    """Complete checkpoints, by step and save, in order: a directory has its name only once it is complete."""
    matches = map(_SAVED.fullmatch, os.listdir(directory) if directory.exists() else ())
    found = {(int(match[1]), int(match[2] or 0)): directory / match[0] for match in matches if match}
    return dict(sorted(found.items()))


def find(directory: Path, step: int | None = None) -> tuple[int, Path] | None:
    """Return the checkpoint that was saved last, in all or of a step, and its step; None where there is none at all.

    Raises:
        CheckpointError: if there is none of the step, or the file that names the last one is damaged.
    """
    checkpoints = [(number, path) for (number, _), path in saved(directory).items()]
    found, needed, latest = checkpoints, "", directory / LATEST
    if step is not None:
        found, needed = [each for each in found if each[0] == step], f"a checkpoint of step {step}"
    # A kill between the first checkpoint and the file leaves no file.
    elif os.path.lexists(latest):
        data = read_bytes(latest, 1000)
        found, needed = [each for each in found if _naming(each[1]) == data], f"{latest} to name a checkpoint"
    steps = ", ".join(dict.fromkeys(f"{number}" for number, _ in checkpoints)) or "none"
    expect_file(found or not needed, f"{directory}", needed, f"steps {steps}", "pass step= one that is there")
    return found[-1] if found else None


def _naming(path: Path) -> bytes:
    """The content of `latest`; the digest tells a damaged name from another one's."""
    return f"{path.name} {digest(path.name.encode())}\n".encode()


@contextmanager
def begun(directory: Path, step: int) -> Iterator[str]:
    """Be the only one that saves to a directory, and make the directory of a new checkpoint in it.

    Returns:
        A context with the name of the new directory; what is left of it is removed when the context ends.

    Raises:
        CheckpointError: if another process, or another save of this one, is writing there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Writing follows no link.
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            # The kernel gives the lock back when a process is killed.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for it, or save to another directory"
            expect_file(False, f"{directory}", "no other save to be under way there", "one", remedy)
        # Also where a process forked meanwhile has the file open still.
        stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        for name in filter(_LEFTOVER.fullmatch, os.listdir(directory)):
            # One that cannot be removed stays, and so does a link.
            shutil.rmtree(directory / name, ignore_errors=True)
        made = _temporary(directory, f".saving-{step:08d}")
        made.mkdir()
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        yield made.name


def publish(temporary: Path, directory: Path, step: int) -> Path:
    """Give a complete checkpoint its name, and make it the latest."""
    number = max((save for (there, save) in saved(directory) if there == step), default=-1) + 1
    path = directory / (f"step-{step:08d}" + (f".{number}" if number else ""))
    sync(temporary)
    os.rename(temporary, path)
    sync(directory)
    write_bytes(directory / LATEST, _naming(path))
    sync(directory)
    return path


def prune(directory: Path, latest: Path, keep: int) -> None:
    """Remove all but a number of checkpoints; directories without a manifest, and links, are none of ours."""
    ours = {
        key: path for key, path in saved(directory).items() if not path.is_symlink() and (path / MANIFEST).is_file()
    }
    # Of a step that was saved more than once only the last can be asked for.
    steps = list({step: path for (step, _), path in ours.items()}.values())
    behind = steps.index(latest) + 1
    # Where a run went back, the checkpoints ahead of it are abandoned and go first.
    kept = [*reversed(steps[behind:]), *steps[:behind]][-keep:]
    for path in ours.values():
        # One that cannot be removed stays, and nothing is lost.
        with suppress(OSError):
            if path not in kept:
                # It loses its name first, so that no half of one is ever taken for one.
                os.rename(path, doomed := _temporary(directory, f".old-{path.name}"))
                shutil.rmtree(doomed)


def _temporary(directory: Path, kind: str) -> Path:
    return directory / f"{kind}-{secrets.token_hex(8)}"
