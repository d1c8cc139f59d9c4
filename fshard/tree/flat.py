"""Pytrees taken apart: leaves with their paths and names, specs and axes."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch

from fshard.errors import Problem
from fshard.tree.nodes import Sharded, is_sharded, tensors_of
from fshard.tree.specs import Axis, Spec

Tree = Any
Treedef = optree.PyTreeSpec
# What is wrong with a leaf, in words that follow its path; or what it is and what was expected; None where it is right.
Misfit = str | tuple[str, str] | None


# A NamedTuple itself cannot have cached properties.
class _Flat(NamedTuple):
    leaves: list[Any]
    treedef: Treedef


class Flat(_Flat):
    """A tree taken apart: the leaves (Sharded and None kept whole) and the structure, which knows their paths."""

    @functools.cached_property
    def paths(self) -> Sequence[str]:
        """One path per leaf, as in ['blocks'][0]."""
        return _paths(self.treedef)

    @property
    def named_leaves(self) -> Iterator[tuple[str, Any]]:
        """Path and leaf of each leaf."""
        return zip(self.paths, self.leaves, strict=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The leaves' names: their keys, indices and fields joined by dots, as in blocks.0.norm."""
        return _make_names(self.treedef, tuple(map(type, _list_keys(self.treedef))))

    @property
    def children(self) -> Iterator["Flat"]:
        """The trees that its root holds, such as the fields of a NamedTuple."""
        begin = 0
        for treedef in self.treedef.children():
            end = begin + treedef.num_leaves
            yield Flat(self.leaves[begin:end], treedef)
            begin = end

    def unflatten(self, leaves: Iterable[Any]) -> Tree:
        """Make the tree of other leaves."""
        return unflatten(self.treedef, list(leaves))

    def problems(self, describe_misfit: Callable[..., Misfit], *columns: Sequence[Any]) -> list[Problem]:
        """List the leaves that are wrong.

        Args:
            describe_misfit: Describes a leaf that is wrong, and returns None for others.
            *columns: What else it is called with, for each leaf, such as the leaves of other trees.
        """
        problems = []
        for path, description in zip(self.paths, map(describe_misfit, self.leaves, *columns), strict=True):
            if description is not None:
                parts = (description,) if isinstance(description, str) else description
                problems.append(Problem(path, *parts))
        return problems

    @functools.cached_property
    def sharded(self) -> list[Sharded]:
        """Its Sharded leaves."""
        return list(filter(is_sharded, self.leaves))

    @functools.cached_property
    def tensors(self) -> list[Any]:
        """The tensor that this rank holds of each leaf; other leaves as they are."""
        return tensors_of(self.leaves)

    @functools.cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of its Sharded leaves, each object once: thousands of leaves share theirs."""
        return tuple({id(leaf.spec): leaf.spec for leaf in self.sharded}.values())

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes that they live on, each once."""
        return tuple(dict.fromkeys(axis for spec in self.specs for axis in spec.axes))


def flatten(tree: Tree) -> Flat:
    """Take a tree apart without looking inside Sharded leaves; None counts as a leaf."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError("torch.compile cannot trace fshard's functions; use fs.jit, or compile the model's blocks")
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_sharded, none_is_leaf=True)
    return Flat(leaves, treedef)


def leaves_of(tree: Tree) -> list[Any]:
    """List the leaves that `flatten` finds, Sharded and None kept whole."""
    return optree.tree_leaves(tree, is_leaf=is_sharded, none_is_leaf=True)


def unflatten(treedef: Treedef, leaves: list[Any]) -> Tree:
    """Put leaves back into the structure that `flatten` returned."""
    return optree.tree_unflatten(treedef, leaves)


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[int]]:
    """Group the positions of items by a key, such as leaves by transform or axes; items that are None are left out.

    >>> grouped(["a", "bb", None, "c"], len)
    {1: [0, 3], 2: [1]}
    """
    groups: dict[Any, list[int]] = {}
    last_key: Any = None
    for i, item in enumerate(items):
        if item is None:
            continue
        group_key = key(item)
        # Most items have the key object of the item before, and keys are slow to hash.
        if group_key is not last_key or not groups:
            last_key = group_key
            positions = groups.setdefault(group_key, [])
        positions.append(i)
    return groups


@functools.lru_cache(maxsize=256)
def _make_names(treedef: Treedef, key_types: tuple[type, ...]) -> tuple[str, ...]:
    """Join the keys of each leaf. Their types are compared too, because structures take 1 and True for one key."""
    return tuple(".".join(map(_key, accessor)) for accessor in optree.treespec_accessors(treedef))


def _list_keys(treedef: Treedef) -> Iterator[Any]:
    """List the keys, indices and fields on the way to each leaf."""
    return itertools.chain.from_iterable(treedef.paths())


def _key(entry: Any) -> str:
    return str(getattr(entry, "field", getattr(entry, "name", entry.entry)))


@functools.lru_cache(maxsize=256)
def _paths(treedef: Treedef) -> tuple[str, ...]:
    """Spell out the leaves' paths, as in ['blocks'][0]; slow enough to remember.

    Paths are read by people. Of keys that compare equal, such as 1 and True, the first one is written for all.
    """
    return tuple(accessor.codify("") or "(root)" for accessor in optree.treespec_accessors(treedef))


def has_plain_keys(treedef: Treedef) -> bool:
    """Tell whether structures that compare equal to this one, and for which this is true too, are the same.

    Python takes 1, 1.0 and True for one key, and a text for the member of an enum that is equal to it. The user's own
    nodes have data, which they compare as they like.
    """
    return not _has_more_than_keys(treedef) and {str, int}.issuperset(map(type, _list_keys(treedef)))


@functools.lru_cache(maxsize=256)
def _has_more_than_keys(treedef: Treedef) -> bool:
    """Tell whether a structure has nodes of the user's own, or keys with no leaf behind them.

    The answer is the same for structures that compare equal, so it may be remembered.
    """
    if treedef.kind == optree.PyTreeKind.CUSTOM:
        return True
    children = treedef.children()
    is_dict = treedef.type is not None and issubclass(treedef.type, dict)
    if is_dict and not all(child.num_leaves for child in children):
        return True
    return any(map(_has_more_than_keys, children))
