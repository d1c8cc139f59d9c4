"""Sharded: this rank's shard of a leaf with its spec, a node of pytrees."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

from fshard import _compat
from fshard.errors import Problem, refuse
from fshard.tree.specs import Spec


def _not_a_tensor(use: str) -> str:
    """Say, where a Sharded leaf is used as a tensor, how to get one."""
    return (
        f"{use}: a Sharded leaf is not a tensor. Call fs.gather for full tensors inside a step, fs.unshard to look at "
        "values, or map over the shards of all ranks by fs.tree_map."
    )


_OF_DTENSOR = ("full_tensor", "to_local", "placements", "device_mesh", "redistribute")


@dataclass(frozen=True, eq=False, init=False, slots=True)
class Sharded:
    """This rank's shard of a leaf and the spec that says what it is a shard of.

    A pytree node of optree and torch whose one child is the local tensor, so tree_map, torch.func and optimizers see
    plain tensors and every result keeps its spec. Not a tensor: nothing communicates unless a verb is called, and
    torch's functions and operators refuse it.

    Attributes:
        local: This rank's tensor, of shape spec.local_shape.
        spec: The leaf's description, equal on every rank of one mesh row.
        shape: The shape of the full tensor.
        dtype: The dtype of the shard, and so of the full tensor.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     return fs.shard({"w": torch.arange(4.0)}, fs.fully_shard(mesh))
    >>> trees = fs.testing.spmd(program, world=2)
    >>> trees[1]
    {'w': Sharded(float32[4], P('shard'), local [2])}
    >>> [tree["w"].local.tolist() for tree in trees], trees[1]["w"].spec.shape
    ([[0.0, 1.0], [2.0, 3.0]], (4,))
    >>> trees[1]["w"].shape, trees[1]["w"].dtype, trees[1]["w"].numel()
    (torch.Size([4]), torch.float32, 4)
    """

    local: torch.Tensor
    spec: Spec

    def __init__(self, local: torch.Tensor, spec: Spec) -> None:
        """Set both: a step makes thousands, and a frozen dataclass takes twice the time."""
        replace_local(self, local)
        _set_spec(self, spec)

    def __repr__(self) -> str:
        if not isinstance(self.local, torch.Tensor):
            return f"Sharded({self.local!r}, {self.spec.partition})"
        dtype = str(self.local.dtype).removeprefix("torch.")
        return f"Sharded({dtype}{list(self.spec.shape)}, {self.spec.partition}, local {list(self.local.shape)})"

    @property
    def shape(self) -> torch.Size:
        """The shape of the full tensor; that of this rank's shard is `local.shape`."""
        return torch.Size(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the shard, and so of the full tensor."""
        return self.local.dtype

    def numel(self) -> int:
        """Count the elements of the full tensor.

        Returns:
            Their number, without the padding of shards.

        >>> import torch, fshard as fs
        >>> fs.Sharded(torch.ones(2, 2), fs.Spec((3, 2), fs.P("shard"), (fs.Axis("shard", 2, "0"),))).numel()
        6
        """
        return math.prod(self.spec.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Called by functions of torch that are given a leaf.

        Raises:
            TypeError: always, with the remedy.
        """
        raise TypeError(_not_a_tensor(getattr(func, "__name__", str(func))))

    # Hidden from type checkers, so that they still report unknown attributes.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for an attribute that a leaf does not have.

            Raises:
                AttributeError: always; with the remedy where a tensor or a DTensor has the attribute.
            """
            if not name.startswith("_") and hasattr(torch.Tensor, name):
                raise AttributeError(_not_a_tensor(f"Sharded.{name}"))
            if name in _OF_DTENSOR:
                raise AttributeError(
                    f"Sharded.{name}: a Sharded leaf is not a DTensor. Use fs.unshard(leaf) for the full tensor, "
                    "leaf.local for the shard, leaf.spec for the layout, and fs.reshard for another one."
                )
            raise AttributeError(f"'Sharded' object has no attribute {name!r}")

    def __reduce__(self) -> Any:
        """Pickle and copy with this rank's coordinates, as the spec does not say whose shard this is."""
        return _unpickle, (self.local, self.spec, _find_coordinates(self.spec))

    def __create_write_items__(self, fqn: str, _: object) -> None:
        """Called by torch.distributed.checkpoint, which would pickle this and keep what one rank has.

        Raises:
            ValueError: always.
        """
        remedy = "pass fs.to_dtensor(params, mesh), or use fs.checkpoint.save or fs.checkpoint.save_dcp"
        headline = "torch.distributed.checkpoint.save: shards of all ranks but one would be lost"
        refuse(headline, [Problem(fqn, repr(self), "tensors or DTensors")], remedy)


# Write the slots directly, which bypasses the frozen dataclass and is fastest.
replace_local: Callable[[Sharded, torch.Tensor], None] = vars(Sharded)["local"].__set__
_set_spec: Callable[[Sharded, Spec], None] = vars(Sharded)["spec"].__set__


def _find_coordinates(spec: Spec) -> dict[str, int]:
    """Find this rank's coordinates on the axes that split a leaf and that this process has, by name."""
    axes = [axis for axis in spec.partition_axes() if _compat.group_size(axis.group_name) == axis.size]
    return {axis.name: _compat.resolve_process_group(axis.group_name).rank() for axis in axes}


def _unpickle(local: torch.Tensor, spec: Spec, coordinates: dict[str, int]) -> Sharded:
    """Make a leaf again, but not on another rank than the one that pickled it, which holds another shard."""
    here = _find_coordinates(spec)
    if here | coordinates != coordinates | here:
        raise ValueError(
            f"Sharded: the rank at {coordinates} pickled its own shard, and the rank at {here} reads it. Save with "
            "fs.checkpoint.save, pickle fs.unshard(params), or let each rank read the file that it wrote."
        )
    return Sharded(local, spec)


def _refusal(operator: str) -> Callable[..., NoReturn]:
    """Make the method of an operator that tensors have and Sharded leaves refuse."""

    def refuse_operator(self: Sharded, *operands: Any) -> NoReturn:
        raise TypeError(_not_a_tensor(operator))

    return refuse_operator


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul "
    "neg pos abs getitem setitem lt le gt ge float int"
)
for _operator in _OPERATORS.split():
    setattr(Sharded, f"__{_operator}__", _refusal(_operator.removeprefix("r")))


