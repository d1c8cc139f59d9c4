"""Checks that every verb makes of its trees before it communicates."""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import Problem, expect, leaf_error, refuse
from fshard.tree import (
    Axis,
    Flat,
    Mask,
    Sharded,
    Spec,
    Tree,
    Treedef,
    TreeMask,
    flatten,
    is_sharded,
    is_trained,
    matches,
    tensor_of,
    tensors_of,
)

# Where a tensor says that it was donated.
DONATED = "donated"


def describe(leaf: Any) -> str:
    """Say what a leaf is, for an error.

    >>> describe(1.5), describe(3), describe(torch.ones(2))
    ('a float', 'an int', 'a float32 Tensor of shape (2,)')
    """
    if leaf is None or is_sharded(leaf):
        return "None" if leaf is None else "a Sharded leaf"
    name = type(leaf).__name__
    if isinstance(leaf, torch.Tensor):
        name = f"{str(leaf.dtype).removeprefix('torch.')} {name} of shape {tuple(leaf.shape)}"
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def check_flags(what: str, remedy: str = "pass one of the two", **flags: Any) -> None:
    """Refuse flags that are neither True nor False: "no" is true to Python, and so is the text of a variable.

    Args:
        what: The function that asks, for its error.
        remedy: What to do.
        flags: The flags, by the names of their arguments.

    Raises:
        ValueError: with the name and the value of the first flag that is another value.
    """
    for name, flag in flags.items():
        expect(type(flag) is bool, f"{what}: {name}", "True or False", f"{flag!r:.40}", remedy)


class Range(NamedTuple):
    """Which numbers an argument may be: in words, for an error, and as a test."""

    expected: str
    holds: Callable[[Any], bool]


FINITE = Range("a finite number", lambda number: -math.inf < number < math.inf)
POSITIVE = Range("a number above 0", lambda number: number > 0)
NOT_NEGATIVE = Range("a finite number, 0 or more", lambda number: 0 <= number < math.inf)
FRACTION = Range("a number, 0 or more and below 1", lambda number: 0 <= number < 1)


def check_numbers(what: str, allowed: Range, **given: Any) -> None:
    """Refuse arguments that are no numbers of a range: real numbers, or tensors of one.

    The value of a tensor is read on a processor alone: elsewhere the host would wait for it, and what a transform or a
    trace holds has none.

    Args:
        what: The function that asks, for its error.
        allowed: The range.
        given: The arguments, by name.

    Raises:
        ValueError: with the name and the value of the first argument that is another value.
    """
    for name, value in given.items():
        shown, number = f"{value!r:.40}", value
        if isinstance(value, torch.Tensor):
            shown, number = describe(value), None
            known = type(value) is torch.Tensor and value.is_cpu and not _compat.is_tracing()
            if value.numel() != 1 or value.is_complex() or value.dtype is torch.bool:
                number = "none"
            elif known and not _compat.is_transformed(value):
                number = value.detach().item()
                shown = f"{number!r}"
        real = isinstance(number, Real) and not isinstance(number, bool)
        holds = value is not None and (number is None or (real and allowed.holds(number)))
        expect(holds, what, f"{name} to be {allowed.expected}", shown)


def check_types(what: str, needed: type | tuple[type, ...], expected: str, **given: Any) -> None:
    """Refuse arguments of another type.

    Args:
        what: The function that asks, for its error.
        needed: The types, as isinstance takes them; a bool is no int.
        expected: The same in words.
        given: The arguments, by name.

    Raises:
        ValueError: with the name of the first argument of another type.
    """
    for name, value in given.items():
        holds = isinstance(value, needed) and not isinstance(value, bool)
        expect(holds, what, f"{name} to be {expected}", describe(value))


def check_seed(what: str, seed: Any) -> None:
    """Refuse a seed that torch's generators do not take.

    Args:
        what: The function that asks, for its error.
        seed: The seed.

    Raises:
        ValueError: if it is no whole number of 64 bits.
    """
    holds = isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**64
    shown = f"{seed!r:.40}" if isinstance(seed, int) else describe(seed)
    expect(holds, what, "seed to be a whole number of 64 bits", shown)


