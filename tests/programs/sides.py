"""A program, and the two sides of its comparison: all rows in one process, a rank's rows with sharded parameters."""

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch.func import vmap

import fshard as fs
from fshard.shard import without_padding
from fshard.tree import flatten
from tests.programs.subjects import COUNTS, ROWS, Subject
from tests.trees import STRATEGIES, Meshes, meshes

Tree = Any
Batch = tuple[torch.Tensor, torch.Tensor]

CHOSEN: dict[str, Callable[[Meshes], fs.ShardTransform]] = {
    **{name: STRATEGIES[name] for name in ("zero2 of every leaf", "hsdp", "last dim", "ddp", "two dims")},
    "zero3": lambda on: fs.zero3(on.line, min_shard_elements=0, merge_bytes=0),
}


class Program(NamedTuple):
    """A program as one process runs it and as a rank of several does.

    Attributes:
        dense: Called with a Dense; returns named results.
        sharded: Called with an OfRank; returns the same ones, sharded or whole.
        sweeps: How often it goes through the model, each time summing as many terms again.
    """

    dense: Callable[[Any], dict[str, Any]]
    sharded: Callable[[Any], dict[str, Any]]
    sweeps: int


def alike(run: Callable[[Any], dict[str, Any]], sweeps: int) -> Program:
    """A program whose text is the same on both sides."""
    return Program(run, run, sweeps)


def errors(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The cross entropy of each row."""
    return outputs.logsumexp(-1) - (outputs * y).sum(-1)


class Dense:
    """One process, which has all rows and whole parameters.

    Attributes:
        support: The batch that programs differentiate.
        query: Another one, for programs that need two.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject, self.params, self.predict = subject, subject.params, subject.dense
        self.support, self.query = subject.batch(3), subject.batch(4)
        # Drawn here, because ranks cannot shard inside a transform, where there are no numbers yet.
        self.directions, self.members = self.drawn(5, 2), self.drawn(20, 3)

    def drawn(self, seed: int, count: int) -> list[Tree]:
        """Trees like the parameters, the same on both sides."""
        return [self.cut(self.subject.like_params(seed + i)) for i in range(count)]

    def cut(self, tree: Tree) -> Tree:
        return tree

    def loss(self, params: Tree, batch: Batch | None = None) -> torch.Tensor:
        """The mean error of all rows."""
        x, y = batch or self.support
        return errors(self.predict(params, x), y).mean()

    def joined(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, on every rank."""
        return rows

    def stack(self, trees: list[Tree], dim: int = 0) -> Tree:
        return fs.tree_map(lambda *leaves: torch.stack(leaves, dim), *trees)


class OfRank(Dense):
    """One rank of several: some rows, sharded parameters."""

    def __init__(self, subject: Subject, strategy: str) -> None:
        on = meshes()
        self.subject, self.axis, self.transform = subject, fs.axis_of(on.line), CHOSEN[strategy](on)
        self.params, self.predict = self.cut(subject.params), subject.sharded()
        before, counts = on.line.get_rank(), COUNTS[self.axis.size]
        self.start, self.count = sum(counts[:before]), counts[before]
        self.support, self.query = self.mine(subject.batch(3)), self.mine(subject.batch(4))
        self.directions, self.members = self.drawn(5, 2), self.drawn(20, 3)

    def mine(self, tensors: tuple[torch.Tensor, ...]) -> Batch:
        return tuple(tensor.narrow(0, self.start, self.count) for tensor in tensors)

    def cut(self, tree: Tree) -> Tree:
        return fs.shard(tree, self.transform)

    def local(self, params: Tree, batch: Batch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of this rank's errors, and how many they are."""
        x, y = batch or self.support
        return errors(self.predict(params, x), y).sum(), torch.tensor(len(x))

    def loss(self, params: Tree, batch: Batch | None = None) -> torch.Tensor:
        return fs.objective(self.local(params, batch), like=params, reduce="weighted")

    def joined(self, rows: torch.Tensor) -> torch.Tensor:
        before, after = (rows.new_zeros(n, *rows.shape[1:]) for n in (self.start, ROWS - self.start - self.count))
        return fs.psum_invariant(torch.cat([before, rows, after]), self.axis)

    def moved(self, full: Tree) -> Tree:
        """The parameters plus a whole tree that every rank holds, differentiably."""
        shift = fs.scatter_grads(fs.pvary(full, self.axis), like=self.params, reduce="mean")
        return fs.tree_map(torch.add, self.params, shift)

    def dot(self, a: Tree, b: Tree) -> torch.Tensor:
        """The inner product: each element once, however many ranks hold it, and no padding."""
        parts = []
        for left, right in zip(flatten(a).leaves, flatten(b).leaves):
            part = (without_padding(left) * without_padding(right)).sum()
            for axis in left.spec.partition_axes():
                part = fs.psum(part, axis)
            parts.append(part)
        return reduce(add, parts)

    def whole(self, stacked: Tree, depth: int = 1) -> Tree:
        """Gather a tree of shards that have `depth` dims of stacks in front."""
        gather = fs.gather
        for _ in range(depth):
            gather = vmap(gather)
        return gather(stacked)
