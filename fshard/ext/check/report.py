"""The report of `fs.check`: problems, each with the line to mend, and the contract of the step."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fshard.ext._compat import Frame

_ONLY_A_RUN = (
    "only a run can find:",
    "  generators of ranks that have equal seeds, where a step draws random numbers without a key",
    "  batches of ranks that are equal, or that leave samples out",
    "  constants of the step, such as learning rates and factors of a loss",
    "  leaves that are frozen, which may be on purpose",
    "  counts of the items that a loss leaves out, such as ignored labels, if they differ between ranks",
    "  positions of items, where ranks split a sequence, or gather rows of each other",
)


class StepProblem(NamedTuple):
    """One mistake in a step.

    Attributes:
        kind: The kind of mistake: "missing sum", "doubled sum", "missing cast", "superfluous cast", "local metric",
            "buffer differs", "rank's own number", "mean of means", "same random numbers", "number of ranks",
            "unused batch" or "refused".
        axis: The axis whose ranks it concerns; empty if it concerns none.
        path: The leaf of the state, or of the result, that is wrong; empty if it is none.
        frames: Lines of the user's program, the innermost first; the first is the line to mend.
        text: What is wrong, and what to do.
    """

    kind: str
    axis: str
    path: str
    frames: tuple[Frame, ...]
    text: str

    def __str__(self) -> str:
        """A block of lines: the mistake, and the lines of the program."""
        where = "".join(f" {word} {name}" for word, name in (("over", self.axis), ("in", self.path)) if name)
        lines = [f"{self.kind}{where}: {self.text}"]
        for frame in self.frames:
            lines.append(f"  {frame.file}:{frame.line} in {frame.function}: {frame.text}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False, eq=False)
class StepCheck:
    """What `fs.check` says of a step. It prints as a report, which ends in what only a run can find.

    Attributes:
        problems: The mistakes that were found; none if nothing is wrong.
        plan: The contract: memory, collectives and bytes, as `fs.plan` predicts them; None if the step could not be
            traced to its end.
    """

    problems: tuple[StepProblem, ...]
    plan: Any

    def __str__(self) -> str:
        count = len(self.problems) or "no"
        headline = f"check: {count} problem{'' if count == 1 else 's'}"
        parts = [headline, *self.problems, self.plan, *_ONLY_A_RUN]
        return "\n".join(str(part) for part in parts if part is not None)

    __repr__ = __str__
