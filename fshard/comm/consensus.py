"""Consensus: ranks see that they do the same before they wait for each other, and hear of each other's failures."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fshard.comm.agree import BITS, NO_FACTS, WORDS, Facts, Vote, facts_of, highest, vote
from fshard.comm.collective import backend_of
from fshard.comm.failure import CollectiveError
from fshard.comm.labels import concerning
from fshard.comm.record import AGREE
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Flat

NOTHING: Mapping[str, str] = MappingProxyType({})

_FAILED = 0
# In what a rank says that has failed, and no other.
_RAISED = " raised "


class Consensus:
    """What the ranks of some axes compare during one call."""

    def __init__(self, what: str, axes: Sequence[Axis], facts: Facts = NO_FACTS) -> None:
        """Compare over those axes that have several ranks.

        Args:
            what: The verb that runs, for errors.
            axes: The mesh axes.
            facts: What the verb was told, which goes with the first message.
        """
        self.axes = [axis for axis in axes if axis.size > 1]
        self._what, self._facts = what, facts
        self._over = False

    def agree(self, event: str, more: Mapping[str, str] = NOTHING) -> None:
        """Refuse on every rank alike where ranks are about to do different things.

        Args:
            event: What comes next.
            more: Of what it consists, by a name for each thing.
        """
        if self.axes:
            with concerning(event):
                self._judge(self._vote({"what comes next": event, **more}, ()))

    def _vote(self, entries: Mapping[str, str], flags: Iterable[int]) -> Vote:
        facts, self._facts = self._facts, NO_FACTS
        return vote(entries, flags, self.axes, AGREE, facts)

    def conclude(
        self,
        phase: str,
        done: Mapping[str, str],
        flags: Iterable[int],
        error: Exception | None,
        end: str = "ended",
    ) -> frozenset[int]:
        """See at the end of a phase whether every rank has come to it, and by the same way.

        Args:
            phase: Its name.
            done: What this rank has done, by a name for each thing.
            flags: Numbers from 0 that this rank puts forward.
            error: What this rank has failed with, or None.
            end: What the phase does where it has not failed.

        Returns:
            The numbers that any rank put forward; those too large to be sent count as put forward.

        Raises:
            RuntimeError: if another rank failed.
            ValueError: if ranks have not done the same.
        """
        if not self.axes or self._over or isinstance(error, CollectiveError):
            # Ranks have parted already, and no other would answer.
            return frozenset()
        event = f"{phase} {end}" if error is None else f"{phase}{_RAISED}{type(error).__name__}: {error}"
        raised = [*([_FAILED] if error is not None else []), *(1 + flag for flag in flags)]
        with concerning(event):
            found = self._vote({"what comes next": event, **done}, raised)
        if error is None:
            self._judge(found)
        too_large = (flag - 1 for flag in raised if flag >= WORDS * BITS)
        return frozenset(flag - 1 for flag in found.flags if flag != _FAILED) | frozenset(too_large)

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """For each number the highest that any rank has."""
        return highest(numbers, self.axes, AGREE)

    def _judge(self, found: Vote) -> None:
        if found.problem is None:
            return
        self._over = True
        if _FAILED in found.flags:
            raise RuntimeError(
                f"{self._what}: another rank failed, and this one stops with it: {_failure(found.problem)}"
            )
        if found.told:
            remedy = (
                "call the same verbs in the same order on every rank, with the same strategies, dtypes and arguments"
            )
            raise leaf_error(f"{self._what}: ranks were told different things", [found.problem], remedy)
        remedy = "let every rank gather the same units in the same order; one that has no use for a unit takes part"
        raise leaf_error(f"{self._what}: ranks do not do the same", [found.problem], remedy)


def same_call(
    what: str, axes: Sequence[Axis], facts: Facts | Flat = NO_FACTS, error: Exception | None = None, **told: Any
) -> None:
    """See that every rank begins the same call, by one message over each axis of processors.

    Accelerators send none, because the host would have to wait for it in every step.

    Args:
        what: The verb that begins, and is no part of a running call.
        axes: The mesh axes that it communicates over.
        facts: What it was told, or the tree whose leaves it was given.
        error: What this rank has failed with instead, or None.
        **told: With a tree, other arguments that decide what is sent or what sums mean.

    Raises:
        ValueError: on every rank alike, if ranks make different calls or were told different things.
        RuntimeError: if another rank failed.
    """
    if any(axis.size > 1 for axis in axes) and backend_of(axes) != "nccl":
        facts = facts_of(what, facts, **told) if isinstance(facts, Flat) else facts
        Consensus(what, axes, facts).conclude(what, {}, (), error, end="begins")


def _failure(problem: Problem) -> str:
    """Which rank failed, in what and with what: of the two that a difference shows, those that did."""
    needed, _, first = problem.expected.rpartition(" as on rank ")
    found, _, other = problem.got.rpartition(" on rank ")
    failed = [f"on rank {rank} {said}" for rank, said in ((first, needed), (other, found)) if _RAISED in said]
    return "; ".join(failed) or "its own error says why"
