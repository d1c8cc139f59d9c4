"""Pipelines: the stages of a model are on the ranks of a mesh axis, and microbatches pass through them.

GPipe (Huang et al., arXiv:1811.06965) and 1F1B (PipeDream-Flush: Narayanan et al., arXiv:2006.09503).
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.parallel.custom_call import custom_call, differentiate
from fshard.extend import (
    NUMBER,
    Range,
    any_dual,
    calling,
    check_arguments,
    check_axis,
    describe,
    expect,
    flatten,
    is_differentiated,
    record_on_tape,
    refuse,
    sum_dtype,
    without_saved_tensor_hooks,
)

SCHEDULES = ("gpipe", "1f1b")
REDUCTIONS = ("mean", "sum", "weighted")

Tensors = Sequence[torch.Tensor]
# By the leaf; None for one that has none.
Gradients = list[torch.Tensor | None]


class Op(NamedTuple):
    """The work of one rank in one tick of 1F1B.

    Attributes:
        is_backward: Whether it is the backward of a microbatch.
        microbatch: The microbatch.
        stage: The stage, and the rank.
    """

    is_backward: bool
    microbatch: int
    stage: int

    def advance(self, stages: int) -> "Op | None":
        """Return the op that takes the result of this one; None beyond the ends of the model."""
        stage = self.stage - 1 if self.is_backward else self.stage + 1
        return self._replace(stage=stage) if 0 <= stage < stages else None


Tick = tuple[Op | None, ...]


@lru_cache(maxsize=64)
def make_ticks(stages: int, microbatches: int, with_backward: bool = True) -> tuple[Tick, ...]:
    """Compute which rank does what in which tick of 1F1B. A result is used in a later tick than it was computed in.

    There are 2 (microbatches + stages - 1) ticks, each as long as one stage. Stage s holds at most stages - s
    microbatches.

    Args:
        stages: The number of stages, and of ranks.
        microbatches: The number of microbatches.
        with_backward: Whether there are backwards.

    Returns:
        For each tick the op of each rank; None if it waits.
    """
    length = microbatches + stages - 1
    if with_backward:
        length *= 2
    table: list[list[Op | None]] = [[None] * stages for _ in range(length)]
    for stage, i in product(range(stages), range(microbatches)):
        forward = stage + i
        if with_backward:
            backward = 2 * stages - 1 - stage + 2 * i
            table[backward][stage] = Op(True, i, stage)
            # Forwards follow each other until the first backward, and then take turns with backwards.
            if i >= stages - stage:
                forward += i
        table[forward][stage] = Op(False, i, stage)
    return tuple(map(tuple, table))


def pipeline(
    stage_fn: Callable[[Any, torch.Tensor], torch.Tensor],
    axis: fs.Axis,
    *,
    microbatches: int,
    last: Callable[..., Any],
    first: Callable[[Any, Any], torch.Tensor] | None = None,
    schedule: str = "1f1b",
    reduce: str = "mean",
) -> Callable[..., Any]:
    """Turn the parts of a model into a loss function for `value_and_grad`, pipelined over a mesh axis.

    Each part is called with the whole tree of parameters, gathered. Leaves that belong to stages, such as layers
    stacked along dim 0, are split over the axis by `split_dim`, and each rank gets its own piece. Leaves that are whole
    on all ranks of the axis, such as those of `first` and `last`, go through `pcast`, which sums their gradients. Every
    rank of the axis is given the same batch, and gets the loss of the last stage.

    With "gpipe", autograd makes the backward. It is differentiable to any order, also by torch.func, and holds all
    microbatches. Every rank computes `first` and `last`, whose results only count on the first and the last rank.

    With "1f1b", the forward of the loss function runs all backwards too: one forward or backward of a stage in each of
    2 (microbatches + ranks - 1) ticks. A stage holds at most ranks - stage microbatches. The backward of the loss
    function only scales the gradients, which are held until then. There are first derivatives by autograd alone.
    So in float16 gradients underflow in spite of a scale that multiplies the pipeline's loss: multiply in `last`.
    If nothing requires a gradient, both schedules run only forwards.

    Args:
        stage_fn: Called as stage_fn(params, h); returns a tensor of h's shape and dtype.
        axis: The mesh axis, whose ranks are the stages in their order.
        microbatches: How many equal parts the batch is cut into, along dim 0.
        last: Called as last(params, h, *rest) with the last stage's result and a microbatch of the arguments that
            follow x; returns a scalar loss, or (sum, count) for "weighted".
        first: Called as first(params, x) with a microbatch; returns the first stage's h. None uses x itself.
        schedule: "gpipe" or "1f1b".
        reduce: "mean" over microbatches, "sum", or "weighted", whose loss function returns (sum, count) of all
            microbatches for `value_and_grad(..., reduce="weighted")`.

    Returns:
        A function of (params, x, *rest), with trees of tensors as x and rest. Its loss agrees between ranks of the
        axis, and has the dtype of h, or float32 if that is wider.

    Raises:
        ValueError: if an argument is out of range; by the function returned, on every rank of the axis, if the batch
            does not divide, ranks have batches of other shapes or other schedules, a leaf is plain or its gradients
            are reduced over the axis, or "1f1b" is differentiated by torch.func, in forward mode or twice.
        RuntimeError: by the function returned, if a stage failed on another rank.

    >>> import fshard as fs
    >>> mesh = fs.init_mesh({"shard": 1, "pipe": -1}, device="cpu")
    >>> shard, pipe = fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "pipe")
    >>> owned = fs.compose(fs.fully_shard(shard, dim=1), fs.split_dim(pipe, dim=0))
    >>> layout = fs.masked(owned, "layers", otherwise=fs.fully_shard(shard))
    >>> params = fs.shard({"layers": torch.ones(4, 3), "head": torch.ones(3)}, fs.zero3(mesh, layout=layout))
    >>> loss_fn = fs.pipeline(
    ...     lambda p, h: h * p["layers"].prod(0),
    ...     pipe,
    ...     microbatches=2,
    ...     last=lambda p, h, y: (h @ p["head"] - y).square().mean(),
    ... )
    >>> loss, grads = fs.value_and_grad(loss_fn)(params, torch.ones(4, 3), torch.zeros(4))
    >>> loss.item()
    9.0
    """
    check_axis("pipeline", axis)
    if first is None:
        first = _return_x
    check_arguments("pipeline", Range("a function", callable), stage_fn=stage_fn, last=last, first=first)
    check_arguments("pipeline", NUMBER, microbatches=microbatches)
    expect(schedule in SCHEDULES, "pipeline", f"schedule to be one of {SCHEDULES}", f"{schedule!r:.40}")
    expect(reduce in REDUCTIONS, "pipeline", f"reduce to be one of {REDUCTIONS}", f"{reduce!r:.40}")
    arguments = _PipelineArguments(stage_fn, first, last, axis, microbatches, schedule, reduce)

    def loss_fn(params: Any, x: Any, *rest: Any) -> Any:
        with calling("pipeline", lambda: [axis], begins=False):
            call = _PipelineCall(arguments, params, (x, *rest))
            sums = call.run_gpipe() if schedule == "gpipe" else call.run_1f1b()
            loss, *counts = fs.psum_invariant(sums, axis)
            return (loss, counts[0].detach()) if counts else loss

    return loss_fn


def _return_x(_: Any, x: Any) -> Any:
    return x


class _PipelineArguments(NamedTuple):
    """The arguments of `fs.pipeline`."""

    stage_fn: Callable[[Any, torch.Tensor], torch.Tensor]
    first: Callable[[Any, Any], torch.Tensor]
    last: Callable[..., Any]
    axis: fs.Axis
    microbatches: int
    schedule: str
    reduce: str


def _check_params(axis: fs.Axis, params: Any) -> None:
    """Refuse leaves that are plain, or reduced over the axis."""

    def misfit(leaf: Any) -> str | tuple[str, str] | None:
        if isinstance(leaf, fs.Sharded):
            transform = leaf.spec.transform
            is_reduced = transform is not None and axis in transform.axes
            return f"has a transform that reduces its gradients over {axis.name!r}" if is_reduced else None
        if leaf is None or axis.size == 1:
            return None
        return "a plain tensor", "a Sharded leaf, which pipeline gathers by itself"

    remedy = f"shard the leaves of stages by a composition with split_dim over {axis.name!r}, and the rest without"
    refuse(f"pipeline over {axis.name!r}: leaves do not fit", params.problems(misfit), remedy)


def _check_batch(arguments: _PipelineArguments, batch: Any) -> None:
    """Refuse a batch that cannot be cut, or differentiated."""
    count = arguments.microbatches

    def misfit(leaf: Any) -> tuple[str, str] | None:
        if leaf is None:
            return None
        divides = isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) % count == 0
        return None if divides else (describe(leaf), f"a multiple of {count} rows")

    remedy = "pass tensors of as many rows, or another number of microbatches"
    refuse(f"pipeline: the batch cannot be cut in {count} microbatches", batch.problems(misfit), remedy)
    if arguments.schedule == "gpipe":
        return
    tensors = [leaf for leaf in batch.leaves if leaf is not None]
    is_constant = not any(map(is_differentiated, tensors)) and not any_dual(tensors)
    expected = f"a batch that requires no gradient with schedule={arguments.schedule!r}"
    remedy = 'use schedule="gpipe" to differentiate with respect to the batch'
    expect(is_constant, "pipeline", expected, "one that does", remedy)


class _PipelineCall:
    """One call: the parts of the model on this rank, the gathered leaves and the microbatches.

    Attributes:
        arguments: The arguments of `fs.pipeline`.
        rank: This rank, and its stage.
        unflatten: Makes the tree of parameters of leaves.
        specs: The spec of each leaf; None for a plain one.
        leaves: The gathered leaves, which vary between the ranks of the axis.
        floating: The numbers of the floating leaves.
        batches: The microbatches.
        like: A tensor of the shape and dtype that stages pass on.
        dtypes: The dtype of the loss and, for "weighted", of the count.
    """

    def __init__(self, arguments: _PipelineArguments, params: Any, batch: tuple[Any, ...]) -> None:
        flat = flatten(params)
        axis = arguments.axis
        _check_params(axis, flat)
        _check_batch(arguments, flatten(batch))
        self.arguments = arguments
        self.rank = fs.comm.rank(axis)
        self.unflatten = flat.unflatten
        self.specs = [getattr(leaf, "spec", None) for leaf in flat.leaves]
        self.leaves = list(flatten(fs.gather(params)).leaves)
        self.floating = [i for i, leaf in enumerate(self.leaves) if _is_floating(leaf)]
        shared = {}
        for i in self.floating:
            spec = self.specs[i]
            if spec is None or spec.dim_of(axis) is None:
                shared[i] = self.leaves[i]
        for i, leaf in fs.pcast(shared, axis, to="varying").items():
            self.leaves[i] = leaf
        count = arguments.microbatches
        self.batches = []
        for i in range(count):
            self.batches.append(fs.tree_map(lambda rows, i=i: rows.chunk(count)[i], batch))
        with torch.no_grad():
            like = arguments.first(self.unflatten(self.leaves), self.batches[0][0])
        is_floating = isinstance(like, torch.Tensor) and like.is_floating_point()
        expect(is_floating, "pipeline", "first to return a floating tensor", describe(like))
        self.like = like.detach()
        self.dtypes = [torch.promote_types(like.dtype, torch.float32)]
        if arguments.reduce == "weighted":
            self.dtypes.append(torch.float64)

    def check(self, name: str, out: Any) -> torch.Tensor:
        """Refuse what a stage cannot pass on."""
        shape = self.like.shape
        dtype = self.like.dtype
        fits = isinstance(out, torch.Tensor) and out.shape == shape and out.dtype is dtype
        expected = f"{name} to return a tensor of shape {tuple(shape)} and {dtype}, as first returned for microbatch 0"
        expect(fits, "pipeline", expected, describe(out))
        return out

    def last(self, params: Any, h: torch.Tensor, microbatch: int) -> list[torch.Tensor]:
        """Turn the last stage's output into a part of the loss and, for "weighted", of the count."""
        arguments = self.arguments
        out = arguments.last(params, h, *self.batches[microbatch][1:])
        values = out if isinstance(out, tuple) else (out,)
        are_scalars = all(isinstance(value, torch.Tensor) and not value.dim() for value in values)
        fits = are_scalars and len(values) == len(self.dtypes)
        expected = 'last to return a scalar tensor, or for reduce="weighted" a pair (sum, count) of them'
        expect(fits, "pipeline", expected, describe(out))
        loss, *counts = (value.to(dtype) for value, dtype in zip(values, self.dtypes, strict=True))
        if arguments.reduce == "mean":
            loss = loss / arguments.microbatches
        return [loss, *counts]

    def zero_sums(self) -> list[torch.Tensor]:
        """Make the part of the loss, and of the count, of a stage that is not the last."""
        return [self.like.new_zeros((), dtype=dtype) for dtype in self.dtypes]

    def run_gpipe(self) -> list[torch.Tensor]:
        """Run the same operators on every rank, so that the graphs of derivatives are equal.

        Returns:
            This rank's part of the loss, differentiable to any order, and of the count.
        """
        arguments = self.arguments
        axis = arguments.axis
        stages = axis.size
        microbatches = arguments.microbatches
        ticks = microbatches + stages - 1
        pairs = [(stage, stage + 1) for stage in range(stages - 1)]
        params = self.unflatten(self.leaves)
        sums = self.zero_sums()
        received = None
        for tick in range(ticks):
            # Until its first microbatch arrives, a stage computes with this one: derivatives at zeros may be NaN.
            x, *_ = self.batches[min(tick, microbatches - 1)]
            h = self.check("first", arguments.first(params, x))
            if received is not None:
                is_first = h.new_full((), self.rank == 0, dtype=torch.bool)
                h = torch.where(is_first, h, received)
            out = self.check("stage_fn", arguments.stage_fn(params, h))
            if tick >= stages - 1:
                parts = self.last(params, out, tick - stages + 1)
                sums = list(map(torch.add, sums, parts))
            if tick < ticks - 1:
                received = fs.ppermute(out, axis, pairs)
        is_last = sums[0].new_full((), self.rank == stages - 1, dtype=torch.bool)
        return [torch.where(is_last, total, 0.0) for total in sums]

    def run_1f1b(self) -> list[torch.Tensor]:
        """Run the forwards of all microbatches and, if something is differentiated, their backwards.

        Returns:
            This rank's part of the loss, differentiable once, and of the count.
        """
        arguments = self.arguments
        tensors = [self.leaves[i] for i in self.floating]
        differentiates = any(map(is_differentiated, tensors))

        def forward(_: Tensors) -> tuple[Tensors, Gradients]:
            run = _Run(self, differentiates)
            run.all_ticks()
            grads: Gradients = []
            for i in self.floating:
                total = run.gradients.get(i)
                grads.append(None if total is None else total.to(self.leaves[i].dtype))
            return run.sums, grads

        def backward(grads: Gradients, cotangents: Tensors) -> Gradients:
            # In place, because there may be no memory for a copy. Autograd refuses to use them again.
            return [None if grad is None else grad.mul_(cotangents[0]) for grad in grads]

        # Ranks compare it. Messages of other shapes would have other sizes.
        options = f"{arguments.microbatches} microbatches, reduce={arguments.reduce!r}"
        name = f"1f1b pipeline of {options}, of {self.like.dtype} {tuple(self.like.shape)}"
        return custom_call(forward, backward, tensors, name, arguments.axis, remedy='use schedule="gpipe"')


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


