"""Sharded leaves, and pytrees of them."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

from fshard import _compat
from fshard.errors import Problem, leaf_error
from fshard.tree.specs import Axis, Spec

Tree = Any
Treedef = optree.PyTreeSpec


NO_TENSOR = (
    "expected a full tensor, got a Sharded leaf; call fs.gather in a step, fs.unshard to look at values, or map over "
    "shards by fs.tree_map"
)


@dataclass(frozen=True, eq=False)
class Sharded:
    """This rank's shard of a leaf and the spec that says what it is a shard of.

    A pytree node of optree and torch whose one child is the local tensor, so tree_map, torch.func and optimizers see
    plain tensors and every result keeps its spec. Not a tensor: nothing communicates unless a verb is called.

    Attributes:
        local: This rank's tensor, of shape spec.local_shape.
        spec: The leaf's description, equal on every rank of one mesh row.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     return fs.shard({"w": torch.arange(4.0)}, fs.fully_shard(mesh))
    >>> trees = fs.testing.spmd(program, world=2)
    >>> trees[1]
    {'w': Sharded(float32[4], P('shard'), local [2])}
    >>> [tree["w"].local.tolist() for tree in trees], trees[1]["w"].spec.shape
    ([[0.0, 1.0], [2.0, 3.0]], (4,))
    """

    local: torch.Tensor
    spec: Spec

    def __repr__(self) -> str:
        if not isinstance(self.local, torch.Tensor):
            return f"Sharded({self.local!r}, {self.spec.partition})"
        dtype = str(self.local.dtype).removeprefix("torch.")
        return f"Sharded({dtype}{list(self.spec.shape)}, {self.spec.partition}, local {list(self.local.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch's functions.

        Raises:
            TypeError: always, with the remedy.
        """
        raise TypeError(f"{getattr(func, '__name__', func)}: {NO_TENSOR}")

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Called by torch.distributed.checkpoint, which would pickle this and keep what one rank has.

        Raises:
            ValueError: always.
        """
        raise dcp_error(fqn, repr(self))


def dcp_error(fqn: str, found: str) -> ValueError:
    """Make the error of torch.distributed.checkpoint.save for shards, of which it would write those of one rank."""
    remedy = "pass fs.to_dtensor(params, mesh), or use fs.checkpoint.save or fs.checkpoint.save_dcp"
    what = "torch.distributed.checkpoint.save: shards of all ranks but one would be lost"
    return leaf_error(what, [Problem(fqn, found, "tensors or DTensors")], remedy)


def _flatten_sharded(node: Sharded) -> tuple[tuple[torch.Tensor], Spec, tuple[str]]:
    return (node.local,), node.spec, ("local",)


def _unflatten_sharded(spec: Spec, children: Any) -> Sharded:
    return Sharded(children[0], spec)


# Users' own optree calls must see into Sharded too, hence optree's global namespace.
optree.register_pytree_node(
    Sharded,  # type: ignore[arg-type]
    _flatten_sharded,  # type: ignore[arg-type]
    _unflatten_sharded,  # type: ignore[arg-type]
    path_entry_type=optree.GetAttrEntry,
    namespace=GLOBAL_NAMESPACE,
)
_compat.register_torch_pytree(
    Sharded,
    lambda node: _flatten_sharded(node)[:2],
    lambda children, data: _unflatten_sharded(data, children),
    "fshard.Sharded",
)


# The same as is_sharded, without a frame of Python's for each node of a tree.
_IS_SHARDED: Callable[[Any], bool] = Sharded.__instancecheck__


class _Flat(NamedTuple):
    paths: list[str]
    leaves: list[Any]
    treedef: Treedef


class Flat(_Flat):
    """A tree taken apart: one path per leaf, the leaves (Sharded and None kept whole) and the structure."""

    @property
    def names(self) -> tuple[str, ...]:
        """The leaves' names: their keys, indices and fields joined by dots, as in blocks.0.norm."""
        return names_of(self.treedef)

    def unflatten(self, leaves: Iterable[Any]) -> Tree:
        """Make the tree of other leaves."""
        return unflatten(self.treedef, list(leaves))

    def problems(self, misfit: Callable[[Any], tuple[str, str] | None]) -> list[Problem]:
        """List the leaves that are wrong: `misfit` describes one and the leaf expected, or returns None."""
        rows = zip(self.paths, self.leaves, strict=True)
        return [Problem(path, *found) for path, leaf in rows if (found := misfit(leaf)) is not None]

    @functools.cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of its Sharded leaves, each once: what they say need not be asked of thousands of leaves."""
        return tuple(dict.fromkeys(self._specs()))

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes that they live on, each once."""
        # Of specs that are refused too, because a transform cannot be hashed.
        return tuple(dict.fromkeys(axis for spec in self._specs() for axis in spec.axes))

    def _specs(self) -> Iterable[Spec]:
        # Most leaves share theirs, and specs are slow to hash.
        return {id(leaf.spec): leaf.spec for leaf in self.leaves if isinstance(leaf, Sharded)}.values()


