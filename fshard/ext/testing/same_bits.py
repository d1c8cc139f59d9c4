"""assert_same_bits: a step trained at several world sizes has one answer, bit for bit."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

import fshard as fs
from fshard.extend import describe, expect, flatten
from fshard.testing import Workers, spmd

# The leaves of one step by the part of the results that they are counted in, such as "state.params", and their paths.
Values = dict[tuple[str, str], Any]

_TREE = 'pass reduction_order="tree" to accumulate or value_and_grad'
_KERNELS = "take one thread and kernels whose bits depend on shape and dtype alone"
# The cause and the remedy, by the first part of a step's results that differs. Parts are computed in this order.
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
    has to compute with the same number of threads in all processes.

    Args:
        step: Called with (state, microbatches); returns (state, loss), or (state, loss, aux) with a tree of more to
            compare. With the gradients as aux, the error tells an update from the sums of gradients.
        state: Called with a mesh, whose axis "shard" has all ranks; returns a TrainState, or parameters alone. A
            function that wants another mesh makes it by `fs.init_mesh`, for mesh.size() ranks.
        batches: All microbatches of the job, step by step.
        world_sizes: Numbers of ranks to simulate, or processes; one or more to compare with the first.
        timeout: Seconds that the run at one world size may take.

    Raises:
        ValueError: if `step` or `state` is no function, it returns something else, such as parameters that are not
            sharded, there are no batches, or the world sizes are equal.
        AssertionError: with the first step and the first leaf that differ, how many of its elements differ, and the
            likely cause.

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
    are_different = isinstance(world_sizes, Sequence) and len(set(world_sizes)) > 1
    expect(are_different, "assert_same_bits", "two or more different world_sizes", f"{world_sizes!r:.100}")
    steps = list(batches)
    expect(steps, "assert_same_bits", "batches of one step or more", "none")
    program = partial(_run_steps, step, state, steps)
    first, *others = (spmd(program, world, timeout)[0] for world in world_sizes)
    ranks = [world.world_size if isinstance(world, Workers) else world for world in world_sizes]
    for size, rows in zip(ranks[1:], others, strict=True):
        # The first row is the state before all steps.
        for number, (a, b) in enumerate(zip(first, rows, strict=True), start=-1):
            differences = {}
            for name in a | b:
                text = _describe_difference(a.get(name, ABSENT), b.get(name, ABSENT))
                if text:
                    differences[name] = text
            if differences:
                raise AssertionError(_report(number, (ranks[0], size), differences, a | b))


def _run_steps(step: Callable[..., Any], state: Callable[..., Any], batches: Sequence[Sequence[Any]]) -> list[Values]:
    """Run all steps; returns the values of the first state and of each step on rank 0, and nothing on others."""
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    current = state(mesh)
    rows = [_values_of_state(current)]
    sharded = flatten(current).sharded
    remedy = "lay them out on the mesh by fs.shard, or every rank gets all microbatches"
    expect(sharded, "assert_same_bits", "state to return Sharded leaves", "none", remedy)
    for batch in batches:
        params = getattr(current, "params", current)
        out = step(current, fs.microbatches(batch, params))
        is_step_result = isinstance(out, tuple) and len(out) in (2, 3)
        expect(is_step_result, "assert_same_bits", "step to return (state, loss) or (state, loss, aux)", describe(out))
        current, loss, *aux = out
        leaves = _values("loss", loss)
        for tree in aux:
            leaves |= _values("aux", tree)
        rows.append(leaves | _values_of_state(current))
    return [] if mesh.get_rank() else rows


def _values_of_state(state: Any) -> Values:
    """Copy the leaves of a TrainState field by field, or of parameters alone."""
    if not isinstance(state, fs.TrainState):
        return _values("state", state)
    leaves: Values = {}
    for field, tree in state._asdict().items():
        leaves |= _values(f"state.{field}", tree)
    return leaves


def _values(part: str, tree: Any) -> Values:
    """Copy the leaves of a tree in full, by their names."""
    tree = fs.unshard(tree)
    leaves: Values = {}
    for path, leaf in flatten(tree).named_leaves:
        # A tensor that stands for a whole tree has no path.
        place = part, "" if leaf is tree else path
        # Tensors and arrays.
        if hasattr(leaf, "__array__"):
            tensor = torch.as_tensor(leaf).detach().cpu()
            leaf = tensor.resolve_conj().resolve_neg().clone()
        leaves[place] = leaf
    return leaves


def _report(number: int, ranks: tuple[int, int], differences: Values, leaves: Values) -> str:
    """Describe the first step that differs, or the state before all steps, whose number is -1."""
    place = f"step {number} (counted from 0) has"
    first = next(iter(differences))
    cause, remedy = _CAUSES[first[0].partition(".")[0]]
    if number < 0:
        place = "the states to start from have"
        cause = "the function that makes the state"
        remedy = "make it of the same values, such as by model.init(strategy, seed=0)"
    counts = Counter(part for part, _ in differences)
    totals = Counter(part for part, _ in leaves)
    lines = [
        f"assert_same_bits: {place} other bits on {ranks[1]} ranks than on {ranks[0]}",
        f"  {first[0]}{first[1]}: {differences[first]}",
        "  leaves that differ: " + ", ".join(f"{counts[part]} of {totals[part]} in {part}" for part in counts),
        f"  {cause}",
        f"To fix: {remedy}.",
    ]
    return "\n".join(lines)


def _describe_difference(a: Any, b: Any) -> str:
    """Describe how two leaves differ; the text is empty if they have the same bits."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        texts = [leaf if leaf is ABSENT else repr(leaf) for leaf in (a, b)]
        # NaN is not equal to itself, 0.0 is to -0.0, and equal sets may list their elements in other orders.
        is_equal = type(a) is type(b) is not float and a == b
        return "" if is_equal or texts[0] == texts[1] else "expected {:.100}, got {:.100}".format(*texts)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"expected {a.dtype} of {tuple(a.shape)}, got {b.dtype} of {tuple(b.shape)}"
    bytes_a, bytes_b = (leaf.reshape(-1, 1).contiguous().view(torch.uint8) for leaf in (a, b))
    differs = (bytes_a != bytes_b).any(1)
    if not differs.any():
        return ""
    position = int(differs.nonzero()[0])
    first = f"expected {a.reshape(-1)[position].item()!r}, got {b.reshape(-1)[position].item()!r}"
    return f"{first} (element {position}, the first of {int(differs.sum())} of {a.numel()} that differ)"