def register_node(
    cls: Any,
    flatten: Callable[[Any], tuple[tuple[Any, ...], Any, tuple[str, ...]]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Register a class as a node of pytrees, with optree and with torch.

    Args:
        cls: The class.
        flatten: Returns a node's children, its other data, and the names of the children.
        unflatten: Makes a node of the data and the children.
    """

    def flatten_for_torch(node: Any) -> tuple[list[Any], Any]:
        children, data, _ = flatten(node)
        return list(children), data

    # torch first: it refuses a class that a library has registered with it, as transformers has its outputs, and then
    # optree must not have the class either.
    _compat.register_torch_pytree(cls, flatten_for_torch, lambda children, data: unflatten(data, tuple(children)))
    # Users' own optree calls must see into these nodes too, hence optree's global namespace.
    optree.register_pytree_node(
        cls, flatten, unflatten, path_entry_type=optree.GetAttrEntry, namespace=GLOBAL_NAMESPACE
    )


def register_leaf_class(cls: type[Sharded]) -> None:
    """Register a class of leaves as a node of pytrees; maps over them make plain Sharded leaves."""
    register_node(
        cls,
        lambda node: ((node.local,), node.spec, ("local",)),
        lambda spec, children: Sharded(children[0], spec),
    )


register_leaf_class(Sharded)


# Whether a node is a Sharded leaf; as isinstance, without a frame of Python for each node of a tree.
is_sharded: Callable[[Any], bool] = Sharded.__instancecheck__
# The same for tensors.
is_tensor: Callable[[Any], bool] = torch.Tensor.__instancecheck__


def is_trained(leaf: Any) -> bool:
    """Tell whether a leaf takes a gradient: it is neither None nor frozen."""
    return leaf is not None and not (isinstance(leaf, Sharded) and leaf.spec.frozen)


def tensor_of(leaf: Any) -> Any:
    """Return the tensor that this rank holds of a leaf: the shard of a Sharded one, else the leaf itself."""
    return leaf.local if isinstance(leaf, Sharded) else leaf


def tensors_of(leaves: Iterable[Any]) -> list[Any]:
    """The `tensor_of` each of thousands of leaves."""
    return [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in leaves]


def attributes_of(values: Iterable[Any], name: str) -> list[Any]:
    """The attribute of a name of each of thousands of values, for which no line of Python runs; None where it lacks."""
    return list(map(getattr, values, repeat(name), repeat(None)))


def like(leaf: Any, tensor: Any) -> Any:
    """Wrap a tensor in the spec of a leaf; one of another shape than the shard belongs to the whole leaf."""
    return Sharded(tensor, leaf.spec) if is_sharded(leaf) and tensor.shape == leaf.local.shape else tensor
