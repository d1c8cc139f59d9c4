"""One rank's part of a pipeline whose forwards and backwards run by hand, as a table of ticks says."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.parallel.ticks import Op, Tick, receiver, ticks
from fshard.extend import chained, custom_call, describe, expect


class Parts(NamedTuple):
    """The arguments of `fs.pipeline`."""

    stage_fn: Callable[[Any, torch.Tensor], torch.Tensor]
    first: Callable[[Any, Any], torch.Tensor]
    last: Callable[..., Any]
    axis: fs.Axis
    microbatches: int
    schedule: str
    virtual_stages: int
    reduce: str


class Stage:
    """The parts of a model on one rank."""

    def __init__(self, parts: Parts, batches: Sequence[tuple[Any, ...]], like: torch.Tensor) -> None:
        """Name the parts.

        Args:
            parts: The parts.
            batches: The microbatches of x and the rest.
            like: A tensor of the shape and dtype that stages take and return.
        """
        self._parts, self._batches, self._like = parts, batches, like
        # The loss of the last stage alone is known, and others add zeros to it.
        self._dtype = torch.promote_types(like.dtype, torch.float32)

    def first(self, params: Any, microbatch: int) -> torch.Tensor:
        """Make the first stage's input."""
        x = self._batches[microbatch][0]
        return self._fitting("first", self._parts.first(params, x))

    def stage(self, params: Any, h: torch.Tensor) -> torch.Tensor:
        """Run a stage."""
        return self._fitting("stage_fn", self._parts.stage_fn(params, h))

    def last(self, params: Any, h: torch.Tensor, microbatch: int) -> list[torch.Tensor]:
        """Make of the last stage's output a part of the loss, and of the count for "weighted"."""
        parts, weighted = self._parts, self._parts.reduce == "weighted"
        out = parts.last(params, h, *self._batches[microbatch][1:])
        found = list(out) if weighted and isinstance(out, tuple) else [out]
        scalars = [isinstance(part, torch.Tensor) and not part.dim() for part in found]
        needed = 'the pair (sum, count) of scalar tensors for reduce="weighted"' if weighted else "a scalar tensor"
        expect(all(scalars) and len(found) == 1 + weighted, "pipeline", f"last to return {needed}", describe(out))
        loss = found[0].to(self._dtype)
        counts = [count.detach().to(torch.float64) for count in found[1:]]
        return [loss / parts.microbatches if parts.reduce == "mean" else loss, *counts]

    def nothing(self) -> list[torch.Tensor]:
        """Make the part of the loss, and of the count, of a stage that is not the last."""
        dtypes = [self._dtype, *([torch.float64] if self._parts.reduce == "weighted" else [])]
        return [self._like.new_zeros((), dtype=dtype) for dtype in dtypes]

    def _fitting(self, name: str, out: Any) -> torch.Tensor:
        shape, dtype = self._like.shape, self._like.dtype
        fits = isinstance(out, torch.Tensor) and out.shape == shape and out.dtype is dtype
        needed = f"{name} to return a tensor of shape {tuple(shape)} and {dtype}, as first returned for microbatch 0"
        expect(fits, "pipeline", needed, describe(out))
        return out


class _Live(NamedTuple):
    """A microbatch between its forward and its backward."""

    h: torch.Tensor | None
    out: torch.Tensor
    tokens: list[torch.Tensor]


