"""Consensus: ranks see that they do the same before they wait for each other, and hear of each other's failures."""

from collections.abc import Iterable, Mapping, Sequence

from fshard import comm
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis

_FAILED = 0
# In what a rank says that has failed, and no other.
_RAISED = " raised "


class Consensus:
    """What the ranks of some axes compare during one call."""

    def __init__(self, what: str, axes: Sequence[Axis]) -> None:
        """Compare over those axes that have several ranks.

        Args:
            what: The verb that runs, for errors.
            axes: The mesh axes.
        """
        self.axes = [axis for axis in axes if axis.size > 1]
        self._what = what
        self._over = False

    def agree(self, event: str) -> None:
        """Refuse on every rank alike where ranks are about to do different things."""
        with comm.concerning(event):
            self._judge(comm.vote({"what comes next": event}, (), self.axes, comm.AGREE))

    def conclude(
        self, phase: str, done: Mapping[str, str], flags: Iterable[int], error: Exception | None
    ) -> frozenset[int]:
        """See at the end of a phase whether every rank has come to it, and by the same way.

        Args:
            phase: Its name.
            done: What this rank has done, by a name for each thing.
            flags: Numbers from 0 that this rank puts forward.
            error: What this rank has failed with, or None.

        Returns:
            The numbers that any rank put forward; those too large to be sent count as put forward.

        Raises:
            RuntimeError: if another rank failed.
            ValueError: if ranks have not done the same.
        """
        if self._over or isinstance(error, comm.CollectiveError):
            # Ranks have parted already, and no other would answer.
            return frozenset()
        event = f"{phase} ended" if error is None else f"{phase}{_RAISED}{type(error).__name__}: {error}"
        raised = [*([_FAILED] if error is not None else []), *(1 + flag for flag in flags)]
        with comm.concerning(event):
            vote = comm.vote({"what comes next": event, **done}, raised, self.axes, comm.AGREE)
        if error is None:
            self._judge(vote)
        too_large = (flag - 1 for flag in raised if flag >= comm.WORDS * comm.BITS)
        return frozenset(flag - 1 for flag in vote.flags if flag != _FAILED) | frozenset(too_large)

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """For each number the highest that any rank has."""
        return comm.highest(numbers, self.axes, comm.AGREE)

    def _judge(self, vote: comm.Vote) -> None:
        if vote.problem is None:
            return
        self._over = True
        if _FAILED in vote.flags:
            raise RuntimeError(
                f"{self._what}: another rank failed, and this one stops with it: {_failure(vote.problem)}"
            )
        remedy = "let every rank gather the same units in the same order; one that has no use for a unit takes part"
        raise leaf_error(f"{self._what}: ranks do not do the same", [vote.problem], remedy)


def _failure(problem: Problem) -> str:
    """Which rank failed, in what and with what: of the two that a difference shows, those that did."""
    needed, _, first = problem.expected.rpartition(" as on rank ")
    found, _, other = problem.got.rpartition(" on rank ")
    failed = [f"on rank {rank} {said}" for rank, said in ((first, needed), (other, found)) if _RAISED in said]
    return "; ".join(failed) or "its own error says why"
