"""check: finds the mistakes of a step on a mesh of any size, without ranks and without running it."""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import Node

import fshard as fs
from fshard.ext._compat import MAX_FRAMES, Frame, list_traced_nodes, noting_origins
from fshard.ext.check.factors import find_wrong_factors
from fshard.ext.check.graphs import Input, find_neighbour, list_inputs, list_other_constants, pair_nodes
from fshard.ext.check.losses import find_mixed_types
from fshard.ext.check.report import StepCheck, StepProblem
from fshard.ext.check.results import find_differing, find_dropped, list_results
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
    call = _CheckedCall(step, (state, *batch), mesh)
    with lay_out_call(step, (state, *batch), mesh, rank, backend, "check"):
        # The arguments are right, so that errors from here on are those of the step.
        pass
    plan = None
    try:
        call.find_problems(rank)
        plan = fs.plan(step, state, *batch, mesh=mesh, rank=rank, backend=backend)
    except ValueError as error:
        call.problems = call.problems or [_describe_refusal(error)]
    return StepCheck(_drop_repeated(call.problems), plan)


class _CheckedCall:
    """A call of a step, to be traced on meshes.

    Attributes:
        problems: The mistakes.
    """

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...], mesh: Mapping[str, int]) -> None:
        self.problems: list[StepProblem] = []
        # The user's own decorators stay.
        self._step = inspect.unwrap(step, stop=lambda function: not isinstance(function, Jitted))
        self._lay_out = partial(lay_out_call, self._step, args, backend="nccl", api_name="check")
        self._mesh = mesh
        # Of the losses that the step differentiates, the axes, and how they are reduced over these.
        self._loss_axes: set[fs.Axis] = set()
        self._reduces: set[str] = set()
        # What the checks of losses have added to the graph.
        self._extra_nodes: set[Node] = set()

    def find_problems(self, rank: int) -> None:
        """Find the mistakes in a rank's losses, and in the values of its graph over each axis."""
        with self._lay_out(self._mesh, rank) as args:
            flat = flatten(args)
            with noting_origins(), setting(OBSERVED, self._observe):
                traced = self._trace(args)
            nodes = list(traced.module.graph.nodes)
            inputs = list_inputs(nodes, traced, args)
            results = list_results(traced, args[0])
            self.problems += find_dropped(results)
            # Without losses batches differ where gradients are reduced.
            varying = self._loss_axes or {axis for spec in flat.specs for axis in spec.scattered_axes}
            runs_alike = True
            for axis in flat.axes:
                if axis.size == 1:
                    continue
                neighbour = self._pair(nodes, self._mesh, find_neighbour(self._mesh, rank, axis))
                runs_alike = runs_alike and bool(neighbour)
                if neighbour:
                    values = ValueTypes(
                        nodes,
                        axis,
                        inputs,
                        rank_constants=list_other_constants(neighbour),
                        doubled=self._pair(nodes, {**self._mesh, axis.name: 2 * axis.size}, rank),
                        varies=axis in varying,
                        are_means=self._reduces == {"mean"},
                    )
                    self.problems += values.problems
                    self.problems += find_differing(results, values)
                    self.problems += find_wrong_factors(results, values)
            if runs_alike:
                self.problems += self._find_unused(inputs)

    def _observe(self, functions: Sequence[Any], flat: Any, axes: Sequence[fs.Axis], options: Any) -> None:
        """Check a loss before the step differentiates it."""
        self._loss_axes.update(axes)
        self._reduces.add(options.reduce)
        count = len(list_traced_nodes())
        self.problems += find_mixed_types(functions[0], flat, axes)
        self._extra_nodes.update(list_traced_nodes()[count:])

    def _trace(self, args: tuple[Any, ...]) -> Traced:
        traced = trace(flatten((args, {})), self._step)
        graph = traced.module.graph
        graph.eliminate_dead_code(lambda node: node not in self._extra_nodes)
        fold_views_and_remove_dead_nodes(graph)
        return traced

    def _pair(self, nodes: Sequence[Node], mesh: Mapping[str, int], rank: int) -> Mapping[Node, Node]:
        """Pair nodes with those in the graph of another rank or mesh; none if the step does not allow it."""
        try:
            with self._lay_out(mesh, rank) as args:
                return pair_nodes(nodes, list(self._trace(args).module.graph.nodes))
        except (ValueError, RuntimeError):
            return {}

    def _find_unused(self, inputs: Mapping[Node, Input]) -> Iterator[StepProblem]:
        """Find tensors of the batch that nothing reads."""
        code = getattr(self._step, "__code__", None)
        frames = () if code is None else (Frame(code.co_filename, code.co_firstlineno, code.co_name),)
        for node, entry in inputs.items():
            if entry.is_batch and not node.users:
                text = "nothing in the step reads this tensor of the batch; use it, or do not pass it."
                yield StepProblem("unused batch", "", entry.path, frames, text)


def _drop_repeated(problems: Sequence[StepProblem]) -> tuple[StepProblem, ...]:
    """Leave out problems of one line, but the first: the others are mostly what follows from it."""
    by_line: dict[Any, StepProblem] = {}
    for problem in problems:
        by_line.setdefault((problem.axis, problem.frames[:1] or problem.path), problem)
    return tuple(by_line.values())


def _describe_refusal(error: ValueError) -> StepProblem:
    """Make a problem of an error of fshard's; errors of the user's code and of torch are raised again."""
    stack = traceback.extract_tb(error.__traceback__)
    users = [each for each in stack if is_users_file(each.filename)]
    if is_users_file(stack[-1].filename) or not users:
        raise error
    # A trace calls the step by a lambda of torch, which has no line to show. Nor has a program that was typed in.
    shown = [each for each in users if each.line] or users
    frames = [Frame(each.filename, each.lineno or 0, each.name) for each in shown]
    return StepProblem("refused", "", "", tuple(frames[::-1][:MAX_FRAMES]), str(error))