class _LiveForward(NamedTuple):
    """The forward of a microbatch on this stage, whose backward has not run yet.

    Attributes:
        out: The stage's output, or the loss of the last stage.
        received: The output of the stage before; empty on the first stage.
        tokens: The tokens of the tape of the collectives that it called.
    """

    out: torch.Tensor
    received: list[torch.Tensor]
    tokens: list[torch.Tensor]


class _Run:
    """All ticks of one rank.

    Attributes:
        gradients: The sum of gradients so far, by the number of the leaf; a leaf may have none.
        sums: This rank's part of the loss and of the count so far.
    """

    def __init__(self, call: _PipelineCall, differentiates: bool) -> None:
        self._call = call
        self._differentiates = differentiates
        self._is_last = call.rank == call.arguments.axis.size - 1
        # By the microbatch.
        self._live: dict[int, _LiveForward] = {}
        # By the op that takes it, a function that waits for messages, and the number of the one that it takes.
        self._inbox: dict[Op, tuple[Callable[[], Tensors], int]] = {}
        self._in_flight: deque[Callable[[], Any]] = deque()
        self._leaves = list(call.leaves)
        # The leaves at which the graphs of microbatches end, by their numbers.
        self._trained: dict[int, torch.Tensor] = {}
        for i in call.floating:
            if differentiates and call.leaves[i].requires_grad:
                self._leaves[i] = self._trained[i] = call.leaves[i].detach().requires_grad_()
        self.gradients: dict[int, torch.Tensor] = {}
        self.sums = call.zero_sums()

    def all_ticks(self) -> None:
        """Run all ticks."""
        call = self._call
        ticks = make_ticks(call.arguments.axis.size, call.arguments.microbatches, self._differentiates)
        # The tensors of these graphs are used soon, so autograd saves them as they are.
        with torch.set_grad_enabled(self._differentiates), without_saved_tensor_hooks():
            for tick in ticks:
                op = tick[call.rank]
                output = None
                if op is not None:
                    output = self._run_backward(op) if op.is_backward else self._run_forward(op)
                self._exchange(tick, output)
        self._finish_messages(remaining=0)

    def _run_forward(self, op: Op) -> torch.Tensor | None:
        """Run the forward of the stage; return its output. The last stage adds to the loss and the count instead."""
        call = self._call
        arguments = call.arguments
        params = call.unflatten(self._leaves)
        with record_on_tape() as tape:
            if op.stage:
                h = self._receive(op).requires_grad_(self._differentiates)
            else:
                h = call.check("first", arguments.first(params, call.batches[op.microbatch][0]))
            results = [call.check("stage_fn", arguments.stage_fn(params, h))]
            if self._is_last:
                results = call.last(params, results[0], op.microbatch)
        if self._differentiates:
            received = [h] if op.stage else []
            self._live[op.microbatch] = _LiveForward(results[0], received, tape.tokens)
            if op.microbatch == 0:
                sources = [*self._trained.values(), *received, *tape.tokens[:1]]
                expected = "stages that only compute with params and h"
                remedy = 'pass it in params, or use schedule="gpipe"'
                _compat.list_graph("pipeline", results[0], sources, expected, remedy)
        parts = [result.detach() for result in results]
        if not self._is_last:
            return parts[0]
        self.sums = list(map(torch.add, self.sums, parts))
        return None

    def _run_backward(self, op: Op) -> torch.Tensor | None:
        """Run the backward of the stage; return the cotangent of its input, None on the first stage."""
        call = self._call
        live = self._live.pop(op.microbatch)
        if self._is_last:
            cotangent = torch.ones_like(live.out)
        else:
            cotangent = self._receive(op)
        inputs = [*self._trained.values(), *live.received]
        grads = differentiate(live.out, cotangent, inputs, live.tokens)
        for i, grad in zip(self._trained, grads, strict=False):
            if grad is None:
                continue
            spec = call.specs[i]
            before = self.gradients.get(i)
            dtype = sum_dtype(spec, grad.dtype) if spec else grad.dtype
            # A copy, because the sum is scaled in place, and leaves may share the memory of a gradient.
            self.gradients[i] = grad.to(dtype, copy=True) if before is None else before + grad.to(dtype)
        if not op.stage:
            return None
        if grads[-1] is None:
            return torch.zeros_like(call.like)
        return grads[-1]

    def _exchange(self, tick: Tick, output: torch.Tensor | None) -> None:
        """Start to send the outputs of a tick's ops to the ranks that use them."""
        axis = self._call.arguments.axis
        stages = axis.size
        rank = self._call.rank
        # By the rank that sends it, the op that takes the output.
        targets = [op and op.advance(stages) for op in tick]
        if not any(targets):
            return
        arriving = [target for target in targets if target and target.stage == rank]
        receive = [int(target in arriving) for target in targets]
        send = [0] * stages
        local_target = targets[rank]
        if local_target:
            send[local_target.stage] = 1
        row = self._call.like if output is None else output
        # shape -> [1, *shape], or [0, *shape] on a rank that sends nothing
        rows = row.expand(sum(send), *row.shape)
        # Two ops may wait for the same message.
        finish = cache(fs.comm.start_all_to_all([rows], send, receive, axis, "pipeline"))
        for row_number, target in enumerate(arriving):
            self._inbox[target] = finish, row_number
        # It keeps the tensors that are sent until they have arrived.
        self._in_flight.append(finish)
        self._finish_messages(remaining=stages)

    def _receive(self, op: Op) -> torch.Tensor:
        """Wait for what an op takes."""
        finish, row = self._inbox.pop(op)
        return finish()[0][row]

    def _finish_messages(self, remaining: int) -> None:
        while len(self._in_flight) > remaining:
            self._in_flight.popleft()()
