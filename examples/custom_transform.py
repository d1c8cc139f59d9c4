"""Write a sharding transform, from one that changes nothing to int8 gradients with error feedback.

Run on two ranks, or on one without a launcher:

    torchrun --standalone --nproc_per_node 2 examples/custom_transform.py
    python examples/custom_transform.py --steps 20

A transform is a pair of pure functions. gather maps the stored shards to full tensors. scatter is the transpose of
gather: it maps gradients of full tensors to gradients of shards and sums them over ranks. fs.Wrapped forwards to
another transform, here fs.fully_shard, and a subclass overrides a part. Read this file from the top:
fs.testing.check_transform checks each step and prints its measurements. Then the program trains a small GPT with each
transform, and shows the loss and the bytes sent in a table and in a PNG.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from compare import compare, parse_args

import fshard as fs

Tensors = Sequence[torch.Tensor]
Specs = Sequence[fs.Spec]


# Step 1: a transform is a frozen dataclass, because specs hold it and are compared by value. This one adds nothing.
@dataclass(frozen=True)
class Identity(fs.Wrapped):
    pass


# Step 2: weights travel as bfloat16. Methods take all leaves that travel together, and return as many new tensors. The
# rounding has no derivative worth the name, so gradients pass straight through: scatter stays what it was.
@dataclass(frozen=True)
class Cast(fs.Wrapped):
    dtype: torch.dtype = torch.bfloat16

    def gather(self, leaves: Tensors, specs: Specs) -> Tensors:
        rounded = [leaf.to(self.dtype) for leaf in leaves]
        gathered = self.inner.gather(rounded, specs)
        full = []
        for tensor, leaf in zip(gathered, leaves):
            full.append(tensor.to(leaf.dtype))
        return full


# Step 3: a gather that multiplies needs a scatter that multiplies. The first one forgets it, and the check says so.
@dataclass(frozen=True)
class Forgetful(fs.Wrapped):
    factor: float

    def gather(self, leaves: Tensors, specs: Specs) -> Tensors:
        gathered = self.inner.gather(leaves, specs)
        return [self.factor * full for full in gathered]


@dataclass(frozen=True)
class Scale(Forgetful):
    def scatter(self, grads: Tensors, specs: Specs) -> Tensors:
        scaled = [self.factor * grad for grad in grads]
        return self.inner.scatter(scaled, specs)


# Step 4: weights travel as int8, in steps of 1/127 of the largest one. Ranks must agree on the steps, so a few bytes
# travel first. Whole numbers go through the inner gather like any others, however it splits and joins them.
def steps_of(tensors: Tensors, specs: Specs, levels: int, axis: fs.Axis) -> list[torch.Tensor]:
    """Find the value of one step of the code for each tensor: the same on every rank, and never zero.

    vmap puts its batch behind a leaf's dims: each member has a step of its own.
    """
    magnitudes = []
    for tensor, spec in zip(tensors, specs):
        last_dim = max(0, len(spec.storage_shape) - 1)
        row = tensor.detach().abs().flatten(0, last_dim)
        # A zero, because an empty tensor has no largest element.
        zero = row.new_zeros(1, *row.shape[1:])
        magnitudes.append(torch.cat([row, zero]).amax(0))
    largest = torch.stack(magnitudes)
    (of_ranks,) = fs.comm.all_gather([largest], axis, "scales")  # (ranks, tensors, *batch)
    steps = of_ranks.amax(0) / levels
    return list(steps.clamp(min=torch.finfo(largest.dtype).tiny))


def codes_of(tensors: Tensors, steps: Tensors) -> list[torch.Tensor]:
    codes = []
    for tensor, step in zip(tensors, steps):
        code = (tensor / step).round()
        codes.append(code.to(torch.int8))
    return codes


def numbers_of(codes: Tensors, steps: Tensors) -> list[torch.Tensor]:
    numbers = []
    for code, step in zip(codes, steps):
        numbers.append(code.to(step.dtype) * step)
    return numbers


@dataclass(frozen=True)
class Int8Weights(fs.Wrapped):
    def gather(self, leaves: Tensors, specs: Specs) -> Tensors:
        steps = steps_of(leaves, specs, 127, self.axes[0])
        codes = codes_of(leaves, steps)
        full = self.inner.gather(codes, specs)
        return numbers_of(full, steps)


# Step 5: gradients too. Sums of all ranks' codes must fit into int8, so each rank has 127 / ranks levels. Such coarse
# rounding would lose small gradients for good; what it leaves out is remembered and added to the next gradient. Memory
# is explicit: init makes it, and scatter takes the old one as its last argument and returns the new one too.
@dataclass(frozen=True)
class Int8(Int8Weights):
    def __post_init__(self) -> None:
        ranks = self.axes[0].size
        if ranks > 127:
            raise ValueError(f"Int8: expected sums of at most 127 ranks, got {ranks}; scatter along a smaller axis")

    def init(self, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)

    def scatter(
        self,
        grads: Tensors,
        specs: Specs,
        states: Tensors,
    ) -> tuple[Tensors, Tensors]:
        axis = self.axes[0]
        due = []
        for grad, left in zip(grads, states):
            due.append(grad + left)
        steps = steps_of(due, specs, 127 // axis.size, axis)
        codes = codes_of(due, steps)
        new_states = []
        for tensor, code, step in zip(due, codes, steps):
            left = tensor - code * step
            # What is not finite must not stay for good.
            new_states.append(left.nan_to_num(0.0, 0.0, 0.0))
        sums = self.inner.scatter(codes, specs)
        return numbers_of(sums, steps), new_states


def bytes_of_gradients(entry: fs.comm.Collective) -> float:
    return entry.sent if entry.label == "scatter" else 0.0


def main() -> None:
    args = parse_args("custom_transform", __doc__, steps=50)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ranks = mesh.size()
    plain = fs.fully_shard(mesh)

    def say(*words: object, sep: str = " ") -> None:
        if mesh.get_rank() == 0:
            print(*words, sep=sep, flush=True)

    def check(name: str, transform: fs.ShardTransform, error: float) -> None:
        """Of its own accord a check asks for exactness; a lossy transform states by how much it may be off."""
        report = fs.testing.check_transform(transform, error=error)
        cells = [f"{number:>16.4g}" for number in report]
        say(f"{name:<24}", *cells, sep="")

    try:
        fs.testing.check_adjoint(Forgetful(plain, 4.0), [(5, 3)])
    except AssertionError as complaint:
        say(f"step 3 with its scatter forgotten: {complaint}\n")
    titles = ("gather bytes", "scatter bytes", "gather error")
    cells = [f"{title:>16}" for title in titles]
    say("checked: 6 small leaves  ", *cells, sep="")
    steps = {
        "1 identity": (Identity(plain), 0.0),
        "2 weights as bfloat16": (Cast(plain), 2**-8),
        # A gather has to return the leaf, so that one scale is undone by another.
        "3 scaled and back": (Scale(Scale(plain, 4.0), 0.25), 0.0),
        "4 weights as int8": (Int8Weights(plain), 0.51 / 127),
        "5 gradients as int8 too": (Int8(plain), 0.51 * ranks / (127 // ranks)),
    }
    strategies = {"fs.fully_shard": fs.zero3(mesh, layout=plain)}
    for name, (transform, error) in steps.items():
        check(name, transform, error)
        strategies[name] = fs.zero3(mesh, layout=transform)
    say()
    compare(args, strategies, "for gradients", bytes_of_gradients)


if __name__ == "__main__":
    main()
