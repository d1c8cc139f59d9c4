"""Runs of a transform: with states, as one node of autograd's graph, and with checks of what users' classes return."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fshard.collectives.linear import Linear, Variance, linear_call
from fshard.errors import Problem, expect, refuse
from fshard.transforms.base import BuiltIn, ShardTransform, Specs, States, Tensors, foreign_names
from fshard.transforms.structure import reduction, sums_gradients
from fshard.tree import Spec
from fshard.tree.checks import check_dense, describe


def gather_by(transform: ShardTransform, paths: Sequence[str], leaves: Tensors, specs: Specs) -> Tensors:
    """Gather differentiably, as one node of autograd's graph.

    Its backward scatters, and refuses a transform with a state.

    Args:
        transform: The transform.
        paths: The leaves' paths.
        leaves: One shard per leaf.
        specs: The leaves' specs.

    Returns:
        The full tensors.
    """
    return linear_call(_linear(transform, specs, paths), leaves)


def scatter_by(
    transform: ShardTransform,
    paths: Sequence[str],
    leaves: Sequence[Any],
    grads: Sequence[torch.Tensor | None],
    states: States,
) -> tuple[Tensors, States]:
    """Scatter the gradients of Sharded leaves, differentiably if the transform has no state.

    Args:
        transform: The transform.
        paths: The leaves' paths.
        leaves: The leaves.
        grads: Their full gradients; None counts as zeros.
        states: As for `start_scatter`.

    Returns:
        The shards, in the leaves' dtypes, and the new states.
    """
    specs = [leaf.spec for leaf in leaves]
    full_grads = []
    for leaf, grad in zip(leaves, grads, strict=True):
        full_grads.append(leaf.local.new_zeros(leaf.spec.gathered_shape) if grad is None else grad)
    shards: Tensors
    if reduction(transform).has_state:
        shards, states = start_scatter(transform, full_grads, specs, states)()
        check_results(transform, "scatter", shards, paths, specs)
    else:
        shards = linear_call(_linear(transform, specs, paths).to_transpose(), full_grads)
    return [shard.to(leaf.local.dtype) for leaf, shard in zip(leaves, shards, strict=True)], states


def _linear(transform: ShardTransform, specs: Specs, paths: Sequence[str]) -> Linear:
    """Make a gather as a linear map; shards vary or agree as their leaves are stored."""

    def gather(leaves: Tensors) -> Tensors:
        return check_results(transform, "gather", transform.gather(leaves, specs), paths, specs)

    def scatter(grads: Tensors) -> Tensors:
        check_stateless(transform)
        check_dense("gather", paths, grads)
        shards, _ = start_scatter(transform, grads, specs, [])()
        return check_results(transform, "scatter", shards, paths, specs)

    variance = Variance("fs.gather", specs[0].scattered_axes, specs, result=True)
    return Linear(gather, scatter, variance)


class Deferral(NamedTuple):
    """What becomes of a scatter's outer stages, which sum over the outermost axis once for several microbatches.

    Attributes:
        num_outer_stages: How many stages are outer ones; scatter runs them last.
        inner_sums: For each leaf the sum of what the other stages made of earlier microbatches, or None. The outer
            stages sum it along with this microbatch. Without any list they do not run.
    """

    num_outer_stages: int
    inner_sums: Sequence[torch.Tensor | None] | None = None

    def add_inner_sums(self, grads: Tensors) -> Tensors:
        """Add the sums of earlier microbatches, and keep the dtypes that are sent."""
        assert self.inner_sums is not None
        totals = []
        for grad, inner_sum in zip(grads, self.inner_sums, strict=True):
            totals.append(grad if inner_sum is None else (inner_sum + grad).to(grad.dtype))
        return totals


class StagedScatter:
    """A scatter through stages, from the last to the first, of which one that sends is under way.

    Whoever calls `start_next` lets a stage overlap what runs until the next call.
    """

    def __init__(
        self,
        stages: Sequence[ShardTransform],
        grads: Tensors,
        specs: Specs,
        states: States | None,
        deferral: Deferral | None = None,
    ) -> None:
        """Start the first stage that sends.

        Args:
            stages: The stages.
            grads: One tensor per leaf.
            specs: The leaves' specs.
            states: One state per leaf, a tuple with the states of all stages; None where no stage has one.
            deferral: What the outer stages do; None lets them run.
        """
        self._stages = stages
        self._deferral = deferral
        # The number of the stage that runs last.
        self._last_stage = deferral.num_outer_stages if deferral is not None and deferral.inner_sums is None else 0
        # The number of stages that have yet to start.
        self._num_left = len(stages)
        self._result: Any = None
        self._pauses = self._scatter(grads, specs, states)
        self.start_next()

    @property
    def sends_again(self) -> bool:
        """Whether a stage that sends has yet to start."""
        return any(map(sends, self._stages[self._last_stage : self._num_left]))

    def start_next(self) -> None:
        """Wait for the stage that is under way, and run the next ones up to one that sends."""
        next(self._pauses, None)

    def __call__(self) -> Any:
        """Run all stages that are left, and return scatter's result."""
        for _ in self._pauses:
            continue
        return self._result

    def _scatter(self, grads: Tensors, specs: Specs, states: States | None) -> Iterator[None]:
        """Run the stages, and pause while one that sends is under way."""
        old_states = [None] * len(grads) if states is None else states
        states_by_stage: list[States] = []
        while self._num_left > self._last_stage:
            if self._deferral is not None and self._num_left == self._deferral.num_outer_stages:
                grads = self._deferral.add_inner_sums(grads)
            self._num_left -= 1
            stage = self._stages[self._num_left]
            stage_states: States = [None if state is None else state[self._num_left] for state in old_states]
            finish = start_scatter(stage, grads, specs, stage_states)
            if sends(stage):
                yield
            grads, stage_states = finish()
            states_by_stage.insert(0, stage_states)
        for number in reversed(range(self._last_stage)):
            states_by_stage.insert(0, [None if state is None else state[number] for state in old_states])
        self._result = grads
        if states is not None:
            new_states = []
            for state, new_state in zip(states, zip(*states_by_stage, strict=True), strict=True):
                new_states.append(None if state is None else new_state)
            self._result = grads, new_states