def check_function(what: str, f: Any) -> None:
    """Refuse what is no function.

    Args:
        what: The function that asks, for its error.
        f: The argument.

    Raises:
        ValueError: if it cannot be called.
    """
    expect(callable(f), what, "f to be a function", describe(f))


def check_dim(what: str, dim: Any, name: str = "dim") -> None:
    """Refuse a dim that is no whole number.

    Args:
        what: The function that asks, for its error.
        dim: The dim.
        name: The argument's name.

    Raises:
        ValueError: if it is another value.
    """
    expect(isinstance(dim, int) and not isinstance(dim, bool), what, f"{name} to be a whole number", f"{dim!r:.40}")


def check_leaves(what: str, flat: Flat, misfit: Callable[[Any], tuple[str, str] | None], remedy: str) -> None:
    """Refuse the leaves that are wrong.

    Args:
        what: The verb that asks and why, in a few words.
        flat: The tree.
        misfit: Describes a leaf that is wrong and the leaf expected; None for one that is right.
        remedy: What the caller can do about them.

    Raises:
        ValueError: with the path of every leaf that is wrong.
    """
    refuse(what, flat.problems(misfit), remedy)


def check_matches(what: str, masks: Iterable[Mask], names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse masks that match none of the leaves, and trees of bools of another structure."""
    for mask in masks:
        if isinstance(mask, TreeMask):
            problems = [Problem(name, got, expected) for name, expected, got in mask.misfits(names)]
            refuse(f"{what}: the mask has other leaves", problems, "make it of this tree, by fs.tree_map for instance")
        if not any(matches(mask, name, leaf) for name, leaf in zip(names, leaves, strict=True)):
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"{what}: the mask {mask!r} matches no leaf of {shown}; name some of these")


def mark_donated(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Hand over the tensors of donated leaves, which are left with an empty tensor that says so.

    A tensor that the caller holds besides is emptied itself, and its memory is handed over in a new one. Leaves that
    share a tensor hand over one for all.
    """
    alone = _hold_alone(leaves)
    kept = [tensor_of(leaf) for leaf in leaves]
    empty: dict[Any, torch.Tensor] = {}
    moved: dict[int, torch.Tensor] = {}
    put = object.__setattr__
    for i, (tensor, is_alone) in enumerate(zip(kept, alone, strict=True)):
        # There may be thousands, and a device is slow to make and to hash.
        kind = tensor.dtype if tensor.is_cpu else (tensor.dtype, tensor.device)
        gone = empty.get(kind)
        if gone is None:
            gone = empty[kind] = tensor.new_empty(0)
            gone.__dict__[DONATED] = True
        if is_alone:
            put(leaves[i], "local", gone)
        elif id(tensor) in moved:
            kept[i] = moved[id(tensor)]
        else:
            kept[i] = moved[id(tensor)] = tensor.data
            # By no operator.
            tensor.data = gone
            tensor.__dict__[DONATED] = True
    return kept


def _hold_alone(leaves: Sequence[Any]) -> list[bool]:
    """For each leaf whether it is Sharded and nothing else refers to its tensor."""
    probe = Sharded(torch.empty(0), Spec(()))
    counts = [sys.getrefcount(leaf.local) if isinstance(leaf, Sharded) else 0 for leaf in (*leaves, probe)]
    return [found == counts[-1] for found in counts[:-1]]


def is_donated(leaf: Any) -> bool:
    """Tell whether a leaf's tensor was donated; it is empty then, of shape (0,)."""
    return getattr(leaf.local if isinstance(leaf, Sharded) else leaf, DONATED, None) is True


def refuse_donated(what: str, flat: Flat) -> None:
    """Refuse tensors that were donated to an earlier call.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Raises:
        ValueError: with the path of every leaf that was donated.
    """
    pair = "a tensor that was donated to an earlier call", "what that call returned in its place"
    donated = [Problem(path, *pair) for path, leaf in zip(flat.paths, flat.leaves, strict=True) if is_donated(leaf)]
    refuse(f"{what}: arguments were donated", donated, "go on with the new state, or do not donate the old one")


def is_reachable(axis: Axis) -> bool:
    """Tell whether this process can communicate over an axis: its group exists here and has as many ranks."""
    return axis.size == 1 or _compat.group_size(axis.group_name) == axis.size


def check_local(what: str, flat: Flat) -> None:
    """Refuse leaves that were donated, and Sharded ones that do not fit their spec or live on no mesh of this process.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Raises:
        ValueError: with every wrong leaf's path, what it holds and what its spec needs, or that it was donated.
    """

    def misfit(leaf: Any) -> tuple[str, str] | None:
        if not isinstance(leaf, Sharded):
            return None
        local, needed = leaf.local, leaf.spec.local_shape
        if isinstance(local, torch.Tensor) and local.shape == needed:
            return None
        shape = f"a local tensor of shape {tuple(local.shape)}" if isinstance(local, torch.Tensor) else ""
        return shape or f"{describe(local)} as local tensor", f"a local tensor of shape {needed}"

    refuse_donated(what, flat)
    members = (
        "stack Sharded members for vmap, each of which fs.shard made: fs.tree_map(lambda *m: torch.stack(m), a, b)"
    )
    remedy = members if _compat.transforms_active() else "keep a leaf's shape when mapping over it"
    check_leaves(f"{what}: shards do not match their specs", flat, misfit, remedy)
    check_axes(what, flat)


def check_axes(what: str, flat: Flat) -> None:
    """Refuse Sharded leaves of another mesh than this process is on.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Raises:
        ValueError: with the path of every leaf that lives on an axis whose process group this process does not have.
    """
    away = [axis for axis in flat.axes if not is_reachable(axis)]
    if not away:
        return
    problems = [
        Problem(
            path,
            f"axis {axis.name!r} of {axis.size} ranks in group {axis.group_name!r}",
            "a group of that size that this process is in",
        )
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        for axis in (leaf.spec.axes if is_sharded(leaf) else ())
        if axis in away
    ]
    refuse(f"{what}: leaves of another mesh", problems, "shard the tree on a mesh of this process")


def check_transforms(what: str, flat: Flat) -> None:
    """Refuse Sharded leaves whose spec does not say how to gather them, or calls frozen what a gradient goes through.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Raises:
        ValueError: with the path of every leaf whose spec has no transform, or is frozen around a computed tensor that
            requires a gradient.
    """

    def missing(leaf: Any) -> tuple[str, str] | None:
        pair = "a spec without a transform", "a spec with one"
        return pair if is_sharded(leaf) and leaf.spec.transform is None else None

    def lost(leaf: Any) -> tuple[str, str] | None:
        computed = is_sharded(leaf) and leaf.spec.frozen and leaf.local.requires_grad and not leaf.local.is_leaf
        pair = "a computed tensor that requires a gradient", "none, because its spec is frozen"
        return pair if computed else None

    if any(spec.transform is None for spec in flat.specs):
        check_leaves(f"{what}: leaves cannot be gathered", flat, missing, "make them by fs.shard or fs.reshard")
    if torch.is_grad_enabled() and any(spec.frozen for spec in flat.specs):
        remedy = "give the result the spec of the leaf that is trained, or detach it"
        check_leaves(f"{what}: a frozen leaf would lose its gradient", flat, lost, remedy)


def check_tensors(what: str, flat: Flat) -> None:
    """Refuse leaves that are no tensors, such as a text or a number, which `shard` refuses too.

    Args:
        what: The verb that asks and the argument, for its error.
        flat: The tree; None leaves are passed over.

    Raises:
        ValueError: with the path of every other leaf that is neither a tensor nor Sharded.
    """

    def misfit(leaf: Any) -> tuple[str, str] | None:
        fits = leaf is None or isinstance(leaf, torch.Tensor) or is_sharded(leaf)
        return None if fits else (describe(leaf), "a Sharded leaf or a tensor")

    check_leaves(f"{what}: leaves are no tensors", flat, misfit, "keep other values out of the tree")


def check_floating(what: str, flat: Flat) -> None:
    """Refuse leaves that cannot take a gradient and are not frozen.

    Args:
        what: The verb that asks, for its error.
        flat: The parameters; None leaves and frozen ones are passed over.

    Raises:
        ValueError: with the path of every other leaf that is no floating or complex tensor.
    """
    rows = zip(flat.paths, flat.leaves, tensors_of(flat.leaves), strict=True)
    problems = [
        Problem(path, describe(tensor), "a floating tensor")
        for path, leaf, tensor in rows
        if not (isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()))
        and is_trained(leaf)
    ]
    remedy = "shard these leaves with frozen=, or keep them out of the parameters"
    refuse(f"{what}: leaves cannot take a gradient", problems, remedy)