class Run:
    """All ticks of one rank.

    Attributes:
        axis: The axis of the stages.
    """

    def __init__(
        self,
        parts: Parts,
        stage: Stage,
        rebuild: Callable[[Sequence[torch.Tensor]], Any],
        like: torch.Tensor,
        split: Sequence[bool],
        sums: Sequence[Callable[[torch.dtype], torch.dtype]],
    ) -> None:
        """Before the first tick.

        Args:
            parts: The arguments of `fs.pipeline`.
            stage: The parts on this rank.
            rebuild: Makes the tree of parameters of its leaves.
            like: A tensor of the shape and dtype that stages exchange.
            split: For each leaf whether it is split over the axis.
            sums: For each leaf the dtype in which gradients of some dtype are added up.
        """
        self.axis, self._parts, self._stage, self._rebuild, self._like = parts.axis, parts, stage, rebuild, like
        self._split, self._sum_dtypes = split, sums
        self._own, self._stages = fs.comm.rank(parts.axis), parts.axis.size
        told = f"{parts.schedule}, {parts.microbatches} microbatches, reduce={parts.reduce!r}"
        self._label = fs.comm.Label("pipeline", parts=f"{told}, {like.dtype} {tuple(like.shape)}")
        self._live: dict[tuple[int, int], _Live] = {}
        self._inbox: dict[Op, Callable[[], torch.Tensor]] = {}
        self._flying: deque[Callable[[], Any]] = deque()
        # Each virtual stage's leaves, and the sums of their gradients by the leaves' ids.
        self._leaves: list[list[torch.Tensor]] = []
        self._sums: dict[int, torch.Tensor] = {}

    def __call__(
        self, tensors: Sequence[torch.Tensor], backward: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Run all ticks.

        Args:
            tensors: The gathered leaves.
            backward: Whether there are backwards.

        Returns:
            This rank's part of the loss and of the count, and for each leaf its gradient, None where it has none.
        """
        parts = self._parts
        for chunk in range(parts.virtual_stages):
            leaves = [self._start(i, tensor, chunk, backward) for i, tensor in enumerate(tensors)]
            self._leaves.append(leaves)
        found = self._stage.nothing()
        # Tensors of these graphs are needed soon, and are saved as they are.
        saved_as_they_are = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        with torch.set_grad_enabled(backward), saved_as_they_are:
            for tick in ticks(self._stages, parts.microbatches, parts.schedule, parts.virtual_stages, backward):
                sent: torch.Tensor | None = None
                if (op := tick[self._own]) is not None:
                    place = op.chunk * self._stages + self._own
                    if op.backward:
                        sent = self._backward(op, place)
                    elif place < self._stages * parts.virtual_stages - 1:
                        sent = self._forward(op, place, backward)[0].detach()
                    else:
                        out = self._forward(op, place, backward)
                        found = [a + b.detach() for a, b in zip(found, out, strict=True)]
                self._exchange(tick, sent)
        self._land(0)
        return found, [self._gradient(i) for i in range(len(tensors))]

    def _start(self, i: int, tensor: torch.Tensor, chunk: int, backward: bool) -> torch.Tensor:
        """The start of a leaf's graphs: one for all virtual stages where it is whole, else one for each."""
        if chunk and not self._split[i]:
            return self._leaves[0][i]
        own = tensor.detach()[chunk] if self._split[i] and self._parts.schedule == "interleaved" else tensor.detach()
        return own.requires_grad_(backward and tensor.requires_grad)

    def _forward(self, op: Op, place: int, backward: bool) -> list[torch.Tensor]:
        """Run a virtual stage forwards; returns its output, or the loss and count of the last one."""
        h, params = None, self._rebuild(self._leaves[op.chunk])
        with chained() as chain:
            if place:
                h = self._inbox.pop(op)()
                if backward:
                    h.requires_grad_()
            out = [self._stage.stage(params, self._stage.first(params, op.microbatch) if h is None else h)]
            if place == self._stages * self._parts.virtual_stages - 1:
                out = self._stage.last(params, out[0], op.microbatch)
        if backward:
            if op.microbatch == 0:
                starts = [*self._leaves[op.chunk], *chain.tokens[:1], *([] if h is None else [h])]
                _refuse_others(out[0], starts)
            self._live[op.microbatch, op.chunk] = _Live(h, out[0], chain.tokens)
        return out

    def _backward(self, op: Op, place: int) -> torch.Tensor | None:
        """Run a virtual stage backwards; returns the cotangent of its input."""
        h, out, tokens = self._live.pop((op.microbatch, op.chunk))
        is_last = place == self._stages * self._parts.virtual_stages - 1
        start = torch.ones_like(out) if is_last else self._inbox.pop(op)()
        trained = [(i, leaf) for i, leaf in enumerate(self._leaves[op.chunk]) if leaf.requires_grad]
        inputs = [*(leaf for _, leaf in trained), *tokens[:1], *([] if h is None else [h])]
        outputs = [(out, start), *((token, torch.zeros_like(token)) for token in tokens[1:])]
        outputs = [pair for pair in outputs if pair[0].requires_grad]
        grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if outputs and inputs:
            ends, starts = zip(*outputs, strict=True)
            grads = torch.autograd.grad(ends, inputs, starts, allow_unused=True)
        for (i, leaf), grad in zip(trained, grads, strict=False):
            if grad is not None:
                dtype, before = self._sum_dtypes[i](grad.dtype), self._sums.get(id(leaf))
                # A copy, because the sum is scaled in place, and leaves may share the memory of a gradient.
                self._sums[id(leaf)] = grad.to(dtype, copy=True) if before is None else before + grad.to(dtype)
        if h is None:
            return None
        return torch.zeros_like(self._like) if grads[-1] is None else grads[-1]

    def _gradient(self, i: int) -> torch.Tensor | None:
        """The gradient of a leaf, in its dtype, with those of virtual stages in one stack."""
        leaves = [leaves[i] for leaves in self._leaves]
        if not self._split[i] or self._parts.schedule != "interleaved":
            found = self._sums.get(id(leaves[0]))
            return None if found is None else found.to(leaves[0].dtype)
        rows = [self._sums.get(id(leaf)) for leaf in leaves]
        if all(row is None for row in rows):
            return None
        pairs = zip(rows, leaves, strict=True)
        return torch.stack([torch.zeros_like(leaf) if row is None else row.to(leaf.dtype) for row, leaf in pairs])

    def _exchange(self, tick: Tick, sent: torch.Tensor | None) -> None:
        """Start to send what the ranks have computed in a tick to those that need it."""
        found = [
            (rank, op and receiver(rank, op, self._stages, self._parts.virtual_stages)) for rank, op in enumerate(tick)
        ]
        moves = [(source, *to) for source, to in found if to is not None]
        for source, target, op in moves:
            if source == target:
                assert sent is not None
                self._inbox[op] = partial(_same, sent)
        moves = [move for move in moves if move[0] != move[1]]
        if not moves:
            return
        targets = [target for source, target, _ in moves if source == self._own]
        sources = sorted(source for source, target, _ in moves if target == self._own)
        row = self._like if sent is None else sent
        send, receive = ([int(rank in ranks) for rank in range(self._stages)] for ranks in (targets, sources))
        rows = row.expand(len(targets), *row.shape)
        finish = cache(fs.comm.start_all_to_all([rows], send, receive, self._parts.axis, self._label))
        for source, target, op in moves:
            if target == self._own:
                self._inbox[op] = partial(_received, finish, sources.index(source))
        self._flying.append(finish)
        # What is sent is kept until it has arrived.
        self._land(self._stages)

    def _land(self, most: int) -> None:
        while len(self._flying) > most:
            self._flying.popleft()()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _received(finish: Callable[[], list[torch.Tensor]], row: int) -> torch.Tensor:
    return finish()[0][row]


def _refuse_others(out: torch.Tensor, starts: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that a stage closes over and that require a gradient, which nobody would compute."""
    edge = torch.autograd.graph.get_gradient_edge
    known = {edge(start).node for start in starts if start.requires_grad}
    waiting: list[Any] = [out.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
    alone = not any(hasattr(node, "variable") and node not in known for node in seen)
    remedy = 'pass it in params, or take schedule="gpipe"'
    expect(
        alone, "pipeline", "stages to compute with params and h", "a closure's tensor that requires a gradient", remedy
    )


def scheduled(run: Run, tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Run all ticks, with the backwards where something is differentiated.

    Args:
        run: The run.
        tensors: The gathered leaves.
        what: A name, with all that ranks must have been told alike.

    Returns:
        This rank's part of the loss, differentiable once, and of the count.
    """
    trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return run(tensors, backward=False)[0]
    used: list[int] = []

    def forward(_: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        found, grads = run(tensors, backward=True)
        pairs = [(i, grads[i]) for i in trained]
        used[:] = [place for place, (_, grad) in enumerate(pairs) if grad is not None]
        return found, [grad for _, grad in pairs if grad is not None]

    def backward(saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        # In place, because there may be no room for another copy; autograd refuses to read them again.
        scaled = {place: grad.mul_(cotangents[0]) for place, grad in zip(used, saved, strict=True)}
        return [scaled.get(place) for place in range(len(trained))]

    return custom_call(forward, backward, [tensors[i] for i in trained], what, run.axis, remedy='take schedule="gpipe"')
