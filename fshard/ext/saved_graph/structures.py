"""Structures of results as JSON: parts of the arguments' structure, and tuples, lists and dicts of such."""

from collections.abc import Iterator
from typing import Any

from fshard.extend import describe, expect

JSON = Any
_KINDS = (("tuple", tuple), ("list", list), ("dict", dict))
# So deep a result may be: deeper ones end Python's stack.
_DEEPEST = 100
# More children than any part has.
_MOST = 2**31


def write_structure(treedef: Any, arguments: Any) -> JSON:
    """Write a structure down.

    Args:
        treedef: Of a result.
        arguments: That of the arguments.

    Raises:
        ValueError: if it has a part that is neither a tuple, a list, a dict nor a part of the arguments.
    """
    paths = {part: path for path, part in reversed([*_parts(arguments, ())])}
    names = {kind: name for name, kind in _KINDS}
    remedy = "return it in an argument's place"

    def write(part: Any, depth: int) -> JSON:
        if part in paths:
            return {"as": paths[part]}
        is_plain = part.type in names and all(map(_is_key, part.entries()))
        expect(is_plain, "save_graph", "results in tuples, lists and dicts with keys of text", f"{part}"[:60], remedy)
        expect(depth < _DEEPEST, "save_graph", f"a result of at most {_DEEPEST} levels", "a deeper one", remedy)
        children = [write(child, depth + 1) for child in part.children()]
        written = {names[part.type]: children}
        return written | {"keys": part.entries()} if part.type is dict else written

    return write(treedef, 0)


def _parts(treedef: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    yield path, treedef
    for n, child in enumerate(treedef.children()):
        yield from _parts(child, (*path, n))


def _is_key(key: Any) -> bool:
    """Whether a dict of a file may have a key, or a list an index."""
    return type(key) is str or (type(key) is int and abs(key) < _MOST)


def find_fault(structure: JSON, depth: int = 0) -> str:
    """Say what is wrong with a structure of a file; nothing where it is as `write_structure` writes it."""
    if depth > _DEEPEST:
        return f"more than {_DEEPEST} levels"
    if type(structure) is not dict:
        return describe(structure)
    match structure:
        case {"as": list(path), **others} if not others:
            return "" if all(type(n) is int and 0 <= n < _MOST for n in path) else "a path of no numbers of children"
        case {"tuple": list(children), **others} | {"list": list(children), **others} if not others:
            pass
        case {"dict": list(children), "keys": list(keys), **others} if not others:
            is_plain = all(_is_key(key) for key in keys)
            if not is_plain or not len(children) == len(keys) == len(set(keys)):
                return "keys that no dict has"
        case _:
            return f"an object of {[*structure]}"[:100]
    return next(filter(None, (find_fault(child, depth + 1) for child in children)), "")


def make_tree(structure: JSON, arguments: Any) -> Any:
    """Make a tree of a structure, with numbers for leaves.

    Args:
        structure: One that `find_fault` finds nothing in.
        arguments: The structure of the arguments of a call.

    Raises:
        LookupError: if the arguments have no such part.
    """
    if "as" in structure:
        part = arguments
        for n in structure["as"]:
            part = part.children()[n]
        return part.unflatten(range(part.num_leaves))
    ((name, kind),) = [(name, kind) for name, kind in _KINDS if name in structure]
    children = [make_tree(child, arguments) for child in structure[name]]
    return dict(zip(structure["keys"], children, strict=True)) if kind is dict else kind(children)