def check_axis(what: str, axis: Any) -> None:
    """Refuse an axis that is no Axis, or of a mesh that this process is not on."""
    expect(isinstance(axis, Axis), what, "axis to be an Axis", describe(axis), "take it from a mesh by fs.axis_of")
    found = f"axis {axis.name!r} of {axis.size} ranks in group {axis.group_name!r}"
    expect(is_reachable(axis), what, "axis of a mesh of this process", found, "call it on the ranks of that mesh")


def check_operands(what: str, tree: Tree, axis: Axis, dim: int | None = None, *, vary: bool | None = None) -> None:
    """Refuse what a collective over an axis cannot take.

    Args:
        what: The collective, for its error.
        tree: Its operands.
        axis: Its axis.
        dim: The dim it counts on, if any.
        vary: Whether operands vary between the ranks of the axis, or agree; None where both are right. It is only known
            of Sharded leaves.

    Raises:
        ValueError: if `axis` is no Axis, or with the path of every leaf that is no tensor, has no such dim, or varies
            where it should not.
    """
    check_axis(what, axis)

    def unfit(leaf: Any) -> tuple[str, str] | None:
        tensor = tensor_of(leaf)
        fits = isinstance(tensor, torch.Tensor) and (dim is None or dim in range(tensor.dim()))
        needed = "a tensor" if dim is None else f"a tensor with a dim {dim}, counted from the front"
        return None if leaf is None or fits else (describe(tensor), needed)

    def untyped(leaf: Any) -> tuple[str, str] | None:
        known = axis.size > 1 and vary is not None and is_sharded(leaf) and axis in leaf.spec.axes
        if not known or (leaf.spec.dim_of(axis) is not None) is vary:
            return None
        found = "a leaf that ranks hold whole" if vary else "a leaf that is split over the axis"
        return found, f"one that {'varies' if vary else 'agrees'} between ranks"

    what, flat = f"{what} over {axis.name!r}", flatten(tree)
    refuse_donated(what, flat)
    remedy = "pass tensors" if dim is None else "pass tensors of more dims, or another dim"
    check_leaves(f"{what}: leaves do not fit", flat, unfit, remedy)
    remedy = "the sum is the value times the number of ranks; leave it out" if vary else "gather it instead"
    check_leaves(f"{what}: leaves do not fit", flat, untyped, remedy)


