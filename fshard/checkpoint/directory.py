"""The directory of checkpoints: names, a lock, and changes that a kill leaves whole or undone."""

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from fshard.checkpoint.manifest import HEAD, MANIFEST, digest
from fshard.interop.files import (
    make_temporary,
    named,
    open_regular,
    read_bytes,
    remove_leftovers,
    sync,
    temporary_name,
    write_bytes,
)
from fshard.interop.ranks import CheckpointError

# The step, and which of several saves of it.
_SAVED = re.compile(r"step-([0-9]{8,18})(?:\.([0-9]{1,9}))?")
# The files of a complete checkpoint.
_FILES = re.compile(rf"rank-[0-9]{{5,}}\.safetensors|{re.escape(MANIFEST)}")
# Directories that are being made, which carry the step, or removed, which carry the name of the checkpoint.
_LEFTOVERS = rf"\.(?:saving-[0-9]{{8,18}}|old-(?P<name>{_SAVED.pattern}))"
LATEST, LOCK = "latest", ".lock"
# The process that holds the lock writes this into it, and which process it is.
_WRITER = b"process "
ELSEWHERE = "move it elsewhere, or save to another directory"


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
        CheckpointError: if another process, or another save of this one, is writing to it, or a file of another program
            is in the way.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        found = b"" if not os.path.lexists(directory / LATEST) else read_bytes(directory / LATEST, 1000)
        file = os.fdopen(open_regular(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab+", buffering=0)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {ELSEWHERE}") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    try:
        file.seek(0)
        writer = file.read(100)
        if not writer.startswith(_WRITER) and writer:
            raise CheckpointError(f"{directory / LOCK}: expected the lock of a save, got another file; {ELSEWHERE}")
        try:
            # The kernel gives the lock back when a process is killed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            by = writer.decode(errors="replace").strip() or "another process"
            remedy = "which is saving there; wait for it, or save to another directory"
            raise CheckpointError(f"{directory}: expected to be alone, got {by}, {remedy}") from None
        name = found.decode(errors="replace").partition(" ")[0]
        ours = not found or (_SAVED.fullmatch(name) and found == _naming(name))
        # Beside checkpoints of ours it is a damaged one of ours.
        if not ours and not any(map(is_ours, saved(directory).values())):
            wrong = f"expected the name of a checkpoint, got {found!r:.100}; {ELSEWHERE}"
            raise CheckpointError(f"{directory / LATEST}: {wrong}")
        file.truncate(0)
        file.write(_WRITER + f"{os.getpid()} of {os.uname().nodename}".encode())
        remove_leftovers(directory, _LEFTOVERS, _remove_leftover)
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


def _remove_leftover(path: Path) -> None:
    """Remove a leftover without the mark: a whole checkpoint that a kill left without its name, or an empty one."""
    if is_ours(path):
        match = re.match(_LEFTOVERS, path.name)
        _clear(path, path.parent / match["name"] if match and match["name"] else path)
    else:
        path.rmdir()


def is_ours(path: Path) -> bool:
    """Whether a directory is a checkpoint that a save wrote, by its manifest; no link is followed."""
    if path.is_symlink():
        return False
    try:
        descriptor = open_regular(path / MANIFEST)
    except (OSError, CheckpointError):
        return False
    with os.fdopen(descriptor, "rb") as file:
        return file.read(len(HEAD)) == HEAD.encode()


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
    doomed = path.with_name(temporary_name(f".old-{path.name}"))
    # Where it cannot be, nothing is lost.
    with suppress(OSError):
        os.rename(path, doomed)
        _clear(doomed, path)


def _clear(path: Path, name: Path) -> None:
    """Remove the files of a checkpoint; a directory that has others in it gets its name back."""
    # By the manifest, the last one, it is known for one of ours.
    for file in sorted(os.listdir(path), key=lambda file: file == MANIFEST):
        if _FILES.fullmatch(file) and stat.S_ISREG(os.lstat(path / file).st_mode):
            os.remove(path / file)
    try:
        path.rmdir()
    except OSError:
        if not os.path.lexists(name):
            os.rename(path, name)
