"""Checks that every verb makes of its arguments and trees before it communicates."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import Problem, expect, leaf_error, refuse
from fshard.tree.flat import Flat, Tree, Treedef, flatten, leaves_of
from fshard.tree.masks import Mask, matches
from fshard.tree.nodes import Sharded, is_sharded, is_trained, lose_tensor, tensor_of, tensors_of
from fshard.tree.specs import Axis

# The attribute of a tensor that says that it was donated.
DONATED = "_fshard_donated"

# The description of a leaf that is wrong and of the leaf expected; None for one that is right.
Misfit = tuple[str, str] | None


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


def is_unregistered(leaf: Any) -> bool:
    """Tell whether a leaf is an instance of a dataclass that is not registered as a pytree."""
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | Sharded)


def tree_remedy(leaves: Iterable[Any], otherwise: str) -> str:
    """Say how to register the first leaf that is an instance of a dataclass; without one return the other remedy.

    >>> tree_remedy([1, None], "pass tensors")
    'pass tensors'
    """
    cls = next((type(leaf).__name__ for leaf in leaves if is_unregistered(leaf)), None)
    if cls is None:
        return otherwise
    return (
        f'declare {cls} with @optree.dataclasses.dataclass(namespace=""), which registers it as a pytree, and for '
        f"torch.func call torch.utils._pytree.register_dataclass({cls}) too; or make it a NamedTuple"
    )


def _hides_shards(leaf: Any) -> bool:
    """Whether a leaf is an instance of a dataclass with Sharded leaves in it, which no verb would find."""
    if not is_unregistered(leaf):
        return False
    inside = [x for field in dataclasses.fields(leaf) for x in leaves_of(getattr(leaf, field.name, None))]
    return any(is_sharded(x) or _hides_shards(x) for x in inside)


class Range(NamedTuple):
    """The values that an argument may have: in words, for an error, and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# For `check_numbers`, which tests real numbers.
POSITIVE = Range("a number above 0", lambda number: number > 0)
NOT_NEGATIVE = Range("a finite number, 0 or more", lambda number: 0 <= number < math.inf)
FRACTION = Range("a number, 0 or more and below 1", lambda number: 0 <= number < 1)

# For `check_arguments`, which tests values of any type.
WHOLE = Range("a whole number", _is_whole)
COUNT = Range("a whole number, 0 or more, or None", lambda value: value is None or (_is_whole(value) and value >= 0))
SEED = Range("a whole number of 64 bits", lambda value: _is_whole(value) and -(2**63) <= value < 2**64)
FLOATING = Range(
    "a floating torch.dtype such as torch.bfloat16, or None",
    lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
)


def check_arguments(what: str, allowed: Range, **given: Any) -> None:
    """Refuse arguments out of a range.

    Args:
        what: The function that asks, for its error.
        allowed: The range.
        given: The arguments, by name.

    Raises:
        ValueError: with the name and the value of the first argument that is another value.
    """
    for name, value in given.items():
        expect(allowed.holds(value), what, f"{name} to be {allowed.expected}", f"{value!r:.40}")


def check_numbers(what: str, allowed: Range, **given: Any) -> None:
    """Refuse arguments that are no real numbers of a range, nor tensors of one: the host does not ask for its value.

    Args:
        what: As for `check_arguments`.
        allowed: As for `check_arguments`.
        given: As for `check_arguments`.

    Raises:
        ValueError: as `check_arguments`.
    """
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            holds = value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
        else:
            holds = isinstance(value, Real) and not isinstance(value, bool) and allowed.holds(value)
        shown = describe(value) if isinstance(value, torch.Tensor) else f"{value!r:.40}"
        expect(holds, what, f"{name} to be {allowed.expected}", shown)


def check_flags(what: str, **flags: Any) -> None:
    """Refuse flags that are neither True nor False: "no" is true to Python, and so is the text of a variable."""
    for name, flag in flags.items():
        expect(type(flag) is bool, f"{what}: {name}", "True or False", f"{flag!r:.40}", "pass one of the two")


def check_reduce(reduce: str, what: str) -> None:
    """Refuse an unknown way to reduce."""
    expect(reduce in ("mean", "sum", "weighted"), what, 'reduce to be "mean", "sum" or "weighted"', repr(reduce))


