"""Donation: whose memory a result takes, and what may be donated."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from fshard import _compat
from fshard.errors import Problem, leaf_error, refuse
from fshard.jit.passes import placeholders, results
from fshard.jit.trace import Traced
from fshard.tree import Flat, is_sharded, tensor_of
from fshard.tree.checks import DONATED


def argument_of(path: str) -> int | None:
    """The number of the argument that a leaf of (args, kwargs) belongs to."""
    head = path.removeprefix("[0][").split("]")[0]
    return int(head) if path.startswith("[0][") else None


def pairs_of(traced: Traced, flat: Flat, donated: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Find for each donated argument a part of the result of its own that has its structure, and pair their tensors.

    Returns:
        For inputs the results that are to be written in their place; and those that are the inputs themselves.
    """
    numbers = {path: n for n, path in enumerate(traced.paths)}
    tensors = [n for n, out in enumerate(traced.outputs) if out is not None]
    place = {leaf: k for k, leaf in enumerate(tensors)}
    inputs, outs = placeholders(traced.graph.graph), results(traced.graph.graph)
    given_as = dict(zip(inputs, (id(tensor_of(leaf)) for leaf in flat.leaves if _is_tensor(leaf)), strict=True))
    pairs: dict[int, int] = {}
    passed: dict[int, int] = {}
    structures = {argument: flat.treedef.children()[0].children()[argument] for argument in donated}
    taken: set[int] = set()
    # A state before a part of it: the gradients look like the state's parameters.
    for argument, structure in sorted(structures.items(), key=lambda item: -item[1].num_leaves):
        given = [i for i, path in enumerate(flat.paths) if argument_of(path) == argument]
        starts = [start for start, part in _parts(traced.treedef) if part == structure]
        size = structure.num_leaves
        start = next((start for start in starts if taken.isdisjoint(range(start, start + size))), None)
        if start is None:
            found = "that another donated argument does not take has" if starts else "has"
            raise ValueError(
                f"jit: argument {argument} is donated, but no part of the result {found} its structure; return its "
                "successor, such as the new state, or do not donate it"
            )
        taken.update(range(start, start + size))
        for offset, i in enumerate(given):
            out = traced.outputs[start + offset]
            if flat.paths[i] in numbers and out is not None:
                spec = flat.leaves[i].spec if is_sharded(flat.leaves[i]) else True
                n, k = numbers[flat.paths[i]], place[start + offset]
                if out == spec and _same(inputs[n].meta["val"], outs[k].meta["val"]):
                    (passed if given_as.get(outs[k]) == id(tensor_of(flat.leaves[i])) else pairs)[n] = k
    return pairs, passed


def _parts(treedef: Any) -> list[tuple[int, Any]]:
    """The whole structure and its children, each with the number of its first leaf."""
    found, start = [(0, treedef)], 0
    for child in treedef.children():
        found.append((start, child))
        start += child.num_leaves
    return found


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def write(pairs: dict[int, int], tensors: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Copy results into the inputs whose place they take; those that lie in one of these are read first."""
    written = {_compat.storage_key(tensors[i]) for i in pairs}
    for k, out in enumerate(outputs):
        if _compat.storage_key(out) in written:
            outputs[k] = out.clone()
    for i, k in pairs.items():
        tensors[i].copy_(outputs[k])


def refuse_shared(flat: Flat, donated: Sequence[int], passed: Collection[int]) -> None:
    """Refuse a tensor that is donated and is another argument too, which would change while it is read.

    Tensors that share memory with others are copied before they are written to.

    Args:
        flat: The arguments.
        donated: The numbers of those that are donated.
        passed: Numbers of the tensors that nothing is written to, such as frozen parameters and their average.
    """
    firsts: dict[int, tuple[str, bool]] = {}
    problems = []
    rows = ((path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True) if _is_tensor(leaf))
    for i, (path, leaf) in enumerate(rows):
        first, stays = firsts.setdefault(id(tensor_of(leaf)), (path, i in passed))
        if first is path or (stays and i in passed) or not tensor_of(leaf).numel():
            continue
        if {argument_of(first), argument_of(path)} & set(donated):
            found = f"memory that {first} has too, and one of them is donated"
            problems.append(Problem(path, found, "tensors of their own"))
    problems += [
        Problem(path, "elements that share their memory, as expand has them", "memory for each")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if isinstance(tensor := tensor_of(leaf), torch.Tensor) and argument_of(path) in donated and _is_expanded(tensor)
    ]
    refuse("jit: arguments share memory that is donated", problems, "clone one of them")


def refuse_closed(flat: Flat, donated: Sequence[int], reached: Collection[int]) -> None:
    """Refuse donated tensors that the function closes over too: the next call would read emptied memory.

    Args:
        flat: The arguments.
        donated: The numbers of those that are donated.
        reached: Identities of the tensors that the function closes over.
    """
    problems = [
        Problem(path, "a tensor that the function closes over too", "one that it takes from its arguments alone")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if id(tensor_of(leaf)) in reached and argument_of(path) in donated
    ]
    remedy = "read it from the argument inside of the function, such as state.buffers, or close over a clone"
    raise leaf_error("jit: donated leaves would be read again in the next call", problems, remedy)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(tensor_of(leaf), torch.Tensor)


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def mark_donated(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Hand over the memory of donated leaves, whose tensors are left empty and say so.

    Leaves that share a tensor hand over one for all.
    """
    empty: dict[Any, torch.Tensor] = {}
    moved: dict[int, torch.Tensor] = {}
    for tensor in map(tensor_of, leaves):
        if id(tensor) not in moved:
            # There may be thousands, and a device is slow to make and to hash.
            kind = tensor.dtype if tensor.is_cpu else (tensor.dtype, tensor.device)
            if kind not in empty:
                empty[kind] = tensor.new_empty(0)
            # By no operator.
            moved[id(tensor)], tensor.data = tensor.data, empty[kind]
            tensor.__dict__[DONATED] = True
    return [moved[id(tensor_of(leaf))] for leaf in leaves]
