"""assert_same_bits: a step trained at several world sizes has one answer, bit for bit."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.testing.compare import differing_leaves
from fshard.extend import describe, expect, flatten, process_rank
from fshard.testing import Workers, spmd

# The leaves of one step by their paths, such as "state.params['w']".
Values = dict[str, Any]

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
        # Whatever differs on another rank than 0, where that has the bits that are expected.
        "rank": (
            "rank 0 has the bits that are expected: the step computes this of the rank, or of its part of the batch",
            "return what agrees between ranks, as after fs.objective, fs.pmean or fs.sync_buffers",
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
    unsharded state of each rank are compared byte by byte with those of rank 0 at the first world size, which are kept
    for all steps; if it has several ranks, it runs twice. Torch has to compute with the same number of threads in all
    processes.

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
        AssertionError: with the first step, rank and leaf that differ, how many of its elements differ, and the likely
            cause.

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
    AssertionError: assert_same_bits: step 0 (counted from 0) has other bits on rank 0 of 4 than on rank 0 of 1
      loss: ...
    """
    expect(callable(step), "assert_same_bits", "step to be a function", describe(step))
    remedy = "pass a function of a mesh that makes the state, because each world size has its own"
    expect(callable(state), "assert_same_bits", "state to be a function", describe(state), remedy)
    are_different = isinstance(world_sizes, Sequence) and len(set(world_sizes)) > 1
    expect(are_different, "assert_same_bits", "two or more different world_sizes", f"{world_sizes!r:.100}")
    steps = list(batches)
    expect(steps, "assert_same_bits", "batches of one step or more", "none")
    run = partial(_run_steps, step, state, steps)
    of_first = spmd(partial(_keep_on_rank_0, run), world_sizes[0], timeout)
    # Rank 0 of the first world size has no others to be compared with if it is alone.
    for world in world_sizes[len(of_first) == 1 :]:
        of_ranks = spmd(partial(_find_difference, run, of_first[0]), world, timeout)
        differences = [difference for difference in of_ranks if difference]
        if differences:
            raise AssertionError(_report(len(of_first), len(of_ranks), *min(differences)))


def _keep_on_rank_0(run: Callable[[], Iterator[Values]]) -> list[Values]:
    return [row for row in run() if process_rank() == 0]


def _find_difference(
    run: Callable[[], Iterator[Values]], expected: Sequence[Values]
) -> tuple[int, int, dict[str, str]] | None:
    """Run all steps, and find the first one whose values differ on this rank.

    Returns:
        Its number, this rank, and how each leaf differs, "" where it does not; None if no step differs.
    """
    first = None
    # The first row is the state before all steps.
    for number, (a, b) in enumerate(zip(expected, run(), strict=True), start=-1):
        texts = {path: _describe_difference(a.get(path, ABSENT), b.get(path, ABSENT)) for path in a | b}
        # Other ranks may find none, and all have to go on together.
        if first is None and any(texts.values()):
            first = number, process_rank(), texts
    return first


def _run_steps(
    step: Callable[..., Any], state: Callable[..., Any], batches: Sequence[Sequence[Any]]
) -> Iterator[Values]:
    """Run all steps, and yield the values of the first state and of each step."""
    current = state(fs.init_mesh({"shard": -1}, device="cpu"))
    yield _copy_in_full(_Results((), (), current))
    sharded = flatten(current).sharded
    remedy = "lay them out on the mesh by fs.shard, or every rank gets all microbatches"
    expect(sharded, "assert_same_bits", "state to return Sharded leaves", "none", remedy)
    for batch in batches:
        params = getattr(current, "params", current)
        out = step(current, fs.microbatches(batch, params))
        is_step_result = isinstance(out, tuple) and len(out) in (2, 3)
        expect(is_step_result, "assert_same_bits", "step to return (state, loss) or (state, loss, aux)", describe(out))
        current, loss, *aux = out
        yield _copy_in_full(_Results(loss, aux[0] if aux else (), current))


class _Results(NamedTuple):
    """What a step computes, in this order."""

    loss: Any
    aux: Any
    state: Any


def _copy_in_full(results: _Results) -> Values:
    """Copy all leaves, by their paths."""
    leaves: Values = {}
    for path, leaf in flatten(fs.unshard(results)).named_leaves:
        # Tensors and arrays.
        if hasattr(leaf, "__array__"):
            leaf = torch.as_tensor(leaf).detach().cpu().clone()
        leaves[path.removeprefix(".")] = leaf
    return leaves


def _part_of(path: str) -> str:
    """The part of the results that a leaf is counted in, such as "state.params"."""
    return path.partition("[")[0]


def _report(first_size: int, size: int, number: int, rank: int, texts: dict[str, str]) -> str:
    """Describe the first step that differs, or the state before all steps, whose number is -1."""
    place = f"step {number} (counted from 0) has"
    different = [path for path, text in texts.items() if text]
    first = different[0]
    cause, remedy = _CAUSES["rank" if rank else _part_of(first).partition(".")[0]]
    if number < 0:
        place = "the states to start from have"
        cause = "the function that makes the state"
        remedy = "make it of the same values, such as by model.init(strategy, seed=0)"
    counts = Counter(map(_part_of, different))
    totals = Counter(map(_part_of, texts))
    lines = [
        f"assert_same_bits: {place} other bits on rank {rank} of {size} than on rank 0 of {first_size}",
        f"  {first}: {texts[first]}",
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
    problems = differing_leaves(b, a, exact=True)
    return problems[0].got if problems else ""