def is_sharded(node: Any) -> bool:
    """Whether `node` is a Sharded leaf."""
    return isinstance(node, Sharded)


def tensor_of(leaf: Any) -> Any:
    """Return the tensor that this rank holds of a leaf: the shard of a Sharded one, else the leaf itself."""
    return leaf.local if isinstance(leaf, Sharded) else leaf


def tensors_of(leaves: Iterable[Any]) -> list[Any]:
    """The `tensor_of` each of thousands of leaves."""
    return [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in leaves]


def like(leaf: Any, tensor: Any) -> Any:
    """Wrap a tensor in the spec of a leaf; one of another shape than the shard belongs to the whole leaf."""
    return Sharded(tensor, leaf.spec) if is_sharded(leaf) and tensor.shape == leaf.local.shape else tensor


def is_trained(leaf: Any) -> bool:
    """Tell whether a leaf takes a gradient: it is neither None nor frozen."""
    return leaf is not None and not (isinstance(leaf, Sharded) and leaf.spec.frozen)


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[int]]:
    """Group the positions of items by a key, such as leaves by transform or axes; items that are None are left out.

    >>> grouped(["a", "bb", None, "c"], len)
    {1: [0, 3], 2: [1]}
    """
    groups: dict[Any, list[int]] = {}
    # Most items share one key object, and keys are slow to hash. A key that is held here keeps its id.
    known: dict[int, tuple[Any, list[int]]] = {}
    for i, item in enumerate(items):
        if item is not None:
            found = key(item)
            if id(found) not in known:
                known[id(found)] = found, groups.setdefault(found, [])
            known[id(found)][1].append(i)
    return groups


def flatten(tree: Tree) -> Flat:
    """Take a tree apart without looking inside Sharded leaves; None counts as a leaf."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError("torch.compile cannot trace fshard's functions; use fs.jit, or compile the model's blocks")
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_IS_SHARDED, none_is_leaf=True)
    return Flat(list(_paths(treedef)), leaves, treedef)


def leaves_of(tree: Tree) -> list[Any]:
    """List the leaves that `flatten` finds, Sharded and None kept whole."""
    return optree.tree_leaves(tree, is_leaf=_IS_SHARDED, none_is_leaf=True)


def map_leaves(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Map `f` over the leaves that `flatten` finds, Sharded and None kept whole, where `tree_map` sees tensors.

    Args:
        f: Called with one leaf of each tree.
        tree: The tree whose structure the result has.
        *rest: Trees of the same structure.

    Returns:
        A tree of f's results.
    """
    leaves, treedef = optree.tree_flatten(tree, is_leaf=_IS_SHARDED, none_is_leaf=True)
    return unflatten(treedef, [f(*row) for row in zip(leaves, *map(leaves_of, rest), strict=True)])


def map_nodes(f: Callable[[Any], Any], tree: Tree, cls: type) -> Tree:
    """Map `f` over the nodes of a class; other leaves stay as they are, Sharded and None among them."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=lambda x: isinstance(x, cls | Sharded), none_is_leaf=True)
    return unflatten(treedef, [f(leaf) if isinstance(leaf, cls) else leaf for leaf in leaves])


@functools.lru_cache(maxsize=256)
def names_of(treedef: Treedef) -> tuple[str, ...]:
    """The leaves' names: their keys, indices and fields joined by dots, as in blocks.0.norm."""
    return tuple(".".join(map(_key, accessor)) for accessor in optree.treespec_accessors(treedef))


def _key(entry: Any) -> str:
    return str(getattr(entry, "field", getattr(entry, "name", entry.entry)))


@functools.lru_cache(maxsize=256)
def _paths(treedef: Treedef) -> tuple[str, ...]:
    """Spell out the leaves' paths, as in ['blocks'][0]; slow enough to remember."""
    return tuple(accessor.codify("") or "(root)" for accessor in optree.treespec_accessors(treedef))


