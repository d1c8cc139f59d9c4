"""Checks that every verb makes of its arguments and trees before it communicates.

The file has over 600 lines, so that the words of one refusal are not written twice: most checks share the describers,
ranges and remedies at its top.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import Problem, expect, refuse
from fshard.tree.abstract import is_abstract
from fshard.tree.flat import Flat, Misfit, Tree, Treedef, flatten, leaves_of
from fshard.tree.masks import Mask, matches
from fshard.tree.nodes import Sharded, attributes_of, is_sharded, is_trained, replace_local, tensor_of
from fshard.tree.specs import Axis

# The attribute of a tensor that says that it was donated.
DONATED = "_fshard_donated"


def describe(leaf: Any) -> str:
    """Say what a leaf is, for an error.

    >>> describe(1.5), describe(3), describe(torch.ones(2))
    ('a float', 'an int', 'a float32 Tensor of shape (2,)')
    """
    if leaf is None:
        return "None"
    if is_sharded(leaf):
        return "a Sharded leaf"
    if isinstance(leaf, type):
        return f"the class {leaf.__name__}"
    name = type(leaf).__name__
    # In a trace a fake tensor stands for the user's plain one.
    if _compat.is_tracing() and _compat.is_fake(leaf):
        name = "Tensor"
    if torch.is_tensor(leaf):
        name = f"{str(leaf.dtype).removeprefix('torch.')} {name} of shape {tuple(leaf.shape)}"
    if is_donated(leaf):
        name += " that was donated to an earlier call"
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
    return f"write @fs.register_dataclass above the declaration of {cls}, or put its tensors in a dict or a NamedTuple"


def _hides_shards(leaf: Any) -> bool:
    """Whether a leaf is an instance of a dataclass with Sharded leaves in it, which no verb would find."""
    if not is_unregistered(leaf):
        return False
    inside = [x for field in dataclasses.fields(leaf) for x in leaves_of(getattr(leaf, field.name, None))]
    return any(is_sharded(x) or _hides_shards(x) for x in inside)


def refuse_frozen_counters(api_name: str, given: Tree) -> None:
    """Refuse numbers on the CPU while an accelerator captures a graph.

    The graph holds the accelerator's kernels alone. Each replay would use the numbers of the capture again, such as the
    count of steps in Adam's bias correction.

    Args:
        api_name: What asks, for an error.
        given: The state that is updated, or the arguments.

    Raises:
        ValueError: with the leaves, while a graph is captured.
    """
    device_type = _compat.capturing_device()
    if device_type is None:
        return

    def describe_counter(leaf: Any) -> str | None:
        is_counter = torch.is_tensor(leaf) and leaf.is_cpu and not leaf.dim()
        return f"{describe(leaf)} on the CPU" if is_counter else None

    headline = f"{api_name}: a graph is being captured, and its replays would not change these numbers"
    move = f'before the capture, move them by state = fs.tree_map(lambda leaf: leaf.to("{device_type}"), state)'
    remedy = f"make optimizers of fs.from_torch with capturable=True, and {move}"
    refuse(headline, flatten(given).problems(describe_counter), remedy)


class Range(NamedTuple):
    """The values that an argument may have: in words, for an error, and as a test."""

    expected: str
    allows: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# For `check_numbers`, which tests real numbers.
POSITIVE = Range("a number above 0", lambda number: number > 0)
FINITE = Range("a finite number", math.isfinite)
NOT_NEGATIVE = Range("a finite number, 0 or more", lambda number: math.isfinite(number) and number >= 0)
FRACTION = Range("a number, 0 or more and below 1", lambda number: 0 <= number < 1)

# For `check_arguments`, which tests values of any type.
WHOLE = Range("a whole number", _is_whole)
NUMBER = Range("a whole number from 1", lambda value: _is_whole(value) and value > 0)
COUNT = Range("a whole number, 0 or more, or None", lambda value: value is None or (_is_whole(value) and value >= 0))
SECONDS = Range(
    "a number of seconds above 0 and below 1e9", lambda value: type(value) in (int, float) and 0 < value < 1e9
)
SEED = Range("a whole number of 64 bits", lambda value: _is_whole(value) and -(2**63) <= value < 2**64)
FLOATING = Range(
    "a floating torch.dtype such as torch.bfloat16, or None",
    lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
)


def check_arguments(api_name: str, allowed: Range, **arguments: Any) -> None:
    """Refuse arguments out of a range.

    Args:
        api_name: The function that asks, for its error.
        allowed: The range.
        arguments: The arguments, by name.

    Raises:
        ValueError: with the name and the value of the first argument that is another value.
    """
    for name, value in arguments.items():
        expect(allowed.allows(value), api_name, f"{name} to be {allowed.expected}", f"{value!r:.40}")


def check_numbers(api_name: str, allowed: Range, **arguments: Any) -> None:
    """Refuse arguments that are not numbers in a range.

    A tensor of shape () or (1,) passes unchecked, because reading its value would wait for the device.

    Args:
        api_name: As for `check_arguments`.
        allowed: As for `check_arguments`.
        arguments: As for `check_arguments`.

    Raises:
        ValueError: as `check_arguments`.
    """
    for name, value in arguments.items():
        if torch.is_tensor(value):
            holds = value.shape in ((), (1,)) and not value.is_complex() and value.dtype is not torch.bool
            shown = describe(value)
        else:
            holds = False
            # A whole number may be beyond float64.
            with suppress(OverflowError):
                holds = isinstance(value, Real) and not isinstance(value, bool) and allowed.allows(value)
            shown = f"{value!r:.40}"
        expect(holds, api_name, f"{name} to be {allowed.expected}", shown)


def check_flags(api_name: str, **flags: Any) -> None:
    """Refuse flags that are neither True nor False: "no" is true to Python, and so is the text of a variable."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{api_name}: {name} must be True or False, got {flag!r:.40}.")


