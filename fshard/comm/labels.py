"""Labels: what a collective says of itself, who asks for it and for which unit and leaves."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

# Stands between the parts of a label.
SEPARATOR = " | "

# So many leaves of a unit are named, which may have hundreds, and so long a name may be.
LEAVES, WIDTH = 6, 200

_subject: ContextVar[str] = ContextVar("fshard_subject", default="")


class Label(NamedTuple):
    """The parts of a label.

    Attributes:
        who: Who asks.
        unit: The unit it is for; empty where nobody says.
        leaves: Its leaves.
    """

    who: str
    unit: str
    leaves: str


class _Subject:
    """A context; as a generator it would take three times as long, at every gather."""

    __slots__ = ("text", "token")

    def __init__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> None:
        self.token = _subject.set(self.text)

    def __exit__(self, *_: object) -> None:
        _subject.reset(self.token)


def concerning(unit: str, leaves: Sequence[str] = ()) -> AbstractContextManager[None]:
    """Let the collectives that start inside a context say what they are for.

    Args:
        unit: A unit's name.
        leaves: Paths of the leaves that travel.

    Returns:
        The context.
    """
    more = [f"and {len(leaves) - LEAVES} more"] if len(leaves) > LEAVES else []
    names = ", ".join([*leaves[:LEAVES], *more])
    # A unit without a name of its own is called by its leaves.
    unit, names = (names, "") if unit == ", ".join(leaves) else (_shortened(unit), names)
    return _Subject(f"{unit}{SEPARATOR}{names}" if names else unit)


def labelled(who: str) -> str:
    """The label of a collective that starts here."""
    subject = _subject.get()
    return f"{who}{SEPARATOR}{subject}" if subject and SEPARATOR not in who else who


def parts(label: str) -> Label:
    """Take a label apart."""
    who, _, subject = label.partition(SEPARATOR)
    unit, _, leaves = subject.partition(SEPARATOR)
    return Label(who, unit, leaves)


def _shortened(text: str) -> str:
    line = text.partition("\n")[0].replace(SEPARATOR, " ")
    return line if len(line) <= WIDTH else f"{line[:WIDTH]}..."
