"""assert_same_bits: a step trained at several world sizes has one answer, bit for bit."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.extend import describe, expect, flatten
from fshard.testing import Workers, spmd


class _Name(NamedTuple):
    """Where a leaf is.

    Attributes:
        result: What a step returns it in: its loss, aux or state.
        field: The field of a state, with a dot before it; else empty.
        path: Its path from there.
    """

    result: str
    field: str
    path: str

    @property
    def part(self) -> str:
        """What leaves are counted by."""
        return f"{self.result}{self.field}"

    def __str__(self) -> str:
        return f"{self.part}{self.path}"


# The leaves of one step by their names.
Values = dict[_Name, Any]

_TREE = 'pass reduction_order="tree" to accumulate or value_and_grad'
_KERNELS = "take one thread and kernels whose bits depend on shape and dtype alone"
# By the part of a step's result that differs first, in the order in which parts are computed: its cause, the remedy.
_CAUSES = MappingProxyType(
    {
        "loss": (
            "the state before is equal: the data, the forward or the sum of losses differs",
            f"{_TREE}, draw random numbers from a generator of your own by the microbatch's number, and {_KERNELS}",
        ),
        "aux": (
            "the state before and the loss are equal: the backward, the sums of gradients, or what else aux holds",
            f"{_TREE}, and {_KERNELS}",
        ),
        "state": (
            "the state before and the loss are equal: the sums of gradients, unless they are aux, or the update",
            f"{_TREE} and to what sums over shards, such as clip_by_global_norm, take no fused optimizer of torch, "
            "whose bits depend on the length of a shard, and return the gradients as a third value to compare",
        ),
    }
)
ABSENT = "no such leaf"


def assert_same_bits(
    step: Callable[..., Any],
    state: Callable[..., Any],
    batches: Iterable[Sequence[Any]],
    world_sizes: Sequence[int | Workers] = (1, 2, 4, 8),
    *,
    timeout: float = 300.0,
) -> None:
    """Run a step at several world sizes and assert that every loss and every leaf of the state have the same bits.

    Every rank makes its state, and gets its share of each batch by `fs.microbatches`. After each step the loss and the
    unsharded state are compared byte by byte with those of the first world size, which are kept for all steps. Torch
    has to compute with one number of threads in all processes. Simulated ranks share torch's own generator: a step
    that draws from it, as dropout does after `model.apply(key=)`, needs `Workers`, or a torch.Generator of its own.

    Args:
        step: Called with (state, microbatches); returns (state, loss), or (state, loss, aux) with a tree of more to
            compare. With the gradients as aux, the error tells an update from the sums of gradients.
        state: Called with a mesh, whose axis "shard" has all ranks; returns a TrainState, or parameters alone. A
            function that wants another mesh makes it by `fs.init_mesh`, for mesh.size() ranks.
        batches: All microbatches of the job, step by step.
        world_sizes: Numbers of ranks to simulate, or processes; one or more to compare with the first.
        timeout: Seconds that the run at one world size may take.

    Raises:
        ValueError: if `step` or `state` is no function, it returns something else, or there are no batches.
        AssertionError: with the first step and the first leaf that differ, how many of its elements differ, and where
            to look.

    >>> import fshard as fs
    >>> tx = fs.sgd(0.1)
    >>> def state(mesh):
    ...     return fs.TrainState.create(fs.shard({"w": torch.ones(64, 3)}, fs.zero3(mesh, min_shard_elements=0)), tx)
    >>> def loss_fn(params, x):
    ...     return torch.tanh(x @ fs.gather(params)["w"]).mean()
    >>> def train_step(state, microbatches, reduction_order="tree"):
    ...     loss, grads = fs.accumulate(loss_fn, reduction_order=reduction_order)(state.params, microbatches)
    ...     return fs.update(tx, state, grads), loss, grads
    >>> batches = torch.randn(3, 8, 5, 64, generator=torch.Generator().manual_seed(0))  # 3 steps of 8 microbatches
    >>> batches = [list(batch) for batch in batches]
    >>> assert_same_bits(train_step, state, batches, world_sizes=(1, 2, 4))
    >>> assert_same_bits(partial(train_step, reduction_order=None), state, batches, world_sizes=(1, 4))
    Traceback (most recent call last):
    AssertionError: assert_same_bits: step 0 (counted from 0) has other bits on 4 ranks than on 1
      loss: ...
    """
    expect(callable(step), "assert_same_bits", "step to be a function", describe(step))
    remedy = "pass a function of a mesh that makes the state, because each world size has its own"
    expect(callable(state), "assert_same_bits", "state to be a function", describe(state), remedy)
    known = isinstance(world_sizes, Sequence) and len(world_sizes) > 1
    expect(known, "assert_same_bits", "world_sizes to be two or more", f"{world_sizes!r:.100}")
    steps = list(batches)
    expect(steps, "assert_same_bits", "batches of one step or more", "none")
    program = partial(_program, step, state, steps)
    needed, *others = (spmd(program, world, timeout)[0] for world in world_sizes)
    ranks = [world.world_size if isinstance(world, Workers) else world for world in world_sizes]
    for size, found in zip(ranks[1:], others, strict=True):
        for number, (a, b) in enumerate(zip(needed, found, strict=True), -1):
            differing = [name for name in {**a, **b} if _difference(a.get(name, ABSENT), b.get(name, ABSENT))]
            if differing:
                raise AssertionError(_report(number, (ranks[0], size), a, b, differing))


def _program(step: Callable[..., Any], state: Callable[..., Any], batches: Sequence[Sequence[Any]]) -> list[Values]:
    """Run all steps; returns the values of the state that they start from and of each step, on one rank alone."""
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    now = state(mesh)
    rows = [_values_of_state(now)]
    for batch in batches:
        out = step(now, fs.microbatches(batch, now.params if isinstance(now, fs.TrainState) else now))
        fits = isinstance(out, tuple) and len(out) in (2, 3)
        expect(fits, "assert_same_bits", "step to return (state, loss) or (state, loss, aux)", describe(out))
        now, loss, *aux = out
        leaves = _values("loss", "", loss)
        if aux:
            leaves |= _values("aux", "", aux[0])
        rows.append(leaves | _values_of_state(now))
    return [] if mesh.get_rank() else rows


def _values_of_state(state: Any) -> Values:
    """The leaves of a TrainState field by field, or of parameters alone."""
    if not isinstance(state, fs.TrainState):
        return _values("state", "", state)
    leaves: Values = {}
    for field in state._fields:
        leaves |= _values("state", f".{field}", getattr(state, field))
    return leaves


def _values(result: str, field: str, tree: Any) -> Values:
    tree = fs.unshard(tree)
    flat = flatten(tree)
    leaves: Values = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        # A tensor that stands for a whole tree has no path.
        name = _Name(result, field, "" if leaf is tree else path)
        is_tensor = isinstance(leaf, torch.Tensor)
        leaves[name] = leaf.detach().cpu().resolve_conj().resolve_neg().clone() if is_tensor else leaf
    return leaves


def _report(number: int, ranks: tuple[int, int], needed: Values, found: Values, differing: Sequence[_Name]) -> str:
    """Describe the first step that differs, or the state before all steps, whose number is -1."""
    place = f"step {number} (counted from 0) has" if number >= 0 else "the states to start from have"
    first = differing[0]
    cause, remedy = _CAUSES[first.result]
    if number < 0:
        cause = "the function that makes the state"
        remedy = "make it of the same values, such as by model.init(strategy, seed=0)"
    of = Counter(name.part for name in differing)
    total = Counter(name.part for name in {**needed, **found})
    lines = [
        f"assert_same_bits: {place} other bits on {ranks[1]} ranks than on {ranks[0]}",
        f"  {first}: {_difference(needed.get(first, ABSENT), found.get(first, ABSENT))}",
        "  leaves that differ: " + ", ".join(f"{of[part]} of {total[part]} in {part}" for part in of),
        f"  {cause}",
    ]
    return "\n".join([*lines, f"To fix: {remedy}."])


def _difference(a: Any, b: Any) -> str:
    """Describe how two leaves differ; empty where they have the same bits."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return "" if type(a) is type(b) and a == b else f"expected {describe(a)}, got {describe(b)}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"expected {a.dtype} of {tuple(a.shape)}, got {b.dtype} of {tuple(b.shape)}"
    x, y = (leaf.reshape(-1, 1).contiguous().view(torch.uint8) for leaf in (a, b))
    wrong = (x != y).any(1)
    if not wrong.any():
        return ""
    place = int(wrong.nonzero()[0])
    first = f"expected {a.reshape(-1)[place].item()!r}, got {b.reshape(-1)[place].item()!r}"
    return f"{first} (element {place}, the first of {int(wrong.sum())} of {a.numel()} that differ)"
