"""One program on several ranks."""

from collections.abc import Callable
from typing import TypeVar

from fshard.checks import POSITIVE, check_function, check_numbers
from fshard.testing.simulate import simulate
from fshard.testing.workers import Workers

# Simulated ranks; a machine has no memory for the threads of many more.
MAX_THREADS = 4096

T = TypeVar("T")


def spmd(f: Callable[[], T], world: int | Workers, timeout: float = 60.0) -> list[T]:
    """Run `f` on every rank of a world, simulated or real.

    Args:
        f: The program of one rank. `torch.distributed` is initialised when it is called.
        world: Number of ranks to simulate by threads, or the processes to run them.
        timeout: Seconds after which ranks that have not ended are stuck.

    Returns:
        What `f` returned on each rank, in rank order.

    Raises:
        ValueError: `f` is no function, or `world` or `timeout` out of range.
        RankError: A rank failed, ended or was stuck.

    >>> spmd(lambda: "done", world=2)
    ['done', 'done']
    """
    check_function("spmd", f)
    check_numbers("spmd", POSITIVE, timeout=timeout)
    if isinstance(world, Workers):
        return world.run(f, timeout)
    if type(world) is not int or not 1 <= world <= MAX_THREADS:
        expected = f"Workers, or a whole number from 1 to {MAX_THREADS}"
        raise ValueError(f"spmd: expected world to be {expected}, got {world!r:.40}")
    return simulate(f, world, timeout)
