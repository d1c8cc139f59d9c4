"""Signatures: what a graph was traced for, so that it serves equal calls and others are traced anew."""

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Exact, Flat, Sharded, Spec, Treedef, flatten, has_plain_keys, is_sharded
from fshard.tree.checks import describe, is_donated


class Aval(NamedTuple):
    """The properties of a tensor without its values; JAX's abstract value."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cls: type
    is_conj: bool
    is_neg: bool
    requires_grad: bool
    is_inference: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"

    def differences(self, other: "Aval") -> str:
        """Describe this value, with the properties that another has differently, for an error or a reason."""
        facts = [
            f"{name}={a.__name__ if isinstance(a, type) else a}"
            for name, a, b in zip(self._fields, self, other, strict=True)
            if name not in ("shape", "dtype", "device") and a != b and (name != "stride" or self.shape == other.shape)
        ]
        return ", ".join([str(self), *facts])


class Signature(NamedTuple):
    """Everything that a graph depends on.

    Attributes:
        treedef: Structure of the arguments.
        keys: The structure's text, where equal structures may differ in the types of keys.
        entries: For each leaf its aval, and its spec where it is Sharded; or the value of a leaf that is no tensor.
        same: For each leaf and for each tensor the place of the first one that is the same object, where one is.
        static: Names and values of static arguments.
        offsets: Where tensors begin in their storage, if functions ask; batches are slices, otherwise the same.
        ranks: This rank's coordinates on the axes of the leaves.
        modes: Names and values of the process's modes that programs run under.
    """

    treedef: Treedef
    keys: str
    entries: tuple[Any, ...]
    same: tuple[int, ...]
    static: tuple[tuple[str, Exact], ...]
    offsets: tuple[Any, ...]
    ranks: tuple[int, ...]
    modes: tuple[tuple[str, Any], ...]


def signature(
    flat: Flat, tensors: Sequence[torch.Tensor], static: Sequence[tuple[str, Any]], offsets: bool = False
) -> Signature:
    """The signature of one call.

    Args:
        flat: Its arguments.
        tensors: The tensors among them.
        static: Names and values of its static ones, which must be hashable.
        offsets: Whether it matters where tensors begin in their storage.
    """
    keys = "" if has_plain_keys(flat.treedef) else str(flat.treedef)
    entries = tuple(map(_entry, flat.leaves))
    same = _same([*tensors, *filter(is_sharded, flat.leaves)])
    begins = tuple(tensor.storage_offset() for tensor in tensors) if offsets else ()
    return Signature(flat.treedef, keys, entries, same, _exact(static), begins, _ranks(flat.axes), _modes())


class Known:
    """Recognizes calls like an earlier one without computing their signatures; it holds no tensors."""

    def __init__(self, asked: Signature, flat: Flat, tensors: Sequence[torch.Tensor]) -> None:
        """Note what a call and its signature look like."""
        self._asked, self._number = asked, len(tensors)
        self._marks, self._facts = list(map(_mark, flat.leaves)), list(map(_fact, flat.leaves))
        self._axes = flat.axes
        self._guards = _compat.guards_of(tensors)
        # Donated tensors have this shape, and so look like nothing else.
        self._empty = [i for i, tensor in enumerate(tensors) if tensor.shape == (0,)]
        # Guards do not compare aliases, offsets or requires_grad, and trees are equal though types of keys differ.
        graded = any(tensor.requires_grad for tensor in tensors)
        self._tells = not (asked.same or asked.offsets or asked.keys or graded)

    def covers(self, flat: Flat, tensors: Sequence[torch.Tensor], static: Sequence[tuple[str, Any]]) -> bool:
        """Whether a call certainly has the same signature, and no tensor that was donated.

        Args:
            flat: Its arguments.
            tensors: The tensors among them.
            static: Names and values of its static ones.
        """
        asked = self._asked
        return (
            self._tells
            and len(tensors) == self._number
            and flat.treedef == asked.treedef
            and (all(map(is_, map(_mark, flat.leaves), self._marks)) or list(map(_fact, flat.leaves)) == self._facts)
            and _exact(static) == asked.static
            and _ranks(self._axes) == asked.ranks
            and _modes() == asked.modes
            and self._guards(*tensors)
            and not any(tensor.requires_grad for tensor in tensors)
            and not any(is_donated(tensors[i]) for i in self._empty)
        )


def _mark(leaf: Any) -> Any:
    """Return the spec of a Sharded leaf, True for a tensor, or the leaf: if it is the same object, so is the fact."""
    return leaf.spec if isinstance(leaf, Sharded) else isinstance(leaf, torch.Tensor) or leaf


def _fact(leaf: Any) -> Any:
    """What an entry says of a leaf besides its aval."""
    if is_sharded(leaf):
        return leaf.spec.exact
    return True if isinstance(leaf, torch.Tensor) else None if leaf is None else Exact(leaf)


def _exact(static: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Exact], ...]:
    return tuple((name, Exact(value)) for name, value in static)


def _ranks(axes: Sequence[Axis]) -> tuple[int, ...]:
    return tuple(map(comm.rank, axes))


def _same(objects: Sequence[Any]) -> tuple[int, ...]:
    """Which objects are given more than once, for a function may ask whether `a is b`."""
    places: dict[int, int] = {}
    firsts = [places.setdefault(id(given), i) for i, given in enumerate(objects)]
    return tuple(firsts) if len(places) < len(objects) else ()


def _modes() -> tuple[tuple[str, Any], ...]:
    """List the modes of the process that a trace reads, or by which torch chooses operators."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in devices
    )
    attention = torch.backends.cuda
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("autocast", autocast),
        ("deterministic mode", torch.get_deterministic_debug_mode()),
        ("matmul precision", torch.get_float32_matmul_precision()),
        (
            "attention kernels",
            (
                attention.flash_sdp_enabled(),
                attention.mem_efficient_sdp_enabled(),
                attention.math_sdp_enabled(),
                attention.cudnn_sdp_enabled(),
                torch.backends.mha.get_fastpath_enabled(),
            ),
        ),
        ("einsum order", (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy)),
        ("oneDNN", torch.backends.mkldnn.enabled),
    )


