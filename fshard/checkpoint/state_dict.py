"""To and from plain state dicts of modules."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from fshard import comm
from fshard.checkpoint.alike import alike
from fshard.checkpoint.check import check_path
from fshard.checkpoint.exchange import (
    Entry,
    Names,
    agree,
    by_name,
    check_trusted,
    entry_of,
    filled,
    gathered,
    owned,
    refuse_untrusted,
)
from fshard.checkpoint.format import CheckpointError
from fshard.checkpoint.layout import replicas
from fshard.checks import check_flags, check_types, kind
from fshard.errors import Problem, leaf_error
from fshard.mesh import world
from fshard.shard import hash_of
from fshard.tree import Tree


def to_state_dict(
    params: Tree, *, module: nn.Module | None = None, rank0_only: bool = False
) -> dict[str, torch.Tensor]:
    """Gather a plain state dict, for `module.load_state_dict` or `torch.save`. Every rank must call this.

    Args:
        params: Any pytree of parameters, Sharded or full; `{**params, **buffers}` has the buffers in it too.
        module: The module whose parameters they are, on any device: a tied parameter then has all its names, and
            buffers that are not persistent are left out, as in `module.state_dict()`.
        rank0_only: Whether the first rank alone gets it; other ranks get an empty dict.

    Returns:
        Full tensors, of storage of their own, by their leaves' names, joined by dots.

    Raises:
        ValueError: on every rank alike, if a leaf is no tensor, the module has none of that name, or ranks hold
            different leaves.

    >>> import fshard as fs
    >>> params = fs.shard({"w": torch.ones(3)}, fs.zero2(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> to_state_dict(params)
    {'w': tensor([1., 1., 1.])}
    """
    label, names = "checkpoint.to_state_dict", Names(module)
    with alike(label):
        check_flags(label, rank0_only=rank0_only)
    leaves = by_name(label, params, names)
    replicas(label, leaves, world())
    out = {}
    for name, full in gathered(leaves):
        if rank0_only and comm.rank(world()):
            continue
        # Names of one tensor share it, as they do in a module's own.
        out.update(dict.fromkeys(names.saved_as(name), owned(full, leaves[name])))
    return out


def from_state_dict(
    state_dict: Mapping[str, Any], like: Tree, *, module: nn.Module | None = None, cast: bool = False
) -> Tree:
    """Cut this rank's part out of each tensor of a plain state dict. Every rank must call this, with the same dict.

    Args:
        state_dict: Full tensors by name, such as `module.state_dict()`.
        like: Parameters as they shall be, perhaps with buffers: leaves say which dtype, shape and layout; their values
            are not used and may be on the meta device.
        module: The module whose parameters they are, on any device: the state dict may then have a tied parameter
            under any of its names, or under several with the same values, and need not have buffers that are not
            persistent, which stay as they are in `like`.
        cast: Whether to convert from one floating dtype to another.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`, in storage of its own.

    Raises:
        ValueError: on every rank alike, with every leaf that the state dict lacks, has otherwise or has besides, or
            that differs between ranks, or where names that are tied have different values.

    >>> from_state_dict({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    {'w': tensor([1., 1., 1.])}
    """
    label, names = "checkpoint.from_state_dict", Names(module)
    found = {
        name: entry_of(tensor, f" of hash {hash_of(tensor)}") for name, tensor in _tensors(label, state_dict).items()
    }
    return filled(label, found, like, names, cast)


def load_torch(
    path: str | PathLike[str], like: Tree, *, module: nn.Module | None = None, cast: bool = False, trusted: bool = False
) -> Tree:
    """Read a file that `torch.save` made of a state dict. Every rank must call this.

    Args:
        path: The file, which all ranks read.
        like: As for `from_state_dict`.
        module: As for `from_state_dict`.
        cast: As for `from_state_dict`.
        trusted: The file is a pickle; True says that you trust whoever wrote it. Only tensors are taken from it, but a
            pickle can be made to run code as it is read.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`.

    Raises:
        ValueError: as `from_state_dict`.
        CheckpointError: on every rank alike, if the file is not trusted or cannot be read.
    """
    label, names = "checkpoint.load_torch", Names(module)
    found: dict[str, Entry] = {}
    with alike(label, path):
        check_trusted(label, trusted)
        check_path(label, "path", path)
        refuse_untrusted(str(path), trusted)
        found = {name: entry_of(tensor) for name, tensor in read_pickle(Path(path)).items()}
    return filled(label, found, like, names, cast)


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read a pickled state dict, by the unpickler that makes tensors and plain containers alone.

    Raises:
        CheckpointError: if it holds anything else or is damaged.
    """
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files of old versions of torch cannot be mapped.
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: found no state dict that torch.save wrote ({type(error).__name__})") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: expected a state dict, got {kind(found)}")
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            remedy = "torch.load it yourself and pass the state dict in it to from_state_dict"
            raise CheckpointError(f"{path}: expected a tensor, got {kind(tensor)} as {name!r}; {remedy}")
    return dict(found)


def _tensors(label: str, state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    check_types(label, Mapping, "a mapping from names to tensors", state_dict=state_dict)
    problems = [
        Problem(str(name), kind(value), "a full tensor")
        for name, value in state_dict.items()
        if type(value) not in (torch.Tensor, nn.Parameter)
    ]
    agree(label, {problem.path: problem.got for problem in problems})
    if problems:
        raise leaf_error(f"{label}: found no plain state dict", problems, "pass full tensors by name")
    return dict(state_dict)
