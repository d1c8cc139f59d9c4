"""Values compared by type and bits, where Python's equality would take 1, 1.0 and True, or 0.0 and -0.0, for one."""

import re
import struct
from dataclasses import fields, is_dataclass
from typing import Any


class Exact:
    """A hashable value, equal to values of its own type and bits alone, those inside it included.

    Other objects compare with their own __eq__, and only within one type.
    """

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: Any) -> None:
        """Keep the value; TypeError if it cannot be hashed."""
        self.value = value
        self._key = exact_key(value)
        # Keys are looked up often, and tuples hash anew each time.
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Exact) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        """Pickle the value alone: another process hashes texts in another way."""
        return Exact, (self.value,)

    def __repr__(self) -> str:
        return repr(self.value)


def exact_key(value: Any) -> Any:
    """The key that a value is compared by.

    >>> exact_key(0.0) == exact_key(-0.0), exact_key((1, 2)) == exact_key((1, True))
    (False, False)
    """
    cls = type(value)
    if isinstance(value, float | complex):
        return cls, struct.pack("dd", value.real, value.imag)
    if isinstance(value, tuple):
        return cls, tuple(map(exact_key, value))
    if is_dataclass(cls) and cls.__dataclass_params__.eq:  # type: ignore[attr-defined]
        hash(value)
        return cls, tuple(exact_key(getattr(value, field.name)) for field in fields(cls) if field.compare)
    # Decimal takes 1.0 and 1.00 for equal, numpy 0.0 and -0.0, and sets 1 and True; their texts differ. An object that
    # is equal to itself alone needs no text. Other texts may contain addresses, which differ between equal objects.
    by_identity = cls.__eq__ is object.__eq__  # type: ignore[comparison-overlap]
    return cls, value, "" if by_identity else re.sub(r" at 0x\w+", "", repr(value))
