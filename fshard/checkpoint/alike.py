"""Errors on every rank alike."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from fshard import _compat, comm
from fshard.checkpoint.format import CheckpointError
from fshard.errors import Problem, leaf_error
from fshard.mesh import world
from fshard.tree import Flat

# What a caller may handle by its type; all else is a checkpoint's failure.
_KINDS = (CheckpointError, ImportError, TypeError, ValueError, RuntimeError)


@contextmanager
def alike(label: str, place: object = "") -> Iterator[None]:
    """Raise on every rank what any of them raises inside, where no rank may wait for another.

    Args:
        label: Who asks.
        place: The file or directory that errors are about which name none.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    for name, text in map(json.loads, comm.texts(json.dumps(_said(failure, label, place)), world(), label)):
        if text:
            kinds = {kind.__name__: kind for kind in _KINDS}
            raise kinds.get(name, CheckpointError)(text) from failure


def reason(error: BaseException, place: object = "") -> str:
    """What an error says, with the file it is about."""
    if isinstance(error, OSError):
        return f"{error.filename or place}: {error.strerror or error}"
    return str(error) or type(error).__name__


def check_call(label: str, flat: Flat) -> None:
    """Refuse a call where nothing has a value yet, and leaves that could not be told from each other.

    Raises:
        ValueError: inside of fs.jit or torch.func, or with each path that several leaves have.
    """
    if _compat.is_tracing() or _compat.transforms_active():
        raise ValueError(f"{label}: expected a call outside of fs.jit and torch.func, on their results, got one inside")
    problems = [
        Problem(path, f"{flat.paths.count(path)} leaves", "one of each path")
        for path in dict.fromkeys(flat.paths if len(set(flat.paths)) < len(flat.paths) else ())
        if flat.paths.count(path) > 1
    ]
    if problems:
        raise leaf_error(f"{label}: leaves of one path", problems, "give keys that print differently")


def _said(error: Exception | None, label: str, place: object) -> tuple[str, str]:
    if error is None:
        return "", ""
    name, text = type(error).__name__, reason(error, place)
    if isinstance(error, CheckpointError | OSError) and not text.startswith(label):
        text = f"{label}: {text}"
    return name, text