def check_reduce(reduce: str, api_name: str) -> None:
    """Refuse an unknown way to reduce."""
    if reduce not in ("mean", "sum", "weighted"):
        raise ValueError(f'{api_name}: reduce must be "mean", "sum" or "weighted", got {reduce!r}.')


def check_matches(api_name: str, masks: Sequence[Mask], names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse masks that match none of the leaves, each pattern of several by itself."""
    for mask in masks:
        patterns = mask if isinstance(mask, list | tuple) else (mask,)
        remedy = " Leave it out, or pass a function of (name, leaf) as the mask of several models."
        for pattern in patterns:
            if any(matches(pattern, name, leaf) for name, leaf in zip(names, leaves, strict=True)):
                continue
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            text = f"{api_name}: the mask {pattern!r} matches no leaf. The leaves are {shown}."
            raise ValueError(text + (remedy if len(patterns) > 1 else ""))


def is_reachable(axis: Axis) -> bool:
    """Tell whether this process can communicate over an axis: its group exists here and has as many ranks."""
    return axis.size == 1 or _compat.group_size(axis.group_name) == axis.size


def describe_axis(axis: Axis) -> str:
    """Name an axis with its group, for an error."""
    return f"axis {axis.name!r} of {axis.size} ranks in group {axis.group_name!r}"


def mark_donated(leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Leave donated leaves with an empty tensor that is marked as donated, before anything is written to them.

    Args:
        leaves: The leaves. A Sharded one lets go of its tensor, which goes on as it is; a plain one is emptied itself.

    Returns:
        For the plain ones, by their identity, new tensors that have their memory.
    """
    moved: dict[int, torch.Tensor] = {}
    mark = {DONATED: True}
    dtype = device = None
    for leaf in leaves:
        tensor = leaf.local if isinstance(leaf, Sharded) else leaf
        # Mostly a leaf is of the kind of the one before.
        if tensor.dtype is not dtype or tensor.device != device:
            dtype = tensor.dtype
            device = tensor.device
            with _compat.outside_transforms():
                empty = tensor.new_empty(0)
            empty.__dict__ = mark
        if leaf is not tensor:
            replace_local(leaf, empty)
        elif id(leaf) not in moved:
            moved[id(leaf)] = leaf.data
            # Assign .data, so that autograd and modes see no operator.
            leaf.data = empty
            if type(leaf) is torch.Tensor:
                # One dict for all: the garbage collector would count one for each.
                leaf.__dict__ = mark
            else:
                leaf.__dict__[DONATED] = True
    return moved


def is_donated(leaf: Any) -> bool:
    """Tell whether a leaf's tensor was donated; it is empty then, of shape (0,)."""
    return getattr(tensor_of(leaf), DONATED, None) is True


def refuse_donated(api_name: str, flat: Flat) -> None:
    """Refuse leaves that were donated.

    Args:
        api_name: The verb that asks, for its error.
        flat: The leaves.

    Raises:
        ValueError: with the path of every leaf that was donated.
    """
    if not any(attributes_of(flat.tensors, DONATED)):
        return

    text = "was donated to an earlier call, so it is empty now"
    problems = flat.problems(lambda leaf: text if is_donated(leaf) else None)
    remedy = "use what that call returned, or do not donate them. If it failed, restore the last checkpoint"
    refuse(f"{api_name}: arguments were donated", problems, remedy)


def explain_donation(error: Exception, api_name: str, **given: Tree) -> None:
    """Add to an error which leaves were donated, as torch does not name them; it may have another cause."""
    # A tree that cannot be taken apart has no part in the error.
    with suppress(Exception):
        try:
            refuse_donated(api_name, flatten(given))
        except ValueError as refusal:
            error.add_note(f"{refusal}")


def refuse_abstract(api_name: str, flat: Flat) -> None:
    """Refuse leaves without values. In a trace no leaf has any.

    Args:
        api_name: The verb that asks, for its error.
        flat: The leaves.

    Raises:
        ValueError: with the path of every abstract leaf, and of every other tensor on the meta device beside one.
    """
    if _compat.is_tracing() or not any(map(is_abstract, flat.leaves)):
        return

    text = "has a shape, but no values"
    problems = flat.problems(lambda leaf: text if getattr(tensor_of(leaf), "is_meta", False) else None)
    remedy = (
        "fill the state with fs.checkpoint.restore(directory, like=state), or make it with values: leave out abstract= "
        "in model.init"
    )
    refuse(f"{api_name}: leaves are abstract", problems, remedy)


def check_tensors(api_name: str, flat: Flat) -> None:
    """Refuse leaves that are no tensors, or plain ones that were donated."""
    if len(flat.sharded) == len(flat.leaves):
        return
    refuse_donated(api_name, flat)

    expected = "a Sharded leaf or a tensor"
    is_fit = (Sharded, torch.Tensor, type(None))
    problems = flat.problems(lambda leaf: None if isinstance(leaf, is_fit) else (describe(leaf), expected))
    remedy = tree_remedy(
        flat.leaves, "keep other values out of the tree. Of a module, pass the parameters of model.init"
    )
    refuse(f"{api_name}: leaves are no tensors", problems, remedy)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's dtype takes gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_floating(api_name: str, flat: Flat) -> None:
    """Refuse leaves that should take a gradient and cannot."""

    def misfit(leaf: Any) -> Misfit:
        tensor = tensor_of(leaf)
        if not is_trained(leaf) or (torch.is_tensor(tensor) and is_differentiable(tensor)):
            return None
        return describe(tensor), "a floating tensor"

    dtypes = set(attributes_of(flat.tensors, "dtype"))
    if not all(isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes):
        remedy = tree_remedy(
            flat.leaves, "pass the parameters of model.init. Shard others with frozen=, or keep them out"
        )
        refuse(f"{api_name}: leaves cannot have gradients", flat.problems(misfit), remedy)


def check_dense(api_name: str, paths: Sequence[str], grads: Sequence[torch.Tensor | None]) -> None:
    """Refuse gradients of Sharded leaves that are sparse: ranks add up and split dense ones.

    Args:
        api_name: The verb that asks, for its error.
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
    refuse(f"{api_name}: gradients are sparse", problems, remedy)


def check_axes(api_name: str, flat: Flat) -> None:
    """Refuse Sharded leaves of another mesh than this process is on."""

    def misfit(leaf: Any) -> Misfit:
        axes = leaf.spec.axes if is_sharded(leaf) else ()
        unreachable = [describe_axis(axis) for axis in axes if not is_reachable(axis)]
        if unreachable:
            return f"{', '.join(unreachable)} is not available here"
        return None

    if not all(map(is_reachable, flat.axes)):
        refuse(
            f"{api_name}: leaves live on a mesh that this process is not part of",
            flat.problems(misfit),
            "shard the tree on a mesh of this process, and after destroy_process_group call fs.init_mesh again",
        )


def check_local(api_name: str, flat: Flat, *, needs_values: bool = True) -> None:
    """Refuse leaves that were donated, and Sharded ones that do not fit their spec or live on no mesh of this process.

    Args:
        api_name: The verb that asks, for its error.
        flat: The tree.
        needs_values: Whether to refuse abstract leaves too.

    Raises:
        ValueError: with every wrong leaf's path, what it holds and what its spec needs, or that it was donated; or if
            Sharded leaves are inside a dataclass that is not a pytree.
    """

    def misfit(leaf: Any) -> Misfit:
        if _hides_shards(leaf):
            return f"is {describe(leaf)}, which contains Sharded leaves but is not a pytree"
        if not is_sharded(leaf) or getattr(leaf.local, "shape", None) == leaf.spec.local_shape:
            return None
        return f"{describe(leaf.local)} as local tensor", f"a local tensor of shape {leaf.spec.local_shape}"

    if not _all_fit(flat):
        refuse_donated(api_name, flat)
        remedy = tree_remedy(flat.leaves, "return tensors of the shard's shape from functions that you map over a tree")
        refuse(f"{api_name}: shards do not match their specs", flat.problems(misfit), remedy)
        if needs_values:
            refuse_abstract(api_name, flat)
    check_axes(api_name, flat)


def _all_fit(flat: Flat) -> bool:
    """Whether all leaves surely fit their specs, have values and were not donated, which leaves nothing."""
    for leaf, tensor in zip(flat.leaves, flat.tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            fits = leaf is tensor and not is_unregistered(leaf)
        elif leaf is tensor:
            fits = tensor.shape != (0,)
        else:
            # One shape at a time: the garbage collector counts them.
            fits = (0,) != tensor.shape == leaf.spec.local_shape and not tensor.is_meta
        if not fits:
            return False
    return True


def check_transforms(api_name: str, flat: Flat) -> None:
    """Refuse Sharded leaves whose spec does not say how to gather them, or calls frozen what a gradient goes through.

    Args:
        api_name: The verb that asks, for its error.
        flat: The tree.

    Raises:
        ValueError: with the path of every leaf whose spec has no transform, or is frozen around a computed tensor that
            requires a gradient.
    """

    def misfit(leaf: Any) -> Misfit:
        if not is_sharded(leaf):
            return None
        if leaf.spec.transform is None:
            return "its spec has no transform, so fshard does not know how to gather it"
        if leaf.spec.frozen and leaf.local.requires_grad and not leaf.local.is_leaf and torch.is_grad_enabled():
            return "its spec is frozen, but it is a computed tensor that requires a gradient"
        return None

    if any(spec.transform is None or spec.frozen for spec in flat.specs):
        remedy = "make leaves with fs.shard or fs.reshard. For a frozen leaf, detach it or use the trained leaf's spec"
        refuse(f"{api_name}: leaves cannot be gathered", flat.problems(misfit), remedy)


def is_differentiated(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether a transform of torch.func runs, or tensors are part of a graph of the caller's."""
    if _compat.transforms_active() or _compat.any_dual(tensors):
        return True
    return torch.is_grad_enabled() and True in attributes_of(tensors, "requires_grad")


def check_differentiable(api_name: str) -> None:
    """Refuse to differentiate in inference mode, where autograd records nothing."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"{api_name}: cannot differentiate inside torch.inference_mode(). Leave the context, or evaluate with "
            "model.apply."
        )


def check_axis(api_name: str, axis: Any) -> None:
    """Refuse an axis that is no Axis, or of a mesh that this process is not on."""
    expect(isinstance(axis, Axis), api_name, "axis to be an Axis", describe(axis), "take it from a mesh by fs.axis_of")
    if not is_reachable(axis):
        raise ValueError(
            f"{api_name}: {describe_axis(axis)} belongs to a mesh that this process is not part of. Call it only on "
            "the ranks of that mesh."
        )


def check_operands(api_name: str, tree: Tree, axis: Axis, dim: int | None = None, *, vary: bool | None = None) -> Flat:
    """Refuse what a collective over an axis cannot take, and return its operands.

    Args:
        api_name: The collective, for its error.
        tree: Its operands.
        axis: Its axis.
        dim: The dim it counts on, if any.
        vary: Whether operands vary between the ranks of the axis, or agree; None where both are right. It is only known
            of Sharded leaves.

    Raises:
        ValueError: if `axis` is no Axis, or with the path of every leaf that is no tensor, has no such dim, or varies
            where it should not.
    """
    check_axis(api_name, axis)
    expect(dim is None or type(dim) is int, api_name, "dim to be a whole number", describe(dim))

    def misfit(leaf: Any) -> Misfit:
        tensor = tensor_of(leaf)
        if leaf is None:
            return None
        if not torch.is_tensor(tensor) or dim not in (None, *range(tensor.dim())):
            expected = "a tensor" if dim is None else f"a tensor with a dim {dim}, counted from the front"
            return describe(tensor), expected
        if vary is None or axis.size == 1 or not is_sharded(leaf) or axis not in leaf.spec.axes:
            return None
        if leaf.spec.dim_of(axis) is None:
            is_replicated = f"is replicated over {axis.name!r}, but {api_name} needs a value that differs between ranks"
            return is_replicated if vary else None
        if vary:
            return f"is split over {axis.name!r}, and {api_name} would mix the different elements that ranks store"
        return f"is split over {axis.name!r}, but {api_name} needs a value that is equal on all ranks"

    collective_name = f"{api_name} over {axis.name!r}"
    flat = flatten(tree)
    refuse_donated(collective_name, flat)
    problems = flat.problems(misfit)
    if problems:
        remedy = tree_remedy(flat.leaves, "pass such tensors")
        if not any(problem.expected for problem in problems):
            remedy = "gather it first"
            if vary:
                remedy = (
                    'use fs.pcast(x, axis, to="varying") first, or pass leaf.local for this rank\'s part. Gradients of '
                    "fs.value_and_grad and fs.scatter_grads are summed over ranks already"
                )
        refuse(f"{collective_name}: leaves do not fit", problems, remedy)
    return flat


def check_loss(loss: Any, reduce: str, api_name: str) -> None:
    """Refuse a loss that does not fit `reduce`, before it is reduced."""
    value = loss
    name = "loss"
    if reduce == "weighted":
        if not (isinstance(loss, tuple) and len(loss) == 2):
            raise ValueError(
                f'{api_name}: with reduce="weighted" the loss must be a pair (sum, count), got {describe(loss)}.'
            )
        value, count = loss
        name = "sum"
        check_count(count, api_name)
    if not torch.is_tensor(value) or value.dim() or not value.is_floating_point():
        raise ValueError(
            f"{api_name}: the {name} must be a floating scalar tensor, got {describe(value)}. Sum or average it over "
            "the batch. A function that returns (loss, aux) needs has_aux=True, and one that returns (sum, count) "
            'needs reduce="weighted".'
        )


def check_count(count: Any, api_name: str) -> None:
    """Refuse a count that is no scalar, or is differentiated: sums are divided by it as by a constant."""
    scalar = torch.is_tensor(count) and not count.dim() and not count.is_complex()
    expect(scalar, api_name, "the count to be a real scalar tensor", describe(count), "torch.tensor makes one")
    if count.requires_grad or _compat.any_dual([count]):
        raise ValueError(
            f"{api_name}: the count requires a gradient, but it is treated as a constant. Pass count.detach()."
        )


def describe_node_types(treedef: Treedef) -> str:
    """The node types of a structure, without keys or the nodes' own data, whose text may differ between processes."""
    if treedef.type is None:
        return "*"
    return f"{treedef.type.__name__}({', '.join(map(describe_node_types, treedef.children()))})"


def same_structure(
    api_name: str, flat: Flat, expected_tree: Flat, remedy: str = "pass trees made from the same parameters"
) -> None:
    """Refuse a tree whose structure differs from the one expected.

    Args:
        api_name: The verb that asks and the tree's part in it, for its error.
        flat: The tree.
        expected_tree: The tree it is held against.
        remedy: What the caller can do about it.

    Raises:
        ValueError: with every path that only one of the two has.
    """
    if flat.treedef == expected_tree.treedef:
        return
    here = set(flat.paths)
    there = set(expected_tree.paths)
    # First what is there, because of thousands of missing leaves only a few are printed.
    problems = [Problem(path, describe(leaf), "nothing") for path, leaf in flat.named_leaves if path not in there]
    problems += [Problem(path, "missing") for path in expected_tree.paths if path not in here]
    # Else nodes of other types, or of one type with other data of their own.
    if not problems:
        problems = [Problem("(structure)", got=str(flat.treedef), expected=str(expected_tree.treedef))]
    refuse(f"{api_name}: trees differ in structure", problems, remedy)


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
def refuse_writes(api_name: str, paths: Sequence[str], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Find in-place writes to tensors that may share memory with the caller's state, by their version counters.

    Args:
        api_name: The verb that asks, for its error.
        paths: The tensors' paths.
        tensors: What must not be written to inside the context.

    Raises:
        ValueError: when the context ends, as for `check_versions`.
    """
    versions = _compat.versions(tensors)
    yield
    check_versions(api_name, paths, tensors, versions)


def check_versions(
    api_name: str, paths: Iterable[str], tensors: Iterable[torch.Tensor], versions: Sequence[int]
) -> None:
    """Refuse tensors that were written to in place.

    Args:
        api_name: The verb that asks, for its error.
        paths: The tensors' paths.
        tensors: The tensors.
        versions: Their version counters before.

    Raises:
        ValueError: with the path of every tensor written to.
    """
    now = _compat.versions(tensors)
    if now != versions:
        problems = []
        for path, writes in zip(paths, map(operator.sub, now, versions), strict=True):
            if writes:
                times = "once" if writes == 1 else f"{writes} times"
                problems.append(Problem(path, f"was written to {times}"))
        remedy = "return a new tensor. The other leaves are unchanged"
        refuse(f"{api_name}: parameters were modified in place", problems, remedy)
