"""Files that appear whole or not at all, and directories in the making, which a later call removes after a kill."""

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from fshard.checkpoint.errors import CheckpointError, expect_file, reason

EXPORTING = ".exporting"


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file in an error of the system."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(reason(error, path)) from error


def open_regular(path: Path) -> int:
    """Open a regular file for reading, where another kind of file might never end.

    Raises:
        CheckpointError: if it is a pipe, a device or a directory.
    """
    # Not to block on a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: expected a regular file, got something else")
    return descriptor


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file of at most so many bytes.

    Raises:
        CheckpointError: if it is larger, or no file.
    """
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        expect_file(size <= limit, str(path), f"at most {limit} bytes", str(size))
        # A read of the limit would take memory for all of it.
        return file.read(size)


def write_bytes(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a file that is there as a whole or not at all; `sync` of its directory has it stay when power fails."""
    beside = path.with_name(f".{path.name}.part")
    with named(path):
        # A kill may have left one.
        beside.unlink(missing_ok=True)
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(beside, path)


def sync(path: Path) -> None:
    """Have the content of a file or a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_temporary(directory: Path, kind: str) -> Path:
    """Make a directory inside another one, so that a move between them is a rename."""
    path = temporary_path(directory, kind)
    path.mkdir()
    return path


def temporary_path(directory: Path, kind: str) -> Path:
    """A new path of a directory in the making, or of one that is being removed."""
    return directory / f"{kind}-{secrets.token_hex(8)}"


def remove_leftovers(directory: Path, kind: str) -> None:
    """Remove temporary directories that killed calls left; no link is followed.

    Args:
        directory: The directory that has them in it.
        kind: A regular expression of how their names begin.
    """
    for name in os.listdir(directory):
        if re.fullmatch(rf"{kind}-[0-9a-f]{{16}}", name):
            # One that cannot be removed stays, and so does a link.
            shutil.rmtree(directory / name, ignore_errors=True)


def refuse_taken(directory: Path, names: Sequence[str]) -> None:
    """Refuse to write over files."""
    for name in names:
        remedy = "write to another directory, or remove what is there"
        expect_file(not os.path.lexists(directory / name), f"{directory / name}", "no file of that name", "one", remedy)


def move(temporary: Path, directory: Path, deciding: Sequence[str]) -> None:
    """Move the files of a temporary directory to another one, the deciding ones last, and remove it."""
    sync(temporary)
    names = sorted(os.listdir(temporary), key=lambda name: (name in deciding, name))
    refuse_taken(directory, names)
    moved = []
    try:
        for name in names:
            os.replace(temporary / name, directory / name)
            moved.append(name)
    except BaseException:
        # Else they would be in the way of the next export.
        for name in moved:
            os.rename(directory / name, temporary / name)
        raise
    temporary.rmdir()
    sync(directory)
