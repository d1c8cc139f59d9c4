"""Print the largest error of every program, over all subjects and strategies: python -m tests.programs.errors."""

import sys
from collections.abc import Sequence

from fshard.testing import spmd
from tests.programs.sides import CHOSEN
from tests.programs.subjects import COUNTS, SUBJECTS
from tests.programs.table import PROGRAMS, expected, relative_error


def largest(program: str, world_size: int) -> float:
    """The largest error relative to the largest element of a result; NaN where a subject fails."""
    worst = [0.0]
    for name in SUBJECTS:
        expected(name, program)
        try:
            ranks = spmd(lambda: [relative_error(name, program, chosen) for chosen in CHOSEN], world_size)  # noqa: B023
        except RuntimeError as error:
            print(f"{program} of {name} on {world_size} ranks: {error.__cause__ or error}"[:300], file=sys.stderr)
            return float("nan")
        worst += [error for errors in ranks for error in errors]
    return max(worst)


def main(world_sizes: Sequence[int]) -> None:
    width = max(map(len, PROGRAMS))
    print(f"{'program':{width}}", *(f"{n:>8}" for n in world_sizes))
    for program in PROGRAMS:
        print(f"{program:{width}}", *(f"{largest(program, n):8.1e}" for n in world_sizes), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or tuple(COUNTS))