def check_reduce(reduce: str, what: str) -> None:
    """Refuse an unknown way to reduce."""
    expect(reduce in ("mean", "sum", "weighted"), what, 'reduce to be "mean", "sum" or "weighted"', repr(reduce))


def check_sums(what: str, sums: Any) -> None:
    """Refuse an unknown order of sums."""
    expect(sums in (None, "tree"), what, 'sums to be "tree" or None', repr(sums))


def check_loss(loss: Any, reduce: str, what: str) -> None:
    """Refuse a loss that does not fit `reduce`, before it is reduced."""
    weighted = reduce == "weighted"
    pair = not weighted or (isinstance(loss, tuple) and len(loss) == 2)
    expect(pair, what, 'the loss to be the pair (sum, count) for reduce="weighted"', describe(loss))
    value, name = (loss[0], "sum") if weighted else (loss, "loss")
    fits = isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
    needed, remedy = "a floating scalar tensor", "sum or average over the batch"
    if isinstance(value, tuple):
        needed, remedy = "a floating scalar tensor alone", "value_and_grad takes (loss, aux) by has_aux=True"
    expect(fits, what, f"the {name} to be {needed}", describe(value), remedy)
    if weighted:
        check_count(loss[1], what)


def check_count(count: Any, what: str) -> None:
    """Refuse a count that is no scalar, or is differentiated: sums are divided by it as by a constant."""
    scalar = isinstance(count, torch.Tensor) and not count.dim() and not count.is_complex()
    expect(scalar, what, "the count to be a real scalar tensor", describe(count), "torch.tensor makes one")
    constant = not (count.requires_grad or _compat.any_dual([count]))
    expect(constant, what, "a count that requires no gradient", "one that does", "pass count.detach()")


