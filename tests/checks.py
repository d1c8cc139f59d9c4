"""What fs.check says of a loss, for tests of losses that are right or wrong."""

from collections.abc import Callable
from typing import Any

import fshard as fs
from fshard.extend import flatten


def find_problems(loss_fn: Callable[..., Any], params: Any, *batch: Any, **options: Any) -> list[str]:
    """Check the gradient of a loss on two ranks or more of each axis of its parameters, and list the kinds of problems.

    Args:
        loss_fn: A local loss. Axes that it sends over are arguments.
        params: Its parameters.
        *batch: Its other arguments.
        **options: Passed to `value_and_grad`.
    """

    def step(params: Any, *batch: Any) -> Any:
        return fs.value_and_grad(loss_fn, **options)(params, *batch)

    mesh = {axis.name: max(axis.size, 2) for axis in flatten(params).axes}
    return [str(problem.kind) for problem in fs.check(step, params, *batch, mesh=mesh).problems]