def sends(stage: ShardTransform) -> bool:
    """Tell whether a stage communicates when it scatters."""
    return sums_gradients(stage) and any(axis.size > 1 for axis in stage.axes)


class PendingScatter(NamedTuple):
    """A scatter that has started, with or without a state; calling it finishes it.

    Attributes:
        transform: The transform.
        specs: The leaves' specs.
        states: One state per leaf, which are the new states too if the transform has none.
        finish: What the transform's start_scatter returned.
    """

    transform: ShardTransform
    specs: Specs
    states: States
    finish: Callable[[], Any]

    @property
    def sends_again(self) -> bool:
        """Whether a stage of the scatter that sends has yet to start."""
        return isinstance(self.finish, StagedScatter) and self.finish.sends_again

    def start_next(self) -> None:
        """Wait for the stage that is under way, and start the next one."""
        assert isinstance(self.finish, StagedScatter)
        self.finish.start_next()

    def __call__(self) -> tuple[Tensors, States]:
        """Finish the scatter, and return its results and the new states."""
        results = self.finish()
        if not reduction(self.transform).has_state:
            return check_number(self.transform, "scatter", results, self.specs), self.states
        shards, new_states = check_number(self.transform, "scatter", results, ("gradients", "states"))
        check_number(self.transform, "scatter", new_states, self.specs)
        return check_number(self.transform, "scatter", shards, self.specs), new_states


def start_scatter(
    transform: ShardTransform,
    grads: Tensors,
    specs: Specs,
    states: States,
    deferral: Deferral | None = None,
) -> PendingScatter:
    """Start to scatter by a transform with or without a state.

    Args:
        transform: The transform.
        grads: One tensor per leaf.
        specs: The leaves' specs.
        states: One state per leaf, None where the transform has none.
        deferral: What the outer stages of a composition do; None lets them run.

    Returns:
        The scatter, which returns what scatter returns, and the new states. Without a state these are `states`.
    """
    options = {} if deferral is None else {"deferral": deferral}
    if reduction(transform).has_state:
        finish = transform.start_scatter(grads, specs, states, **options)
    else:
        finish = transform.start_scatter(grads, specs, **options)
    return PendingScatter(transform, specs, states, finish)


def check_stateless(transform: ShardTransform) -> None:
    """Refuse a transform with a state where nobody can carry one."""
    if reduction(transform).has_state:
        raise ValueError(
            "fs.gather: this strategy keeps a state between steps, which autograd cannot pass on. Use "
            "fs.value_and_grad, or differentiate by gathered parameters and call fs.scatter_grads(..., "
            "transform_state=...)."
        )


def check_number(transform: ShardTransform, half: str, results: Any, inputs: Sequence[Any]) -> Any:
    """Refuse results of a user's transform that are not as many as what it was given.

    Args:
        transform: The transform.
        half: "gather" or "scatter".
        results: What that returned.
        inputs: What it returns one value for each of.

    Returns:
        The results.

    Raises:
        ValueError: if there are more or fewer.
    """
    if isinstance(transform, BuiltIn):
        return results
    is_sequence = isinstance(results, list | tuple)
    fits = is_sequence and len(results) == len(inputs)
    got = f"{len(results)}" if is_sequence else describe(results)
    remedy = "return one for each leaf, in their order; with states the pair of gradients and states"
    expect(fits, f"{type(transform).__name__}.{half}", f"{len(inputs)} results", got, remedy)
    return results


def check_results(
    transform: ShardTransform,
    half: str,
    results: Tensors,
    paths: Sequence[str],
    specs: Specs,
) -> Tensors:
    """Refuse results of a user's transform that are no tensors of the right number and shapes.

    Args:
        transform: The transform of some leaves.
        half: "gather" or "scatter".
        results: What that returned.
        paths: The leaves' paths.
        specs: The leaves' specs, which tell the shapes that results must have. Dims behind these are vmap's.

    Returns:
        The results.

    Raises:
        ValueError: with the path of every leaf whose result is wrong.
    """
    if not reduction(transform).is_foreign:
        return results
    check_number(transform, half, results, paths)
    problems = []
    for path, result, spec in zip(paths, results, specs, strict=True):
        shape = _result_shape(half, spec)
        if not isinstance(result, torch.Tensor):
            problems.append(Problem(path, describe(result), "a tensor"))
        elif shape is not None and tuple(result.shape[: len(shape)]) != tuple(shape):
            problems.append(Problem(path, describe(result), f"a tensor of shape {tuple(shape)}"))
    api_name = f"{' or '.join(foreign_names(transform))}.{half}"
    stored_as = "full leaf" if half == "gather" else "shard"
    remedy = f"let {half} return a tensor for each leaf, shaped as the {stored_as}"
    refuse(f"{api_name}: results do not fit", problems, remedy)
    return results


def _result_shape(half: str, spec: Spec) -> tuple[int, ...] | None:
    """Return the shape that a gather or a scatter of a leaf has; None for any."""
    if half == "scatter":
        return spec.local_shape
    # Leaves that take no gradient may become anything.
    return None if spec.frozen else spec.gathered_shape
