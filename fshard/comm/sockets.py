"""How many sockets the ranks of a mesh open, and whether a process may open so many files."""

import math
import os
import resource
from collections.abc import Sequence

from fshard.comm.links import list_peers

# Connections of a rank with the store: torch's, this rank's own, and that which constructors wait on.
STORE_CLIENTS = 3
# Files beside sockets: pipes and polls of gloo's threads, and what a program opens as it starts.
OTHER_FILES = 64


def sockets_of_mesh(sizes: Sequence[int], *, sends_itself: bool) -> int:
    """Count the sockets that a rank opens for the first mesh of a run: torch's, and fshard's own beside them.

    Args:
        sizes: The number of ranks on each axis.
        sends_itself: Whether the axes' devices have a backend of their own, so that fshard connects a rank with few.

    Returns:
        The number, with a listening socket in every group of gloo. The process that holds the store has
        `STORE_CLIENTS` more for each rank, and one to listen.

    >>> sockets_of_mesh([16], sends_itself=False), sockets_of_mesh([2, 8], sends_itself=False)
    (55, 53)
    >>> sockets_of_mesh([4096], sends_itself=False), sockets_of_mesh([4096], sends_itself=True)
    (12303, 4111)
    """
    sockets = STORE_CLIENTS
    world_size = math.prod(sizes)
    # torch has one group of all ranks, which is that of the axis if there is one alone.
    if world_size not in sizes:
        sockets += world_size
    for size in sizes:
        if size > 1:
            links = len(list_peers(0, range(size)))
            sockets += links + (size if sends_itself else 3 * size)
    return sockets


def allow_sockets(count: int) -> str:
    """Let this process open more sockets: raise its limit of open files if it is too low.

    Args:
        count: How many.

    Returns:
        "" if it may open them, else what a rank lacks, for an error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = len(os.listdir("/dev/fd")) + count + OTHER_FILES
    if files > hard:
        return f"needs about {files} open files for this mesh, and may open {hard}"
    if files > soft:
        # What the program opens itself has as much room as before.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + files, hard), hard))
    return ""
