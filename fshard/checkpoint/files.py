"""The directory of checkpoints: names, a lock, and writes that a kill leaves whole or undone."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fshard.checkpoint.format import HEAD, MANIFEST, MAX_MANIFEST_BYTES, NAME, CheckpointError, digest

# The step, and which of several saves of it.
_SAVED = re.compile(r"step-([0-9]{8,18})(?:\.([0-9]{1,9}))?")
# The files of a complete checkpoint.
_FILES = re.compile(rf"rank-[0-9]{{5,}}\.safetensors|{re.escape(MANIFEST)}")
LATEST, LOCK = "latest", ".lock"
# A directory that is not complete yet has this file, by which a later call knows that it may be removed.
MARK, MARKED = ".fshard", f"{NAME}\n".encode()
SAVING, OLD, EXPORTING = ".saving", ".old", ".exporting"
# What the process that holds the lock writes into it.
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
    """The step that the name of a checkpoint says."""
    match = _SAVED.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def pointed(directory: Path) -> Path | None:
    """The checkpoint that was saved last.

    Raises:
        CheckpointError: if the file that says so is damaged.
    """
    there = saved(directory)
    try:
        data = read_bytes(directory / LATEST, 1000)
    except FileNotFoundError:
        # Nobody was killed here but between the first checkpoint and the file.
        return list(there.values())[-1] if there else None
    for path in there.values():
        if data == _naming(path.name):
            return path
    remedy = f"pass step= one of those that are there: {_steps(there)}"
    raise CheckpointError(f"{directory / LATEST}: expected the name of a checkpoint, got {data!r:.100}; {remedy}")


def of_step(directory: Path, step: int) -> Path:
    """The checkpoint that was saved last of a step.

    Raises:
        CheckpointError: if there is none.
    """
    there = saved(directory)
    found = [path for (number, _), path in there.items() if number == step]
    if not found:
        raise CheckpointError(f"{directory}: found no checkpoint of step {step}, only of {_steps(there)}")
    return found[-1]


def _steps(there: dict[tuple[int, int], Path]) -> str:
    return ", ".join(dict.fromkeys(str(step) for step, _ in there)) or "none"


def _name(step: int, number: int) -> str:
    return f"step-{step:08d}" + (f".{number}" if number else "")


def _naming(name: str) -> bytes:
    """What names the latest checkpoint; the digest tells a damaged name from another one's."""
    return f"{name} {digest(name.encode())}\n".encode()


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file of at most so many bytes.

    Raises:
        CheckpointError: if it is larger, or a link or a device, which would lead elsewhere.
    """
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointError(f"{path}: expected at most {limit} bytes, got {size}")
        # The limit itself would be taken at once.
        return file.read(size)


def open_regular(path: Path) -> int:
    """Open a regular file for reading.

    Raises:
        CheckpointError: if it is a link or a device.
    """
    try:
        # Not to block on a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path}: expected a regular file, got a link") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: expected a regular file, got something else")
    return descriptor


def read_manifest(path: Path) -> bytes:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: if the checkpoint is a link, which would lead elsewhere.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path}: expected a directory, got a link")
    return read_bytes(path / MANIFEST, MAX_MANIFEST_BYTES)


def write_bytes(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a file that is there as a whole or not at all; `sync` of its directory has it stay when power fails."""
    beside = path.with_name(f".{path.name}.part")
    with named(path):
        # What a kill left; not to write through a link either.
        beside.unlink(missing_ok=True)
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(beside, path)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Have errors of the system name the file that they are about."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Have what a file or a directory holds on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(directory: Path) -> IO[bytes]:
    """Make the directory where there is none, and become the only one that writes to it until the file is closed.

    Raises:
        CheckpointError: if another process, or another save of this one, is writing to it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # The kernel gives the lock back when a process is killed.
    file = _open_lock(directory / LOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        writer = file.read(100).decode(errors="replace").strip() or "another process"
        file.close()
        remedy = "wait for it, or save to another directory"
        raise CheckpointError(
            f"{directory}: expected to be alone, got {writer}, which is saving there; {remedy}"
        ) from None
    try:
        _refuse_another_latest(directory / LATEST)
        file.truncate(0)
        file.write(_WRITER + f"{os.getpid()} of {os.uname().nodename}".encode())
        remove_leftovers(directory, SAVING, OLD)
    except BaseException:
        unlock(file)
        raise
    return file


def unlock(file: IO[bytes]) -> None:
    """Give the directory back, also where a process forked meanwhile has the file open still."""
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def _open_lock(path: Path) -> IO[bytes]:
    """Open the file of the lock; refuse one of that name that no save wrote."""
    try:
        file = open(path, "ab+", buffering=0, opener=_no_link)  # noqa: SIM115 - it stays open
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        raise CheckpointError(f"{path}: expected a regular file, got a link; {ELSEWHERE}") from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.seek(0)
        found = file.read(len(_WRITER))
        if found in (b"", _WRITER):
            return file
    file.close()
    raise CheckpointError(f"{path}: expected the lock of a save, got another file; {ELSEWHERE}")


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _refuse_another_latest(path: Path) -> None:
    """Refuse a file in the place of `latest` that no save wrote; beside checkpoints it is ours, and may be damaged."""
    try:
        found = read_bytes(path, 1000)
    except FileNotFoundError:
        return
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {ELSEWHERE}") from None
    name = found.decode(errors="replace").partition(" ")[0]
    if not found or (_SAVED.fullmatch(name) and found == _naming(name)):
        return
    if not any(map(is_ours, saved(path.parent).values())):
        raise CheckpointError(f"{path}: expected the name of a checkpoint, got {found!r:.100}; {ELSEWHERE}")


def make_temporary(directory: Path, kind: str) -> Path:
    """Make a directory for what is not complete yet.

    Args:
        directory: Where.
        kind: How its name begins: SAVING with the step, or EXPORTING.

    Returns:
        The new directory, with the mark.
    """
    path = _temporary(directory, kind)
    path.mkdir()
    try:
        (path / MARK).write_bytes(MARKED)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def _temporary(directory: Path, kind: str) -> Path:
    return directory / f"{kind}-{secrets.token_hex(8)}"


def remove_leftovers(directory: Path, *kinds: str) -> None:
    """Remove what calls that were killed left: directories of these kinds that have our mark or are empty.

    Args:
        directory: Where.
        kinds: How their names begin.
    """
    named = re.compile(rf"(?:{'|'.join(map(re.escape, kinds))})(?:-({_SAVED.pattern}|[0-9]{{8,18}}))?-[0-9a-f]{{16}}")
    for name in os.listdir(directory):
        path, match = directory / name, named.fullmatch(name)
        if not match or path.is_symlink():
            continue
        # One that cannot be removed stays.
        with contextlib.suppress(OSError):
            if _is_marked(path):
                shutil.rmtree(path)
            elif is_ours(path):
                # Killed just before it had its name, or after it had lost it.
                _clear(path, directory / match[1] if match[2] else path)
            else:
                # Killed before the mark, or after all was removed; nothing is lost with an empty one.
                path.rmdir()


def _is_marked(path: Path) -> bool:
    try:
        found = read_bytes(path / MARK, len(MARKED))
    except (OSError, CheckpointError):
        return False
    # A kill may have cut it short.
    return MARKED.startswith(found)


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
    newest = pointed(directory)
    there = {key: path for key, path in saved(directory).items() if is_ours(path)}
    # Of a step that was saved more than once only the last can be asked for.
    steps = list({step: path for (step, _), path in there.items()}.values())
    # Where a run went back, what lies ahead of it was given up and goes first.
    behind = steps.index(newest) + 1 if newest else 0
    kept = steps[:behind][-keep:]
    kept += steps[behind:][: keep - len(kept)]
    for path in there.values():
        if path not in kept:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, which loses its name first, so that no half of one is ever taken for one."""
    doomed = _temporary(path.parent, f"{OLD}-{path.name}")
    # Where it cannot be, nothing is lost.
    with contextlib.suppress(OSError):
        os.rename(path, doomed)
        _clear(doomed, path)


def _clear(path: Path, name: Path) -> None:
    """Remove the files of a checkpoint; a directory that has others in it gets its name back."""
    # By the manifest it is known for one of ours.
    for file in sorted(os.listdir(path), key=lambda file: file == MANIFEST):
        if _FILES.fullmatch(file) and stat.S_ISREG(os.lstat(path / file).st_mode):
            os.remove(path / file)
    try:
        path.rmdir()
    except OSError:
        if not os.path.lexists(name):
            os.rename(path, name)
