"""Where a graph is read from, for the errors of what stands there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Source(NamedTuple):
    """Where a graph is read from.

    Attributes:
        reader: Who reads which file.
        remedy: What the user can do where it is wrong.
    """

    reader: str
    remedy: str

    @contextmanager
    def reading(self, part: str) -> Iterator[None]:
        """Name the source and the part in whatever error the content of a part causes."""
        try:
            yield
        except Exception as error:
            problem = str(error) if type(error) is ValueError else repr(error)
            raise ValueError(f"{self.reader}: {part}: {problem:.400}; {self.remedy}") from error
