"""Progress bars of saves and restores."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Tick = Callable[[int], Any]
Bar = Callable[[str, int, int], AbstractContextManager[Tick]]


def progress_bar(shown: bool) -> Bar:
    """Make what opens a progress bar of so many bytes on the first rank, or what opens none.

    Raises:
        ImportError: if one is to be shown and tqdm is not installed.
    """
    if not shown:
        return _none
    from tqdm import tqdm  # type: ignore[import-untyped]

    @contextmanager
    def bar(what: str, total: int, rank: int) -> Iterator[Tick]:
        with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=rank > 0) as drawn:
            yield drawn.update

    return bar


@contextmanager
def _none(what: str, total: int, rank: int) -> Iterator[Tick]:
    yield lambda nbytes: None
