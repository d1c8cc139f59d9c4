from collections.abc import Callable, Iterator

import pytest

from fshard.testing import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Workers]]:
    """Real processes to run programs on: workers(2) and workers(3) start once and serve the whole session."""
    pools: dict[int, Workers] = {}

    def of_size(world_size: int) -> Workers:
        if world_size not in pools:
            pools[world_size] = Workers(world_size)
        return pools[world_size]

    yield of_size
    # Closing raises where a worker's exit code is not 0.
    for pool in pools.values():
        pool.close()
