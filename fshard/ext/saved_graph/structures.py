"""The structure of a result as JSON: parts of the structure of the arguments, and tuples, lists and dicts of such."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

JSON = Any
_KEY_TYPES = (str, int, float, bool)


def write_structure(treedef: Any, arguments: Any) -> JSON:
    """Write a structure down.

    Args:
        treedef: The structure of a result.
        arguments: The structure of the arguments.

    Returns:
        A pair for each part: "tuple", "list" or the keys of a dict, and the parts of this one; for leaves and other
        classes "as" and the number of an equal part of the arguments.

    Raises:
        ValueError: if it has a part that is neither a tuple, a list, a dict nor a part of the arguments.
    """
    numbers: dict[Any, int] = {}
    for number, part in enumerate(_list_parts(arguments)):
        numbers.setdefault(part, number)
    return _write(treedef, numbers)


def _list_parts(treedef: Any) -> Iterator[Any]:
    """List a structure and all parts of it."""
    yield treedef
    for child in treedef.children():
        yield from _list_parts(child)


def _write(part: Any, numbers: Mapping[Any, int]) -> JSON:
    if part.type in (tuple, list):
        return part.type.__name__, [_write(child, numbers) for child in part.children()]
    # Never as one of the arguments, which is equal where its keys are 1 for True, or have another order.
    if part.type is dict and all(type(key) in _KEY_TYPES for key in part.entries()):
        child_of_key = dict(zip(part.entries(), part.children(), strict=True))
        # Entries are sorted. Who iterates over the dict gets the keys in the order in which the function made it.
        keys = list(part.unflatten(range(part.num_leaves)))
        return keys, [_write(child_of_key[key], numbers) for key in keys]
    if part in numbers:
        return "as", numbers[part]
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
    return _make(structure, list(_list_parts(arguments)))


def _make(structure: JSON, parts_of_arguments: Sequence[Any]) -> Any:
    kind, content = structure
    if kind == "as":
        part = parts_of_arguments[content]
        return part.unflatten(range(part.num_leaves))
    children = [_make(part, parts_of_arguments) for part in content]
    if isinstance(kind, list):
        return dict(zip(kind, children, strict=True))
    return {"tuple": tuple, "list": list}[kind](children)
