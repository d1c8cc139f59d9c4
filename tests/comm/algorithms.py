"""Collectives by another algorithm than the backend's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fshard.comm import collective

ALGORITHMS = ("auto", "direct", "by the backend")

_of_backend = collective.is_direct
_chosen = threading.local()


def _is_direct(*args):
    chosen = getattr(_chosen, "algorithm", "auto")
    return _of_backend(*args) if chosen == "auto" else chosen == "direct"


@contextmanager
def sent_by(algorithm: str) -> Iterator[None]:
    """Let this rank's collectives run by an algorithm; by "auto" the backend chooses."""
    # The same function on every rank, which may be a thread: each chooses for itself.
    collective.is_direct = _is_direct
    _chosen.algorithm = algorithm
    try:
        yield
    finally:
        _chosen.algorithm = "auto"
