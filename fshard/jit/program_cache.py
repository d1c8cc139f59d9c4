"""Caches of the caller: functions that keep the programs of a function from one process to the next."""

from collections.abc import Callable
from typing import Any, Protocol

from fshard.jit.signature import Signature
from fshard.tree import Flat


class ProgramCache(Protocol):
    """A function that keeps programs; `jit` asks it before it traces, because a trace may change what it reads."""

    def __call__(self, jitted: Any, signature: Signature, flat: Flat) -> tuple[Any, Callable[[Any], None] | None]:
        """Find the Program of a call.

        It must not raise, and must not return a program of other code, of other values that the function reads, or of
        other options. Where it cannot tell, it has no program.

        Args:
            jitted: The function, as `jit` returned it.
            signature: The signature of the call.
            flat: Its arguments, taken apart.

        Returns:
            The Program that this rank stored before, or None; and a function that stores the one that is traced now, or
            None if no later process can find it.
        """
