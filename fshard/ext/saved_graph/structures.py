"""The structure of a result as JSON: leaves, tuples, lists, dicts, and classes that the arguments have parts of."""

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
        A pair for each part: its kind, and the parts of this one. The kind is "leaf", "tuple", "list" or the keys of a
        dict; for other classes it is the number of a part of the arguments that is alike, whatever its own parts.

    Raises:
        ValueError: if it has a part that is neither a tuple, a list or a dict nor like a part of the arguments.
    """
    numbers: dict[Any, int] = {}
    for number, part in enumerate(_list_parts(arguments)):
        numbers.setdefault(part.one_level(), number)
    return _write(treedef, numbers)


def _list_parts(treedef: Any) -> Iterator[Any]:
    """List a structure and all parts of it."""
    yield treedef
    for child in treedef.children():
        yield from _list_parts(child)


def _write(part: Any, numbers: Mapping[Any, int]) -> JSON:
    children = [_write(child, numbers) for child in part.children()]
    if part.type is None:
        return "leaf", children
    if part.type in (tuple, list):
        return part.type.__name__, children
    alone = part.one_level()
    # Never as one of the arguments, which is equal where its keys are 1 for True, or have another order.
    if part.type is dict and all(type(key) in _KEY_TYPES for key in part.entries()):
        # Entries are sorted. Who iterates over the dict gets the keys in the order in which the function made it.
        child_of_key = alone.unflatten(children)
        return list(child_of_key), list(child_of_key.values())
    if alone in numbers:
        return numbers[alone], children
    raise ValueError(
        f"save_graph: a part of the result is {str(part)[:60]}, and a file holds tuples, lists and dicts whose keys "
        "are texts or numbers. Return one of these, or of a class that is in the arguments."
    )


def make_tree(structure: JSON, arguments: Any) -> Any:
    """Make a tree of a structure, with numbers for leaves.

    Args:
        structure: What `write_structure` wrote; of something else any error is raised.
        arguments: The structure of the arguments of a call.
    """
    return _make(structure, list(_list_parts(arguments)))


def _make(structure: JSON, parts_of_arguments: Sequence[Any]) -> Any:
    kind, parts = structure
    children = [_make(part, parts_of_arguments) for part in parts]
    if kind == "leaf":
        return 0
    if isinstance(kind, list):
        return dict(zip(kind, children, strict=True))
    if isinstance(kind, int):
        return parts_of_arguments[kind].one_level().unflatten(children)
    return {"tuple": tuple, "list": list}[kind](children)