def check_matches(what: str, masks: Iterable[Mask], names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse masks that match none of the leaves."""
    for mask in masks:
        if not any(matches(mask, name, leaf) for name, leaf in zip(names, leaves, strict=True)):
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"{what}: the mask {mask!r} matches no leaf of {shown}; name some of these")


def is_reachable(axis: Axis) -> bool:
    """Tell whether this process can communicate over an axis: its group exists here and has as many ranks."""
    return axis.size == 1 or _compat.group_size(axis.group_name) == axis.size


def named(axis: Axis) -> str:
    """Name an axis with its group, for an error."""
    return f"axis {axis.name!r} of {axis.size} ranks in group {axis.group_name!r}"


def mark_donated(leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Leave donated leaves with an empty tensor that says so, before anything is written to them.

    Args:
        leaves: The leaves. A Sharded one lets go of its tensor, which goes on as it is; a plain one is emptied itself.

    Returns:
        For the plain ones, by their identity, new tensors that have their memory.
    """
    empty: dict[Any, torch.Tensor] = {}
    moved: dict[int, torch.Tensor] = {}
    # There may be thousands, and a device is slow to make and to hash.
    for leaf in leaves:
        if isinstance(leaf, Sharded):
            tensor = leaf.local
            gone = empty.get(tensor.dtype) if tensor.is_cpu else None
            lose_tensor(leaf, _empty_like(tensor, empty) if gone is None else gone)
        elif id(leaf) not in moved:
            # By no operator.
            moved[id(leaf)], leaf.data = leaf.data, _empty_like(leaf, empty)
            leaf.__dict__[DONATED] = True
    return moved


def _empty_like(tensor: torch.Tensor, known: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Find or make the empty tensor that takes the place of donated ones of a dtype and a device."""
    kind = tensor.dtype if tensor.is_cpu else (tensor.dtype, tensor.device)
    gone = known.get(kind)
    if gone is None:
        gone = known[kind] = tensor.new_empty(0)
        gone.__dict__[DONATED] = True
    return gone


def any_donated(leaves: Iterable[Any]) -> bool:
    """Tell whether one of thousands of leaves was donated."""
    return any(getattr(tensor, DONATED, None) is True for tensor in tensors_of(leaves))


def is_donated(leaf: Any) -> bool:
    """Tell whether a leaf's tensor was donated; it is empty then, of shape (0,)."""
    return getattr(tensor_of(leaf), DONATED, None) is True


def refuse_donated(what: str, flat: Flat) -> None:
    """Refuse leaves that were donated; `what` is the verb that asks."""

    def misfit(leaf: Any) -> Misfit:
        if is_donated(leaf):
            return "a tensor that was donated to an earlier call", "what that call returned in its place"
        return None

    remedy = "go on with the state that the call returned; if the call failed, restore the last checkpoint"
    refuse(f"{what}: arguments were donated", flat.problems(misfit), remedy)


def check_tensors(what: str, flat: Flat) -> None:
    """Refuse leaves that are no tensors."""

    def misfit(leaf: Any) -> Misfit:
        if is_sharded(leaf) or leaf is None or isinstance(leaf, torch.Tensor):
            return None
        return describe(leaf), "a Sharded leaf or a tensor"

    problems = flat.problems(misfit)
    if problems:
        remedy = tree_remedy(flat.leaves, "keep other values out of the tree")
        refuse(f"{what}: leaves are no tensors", problems, remedy)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's dtype takes gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_floating(what: str, flat: Flat) -> None:
    """Refuse leaves that should take a gradient and cannot."""

    def misfit(leaf: Any) -> Misfit:
        tensor = tensor_of(leaf)
        if not is_trained(leaf) or (isinstance(tensor, torch.Tensor) and is_differentiable(tensor)):
            return None
        return describe(tensor), "a floating tensor"

    held = tensors_of(flat.leaves)
    dtypes = {tensor.dtype if isinstance(tensor, torch.Tensor) else torch.int for tensor in held}
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        remedy = tree_remedy(flat.leaves, "shard these leaves with frozen=, or keep them out of the parameters")
        refuse(f"{what}: leaves cannot take a gradient", flat.problems(misfit), remedy)


def check_dense(what: str, paths: Sequence[str], grads: Sequence[torch.Tensor | None]) -> None:
    """Refuse gradients of Sharded leaves that are sparse: ranks add up and split dense ones.

    Args:
        what: The verb that asks, for its error.
        paths: The leaves' paths.
        grads: Their full gradients; None where there is none.

    Raises:
        ValueError: with the path of every leaf whose gradient is sparse.
    """
    problems = []
    for path, grad in zip(paths, grads, strict=True):
        if grad is not None and grad.layout is not torch.strided:
            problems.append(Problem(path, f"one of layout {grad.layout}", "a dense gradient"))
    remedy = (
        "pass sparse=False to nn.Embedding, nn.EmbeddingBag and their functions, sparse_grad=False to torch.gather, or "
        "call grad.to_dense()"
    )
    refuse(f"{what}: gradients are sparse", problems, remedy)


def check_axes(what: str, flat: Flat) -> None:
    """Refuse Sharded leaves of another mesh than this process is on."""

    def misfit(leaf: Any) -> Misfit:
        axes = leaf.spec.axes if is_sharded(leaf) else ()
        away = [named(axis) for axis in axes if not is_reachable(axis)]
        if away:
            return ", ".join(away), "a group of that size that this process is in"
        return None

    if not all(map(is_reachable, flat.axes)):
        refuse(f"{what}: leaves of another mesh", flat.problems(misfit), "shard the tree on a mesh of this process")


def check_local(what: str, flat: Flat) -> None:
    """Refuse leaves that were donated, and Sharded ones that do not fit their spec or live on no mesh of this process.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Raises:
        ValueError: with every wrong leaf's path, what it holds and what its spec needs, or that it was donated; or if
            Sharded leaves are inside a dataclass that is not a pytree.
    """

    def misfit(leaf: Any) -> Misfit:
        if _hides_shards(leaf):
            return f"{describe(leaf)} with Sharded leaves in it", "a pytree"
        if not isinstance(leaf, Sharded) or getattr(leaf.local, "shape", None) == leaf.spec.local_shape:
            return None
        return f"{describe(leaf.local)} as local tensor", f"a local tensor of shape {leaf.spec.local_shape}"

    if not all(map(_fits, flat.leaves)):
        refuse_donated(what, flat)
        remedy = tree_remedy(flat.leaves, "keep a leaf's shape when mapping over it")
        refuse(f"{what}: shards do not match their specs", flat.problems(misfit), remedy)
    check_axes(what, flat)


def _fits(leaf: Any) -> bool:
    """Whether a leaf surely fits its spec and was not donated, which leaves nothing of a tensor; for thousands."""
    shape = getattr(leaf.local if isinstance(leaf, Sharded) else leaf, "shape", None)
    if isinstance(leaf, Sharded):
        return shape != (0,) and shape == leaf.spec.local_shape
    return shape != (0,) and not (shape is None and is_unregistered(leaf))


def check_transforms(what: str, flat: Flat) -> None:
    """Refuse Sharded leaves whose spec does not say how to gather them, or calls frozen what a gradient goes through.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Raises:
        ValueError: with the path of every leaf whose spec has no transform, or is frozen around a computed tensor that
            requires a gradient.
    """

    def misfit(leaf: Any) -> Misfit:
        if not is_sharded(leaf):
            return None
        if leaf.spec.transform is None:
            return "a spec without a transform", "a spec with one"
        if leaf.spec.frozen and leaf.local.requires_grad and not leaf.local.is_leaf and torch.is_grad_enabled():
            return "a computed tensor that requires a gradient", "none, because its spec is frozen"
        return None

    if any(spec.transform is None or spec.frozen for spec in flat.specs):
        remedy = "make them by fs.shard or fs.reshard; give a frozen leaf the spec of the trained one, or detach it"
        refuse(f"{what}: leaves cannot be gathered", flat.problems(misfit), remedy)


def check_differentiable(what: str) -> None:
    """Refuse to differentiate in inference mode, where autograd records nothing."""
    needed, remedy = "a call outside of torch.inference_mode()", "call it outside, and evaluate with model.apply inside"
    expect(not torch.is_inference_mode_enabled(), what, needed, "one inside it", remedy)


def check_axis(what: str, axis: Any) -> None:
    """Refuse an axis that is no Axis, or of a mesh that this process is not on."""
    expect(isinstance(axis, Axis), what, "axis to be an Axis", describe(axis), "take it from a mesh by fs.axis_of")
    expect(is_reachable(axis), what, "axis of a mesh of this process", named(axis), "call it on the ranks of that mesh")


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
    expect(dim is None or type(dim) is int, what, "dim to be a whole number", describe(dim))

    def misfit(leaf: Any) -> Misfit:
        tensor = tensor_of(leaf)
        if leaf is None:
            return None
        if not isinstance(tensor, torch.Tensor) or dim not in (None, *range(tensor.dim())):
            needed = "a tensor" if dim is None else f"a tensor with a dim {dim}, counted from the front"
            return describe(tensor), needed
        typed = axis.size > 1 and vary is not None and is_sharded(leaf) and axis in leaf.spec.axes
        if not typed or (leaf.spec.dim_of(axis) is not None) is vary:
            return None
        found = "a leaf that ranks hold whole" if vary else "a leaf that is split over the axis"
        return found, f"one that {'varies' if vary else 'agrees'} between ranks"

    what, flat = f"{what} over {axis.name!r}", flatten(tree)
    refuse_donated(what, flat)
    problems = flat.problems(misfit)
    if problems:
        refuse(f"{what}: leaves do not fit", problems, tree_remedy(flat.leaves, "pass such tensors"))


def check_loss(loss: Any, reduce: str, what: str) -> None:
    """Refuse a loss that does not fit `reduce`, before it is reduced."""
    weighted = reduce == "weighted"
    pair = not weighted or (isinstance(loss, tuple) and len(loss) == 2)
    expect(pair, what, 'the loss to be the pair (sum, count) for reduce="weighted"', describe(loss))
    value, name = (loss[0], "sum") if weighted else (loss, "loss")
    fits = isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
    remedy = "sum or average over the batch; value_and_grad takes (loss, aux) by has_aux=True"
    expect(fits, what, f"the {name} to be a floating scalar tensor", describe(value), remedy)
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


def same_structure(
    what: str, flat: Flat, needed: Flat, remedy: str = "pass trees made from the same parameters"
) -> None:
    """Refuse a tree whose structure differs from the one expected.

    Args:
        what: The verb that asks and the tree's part in it, for its error.
        flat: The tree.
        needed: The tree it is held against.
        remedy: What the caller can do about it.

    Raises:
        ValueError: with every path that only one of the two has.
    """
    if flat.treedef == needed.treedef:
        return
    here, there = set(flat.paths), set(needed.paths)
    problems = [Problem(path, "nothing", "a leaf") for path in needed.paths if path not in here]
    problems += [Problem(path, "a leaf", "nothing") for path in flat.paths if path not in there]
    # Else nodes of other types, or of one type with other data of their own.
    problems = problems or [Problem("(structure)", str(flat.treedef), str(needed.treedef))]
    raise leaf_error(f"{what}: trees differ in structure", problems, remedy)


@contextmanager
def count_writes() -> Iterator[None]:
    """Make tensors whose in-place writes are counted, inside torch.inference_mode() too."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    # Leaving inference mode turns gradients on.
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def refuse_writes(what: str, paths: Sequence[str], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Find in-place writes to tensors that may share memory with the caller's state, by their version counters.

    Args:
        what: The verb that asks, for its error.
        paths: The tensors' paths.
        tensors: What must not be written to inside the context.

    Raises:
        ValueError: when the context ends, as for `check_versions`.
    """
    versions = _compat.versions(tensors)
    yield
    check_versions(what, paths, tensors, versions)


def check_versions(what: str, paths: Sequence[str], tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Refuse tensors that were written to in place.

    Args:
        what: The verb that asks, for its error.
        paths: The tensors' paths.
        tensors: The tensors.
        versions: Their version counters before.

    Raises:
        ValueError: with the path of every tensor written to.
    """
    now = _compat.versions(tensors)
    if now != versions:
        rows = zip(paths, map(operator.sub, now, versions), strict=True)
        problems = [Problem(path, f"{writes} in-place writes", "none") for path, writes in rows if writes]
        refuse(f"{what}: parameters were written to", problems, "compute a new tensor instead; other leaves are whole")
