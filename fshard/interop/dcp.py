"""Checkpoints of torch.distributed.checkpoint, under the names that FSDP2 gives its state."""

from collections.abc import Callable
from os import PathLike
from types import NoneType
from typing import Any

import torch
from torch import nn

from fshard.errors import expect
from fshard.interop.files import new_files
from fshard.interop.optimizer_state import (
    check_updates,
    groups_of,
    optimizer_leaves,
    optimizer_names,
    rebuilt,
    states_of,
)
from fshard.interop.pieces import layout_of, replicas
from fshard.interop.ranks import TRUST, agree, check_path, raise_on_all_ranks, refuse_untrusted
from fshard.interop.state_dict import Entry, Names, by_name, read_leaves, with_leaves
from fshard.mesh import world
from fshard.tree import Tree
from fshard.tree.checks import check_flags, check_types

METADATA = ".metadata"


def save_dcp(
    directory: str | PathLike[str],
    state: Tree,
    *,
    module: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_key: str = "model",
    optimizer_key: str = "optim",
    flatten_optimizer_state_dict: bool = False,
) -> None:
    """Write a checkpoint of torch.distributed.checkpoint that an FSDP2 run resumes from. Every rank must call this.

    It is what `dcp.save({"model": model_state, "optim": optimizer_state})` writes of what `get_state_dict(module,
    optimizer)` returned. Each rank writes its own shards. What FSDP2 has no place for (the step, the key, the state of
    transforms) is not written; `fs.checkpoint.save` writes all.

    Args:
        directory: Where the files go; made where there is none. They appear when they are complete.
        state: A TrainState, or any pytree of parameters and buffers.
        module: The module whose parameters they are, on any device: a tied parameter then has all its names, and
            buffers that are not persistent are left out.
        optimizer: A torch optimizer of that module's parameters, made as the FSDP2 run makes its own: its parameter
            groups are written, with numbers that were injected as the state has them. Needed for a TrainState.
        model_key: The key of the module's state, dots for nested dicts.
        optimizer_key: The key of the optimizer's state.
        flatten_optimizer_state_dict: Write parameter groups as torch's option of that name does, by parameter.

    Raises:
        ValueError: on every rank, if a leaf is no tensor or ranks hold different leaves, or the optimizer's state
            holds more than that of `fs.from_torch`.
        CheckpointError: on every rank, if the directory has a checkpoint already, or files cannot be written.

    >>> import tempfile, torch, fshard as fs
    >>> import torch.distributed.checkpoint as dcp
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> state_dict = {"model": {"w": torch.zeros(2)}}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     fs.checkpoint.save_dcp(directory, params)
    ...     dcp.load(state_dict, checkpoint_id=directory)
    >>> state_dict
    {'model': {'w': tensor([1., 2.])}}
    """
    label, names = "checkpoint.save_dcp", Names(module)
    check_types(label, str, "a text", model_key=model_key, optimizer_key=optimizer_key)
    check_types(label, (torch.optim.Optimizer, NoneType), "a torch optimizer or None", optimizer=optimizer)
    with raise_on_all_ranks(label):
        check_flags(label, flatten_optimizer_state_dict=flatten_optimizer_state_dict)
    trained = hasattr(state, "opt_state")
    whole = not trained or (module is not None and optimizer is not None)
    needed = "module= and optimizer= too, as get_state_dict takes them"
    expect(whole, label, needed, f"a {type(state).__name__} alone")
    leaves = _model_leaves(label, state, names)
    replicas(label, leaves, world())
    content: dict[tuple[str | int, ...], Any] = {
        (*_split(model_key), alias): leaf for name, leaf in leaves.items() for alias in names.saved_as(name)
    }
    if trained:
        assert optimizer is not None
        slots = optimizer_leaves(label, state.opt_state)
        agree(label, {f"{name} {slot}": layout_of(leaf) for (name, slot), leaf in slots.items()})
        replicas(label, {f"{name} {slot}": leaf for (name, slot), leaf in slots.items()}, world())
        parts: dict[tuple[str | int, ...], Any] = {("state", *key): leaf for key, leaf in slots.items()}
        order = optimizer_names(label, names, optimizer)
        for i, group in enumerate(groups_of(state.opt_state, optimizer, order)):
            members = [order[number] for number in group.pop("params")]
            owners = members if flatten_optimizer_state_dict else [i]
            parts |= {("param_groups", owner, key): group[key] for owner in owners for key in group}
            if not flatten_optimizer_state_dict:
                parts["param_groups", i, "params"] = members
        for place, value in parts.items():
            content[*_split(optimizer_key), *([_key(*place)] if flatten_optimizer_state_dict else place)] = value
    with new_files(label, directory, (METADATA,)) as temporary:
        from fshard.interop import dcp_files

        dcp_files.write(temporary, content)