@functools.lru_cache(maxsize=256)
def has_plain_keys(treedef: Treedef) -> bool:
    """Tell whether equal structures are the same: 1, 1.0 and True are one key, and the user's own nodes have data."""
    if treedef.kind == optree.PyTreeKind.CUSTOM:
        return False
    keys = treedef.entries() if treedef.type is not None and issubclass(treedef.type, dict) else ()
    return all(type(key) is str for key in keys) and all(map(has_plain_keys, treedef.children()))


def subtrees(treedef: Treedef) -> list[Treedef]:
    """The structures of a structure's children."""
    return treedef.children()


def unflatten(treedef: Treedef, leaves: list[Any]) -> Tree:
    """Put leaves back into the structure that `flatten` returned."""
    return optree.tree_unflatten(treedef, leaves)


def tree_map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Map `f` over the plain tensors of a tree, those inside Sharded leaves included; specs are kept.

    Args:
        f: Called with one tensor of each tree.
        tree: The tree whose structure and specs the result has. Where it has None, such as gradients of parameters that
            were not used, so has the result.
        *rest: Trees of the same structure. Beside a leaf they may have None, which `f` is given, and beside a Sharded
            one a tensor of shape (), such as its norm.

    Returns:
        A tree of f's results.

    Raises:
        ValueError: if structures or specs differ, or `f` is no function.

    >>> tree_map(lambda x: x + 1, {"a": 1, "b": (2, None)})
    {'a': 2, 'b': (3, None)}
    """
    if not callable(f):
        raise ValueError(f"tree_map: expected f to be a function, got {f!r:.40}")
    # First, because optree's error prints values, which a trace does not have.
    if rest and _in_step(tree, rest):
        return map_leaves(functools.partial(_mapped, f), tree, *rest)
    try:
        return optree.tree_map(f, tree, *rest)
    except ValueError as error:
        if problems := [problem for other in rest for problem in _differing_specs(flatten(tree), flatten(other))]:
            raise leaf_error(
                "tree_map: specs differ", problems, "shard both in the same way, frozen= included"
            ) from None
        structure = optree.tree_structure(tree)
        if not all(structure.is_prefix(optree.tree_structure(other)) for other in rest):
            found = f"rest with another; optree says: {error}"
            raise ValueError(f"tree_map: expected rest to have the structure of tree, got {found}") from None
        raise


def _in_step(tree: Tree, rest: Sequence[Tree]) -> bool:
    """Tell whether trees differ in None and tensors of shape () alone, beside leaves of the first."""
    parts = [optree.tree_flatten(t, is_leaf=_IS_SHARDED, none_is_leaf=True) for t in (tree, *rest)]
    (leaves, treedef), *others = parts
    if any(structure != treedef for _, structure in others):
        return False
    rows = [pair for found, _ in others for pair in zip(leaves, found, strict=True)]
    odd = [(leaf, x) for leaf, x in rows if (leaf is None, is_sharded(leaf)) != (x is None, is_sharded(x))]
    return bool(odd) and all(leaf is None or x is None or getattr(x, "shape", None) == () for leaf, x in odd)


def _mapped(f: Callable[..., Any], leaf: Any, *others: Any) -> Any:
    if leaf is None:
        return None
    out = f(tensor_of(leaf), *map(tensor_of, others))
    return replace(leaf, local=out) if is_sharded(leaf) else out


def _differing_specs(flat: Flat, other: Flat) -> Iterator[Problem]:
    pairs = zip(flat.paths, flat.leaves, other.leaves, strict=True) if flat.treedef == other.treedef else ()
    for path, *leaves in pairs:
        specs = [leaf.spec for leaf in leaves if is_sharded(leaf)]
        names = [f.name for f in fields(Spec) if len({getattr(spec, f.name) for spec in specs}) > 1]
        if names:
            needed, found = (", ".join(f"{name}={getattr(spec, name)!r}" for name in names) for spec in specs)
            yield Problem(path, found, needed)


def tree_leaves(tree: Tree) -> list[Any]:
    """List the plain tensors of a tree, the local tensors of Sharded leaves included.

    Args:
        tree: Any pytree.

    Returns:
        Its leaves, dict entries in the order of their sorted keys.

    >>> tree_leaves({"b": 2, "a": (1, None)})
    [1, 2]
    """
    return optree.tree_leaves(tree)