def outline(treedef: Treedef) -> str:
    """The node types of a structure, without keys or the nodes' own data, whose text may differ between processes."""
    if treedef.type is None:
        return "*"
    return f"{treedef.type.__name__}({', '.join(map(outline, treedef.children()))})"


def same_structure(what: str, flat: Flat, needed: Flat) -> None:
    """Refuse a tree whose structure differs from the one expected.

    Args:
        what: The verb that asks and the tree's part in it, for its error.
        flat: The tree.
        needed: The tree it is held against.

    Raises:
        ValueError: with every path that only one of the two has.
    """
    if flat.treedef == needed.treedef:
        return
    here, there = dict.fromkeys(flat.paths), dict.fromkeys(needed.paths)
    problems = [Problem(path, "nothing", "a leaf") for path in there if path not in here]
    problems += [Problem(path, "a leaf", "nothing") for path in here if path not in there]
    if not problems:
        # Nodes of other types, or of one type with other data of their own.
        pair = outline(flat.treedef), outline(needed.treedef)
        pair = pair if pair[0] != pair[1] else (str(flat.treedef), str(needed.treedef))
        problems = [Problem("(structure)", *pair)]
    raise leaf_error(f"{what}: trees differ in structure", problems, "pass trees made from the same parameters")


def check_differentiable(what: str, flat: Flat) -> None:
    """Refuse to differentiate in inference mode, where autograd records nothing, or what was made there.

    Args:
        what: The verb that asks, for its error.
        flat: The parameters.

    Raises:
        ValueError: in inference mode, or with the path of every parameter that was made in it.
    """
    needed = "a call outside of torch.inference_mode(), where autograd records nothing"
    remedy = "call it outside, and evaluate with model.apply inside"
    expect(not torch.is_inference_mode_enabled(), what, needed, "one inside it", remedy)
    pair = "a tensor made in torch.inference_mode()", "one that autograd can record"
    problems = [
        Problem(path, *pair)
        for path, tensor in zip(flat.paths, tensors_of(flat.leaves), strict=True)
        if isinstance(tensor, torch.Tensor) and tensor.is_inference()
    ]
    refuse(f"{what}: parameters take no gradient", problems, "clone them outside of inference mode")


@contextmanager
def writes_counted() -> Iterator[None]:
    """Make tensors whose in-place writes are counted, inside torch.inference_mode() too."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    # Leaving inference mode turns gradients on.
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def refuse_writes(
    what: str, paths: Sequence[str], tensors: Sequence[torch.Tensor], owned: Sequence[Any] | None = None
) -> Iterator[None]:
    """Find in-place writes to tensors that may share memory with the caller's state, by their version counters.

    Args:
        what: The verb that asks, for its error.
        paths: The tensors' paths.
        tensors: What must not be written to inside the context.
        owned: The caller's tensors in the same order; by default these.

    Raises:
        ValueError: when the context ends, as for `check_versions`.
    """
    versions = _compat.versions(tensors)
    yield
    check_versions(what, paths, tensors, versions, tensors if owned is None else owned)


def check_versions(
    what: str, paths: Sequence[str], tensors: Sequence[Any], versions: Sequence[int], owned: Sequence[Any]
) -> None:
    """Refuse tensors that were written to in place.

    Args:
        what: The verb that asks, for its error.
        paths: The tensors' paths.
        tensors: The tensors; None for those that are gone.
        versions: Their version counters before.
        owned: The caller's tensors of the same leaves. What shares memory with one that was written to is lost.

    Raises:
        ValueError: with the path of every tensor written to, and whether the caller has lost it.
    """
    now = _compat.versions(tensors)
    if now == versions:
        return
    problems, lost = [], False
    for path, tensor, owner, writes in zip(paths, tensors, owned, map(operator.sub, now, versions), strict=True):
        if writes:
            mine = _compat.is_transformed(tensor) or _compat.storage_key(tensor) == _compat.storage_key(owner)
            lost = lost or mine
            problems.append(Problem(path, f"{writes} in-place writes{' (the leaf is lost)' if mine else ''}", "none"))
    state = "the values of a lost leaf have changed in the caller's state" if lost else "the caller's state is whole"
    refuse(f"{what}: parameters were written to", problems, f"compute a new tensor instead; {state}")
