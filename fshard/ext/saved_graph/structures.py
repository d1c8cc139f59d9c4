"""The structure of a result as JSON: parts of the structure of the arguments, and tuples, lists and dicts of such."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fshard.ext.saved_graph.forms import Source, has_form

JSON = Any
_KINDS = (tuple, list, dict)
# Deeper results would end Python's stack.
_MAX_DEPTH = 100


def write_structure(treedef: Any, arguments: Any) -> JSON:
    """Write a structure down.

    Args:
        treedef: The structure of a result.
        arguments: The structure of the arguments.

    Raises:
        ValueError: if it has a part that is neither a tuple, a list, a dict nor a part of the arguments.
    """
    paths: dict[Any, tuple[int, ...]] = {}
    for path, part in _list_parts(arguments, ()):
        paths.setdefault(part, path)
    return _write(treedef, paths, depth=0)


def _list_parts(treedef: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """List a structure and all parts of it, each with the numbers of the children on the way to it."""
    yield path, treedef
    for number, child in enumerate(treedef.children()):
        yield from _list_parts(child, (*path, number))


def _write(part: Any, paths: Mapping[Any, tuple[int, ...]], depth: int) -> JSON:
    if part in paths:
        return {"as": paths[part]}
    if part.type not in _KINDS or not all(map(_is_key, part.entries())):
        raise ValueError(
            f"save_graph: a part of the result is {str(part)[:60]}, and a file holds tuples, lists and dicts whose "
            "keys are texts or numbers of 64 bits. Return one of these, or a part of the arguments."
        )
    if depth == _MAX_DEPTH:
        raise ValueError(f"save_graph: the result has more than {_MAX_DEPTH} levels. Return a flatter one.")
    children = [_write(child, paths, depth + 1) for child in part.children()]
    if part.type is dict:
        return {"dict": children, "keys": part.entries()}
    return {part.type.__name__: children}


def _is_key(key: Any) -> bool:
    """Whether a dict of a file may have a key, or a list an index."""
    if type(key) is float:
        return math.isfinite(key)
    return type(key) is str or (type(key) is int and abs(key) < 2**63)


def check_structure(structure: JSON, source: Source, depth: int = 0) -> None:
    """Refuse a structure of a file that is not as `write_structure` writes it."""
    if depth > _MAX_DEPTH:
        source.refuse("result", f"at most {_MAX_DEPTH} levels", depth)
    match structure:
        case {"as": path, **others} if has_form(path, [int]) and not others:
            return
        case {"tuple": list(children), **others} | {"list": list(children), **others} if not others:
            pass
        case {"dict": list(children), "keys": list(keys), **others} if _are_keys(keys, len(children)) and not others:
            pass
        case _:
            source.refuse("result", "tuples, lists, dicts and parts of the arguments", structure)
    for child in children:
        check_structure(child, source, depth + 1)


def _are_keys(keys: list[JSON], size: int) -> bool:
    """Whether a list has the keys of a dict of a size, each once."""
    return all(map(_is_key, keys)) and len(keys) == len(set(keys)) == size


def make_tree(structure: JSON, arguments: Any) -> Any:
    """Make a tree of a structure, with numbers for leaves.

    Args:
        structure: One that `check_structure` accepts.
        arguments: The structure of the arguments of a call.

    Raises:
        LookupError: if the arguments have no such part.
    """
    if "as" in structure:
        part = arguments
        for number in structure["as"]:
            part = part.children()[number]
        return part.unflatten(range(part.num_leaves))
    (kind,) = (kind for kind in _KINDS if kind.__name__ in structure)
    children = [make_tree(child, arguments) for child in structure[kind.__name__]]
    if kind is dict:
        return dict(zip(structure["keys"], children, strict=True))
    return kind(children)
