"""Traces that are made once for a step that is replayed many times: tracing takes most of the time of small ones."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import fshard as fs
from fshard.extend import Jitted


class _OfRank(threading.local):
    """What this rank has jitted, by the function's number in memory, which the jitted function keeps taken."""

    def __init__(self) -> None:
        self.jitted: dict[int, Jitted] = {}


@contextmanager
def reusing_traces() -> Iterator[None]:
    """Let replay, verify and diff trace a step once on each rank, and not again for other arguments of equal shapes.

    They call `fs.jit` anew in each call, and this keeps what it returned, which keeps its traces.
    """
    jit = fs.jit
    of_rank = _OfRank()

    def jit_once(f: Callable[..., Any], **options: Any) -> Jitted:
        if options:
            return jit(f, **options)
        if id(f) not in of_rank.jitted:
            of_rank.jitted[id(f)] = jit(f)
        return of_rank.jitted[id(f)]

    with patch.object(fs, "jit", jit_once):
        yield
