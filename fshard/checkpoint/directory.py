"""The directory of checkpoints: names, a lock, and changes that a kill leaves whole or undone."""

import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from fshard.checkpoint.errors import CheckpointError
from fshard.checkpoint.files import (
    make_temporary,
    named,
    read_bytes,
    remove_leftovers,
    sync,
    temporary_path,
    write_bytes,
)
from fshard.checkpoint.manifest import MANIFEST, digest

# The step, and which of several saves of it.
_SAVED = re.compile(r"step-([0-9]{8,18})(?:\.([0-9]{1,9}))?")
# Directories that are being made, or removed.
_LEFTOVERS = r"\.(?:saving|old)-.*"
LATEST, LOCK = "latest", ".lock"


def saved(directory: Path) -> dict[tuple[int, int], Path]:
    """Complete checkpoints, by step and save, in order: a directory has its name only once it is complete."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    keys = [(int(match[1]), int(match[2] or 0)) for match in map(_SAVED.fullmatch, names) if match]
    # Numbers have other spellings, which no save writes.
    return {key: directory / _name(*key) for key in sorted(keys) if _name(*key) in names}


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name[len("step-") :].partition(".")[0])


def latest_path(directory: Path) -> Path | None:
    """The checkpoint that was saved last.

    Raises:
        CheckpointError: if the file that names it is damaged.
    """
    checkpoints = saved(directory)
    try:
        data = read_bytes(directory / LATEST, 1000)
    except FileNotFoundError:
        # A kill between the first checkpoint and the file leaves one checkpoint.
        return list(checkpoints.values())[-1] if checkpoints else None
    for path in checkpoints.values():
        if data == _naming(path.name):
            return path
    remedy = f"pass step= one of those that are there: {_steps(checkpoints)}"
    raise CheckpointError(f"{directory / LATEST}: expected the name of a checkpoint, got {data!r:.100}; {remedy}")


def path_of(directory: Path, step: int) -> Path:
    """The checkpoint that was saved last of a step.

    Raises:
        CheckpointError: if there is none.
    """
    checkpoints = saved(directory)
    found = [path for (number, _), path in checkpoints.items() if number == step]
    if not found:
        raise CheckpointError(f"{directory}: found no checkpoint of step {step}, only of {_steps(checkpoints)}")
    return found[-1]


def _steps(checkpoints: dict[tuple[int, int], Path]) -> str:
    return ", ".join(dict.fromkeys(str(step) for step, _ in checkpoints)) or "none"


def _name(step: int, number: int) -> str:
    return f"step-{step:08d}" + (f".{number}" if number else "")


def _naming(name: str) -> bytes:
    """The content of `latest`; the digest tells a damaged name from another one's."""
    return f"{name} {digest(name.encode())}\n".encode()


def lock(directory: Path) -> IO[bytes]:
    """Make the directory where there is none, and become the only one that writes to it until the file is closed.

    Raises:
        CheckpointError: if another process, or another save of this one, is writing to it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Writing follows no link.
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    file = os.fdopen(descriptor, "ab+", buffering=0)
    try:
        # The kernel gives the lock back when a process is killed.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        by = file.read(100).decode(errors="replace").strip() or "another process"
        file.close()
        remedy = "which is saving there; wait for it, or save to another directory"
        raise CheckpointError(f"{directory}: expected to be alone, got {by}, {remedy}") from None
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} of {os.uname().nodename}".encode())
        remove_leftovers(directory, _LEFTOVERS)
    except BaseException:
        unlock(file)
        raise
    return file


def unlock(file: IO[bytes]) -> None:
    """Give the directory back, also where a process forked meanwhile has the file open still."""
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def make(directory: Path, step: int) -> Path:
    """Make the directory of a checkpoint that is not complete yet."""
    return make_temporary(directory, f".saving-{step:08d}")


def is_ours(path: Path) -> bool:
    """Whether a directory is a checkpoint, by its manifest; a link to one is not."""
    return not path.is_symlink() and (path / MANIFEST).is_file()


def publish(temporary: Path, directory: Path, step: int) -> Path:
    """Give a complete checkpoint its name, and make it the latest."""
    number = max((save for (there, save) in saved(directory) if there == step), default=-1) + 1
    path = directory / _name(step, number)
    with named(path):
        sync(temporary)
        os.rename(temporary, path)
        sync(directory)
    write_bytes(directory / LATEST, _naming(path.name))
    with named(directory / LATEST):
        sync(directory)
    return path


def prune(directory: Path, keep: int) -> None:
    """Remove all but a number of checkpoints: of those no later than the latest the newest are kept."""
    newest = latest_path(directory)
    ours = {key: path for key, path in saved(directory).items() if is_ours(path)}
    # Of a step that was saved more than once only the last can be asked for.
    steps = list({step: path for (step, _), path in ours.items()}.values())
    # Where a run went back, the checkpoints ahead of it are abandoned and go first.
    behind = steps.index(newest) + 1 if newest else 0
    kept = steps[:behind][-keep:]
    kept += steps[behind:][: keep - len(kept)]
    for path in ours.values():
        if path not in kept:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, which loses its name first, so that no half of one is ever taken for one."""
    doomed = temporary_path(path.parent, f".old-{path.name}")
    # Where it cannot be, nothing is lost.
    with suppress(OSError):
        os.rename(path, doomed)
        shutil.rmtree(doomed)
