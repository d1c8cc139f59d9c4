"""Pipelines: the stages of a model on the ranks of a mesh axis, microbatches passing through them.

GPipe (Huang et al., arXiv:1811.06965) and 1F1B (PipeDream-Flush: Narayanan et al., arXiv:2006.09503).
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.extend import (
    calling,
    check_axis,
    custom_call,
    describe,
    expect,
    flatten,
    record_on_tape,
    refuse,
    sum_dtype,
)
from fshard.extend import walk_graph as nodes_from
from fshard.extend import without_saved_tensor_hooks as as_they_are

SCHEDULES = ("gpipe", "1f1b")
REDUCTIONS = ("mean", "sum", "weighted")


class Op(NamedTuple):
    """The work of one rank in one tick of 1F1B.

    Attributes:
        backward: Whether it is the backward of a microbatch.
        microbatch: The microbatch.
        stage: The stage, and the rank.
    """

    backward: bool
    microbatch: int
    stage: int

    def moved(self, step: int, stages: int) -> "Op | None":
        """Find the op so many stages on its way; None beyond the ends of the model."""
        stage = self.stage + (-step if self.backward else step)
        return self._replace(stage=stage) if 0 <= stage < stages else None


Tick = tuple[Op | None, ...]


@lru_cache(maxsize=64)
def ticks(stages: int, microbatches: int, backward: bool = True) -> tuple[Tick, ...]:
    """Compute which rank does what in which tick of 1F1B; a result is used in a later tick than it was computed in.

    There are 2 (microbatches + stages - 1) ticks, each a stage long. Stage s holds at most stages - s microbatches.

    Args:
        stages: How many ranks.
        microbatches: How many.
        backward: Whether there are backwards.

    Returns:
        For each tick what each rank does, None where it waits.
    """
    queues: list[deque[Op]] = []
    for stage in range(stages):
        forwards, backwards = ([Op(back, i, stage) for i in range(microbatches)] for back in (False, True))
        # Some forwards, then one of both, then the backwards that are left.
        ahead = min(stages - stage - 1, microbatches)
        both = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
        order = [*forwards[:ahead], *both, *backwards[microbatches - ahead :]]
        queues.append(deque(op for op in order if backward or not op.backward))
    done: set[Op | None] = {None}
    table: list[Tick] = []
    while any(queues):
        row = tuple(queue[0] if queue and _needed(queue[0], stages) in done else None for queue in queues)
        done.update(queue.popleft() for op, queue in zip(row, queues, strict=True) if op is not None)
        table.append(row)
    return tuple(table)


def _needed(op: Op, stages: int) -> Op | None:
    """Find the op whose result an op takes; None for the first forward."""
    return op.moved(-1, stages) or (op._replace(backward=False) if op.backward else None)


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

    Each part is called with the whole tree of parameters, gathered. What stages own is split over the axis by
    `split_dim`, as stacked layers are along dim 0, and a rank gets its own piece; leaves that are whole on all ranks of
    the axis, such as those of `first` and `last`, go through `pcast`, which sums their gradients. Every rank of the
    axis is given the same batch, and gets the loss of the last stage.

    With "gpipe" autograd makes the backward: it is differentiable to any order, by torch.func too, holds all
    microbatches, and every rank computes `first` and `last`, whose results count on the first and the last one alone.
    "1f1b" runs forwards and backwards by hand, one of them a tick: 2 (microbatches + ranks - 1) ticks, and at most
    ranks - stage microbatches live on a stage. It has first derivatives by autograd alone. Without a gradient both run
    forwards alone.

    Args:
        stage_fn: Called as stage_fn(params, h); returns a tensor of h's shape and dtype.
        axis: The mesh axis, whose ranks are the stages in their order.
        microbatches: How many equal parts the batch is cut in, along dim 0.
        last: Called as last(params, h, *rest) with the last stage's result and a microbatch of what the loss function
            is given behind x; returns a scalar loss, or (sum, count) for "weighted".
        first: Called as first(params, x) with a microbatch; returns the first stage's h. None takes x itself.
        schedule: "gpipe" or "1f1b".
        reduce: "mean" over microbatches, "sum", or "weighted", whose loss function returns (sum, count) of all
            microbatches for `value_and_grad(..., reduce="weighted")`.

    Returns:
        A function of (params, x, *rest), with trees of tensors as x and rest. Its loss agrees between ranks of the
        axis, and has the dtype of h, or float32 where that has fewer bits.

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
    for name, f in (("stage_fn", stage_fn), ("last", last), ("first", first)):
        expect(callable(f) or (f is None and name == "first"), "pipeline", f"{name} to be a function", describe(f))
    expect(schedule in SCHEDULES, "pipeline", f"schedule to be one of {SCHEDULES}", f"{schedule!r:.40}")
    expect(reduce in REDUCTIONS, "pipeline", f"reduce to be one of {REDUCTIONS}", f"{reduce!r:.40}")
    whole = type(microbatches) is int and microbatches >= 1
    expect(whole, "pipeline", "microbatches to be a whole number of 1 or more", f"{microbatches!r:.40}")
    parts = _Parts(stage_fn, first or (lambda _, x: x), last, axis, microbatches, schedule, reduce)

    def loss_fn(params: Any, x: Any, *rest: Any) -> Any:
        with calling("pipeline", lambda: [axis], begins=False):
            call = _PipelineCall(parts, params, (x, *rest))
            value, *counts = fs.psum_invariant(call.gpipe() if schedule == "gpipe" else call.scheduled(), axis)
            return (value, counts[0].detach()) if counts else value

    return loss_fn


class _Parts(NamedTuple):
    """The arguments of `fs.pipeline`."""

    stage_fn: Callable[[Any, torch.Tensor], torch.Tensor]
    first: Callable[[Any, Any], torch.Tensor]
    last: Callable[..., Any]
    axis: fs.Axis
    microbatches: int
    schedule: str
    reduce: str

    def check(self, params: Any, batch: Any) -> None:
        """Refuse leaves that are plain or reduced over the axis, and batches that cannot be cut or differentiated."""
        axis, count = self.axis, self.microbatches

        def misfit(leaf: Any) -> tuple[str, str] | None:
            if not isinstance(leaf, fs.Sharded):
                plain = leaf is not None and axis.size > 1
                return ("a plain tensor", "a Sharded leaf, which pipeline gathers by itself") if plain else None
            transform = leaf.spec.transform
            reduced = transform is not None and axis in transform.axes
            needed = "one split by split_dim, or whole"
            return (f"one whose gradients are reduced over {axis.name!r}", needed) if reduced else None

        def uncut(leaf: Any) -> tuple[str, str] | None:
            fits = isinstance(leaf, torch.Tensor) and leaf.dim() and not len(leaf) % count
            return None if fits or leaf is None else (describe(leaf), f"a multiple of {count} rows")

        remedy = f"shard what stages own by a composition with split_dim over {axis.name!r}, and the rest without"
        refuse(f"pipeline over {axis.name!r}: leaves do not fit", params.problems(misfit), remedy)
        remedy = "pass tensors of as many rows, or another number of microbatches"
        refuse(f"pipeline: the batch cannot be cut in {count} microbatches", batch.problems(uncut), remedy)
        if self.schedule != "gpipe":
            given = [leaf for leaf in batch.leaves if leaf is not None]
            wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
            needed = f"no gradient of the batch with schedule={self.schedule!r}"
            found, remedy = "one that requires a gradient", 'take schedule="gpipe", which is differentiable so'
            expect(not wanted and not _compat.any_dual(given), "pipeline", needed, found, remedy)


class _PipelineCall:
    """One call: the parts of the model on this rank, the gathered leaves and the microbatches."""

    def __init__(self, parts: _Parts, params: Any, batch: tuple[Any, ...]) -> None:
        flat = flatten(params)
        parts.check(flat, flatten(batch))
        self.parts, self.rebuild, self.own = parts, flat.unflatten, fs.comm.rank(parts.axis)
        self.specs = [leaf.spec if isinstance(leaf, fs.Sharded) else None for leaf in flat.leaves]
        self.leaves = list(flatten(fs.gather(params)).leaves)
        floating = [
            isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in self.leaves
        ]
        self.varied = [i for i, is_floating in enumerate(floating) if is_floating]
        shared = [i for i in self.varied if (spec := self.specs[i]) is None or spec.dim_of(parts.axis) is None]
        for i, leaf in zip(shared, fs.pcast([self.leaves[i] for i in shared], parts.axis, to="varying"), strict=True):
            self.leaves[i] = leaf
        count = parts.microbatches
        self.batches = [fs.tree_map(lambda rows, i=i: rows.chunk(count)[i], batch) for i in range(count)]
        with torch.no_grad():
            like = parts.first(self.rebuild(self.leaves), self.batches[0][0])
        fits = isinstance(like, torch.Tensor) and like.is_floating_point()
        expect(fits, "pipeline", "first to return a floating tensor", describe(like))
        self.like = like.detach()
        # The loss of the last stage alone is known, and others add zeros to it.
        self.dtypes = [torch.promote_types(like.dtype, torch.float32), torch.float64][
            : 1 + (parts.reduce == "weighted")
        ]

    def first(self, params: Any, microbatch: int) -> torch.Tensor:
        """Make the first stage's input."""
        return self._fitting("first", self.parts.first(params, self.batches[microbatch][0]))

    def stage(self, params: Any, h: torch.Tensor) -> torch.Tensor:
        """Run a stage."""
        return self._fitting("stage_fn", self.parts.stage_fn(params, h))

    def _fitting(self, name: str, out: Any) -> torch.Tensor:
        shape, dtype = self.like.shape, self.like.dtype
        fits = isinstance(out, torch.Tensor) and out.shape == shape and out.dtype is dtype
        needed = f"{name} to return a tensor of shape {tuple(shape)} and {dtype}, as first returned for microbatch 0"
        expect(fits, "pipeline", needed, describe(out))
        return out

    def last(self, params: Any, h: torch.Tensor, microbatch: int) -> list[torch.Tensor]:
        """Make of the last stage's output a part of the loss, and of the count for "weighted"."""
        out = self.parts.last(params, h, *self.batches[microbatch][1:])
        weighted = len(self.dtypes) > 1
        found = list(out) if weighted and isinstance(out, tuple) else [out]
        scalars = [isinstance(part, torch.Tensor) and not part.dim() for part in found]
        needed = 'the pair (sum, count) of scalar tensors for reduce="weighted"' if weighted else "a scalar tensor"
        expect(all(scalars) and len(found) == 1 + weighted, "pipeline", f"last to return {needed}", describe(out))
        loss, *counts = (part.to(dtype) for part, dtype in zip(found, self.dtypes, strict=True))
        mean = self.parts.reduce == "mean"
        return [loss / self.parts.microbatches if mean else loss, *(count.detach() for count in counts)]

    def nothing(self) -> list[torch.Tensor]:
        """Make the part of the loss, and of the count, of a stage that is not the last."""
        return [self.like.new_zeros((), dtype=dtype) for dtype in self.dtypes]

    def gpipe(self) -> list[torch.Tensor]:
        """Run the same operators on every rank, so that graphs of derivatives are equal; `where` selects a rank's own.

        Returns:
            This rank's part of the loss, differentiable to any order, and of the count.
        """
        axis, count, stages = self.parts.axis, self.parts.microbatches, self.parts.axis.size
        own, pairs = fs.axis_index(axis), [(rank, rank + 1) for rank in range(stages - 1)]
        params, total, received = self.rebuild(self.leaves), self.nothing(), None
        for tick in range(count + stages - 1):
            h = self.first(params, min(tick, count - 1))
            # Before the first microbatch comes, a stage takes one like it: derivatives at zeros may be NaN.
            h = h if received is None else torch.where(h.new_full((), own == 0, dtype=torch.bool), h, received)
            out = self.stage(params, h)
            if tick >= stages - 1:
                total = [a + b for a, b in zip(total, self.last(params, out, tick - stages + 1), strict=True)]
            if tick < count + stages - 2:
                received = fs.ppermute(out, axis, pairs)
        is_last = total[0].new_full((), own == stages - 1, dtype=torch.bool)
        return [torch.where(is_last, part, torch.zeros_like(part)) for part in total]

    def scheduled(self) -> list[torch.Tensor]:
        """Run forwards and backwards by hand, as the table says; the latter where something is differentiated.

        Returns:
            This rank's part of the loss, differentiable once, and of the count.
        """
        parts, tensors = self.parts, [self.leaves[i] for i in self.varied]
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        used: list[int] = []

        def forward(_: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            found, grads = _Run(self, differentiated).all_ticks()
            used[:] = [place for place, i in enumerate(self.varied) if grads[i] is not None]
            return found, [grad for grad in grads if grad is not None]

        def backward(saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            # In place, because there may be no room for another copy; autograd refuses to read them again.
            scaled = {place: grad.mul_(cotangents[0]) for place, grad in zip(used, saved, strict=True)}
            return [scaled.get(place) for place in range(len(tensors))]

        what = f"{parts.schedule} pipeline of {parts.microbatches} microbatches"
        return custom_call(forward, backward, tensors, what, parts.axis, remedy='take schedule="gpipe"')


class _Run:
    """All ticks of one rank."""

    def __init__(self, call: _PipelineCall, differentiates: bool) -> None:
        parts = call.parts
        self._call, self._differentiates, self._axis = call, differentiates, parts.axis
        told = f"{parts.schedule}, {parts.microbatches} microbatches, reduce={parts.reduce!r}"
        self._label = fs.comm.Label("pipeline", parts=f"{told}, {call.like.dtype} {tuple(call.like.shape)}")
        # By the forward of a microbatch its input, its output and its chain, until its backward.
        self._live: dict[Op, tuple[torch.Tensor | None, torch.Tensor, list[torch.Tensor]]] = {}
        self._inbox: dict[Op, tuple[Callable[[], list[torch.Tensor]], int]] = {}
        self._flying: deque[Callable[[], Any]] = deque()
        # The starts of graphs, and sums of their gradients.
        self._leaves = [leaf.detach() for leaf in call.leaves]
        self._sums: list[torch.Tensor | None] = [None] * len(call.leaves)
        for start, leaf in zip(self._leaves, call.leaves, strict=True):
            start.requires_grad_(differentiates and leaf.requires_grad)

    def all_ticks(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Run all ticks.

        Returns:
            This rank's part of the loss and of the count, and for each leaf its gradient, None where it has none.
        """
        call, found = self._call, self._call.nothing()
        table, last = ticks(self._axis.size, call.parts.microbatches, self._differentiates), self._axis.size - 1
        # Tensors of these graphs are needed soon, and are saved as they are.
        with torch.set_grad_enabled(self._differentiates), as_they_are():
            for tick in table:
                op, sent = tick[call.own], None
                if op is not None and op.backward:
                    sent = self._backward(op)
                elif op is not None:
                    out = self._forward(op)
                    if call.own < last:
                        sent = out[0].detach()
                    else:
                        found = [a + b.detach() for a, b in zip(found, out, strict=True)]
                self._exchange(tick, sent)
        self._land(0)
        dtypes = (leaf.dtype for leaf in self._leaves)
        return found, [None if t is None else t.to(dtype) for t, dtype in zip(self._sums, dtypes, strict=True)]

    def _received(self, op: Op) -> torch.Tensor:
        finish, row = self._inbox.pop(op)
        return finish()[0][row]

    def _forward(self, op: Op) -> list[torch.Tensor]:
        """Run the stage forwards; returns its output, or the loss and count of the last one."""
        call, h = self._call, None
        params = call.rebuild(self._leaves)
        with record_on_tape() as tape:
            if op.stage:
                h = self._received(op).requires_grad_(self._differentiates)
            out = [call.stage(params, call.first(params, op.microbatch) if h is None else h)]
            if op.stage == self._axis.size - 1:
                out = call.last(params, out[0], op.microbatch)
        if self._differentiates:
            if op.microbatch == 0:
                _refuse_others(out[0], [*self._leaves, *tape.tokens[:1], *([] if h is None else [h])])
            self._live[op] = h, out[0], tape.tokens
        return out

    def _backward(self, op: Op) -> torch.Tensor | None:
        """Run the stage backwards; returns the cotangent of its input."""
        h, out, tokens = self._live.pop(op._replace(backward=False))
        start = torch.ones_like(out) if op.stage == self._axis.size - 1 else self._received(op)
        trained = [i for i, leaf in enumerate(self._leaves) if leaf.requires_grad]
        inputs = [*(self._leaves[i] for i in trained), *tokens[:1], *([] if h is None else [h])]
        outputs = [(out, start), *((token, torch.zeros_like(token)) for token in tokens[1:])]
        outputs = [pair for pair in outputs if pair[0].requires_grad]
        grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if outputs and inputs:
            ends, starts = zip(*outputs, strict=True)
            grads = torch.autograd.grad(ends, inputs, starts, allow_unused=True)
        for i, grad in zip(trained, grads, strict=False):
            if grad is not None:
                spec, before = self._call.specs[i], self._sums[i]
                dtype = sum_dtype(spec, grad.dtype) if spec else grad.dtype
                # A copy, because the sum is scaled in place, and leaves may share the memory of a gradient.
                self._sums[i] = grad.to(dtype, copy=True) if before is None else before + grad.to(dtype)
        if h is None:
            return None
        return torch.zeros_like(self._call.like) if grads[-1] is None else grads[-1]

    def _exchange(self, tick: Tick, sent: torch.Tensor | None) -> None:
        """Start to send what the ranks have computed in a tick to those that need it."""
        stages, own = self._axis.size, self._call.own
        moves = [(op.stage, to) for op in tick if op is not None and (to := op.moved(1, stages))]
        if not moves:
            return
        targets = [to.stage for source, to in moves if source == own]
        arriving = sorted((source, to) for source, to in moves if to.stage == own)
        sources = [source for source, _ in arriving]
        send, receive = ([int(rank in ranks) for rank in range(stages)] for ranks in (targets, sources))
        row = self._call.like if sent is None else sent
        rows = row.expand(len(targets), *row.shape)
        finish = cache(fs.comm.start_all_to_all([rows], send, receive, self._axis, self._label))
        self._inbox.update((to, (finish, i)) for i, (_, to) in enumerate(arriving))
        # Keeps the tensors that are sent until they have arrived.
        self._flying.append(finish)
        self._land(stages)

    def _land(self, most: int) -> None:
        while len(self._flying) > most:
            self._flying.popleft()()


def _refuse_others(out: torch.Tensor, starts: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that a stage closes over and that require a gradient, which nobody would compute."""
    edge = torch.autograd.graph.get_gradient_edge
    known = {edge(start).node for start in starts if start.requires_grad}
    nodes = nodes_from([out.grad_fn], lambda node: [other for other, _ in node.next_functions if other])  # type: ignore[union-attr]
    alone = not any(hasattr(node, "variable") and node not in known for node in nodes)
    needed, found = "stages to compute with params and h", "a closure's tensor that requires a gradient"
    expect(alone, "pipeline", needed, found, 'pass it in params, or take schedule="gpipe"')
