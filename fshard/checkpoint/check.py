"""What can be saved: refusals before anything is written."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fshard import _compat, comm
from fshard.checkpoint.format import DTYPES, digest, dtype_name
from fshard.checkpoint.layout import local_of, shape_of
from fshard.checkpoint.write import bytes_of
from fshard.checks import kind
from fshard.errors import Problem, leaf_error
from fshard.mesh import world
from fshard.tree import Flat, Tree, is_sharded

# Larger ones Python may refuse to read as text.
MAX_INT_BITS = 2000


def step_of(label: str, state: Tree, step: Any) -> int:
    """The step to save a state as.

    Raises:
        ValueError: if it is none.
    """
    found = getattr(state, "step", None) if step is None else step
    if type(found) is torch.Tensor and not (found.dim() or found.is_meta or _compat.is_transformed(found)):
        found = found.item()
    if type(found) is not int or not 0 <= found < 10**18:
        shown = kind(found) if isinstance(found, torch.Tensor) else repr(found)[:40]
        raise ValueError(
            f"{label}: expected step to be a whole number from 0, got {shown}; pass step=, or a state that has one"
        )
    return found


def check_directory(label: str, directory: Any) -> None:
    """Refuse a directory that is no path, or could be written to and not read: torch opens files whose names are text.

    Raises:
        ValueError: if it is no path, or its name is no text.
    """
    check_path(label, "directory", directory)
    if not _is_text(str(directory)):
        raise ValueError(f"{label}: expected directory to be a name that is text in UTF-8, got {str(directory)!r}")


def check_path(label: str, name: str, path: Any) -> Path:
    """Refuse a file or a directory that is no path.

    Args:
        label: The function that asks, for its error.
        name: The argument.
        path: The file or directory.

    Returns:
        The path.

    Raises:
        ValueError: if it is another value.
    """
    if not isinstance(path, str | PathLike) or not str(path):
        raise ValueError(f"{label}: expected {name} to be a path, got {path!r:.40}")
    return Path(path)


def _is_text(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def check_state(label: str, flat: Flat, step: int, directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Refuse on every rank what cannot be saved; the leaves that are tensors, and the others, by path."""
    problems: list[Problem] = []
    tensors, values, entries = {}, {}, {"(step)": str(step), "(directory)": directory}
    # Sorted, because the order of a dict's entries is no part of a state, and may differ between ranks.
    for path, leaf in sorted(zip(flat.paths, flat.leaves, strict=True), key=lambda pair: pair[0]):
        unfit = _unfit(leaf)
        if unfit:
            problems.append(Problem(path, *unfit))
            entries[path] = unfit[0]
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            values[path] = leaf
            entries[path] = repr(leaf)
        else:
            tensors[path] = leaf
            entries[path] = _describe(leaf)
    difference = comm.disagreement(entries, [world()], label)
    if difference:
        remedy = "make what is not Sharded the same on every rank, buffers for instance by fs.sync_buffers"
        raise leaf_error("checkpoint.save: ranks hold different states", [difference], remedy)
    if problems:
        raise leaf_error("checkpoint.save: leaves cannot be saved", problems, "keep them out of the state")
    return tensors, values


def _unfit(leaf: Any) -> tuple[str, str] | None:
    if type(leaf) is int and leaf.bit_length() > MAX_INT_BITS:
        return f"an int of {leaf.bit_length()} bits", f"at most {MAX_INT_BITS}"
    if type(leaf) is str and not _is_text(leaf):
        return "a str with surrogates", "one that is text; encode it otherwise"
    if leaf is None or type(leaf) in (bool, int, float, str):
        return None
    local = local_of(leaf) if is_sharded(leaf) or isinstance(leaf, torch.Tensor) else None
    if local is None or type(local) not in (torch.Tensor, torch.nn.Parameter):
        return kind(leaf), "a tensor, or None, bool, int, float or str"
    if _compat.is_transformed(local) or local.is_meta or local.layout != torch.strided:
        return f"{kind(local)} without values of its own", "a strided tensor with values, outside of torch.func and jit"
    if dtype_name(local_of(leaf)) not in dict(DTYPES):
        return f"dtype {dtype_name(local_of(leaf))}", f"one of {', '.join(dict(DTYPES))}"
    return None


def _describe(leaf: Any) -> str:
    """What ranks must agree on."""
    if is_sharded(leaf):
        return f"{dtype_name(local_of(leaf))}{list(shape_of(leaf))} split by {leaf.spec.partition!r}"
    return f"{kind(leaf)} of hash {digest(bytes_of(leaf))}"
