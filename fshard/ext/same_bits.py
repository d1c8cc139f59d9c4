"""assert_same_bits: a step trained at several world sizes has one answer, bit for bit."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.extend import describe, expect, flatten
from fshard.testing import Workers, spmd

# The parts of a step's result in the order in which they are computed.
LOSS, AUX, STATE = "loss", "aux", "state"


class _Values(NamedTuple):
    """Leaves of one step by their names, as digests or as tensors, and its sums over ranks that are no gradients'."""

    leaves: dict[str, Any]
    sums: Counter[str]


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
    unsharded state are compared byte by byte with those of the first world size. Simulated ranks share torch's own
    generator: a step that draws from it, as dropout does after `model.apply(key=)`, needs `Workers`, or a
    torch.Generator of its own.

    Args:
        step: Called with (state, microbatches); returns (state, loss), or (state, loss, aux) with a tree of more to
            compare. With the gradients as aux, the error tells an update from the sums of gradients.
        state: Called with a mesh, whose axis "shard" has all ranks; returns a TrainState, or parameters alone. A
            function that wants another mesh makes it by `fs.init_mesh`, for mesh.size() ranks.
        batches: All microbatches of the job, step by step.
        world_sizes: Numbers of ranks to simulate, or processes; one or more to compare with the first.
        timeout: Seconds that the run at one world size may take.

    Raises:
        ValueError: if `step` or `state` is no function, it returns something else, there are no batches, or torch has
            more threads in some processes than in others.
        AssertionError: with the first step and the first leaf that differ, how many of its elements differ and by how
            many units in the last place, and where to look.

    >>> import fshard as fs
    >>> tx = fs.sgd(0.1)
    >>> def state(mesh):
    ...     return fs.TrainState.create(fs.shard({"w": torch.ones(64, 3)}, fs.zero3(mesh, min_shard_elements=0)), tx)
    >>> def loss_fn(params, x):
    ...     return torch.tanh(x @ fs.gather(params)["w"]).mean()
    >>> def train_step(state, microbatches, sums="tree"):
    ...     loss, grads = fs.accumulate(loss_fn, sums=sums)(state.params, microbatches)
    ...     return fs.update(tx, state, grads), loss, grads
    >>> batches = torch.randn(3, 8, 5, 64, generator=torch.Generator().manual_seed(0))  # 3 steps of 8 microbatches
    >>> batches = [list(batch) for batch in batches]
    >>> assert_same_bits(train_step, state, batches, world_sizes=(1, 2, 4))
    >>> assert_same_bits(partial(train_step, sums=None), state, batches, world_sizes=(1, 4))
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
    _check_threads(world_sizes)

    def run(world: int | Workers, keep: int | None = None) -> list[_Values]:
        program = partial(_program, step, state, steps if keep is None else steps[:keep], keep)
        return spmd(program, world, timeout)[0]

    reference, *others = world_sizes
    needed = run(reference)
    for world in others:
        found = run(world)
        row = next((row for row, (a, b) in enumerate(zip(needed, found, strict=True)) if a.leaves != b.leaves), None)
        if row is None:
            continue
        first, second = run(reference, row)[-1], run(world, row)[-1]
        raise AssertionError(_report(row, (reference, world), (needed[row], found[row]), (first, second)))


def _check_threads(world_sizes: Sequence[int | Workers]) -> None:
    """Refuse processes that compute with other numbers of threads, by which torch's kernels cut their sums."""
    counts = {_size(world): sorted(set(spmd(torch.get_num_threads, world))) for world in world_sizes}
    equal = len({count for found in counts.values() for count in found}) == 1
    found = ", ".join(f"{' and '.join(map(str, threads))} on {_ranks(size)}" for size, threads in counts.items())
    remedy = "call torch.set_num_threads(1) in every process first, because sums of torch's kernels depend on it"
    expect(equal, "assert_same_bits", "torch to compute with one number of threads at every world size", found, remedy)


def _program(
    step: Callable[..., Any],
    state: Callable[..., Any],
    batches: Sequence[Sequence[Any]],
    keep: int | None,
) -> list[_Values]:
    """Run all steps on this rank; a value for the state that it starts from, and one for each step.

    Args:
        step: As for `assert_same_bits`.
        state: Likewise.
        batches: Likewise.
        keep: The number of the value that holds tensors, the last one; None leaves digests alone.
    """
    now = state(fs.init_mesh({"shard": -1}, device="cpu"))
    rows = [_values({STATE: now}, Counter(), keep == 0)]
    for number, batch in enumerate(batches, 1):
        share = fs.microbatches(batch, now.params if isinstance(now, fs.TrainState) else now)
        with fs.comm.record() as record:
            out = step(now, share)
        fits = isinstance(out, tuple) and len(out) in (2, 3)
        expect(fits, "assert_same_bits", "step to return (state, loss) or (state, loss, aux)", describe(out))
        now, loss, *aux = out
        own = (fs.comm.Verb.SCATTER, fs.comm.Verb.OBJECTIVE, fs.comm.Verb.AGREE, fs.comm.Verb.START)
        sums = (entry for entry in record if entry.op in ("all_reduce", "reduce_scatter") and entry.label not in own)
        tree = {LOSS: loss, **({AUX: aux[0]} if aux else {}), STATE: now}
        rows.append(_values(tree, Counter(entry.label for entry in sums), keep == number))
    return rows


def _values(parts: dict[str, Any], sums: Counter[str], whole: bool) -> _Values:
    leaves = {}
    for name, tree in parts.items():
        tree = fs.unshard(tree)
        flat = flatten(tree)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            # A tensor that stands for a whole tree has no path.
            leaves[name if leaf is tree else f"{name}{path}"] = _copied(leaf) if whole else _digest(leaf)
    return _Values(leaves, sums)


