"""Collectives by another algorithm than the backend's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fshard.comm import collective

ALGORITHMS = ("auto", "direct", "coalesced", "flat")

_of_backend = collective.algorithm_of
_chosen = threading.local()


def _algorithm_of(*args):
    return getattr(_chosen, "algorithm", None) or _of_backend(*args)


@contextmanager
def sent_by(algorithm: str) -> Iterator[None]:
    """Let this rank's collectives run by an algorithm; by "auto" the backend chooses."""
    # The same function on every rank, which may be a thread: each chooses for itself.
    collective.algorithm_of = _algorithm_of
    _chosen.algorithm = None if algorithm == "auto" else algorithm
    try:
        yield
    finally:
        _chosen.algorithm = None
