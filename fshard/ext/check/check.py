"""check: finds the mistakes of a step on a mesh of any size, without ranks and without running it."""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

import fshard as fs
from fshard.ext._compat import MAX_FRAMES, Frame, noting_origins
from fshard.ext.check.dropped import find_dropped
from fshard.ext.check.factors import find_wrong_factors
from fshard.ext.check.facts import (
    Input,
    Objectives,
    find_changes,
    list_constants,
    list_inputs,
    list_neighbours,
    make_facts,
)
from fshard.ext.check.losses import find_mixed_types
from fshard.ext.check.report import Mistake, StepCheck, StepProblem
from fshard.ext.check.results import find_differing, list_results
from fshard.ext.check.values import ValueTypes
from fshard.extend import (
    OBSERVED,
    Jitted,
    Traced,
    flatten,
    fold_views_and_remove_dead_nodes,
    is_users_file,
    lay_out_call,
    setting,
    trace,
)

UNCHECKED = (
    "generators of ranks that have equal seeds, where a step draws random numbers without a key",
    "batches of ranks that are equal, or that leave samples out",
    "constants of the step, such as learning rates and factors of a loss",
    "leaves that are frozen, which may be on purpose",
    "counts of the items that a loss leaves out, such as ignored labels, if they differ between ranks",
    "positions of items, where ranks split a sequence",
)


def check(
    step: Callable[..., Any],
    state: Any,
    *batch: Any,
    mesh: Mapping[str, int],
    rank: int = 0,
    backend: str = "nccl",
) -> StepCheck:
    """Find the mistakes of a train step on a mesh of any size, with the lines to mend, without running it.

    Args:
        step: A pure function of (state, *batch), or a jitted one.
        state: A TrainState, or any tree with Sharded leaves, as for `fs.plan`.
        *batch: The step's other arguments, as one rank gets them.
        mesh: Ranks on each axis by its name, outermost first.
        rank: The number of the rank whose step is checked.
        backend: "nccl" or "gloo": the backend of collectives.

    Returns:
        The report, which prints its problems, each with its line, and the plan of the step.

    Raises:
        ValueError: if the arguments are wrong, as by `fs.plan`.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(4096, 1)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> def step(params, x):
    ...     return fs.value_and_grad(lambda p, x: (x @ fs.gather(p)["w"]).sum())(params, x)
    >>> check(step, params, torch.ones(8, 4096), mesh={"shard": 1024}).problems
    ()
    """
    call = _CheckedCall(step, (state, *batch))
    with lay_out_call(step, (state, *batch), mesh, rank, backend, "check"):
        # The arguments are right, so that errors from here on are those of the step.
        pass
    try:
        problems = call.find_problems(mesh, rank)
    except ValueError as error:
        problems = call.problems or [_describe_refusal(error)]
        return StepCheck(_drop_repeated(problems), None, UNCHECKED)
    plan = fs.plan(step, state, *batch, mesh=mesh, rank=rank, backend=backend)
    return StepCheck(_drop_repeated(problems), plan, UNCHECKED)


class _CheckedCall:
    """A call of a step, to be traced on meshes.

    Attributes:
        problems: Mistakes in its losses.
    """

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.problems: list[StepProblem] = []
        self._objectives = Objectives(set(), set())
        self._step = inspect.unwrap(step) if isinstance(step, Jitted) else step
        self._args = args

    def find_problems(self, mesh: Mapping[str, int], rank: int) -> list[StepProblem]:
        """Find the mistakes in a rank's losses, and in the values of its graph."""
        with lay_out_call(self._step, self._args, mesh, rank, "nccl", "check") as args:
            flat = flatten(args)
            traced = self._trace(args)
            nodes = list(traced.module.graph.nodes)
            constants = list_constants(traced.module)
            state, *_ = flat.unflatten(flat.leaves)
            inputs = list_inputs(nodes, flat, len(flatten(state).leaves))
            results = list_results(traced, state)
            problems = [*self.problems, *find_dropped(nodes, results)]
            changes = {}
            for name, other in list_neighbours(mesh, rank).items():
                changes[name] = find_changes(nodes, constants, self._list_constants(mesh, other))
            if None not in changes.values():
                # Every rank runs these operators.
                problems += self._find_unused(inputs)
            for axis in flat.axes:
                by_rank = changes.get(axis.name)
                if by_rank is None:
                    continue
                facts = make_facts(nodes, inputs, by_rank, axis, self._objectives)
                values = ValueTypes(traced.module.graph, facts)
                problems += values.problems
                problems += find_differing(results, values, axis, facts)
                if facts.varies:
                    larger = self._list_constants({**mesh, axis.name: 2 * axis.size}, rank)
                    scales = find_changes(nodes, constants, larger)
                    problems += find_wrong_factors(results, values, facts, scales)
        return problems

    def _observe(self, functions: Sequence[Any], flat: Any, axes: Sequence[fs.Axis], options: Any) -> None:
        """Check a loss before the step differentiates it."""
        self._objectives.axes.update(axis.name for axis in axes)
        self._objectives.reduces.add(options.reduce)
        self.problems += find_mixed_types(functions[0], flat, axes, options.has_aux)

    def _trace(self, args: tuple[Any, ...]) -> Traced:
        # What the checks of losses run is a part of each graph.
        with noting_origins(), setting(OBSERVED, self._observe):
            traced = trace(flatten((args, {})), lambda *args: self._step(*args))
        fold_views_and_remove_dead_nodes(traced.module.graph)
        return traced

    def _list_constants(self, mesh: Mapping[str, int], rank: int) -> list[Any] | None:
        """List the constants in the graph of another rank or mesh, if the step allows it."""
        try:
            with lay_out_call(self._step, self._args, mesh, rank, "nccl", "check") as args:
                return list_constants(self._trace(args).module)
        except (ValueError, RuntimeError):
            return None

    def _find_unused(self, inputs: Mapping[Node, Input]) -> Iterator[StepProblem]:
        """Find tensors of the batch that nothing reads."""
        code = getattr(self._step, "__code__", None)
        frames = () if code is None else (Frame(code.co_filename, code.co_firstlineno, code.co_name),)
        for node, entry in inputs.items():
            if entry.is_batch and not node.users:
                text = "nothing in the step reads this tensor of the batch; use it, or do not pass it."
                yield StepProblem(Mistake.UNUSED_BATCH, "", entry.path, frames, text)


def _drop_repeated(problems: Sequence[StepProblem]) -> tuple[StepProblem, ...]:
    """Leave out problems of one kind and line, but the first."""
    by_line = {(problem.kind, problem.axis, problem.frames[:1]): problem for problem in reversed(problems)}
    return tuple(reversed(by_line.values()))


def _describe_refusal(error: ValueError) -> StepProblem:
    """Make a problem of an error of fshard's; errors of the user's code and of torch are raised again."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [Frame(entry.filename, entry.lineno or 0, entry.name) for entry in stack if is_users_file(entry.filename)]
    if is_users_file(stack[-1].filename) or not frames:
        raise error
    return StepProblem(Mistake.REFUSED, "", "", tuple(frames[::-1][:MAX_FRAMES]), str(error))