def _copied(leaf: Any) -> Any:
    return leaf.detach().resolve_conj().resolve_neg().clone() if isinstance(leaf, torch.Tensor) else leaf


def _digest(leaf: Any) -> Any:
    """A leaf's dtype, shape and a hash of its bytes."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.dtype, tuple(leaf.shape), hashlib.sha256(_bytes(leaf).numpy().tobytes()).hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _copied(tensor.cpu()).contiguous().reshape(-1).clone().view(torch.uint8)


def _report(
    row: int,
    worlds: tuple[int | Workers, int | Workers],
    digests: tuple[_Values, _Values],
    kept: tuple[_Values, _Values],
) -> str:
    """Describe the first row of values that differs.

    Args:
        row: Its number; 0 is the state before the first step.
        worlds: The world sizes.
        digests: What was found at both of them.
        kept: What was found there by another run of the same steps, as tensors.
    """
    a, b = map(_size, worlds)
    needed, found = (values.leaves for values in digests)
    place = f"step {row - 1} (counted from 0) has" if row else "the states to start from have"
    lines = [f"assert_same_bits: {place} other bits on {_ranks(b)} than on {a}"]
    differing = [name for name in {**needed, **found} if needed.get(name, ABSENT) != found.get(name, ABSENT)]
    first, of = differing[0], Counter(map(_part, differing))
    lines.append(f"  {first}: {_difference(kept[0].leaves.get(first, ABSENT), kept[1].leaves.get(first, ABSENT))}")
    total = Counter(map(_part, {**needed, **found}))
    lines.append("  leaves that differ: " + ", ".join(f"{of[name]} of {total[name]} in {name}" for name in of))
    again = [size for size, once, twice in zip((a, b), digests, kept, strict=True) if _digests(twice) != once.leaves]
    if again:
        found_twice = f"two runs on {_ranks(again[0])} differ from each other"
        remedy = (
            "draw random numbers from a key, on Workers or from a torch.Generator of your own, because simulated ranks "
            "share torch's; read nothing that a run changes, and take deterministic kernels"
        )
    else:
        found_twice, remedy = _cause(row, first, any(name.startswith(AUX) for name in total))
    lines.append(f"  {found_twice}")
    if row and digests[1].sums:
        sums = ", ".join(f"{label} ({number})" for label, number in digests[1].sums.items())
        lines.append(f"  sums over ranks in that step beside those of gradients and losses: {sums}")
    return "\n".join([*lines, f"To fix: {remedy}."])


ABSENT = "no such leaf"


def _size(world: int | Workers) -> int:
    return world.world_size if isinstance(world, Workers) else world


def _ranks(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"


def _part(name: str) -> str:
    """The loss, aux, or the field of a state."""
    return ".".join(name.partition("[")[0].split(".")[:2])


def _digests(values: _Values) -> dict[str, Any]:
    return {name: _digest(leaf) for name, leaf in values.leaves.items()}


def _cause(row: int, first: str, with_aux: bool) -> tuple[str, str]:
    """Tell from the first differing leaf of a row where the difference comes from, and the remedy."""
    tree = 'pass sums="tree" to accumulate or value_and_grad'
    kernels = "one thread and kernels whose bits depend on shape and dtype alone"
    if not row:
        remedy = "make it of the same values, such as by model.init(strategy, seed=0)"
        return "the function that makes the state", remedy
    if first.startswith(LOSS):
        source = "the state before is equal: the data, the forward or the sum of losses differs"
        return source, f"{tree}, draw random numbers by the microbatch's number, and take {kernels}"
    if first.startswith(AUX):
        source = "the state before and the loss are equal: the backward, the sums of gradients, or what else aux holds"
        return source, f"{tree}, and take {kernels}"
    if with_aux:
        source = "the state before, the loss and aux are equal: the update"
        norms = 'pass sums="tree" to what sums over shards, such as clip_by_global_norm'
        return source, f"{norms}, and take no fused optimizer of torch, whose bits depend on the length of a shard"
    source = "the state before and the loss are equal: the sums of gradients, or the update"
    return source, f"{tree}; return the gradients as a third value to learn which of the two it is"


def _difference(a: Any, b: Any) -> str:
    """How many elements of two leaves differ, by how many units in the last place, and where most."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return f"expected {describe(a)}, got {describe(b)}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"expected {a.dtype} of {tuple(a.shape)}, got {b.dtype} of {tuple(b.shape)}"
    a, b = (torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in (a, b))
    if not a.numel() or _bytes(a).equal(_bytes(b)):
        return "equal in another run"
    x, y = _ordinals(a), _ordinals(b)
    # Signs of zeros differ in a bit, but by nothing in the last place.
    wrong = (_bytes(a) != _bytes(b)).view(a.numel(), -1).any(dim=1).view(a.shape)
    far = ((x.double() - y.double()).abs() + 1) * wrong
    worst = tuple(int(i) for i in torch.unravel_index(far.argmax(), a.shape))
    by = abs(int(x[worst]) - int(y[worst]))
    count = f"{int(wrong.sum())} of {a.numel()} elements differ, by {by} ulp at most, at {worst}"
    return f"expected {a[worst].item()!r}, got {b[worst].item()!r} ({count})"


def _ordinals(tensor: torch.Tensor) -> torch.Tensor:
    """Number the values of a dtype in their order: neighbours differ by 1."""
    if not tensor.is_floating_point():
        return tensor.long()
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(kinds[tensor.element_size()])
    magnitude = (bits & torch.iinfo(bits.dtype).max).long()
    return torch.where(bits < 0, -magnitude, magnitude)
