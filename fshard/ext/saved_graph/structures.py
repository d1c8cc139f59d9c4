"""The structure of a result as JSON: parts of the structure of the arguments, and tuples, lists and dicts of such."""

from collections.abc import Iterator, Mapping
from typing import Any

JSON = Any
_KEY_TYPES = (str, int, float, bool)


def write_structure(treedef: Any, arguments: Any) -> JSON:
    """Write a structure down.

    Args:
        treedef: The structure of a result.
        arguments: The structure of the arguments.

    Returns:
        A pair for each part: "as" and the path of an equal part of the arguments, or else "tuple", "list" or the keys
        of a dict, and the parts of this one.

    Raises:
        ValueError: if it has a part that is neither a tuple, a list, a dict nor a part of the arguments.
    """
    paths: dict[Any, tuple[int, ...]] = {}
    for path, part in _list_parts(arguments, ()):
        paths.setdefault(part, path)
    return _write(treedef, paths)


def _list_parts(treedef: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """List a structure and all parts of it, each with the numbers of the children on the way to it."""
    yield path, treedef
    for number, child in enumerate(treedef.children()):
        yield from _list_parts(child, (*path, number))


def _write(part: Any, paths: Mapping[Any, tuple[int, ...]]) -> JSON:
    if part in paths:
        return "as", paths[part]
    children = [_write(child, paths) for child in part.children()]
    if part.type in (tuple, list):
        return part.type.__name__, children
    if part.type is dict and all(type(key) in _KEY_TYPES for key in part.entries()):
        child_of_key = dict(zip(part.entries(), children, strict=True))
        # Entries are sorted. Who iterates over the dict gets the keys in the order in which the function made it.
        keys = list(part.unflatten(range(part.num_leaves)))
        return keys, [child_of_key[key] for key in keys]
    raise ValueError(
        f"save_graph: a part of the result is {str(part)[:60]}, and a file holds tuples, lists and dicts whose keys "
        "are texts or numbers. Return one of these, or a part of the arguments."
    )


def make_tree(structure: JSON, arguments: Any) -> Any:
    """Make a tree of a structure, with numbers for leaves.

    Args:
        structure: What `write_structure` wrote; of something else any error is raised.
        arguments: The structure of the arguments of a call.
    """
    kind, parts = structure
    if kind == "as":
        same = arguments
        for number in parts:
            same = same.children()[number]
        return same.unflatten(range(same.num_leaves))
    children = [make_tree(part, arguments) for part in parts]
    if isinstance(kind, list):
        return dict(zip(kind, children, strict=True))
    return {"tuple": tuple, "list": list}[kind](children)
