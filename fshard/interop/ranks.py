"""Errors that every rank raises, and checks that every rank passes the same arguments."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from fshard import _compat, comm
from fshard.errors import Problem, expect, refuse
from fshard.mesh import world
from fshard.tree import Axis, Flat


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message names the file or the leaf.

    >>> import tempfile, torch, fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     try:
    ...         state = fs.checkpoint.restore(directory, like={"w": torch.zeros(3)})
    ...     except fs.checkpoint.CheckpointError as error:
    ...         print(error)
    checkpoint.restore: ...: expected a checkpoint that fs.checkpoint.save wrote, got none
    """


# Refuses a file unless it is as expected.
expect_file = partial(expect, error=CheckpointError)

# The remedy where a pickle is refused.
TRUST = "pass trusted=True if you trust whoever wrote it"

# The types that a caller may handle; any other exception becomes the first of them.
_KINDS = (CheckpointError, ImportError, TypeError, ValueError, RuntimeError)


@contextmanager
def raise_on_all_ranks(label: str, place: object = "", ranks: Axis | None = None) -> Iterator[None]:
    """Raise on every rank the first exception that any of them raises inside, where no rank may wait for another.

    Args:
        label: The public function, for the error.
        place: The file or directory that an error is about which names none.
        ranks: The ranks; None for all of this run.
    """
    failure, said = None, (0, "")
    try:
        yield
    except Exception as error:
        failure, text = error, reason(error, place)
        named = isinstance(error, CheckpointError | OSError)
        kind = next((i for i, kind in enumerate(_KINDS) if type(error) is kind), 0)
        said = kind, f"{label}: {text}" if named else text
    for kind, text in comm.everyone(said, [ranks or world()], label):
        if text:
            raise _KINDS[kind](text) from failure


def reason(error: BaseException, place: object = "") -> str:
    """Return the text of an error, with the file that it is about."""
    if isinstance(error, OSError):
        return f"{error.filename or place}: {error.strerror or error}"
    return str(error) or type(error).__name__


def agree(
    label: str,
    entries: Mapping[str, str],
    what: str = "ranks hold different leaves",
    remedy: str = "make what is not Sharded the same on every rank, and read the same files",
    ranks: Axis | None = None,
) -> None:
    """Refuse on every rank entries that differ between ranks."""
    difference = comm.disagreement(entries, [ranks or world()], label)
    refuse(f"{label}: {what}", [difference] if difference else [], remedy)


def check_call(label: str, flat: Flat) -> None:
    """Refuse a call inside a trace or a transform, where tensors have no values, and leaves of one path.

    Raises:
        ValueError: inside of fs.jit or torch.func, or with each path that several leaves have.
    """
    plain = not (_compat.is_tracing() or _compat.transforms_active())
    expect(plain, label, "a call outside of fs.jit and torch.func, on their results", "one inside")
    counts = Counter(flat.paths).items()
    problems = [Problem(path, f"{n} leaves", "one of each path") for path, n in counts if n > 1]
    refuse(f"{label}: leaves of one path", problems, "give keys that print differently")


def check_path(label: str, name: str, path: Any) -> Path:
    """Return the path of a file or a directory, and refuse an argument of another type."""
    # No file has a name with a null character.
    known = isinstance(path, str | PathLike) and str(path) and "\0" not in str(path)
    expect(known, label, f"{name} to be a path", f"{path!r:.40}")
    return Path(path)


def refuse_untrusted(path: object, trusted: bool) -> None:
    """Refuse to read a pickle unless the caller has passed trusted=True."""
    if not trusted:
        remedy = f"{TRUST}, or have it written as safetensors"
        raise CheckpointError(f"{path} is pickled, and reading it can run code of its author; {remedy}")