def aval(tensor: torch.Tensor) -> Aval:
    """Return the abstract value of a tensor."""
    return Aval(
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        type(tensor),
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.requires_grad,
        tensor.is_inference(),
    )


def changes(before: Signature, after: Signature, paths: Sequence[str]) -> list[str]:
    """Say what differs between two signatures.

    Args:
        before: The one that there is a graph for.
        after: The one of a call.
        paths: Paths of the call's leaves.
    """
    if (before.treedef, before.keys) != (after.treedef, after.keys):
        return [f"the structure of the arguments was {before.treedef} and is {after.treedef}"]
    found = [
        f"{path} was {_said(a, b)} and is {_said(b, a)}"
        for path, a, b in zip(paths, before.entries, after.entries, strict=True)
        if a != b
    ]
    if before.same != after.same:
        found.append("other arguments are one and the same tensor")
    found += [
        f"static argument {name} was {a!r} and is {b!r}"
        for (_, a), (name, b) in zip(before.static, after.static, strict=True)
        if a != b
    ]
    if before.offsets != after.offsets:
        found.append(f"tensors began at {before.offsets} in their storage and begin at {after.offsets}")
    if before.ranks != after.ranks:
        found.append(f"this rank was at {before.ranks} and is at {after.ranks}")
    found += [
        f"{name} was {a} and is {b}" for (name, a), (_, b) in zip(before.modes, after.modes, strict=True) if a != b
    ]
    return found


def changed_values(before: Signature, after: Signature, flat: Flat) -> list[tuple[str, Any, Any]]:
    """Leaves that are no tensors and have other values than in another signature of this structure."""
    if before.treedef != after.treedef:
        return []
    return [
        (path, a, b)
        for path, a, b in zip(flat.paths, before.entries, after.entries, strict=True)
        if not isinstance(a, tuple) and not isinstance(b, tuple) and a != b
    ]


def _entry(leaf: Any) -> Any:
    if is_sharded(leaf):
        return aval(leaf.local), leaf.spec.exact
    return (aval(leaf), None) if isinstance(leaf, torch.Tensor) else None if leaf is None else Exact(leaf)


def _said(entry: Any, other: Any) -> str:
    """Describe an entry next to another at its place."""
    if not isinstance(entry, tuple):
        return repr(entry)
    found, spec = entry
    said = found.differences(other[0]) if isinstance(other, tuple) else str(found)
    if spec is None:
        return said
    before = other[1].value if isinstance(other, tuple) and other[1] is not None else None
    text = _described(spec.value)
    # What is not said of a spec is its transform, with all that it holds.
    same = before is not None and before != spec.value and _described(before) == text
    return f"{said}, {text}{f' of {spec.value.transform!r:.200}' * same}"


def _described(spec: Spec) -> str:
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in spec.axes)
    return f"a shard of {list(spec.shape)} by {spec.partition!r} over {axes}{', frozen' * spec.frozen}"


def flat_arguments(
    args: Sequence[Any], kwargs: dict[str, Any], static: Sequence[int], names: Sequence[str] = ()
) -> Flat:
    """All traced arguments, taken apart; None in the place of static ones."""
    keywords = {name: None if name in names else given for name, given in kwargs.items()} if names else kwargs
    return flatten((tuple(None if i in static else arg for i, arg in enumerate(args)), keywords))


def unhashable(static: Sequence[tuple[str, Any]], flat: Flat) -> ValueError:
    """Make the error of arguments by which a graph cannot be found again."""
    named = [(f"static argument {name}", value) for name, value in static]
    problems = []
    for path, value in (*named, *zip(flat.paths, flat.leaves, strict=True)):
        try:
            hash(value.spec if is_sharded(value) else value)
        except TypeError:
            problems.append(Problem(path, f"{describe(value)}, which cannot be hashed", "a tensor, or what can"))
    remedy = "pass tensors in dicts, lists, tuples or NamedTuples"
    return leaf_error("jit: arguments are no pytrees of tensors", problems, remedy)
