"""Refusals of what a file says: who reads it, the part, what was expected and what is there."""

from typing import Any, NamedTuple, NoReturn

from fshard.extend import describe


class Source(NamedTuple):
    """Where a graph is read from.

    Attributes:
        reader: Who reads which file.
        remedy: What the user can do where it is wrong.
    """

    reader: str
    remedy: str

    def refuse(self, part: str, expected: str, got: Any) -> NoReturn:
        """Raise the error of a part that is not as expected; `got` is a value of JSON."""
        # Lists and objects may be nested deeper than Python's stack.
        text = describe(got) if isinstance(got, list | dict) else f"{got!r:.100}"
        raise ValueError(f"{self.reader}: {part}: expected {expected}, got {text}; {self.remedy}")
