"""Peers: ranks see that they do the same before they wait for each other, and hear of each other's failures."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fshard import _compat
from fshard.comm.agree import BITS, NO_FACTS, WORDS, Facts, everyone, facts_of, highest, vote
from fshard.comm.collective import backend_of
from fshard.comm.failure import CollectiveError
from fshard.comm.labels import concerning
from fshard.comm.record import AGREE
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Flat

_FAILED, _FIRST = 0, 1

# Flags from this number on do not fit into a message, and count as put forward.
FLAGS = WORDS * BITS - _FIRST


class Peers:
    """The ranks of some axes, during one call.

    Attributes:
        axes: The mesh axes that have several ranks.
    """

    def __init__(self, what: str, axes: Sequence[Axis], facts: Facts = NO_FACTS) -> None:
        """Name the ranks.

        Args:
            what: The verb that runs, for errors.
            axes: The mesh axes.
            facts: What the verb was told, which goes with the first message.
        """
        self.axes = [axis for axis in axes if axis.size > 1]
        self._what, self._facts = what, facts
        self._over = False

    def begin(self, new: bool, error: Exception | None = None) -> bool:
        """See by one message that every rank begins the same call.

        Accelerators send none for a call that they know, because the host would have to wait for it in every step.

        Args:
            new: Whether this rank does not know the order of the call.
            error: The error that this rank has failed with instead, or None.

        Returns:
            Whether the call is new to any rank.

        Raises:
            ValueError: on every rank alike, if ranks make different calls or were told different things.
            RuntimeError: if another rank failed.
        """
        if not self.axes or (not new and not _compat.is_tracing() and backend_of(self.axes) == "nccl"):
            return new
        found = self.agree({"what comes next": f"{self._what} begins"}, (0,) if new else (), error, self._what)
        return bool(found)

    def agree(
        self,
        entries: Mapping[str, str],
        flags: Collection[int] = (),
        error: Exception | None = None,
        phase: str = "",
        unit: str = "",
    ) -> frozenset[int]:
        """Refuse on every rank alike where ranks are about to do different things.

        Args:
            entries: What comes next, and of what it consists, by a name for each.
            flags: Numbers from 0 that this rank puts forward; from FLAGS on they are left out.
            error: The error that this rank has failed with, or None.
            phase: Where it failed.
            unit: The unit that comes next, for traces.

        Returns:
            The numbers that any rank put forward.

        Raises:
            ValueError: if ranks do not do the same.
            RuntimeError: if another rank failed.
        """
        if not self.axes or self._over or isinstance(error, CollectiveError):
            # Ranks have parted already, and no other would answer.
            return frozenset()
        facts, self._facts = self._facts, NO_FACTS
        raised = [*([_FAILED] if error is not None else []), *(_FIRST + flag for flag in flags)]
        with concerning(unit or next(iter(entries.values()), phase)):
            found = vote(entries, raised, self.axes, AGREE, facts, fails=_FAILED)
            if _FAILED in found.flags:
                self.failed(error, phase)
        if found.problem is not None and error is None:
            self._over = True
            self._refuse(found.problem, found.told)
        return frozenset(flag - _FIRST for flag in found.flags if flag != _FAILED)

    def failed(self, error: Exception | None, phase: str) -> None:
        """Tell each other of failures, where ranks know that there are some.

        Args:
            error: The error that this rank has failed with, or None.
            phase: Where it failed.

        Raises:
            RuntimeError: on ranks that have not failed, which rank has, where and by which error.
        """
        self._over = True
        said = "" if error is None else f"{phase} raised {type(error).__name__}: {error}"
        found = everyone(said, self.axes, AGREE)
        if error is None:
            failures = "; ".join(f"on rank {place} {text}" for place, text in found if text)
            raise RuntimeError(f"{self._what}: another rank failed, and this one stops with it: {failures}")

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """For each number the highest that any rank has."""
        return highest(numbers, self.axes, AGREE)

    def _refuse(self, problem: Problem, told: bool) -> None:
        if told:
            remedy = (
                "call the same verbs in the same order on every rank, with the same strategies, dtypes and arguments"
            )
            raise leaf_error(f"{self._what}: ranks were told different things", [problem], remedy)
        remedy = "let every rank gather the same units in the same order; one that has no use for a unit takes part"
        raise leaf_error(f"{self._what}: ranks do not do the same", [problem], remedy)


def same_call(
    what: str, axes: Sequence[Axis], facts: Facts | Flat = NO_FACTS, error: Exception | None = None, **told: Any
) -> None:
    """See that every rank begins the same call, by one message over each axis of processors.

    Args:
        what: The verb that begins, and is no part of a running call.
        axes: The mesh axes that it communicates over.
        facts: What it was told, or the tree whose leaves it was given.
        error: The error that this rank has failed with instead, or None.
        **told: With a tree, other arguments that decide what is sent or what sums mean.

    Raises:
        ValueError: on every rank alike, if ranks make different calls or were told different things.
        RuntimeError: if another rank failed.
    """
    if any(axis.size > 1 for axis in axes) and backend_of(axes) != "nccl":
        facts = facts_of(what, facts, **told) if isinstance(facts, Flat) else facts
        Peers(what, axes, facts).begin(new=False, error=error)