def load_dcp(
    directory: str | PathLike[str],
    like: Tree,
    *,
    module: nn.Module | None = None,
    updates: int | None = None,
    model_key: str = "model",
    optimizer_key: str = "optim",
    trusted: bool = False,
) -> Tree:
    """Read a checkpoint of torch.distributed.checkpoint, as FSDP2 runs write it. Every rank must call this.

    It is what `dcp.save({"model": model_state, "optim": optimizer_state})` wrote of what `get_state_dict(module,
    optimizer)` returned, with flattened optimizer state or not, from any number of ranks. Each rank reads its shards.

    Args:
        directory: Where the checkpoint is.
        like: A TrainState with an optimizer of `fs.from_torch`, or a pytree of parameters and buffers, as it shall be:
            leaves say which dtype, shape and layout; their values are not used and may be on the meta device.
        module: The module whose parameters they are, on any device: the checkpoint then has a tied parameter under
            several names, and no buffers that are not persistent, which stay as they are.
        updates: How many updates were made; None takes the torch class's own count.
        model_key: The key of the module's state, dots for nested dicts.
        optimizer_key: The key of the optimizer's state.
        trusted: Whether the checkpoint may be read: its list of contents is pickled, so reading it can run code of
            whoever wrote it.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`; the key and the state of transforms are those of
        `like`, and hyperparameters those of its optimizer but for numbers that were injected.

    Raises:
        ValueError: on every rank, with every leaf that the checkpoint lacks, has otherwise or has besides.
        CheckpointError: on every rank, if the checkpoint is not trusted or cannot be read.

    >>> import tempfile, torch, fshard as fs
    >>> import torch.distributed.checkpoint as dcp
    >>> like = fs.shard({"w": torch.zeros(2)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     metadata = dcp.save({"model": {"w": torch.tensor([1.0, 2.0])}}, checkpoint_id=directory)
    ...     fs.unshard(fs.checkpoint.load_dcp(directory, like, trusted=True))
    {'w': tensor([1., 2.])}
    """
    label, names = "checkpoint.load_dcp", Names(module)
    check_types(label, str, "a text", model_key=model_key, optimizer_key=optimizer_key)
    check_updates(label, updates)
    entries: dict[str, Entry] = {}
    values: dict[str, Callable[[], Any]] = {}
    with raise_on_all_ranks(label, directory):
        check_flags(label, TRUST, trusted=trusted)
        place = check_path(label, "directory", directory)
        refuse_untrusted(place / METADATA, trusted)
        from fshard.interop import dcp_files

        entries, values = dcp_files.contents(place)
    opt_state = getattr(like, "opt_state", None)
    states, groups = _key(optimizer_key, "state"), _key(optimizer_key, "param_groups")
    given = _model_leaves(label, like, names)
    model = {name: leaf for name, leaf in given.items() if names.saved_as(name)}
    prefix = f"{model_key}." if model_key else ""
    under = [key for key in entries if key.startswith(prefix) and not key.startswith(f"{states}.")]
    # A tied parameter is there under several names.
    keys = {name: [_key(model_key, name)] for name in model} | names.grouped({key[len(prefix) :]: key for key in under})
    needed = {keys[name][0]: leaf for name, leaf in model.items()}
    found = {group[0]: [entries[key] for key in group] for group in keys.values() if group[0] in entries}
    if opt_state is not None:
        needed |= {_key(states, *key): leaf for key, leaf in optimizer_leaves(label, opt_state).items()}
        found |= {key: [entry] for key, entry in entries.items() if key.startswith(f"{states}.")}
    remedy = "pass a state built as the one that was saved; module= knows which names are tied or not saved"
    made = read_leaves(label, needed, found, remedy)
    restored = given | {name: made[keys[name][0]] for name in model}
    if opt_state is None:
        return with_leaves(like, restored)
    injected = {name for state in states_of(opt_state) for name in state.hyper}
    numbers: dict[str, Any] = {}
    if injected:
        wanted = {
            key for key in values if key.startswith(f"{groups}.") and key.rpartition(".")[2] in {*injected, "params"}
        }
        with raise_on_all_ranks(label, directory):
            numbers = {key: values[key]() for key in wanted}

    def number(owner: str, name: str) -> Any:
        # By parameter where the state was flattened; else of the group that has the parameter, and any where a class
        # keeps nothing, whose state does not say whose it is.
        flat = _key(groups, owner, name)
        members = [
            key.removesuffix("params") for key, value in numbers.items() if key.endswith(".params") and owner in value
        ]
        found = (
            [flat, *(f"{prefix}{name}" for prefix in members)]
            if owner
            else [k for k in numbers if k.endswith(f".{name}")]
        )
        return next((numbers[key] for key in found if key in numbers), None)

    opt_state = rebuilt(label, opt_state, lambda name, slot: made[_key(states, name, slot)], number, updates)
    return like._replace(
        step=torch.full_like(like.step, max((int(state.updates) for state in states_of(opt_state)), default=0)),
        params=with_leaves(like.params, restored),
        opt_state=opt_state,
        buffers=with_leaves(like.buffers, restored),
    )


def _model_leaves(label: str, state: Tree, names: Names) -> dict[str, Any]:
    if not hasattr(state, "opt_state"):
        return by_name(label, state, names)
    return by_name(label, state.params, names) | by_name(label, state.buffers, names)


def _key(*path: str | int) -> str:
    return ".".join(str(part) for part in path if part != "")


def _split(key: str) -> tuple[str, ...]:
    return tuple(key.split(".")) if key else ()
