"""One program on several ranks."""

from collections.abc import Callable
from typing import TypeVar

from fshard.testing.simulate import simulate
from fshard.testing.workers import Workers

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
        RankError: A rank failed, ended or was stuck.

    >>> spmd(lambda: "done", world=2)
    ['done', 'done']
    """
    if isinstance(world, Workers):
        return world.run(f, timeout)
    return simulate(f, world, timeout)
