"""Outermost calls of fshard: an error that leaves one is told to the other ranks, which would wait for this one."""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm import ops
from fshard.comm.agree import same_call, told_of
from fshard.comm.failure import CollectiveError, all_fail, tell
from fshard.comm.groups import World, world
from fshard.tree import Axis, flatten, is_sharded
from fshard.tree.checks import is_reachable

P = ParamSpec("P")
R = TypeVar("R")


class calling:  # noqa: N801
    """Let an error that leaves a context reach the other ranks, if no call is running yet.

    An error before the call begins goes with the message that begins it. Later, where all fail at one place, or have
    told each other by messages, nothing more happens. Else the groups of this rank are broken, and every rank ends with
    the error's text.

    Attributes:
        begun: Whether the message that begins the call has been sent.
        settled: Whether ranks have told each other of the error.
    """

    __slots__ = ("_axes", "_begins", "begun", "settled", "what", "world")

    def __init__(self, what: str, axes: Callable[[], Sequence[Axis]], begins: bool = True) -> None:
        """Name the call.

        Args:
            what: The function.
            axes: Finds those that it communicates over.
            begins: Whether it begins by a message over them.
        """
        self.what, self._axes, self._begins, self.begun, self.settled = what, axes, begins, False, False

    def __enter__(self) -> "calling":
        self.world: World | None = None
        if torch.compiler.is_dynamo_compiling():
            return self
        if dist.is_initialized() and not _compat.is_tracing() and world().call is None:
            self.world = world()
            self.world.call = self
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self.world is None:
            return
        try:
            if error is not None and self.world.others:
                self._tell(self.world, error)
        finally:
            self.world.call = None

    def _tell(self, own: World, error: BaseException) -> None:
        axes: Sequence[Axis] = ()
        with suppress(Exception):
            axes = self._axes()
        reached = [axis for axis in axes if is_reachable(axis)]
        told = own.broken is not None or isinstance(error, CollectiveError)
        # Nobody of another mesh waits for this rank.
        if not told and (reached or not axes):
            if self._begins and not self.begun and isinstance(error, Exception):
                with suppress(Exception):
                    same_call(self.what, reached, error=error)
            if not self.settled and own.broken is None and not all_fail(own, f"{self.what} {type(error).__name__}"):
                tell(own, f"rank {own.rank} failed in {self.what}: {told_of(error)}")
        for buffer in [ref() for ref in own.flying.values()]:
            # The backend lets go of what it works on, now that it has ended.
            with suppress(RuntimeError):
                ops.wait(buffer) if buffer is not None else None
        own.flying.clear()


def axes_in(given: Any) -> Sequence[Axis]:
    """List the axes over which a function of Axis values and Sharded leaves communicates."""
    leaves = flatten(given).leaves
    specs = {id(leaf.spec): leaf.spec for leaf in leaves if is_sharded(leaf)}
    found = [leaf for leaf in leaves if isinstance(leaf, Axis)]
    return tuple(dict.fromkeys([*found, *(a for spec in specs.values() for a in (spec.transform or spec).axes)]))


def call(f: Callable[P, R], what: str = "", begins: bool = True) -> Callable[P, R]:
    """Make a function an outermost call, unless one is running.

    Args:
        f: The function.
        what: Its name, if that is another than its own.
        begins: Whether it begins by a message over the axes of its arguments.

    Returns:
        The function.
    """

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with calling(what or f.__name__, lambda: axes_in((args, kwargs)), begins):
            return f(*args, **kwargs)

    return run
