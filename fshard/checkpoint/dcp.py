"""To and from torch.distributed.checkpoint, under the names that FSDP2 gives its state.

Leaves are handed over as boxes of elements, without a copy, so that any layout is written and read: DTensor has no such
for some. torch.distributed.checkpoint is imported on first use.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fshard.checkpoint.alike import alike
from fshard.checkpoint.check import check_path
from fshard.checkpoint.dcp_planners import Place, load_planner, save_planner
from fshard.checkpoint.exchange import (
    Entry,
    Names,
    agree,
    by_name,
    check_tied,
    check_trusted,
    described,
    fresh,
    misfits,
    refuse_untrusted,
)
from fshard.checkpoint.format import CheckpointError
from fshard.checkpoint.layout import empty_like, replicas
from fshard.checkpoint.optimizer_state import (
    check_updates,
    groups_of,
    injected_names,
    optimizer_leaves,
    optimizer_names,
    rebuilt,
    updates_of,
)
from fshard.checks import check_flags, check_types, kind
from fshard.errors import leaf_error
from fshard.mesh import world
from fshard.tree import Tree, flatten, names_of, unflatten

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
        ValueError: on every rank alike, if a leaf is no tensor or ranks hold different leaves, or the optimizer's state
            holds more than that of `fs.from_torch`.
        CheckpointError: on every rank alike, if the directory has a checkpoint already, or files cannot be written.
    """
    label, names = "checkpoint.save_dcp", Names(module)
    check_types(label, str, "a text", model_key=model_key, optimizer_key=optimizer_key)
    check_types(label, (torch.optim.Optimizer, NoneType), "a torch optimizer or None", optimizer=optimizer)
    with alike(label):
        check_flags(label, flatten_optimizer_state_dict=flatten_optimizer_state_dict)
    trained = hasattr(state, "opt_state")
    if trained and (module is None or optimizer is None):
        needed = "module= and optimizer= too, as get_state_dict takes them"
        raise ValueError(f"{label}: expected {needed}, got a {type(state).__name__} alone")
    content: dict[Place, Any] = {}
    model_leaves = _model_leaves(label, state, names)
    replicas(label, model_leaves, world())
    for name, leaf in model_leaves.items():
        content |= {(*_split(model_key), alias): leaf for alias in names.saved_as(name)}
    if trained:
        assert optimizer is not None
        leaves = optimizer_leaves(label, state.opt_state)
        agree(label, {f"{name} {slot}": described(leaf) for (name, slot), leaf in leaves.items()})
        replicas(label, {f"{name} {slot}": leaf for (name, slot), leaf in leaves.items()}, world())
        parts: dict[Place, Any] = {("state", name, slot): leaf for (name, slot), leaf in leaves.items()}
        order = optimizer_names(label, names, optimizer)
        for i, group in enumerate(groups_of(state.opt_state, optimizer, order)):
            members = [order[number] for number in group.pop("params")]
            owners = members if flatten_optimizer_state_dict else [i]
            parts |= {("param_groups", owner, key): group[key] for owner in owners for key in group}
            if not flatten_optimizer_state_dict:
                parts["param_groups", i, "params"] = members
        for place, value in parts.items():
            content[*_split(optimizer_key), *([_key(*place)] if flatten_optimizer_state_dict else place)] = value
    with fresh(label, directory, (METADATA,)) as temporary, _one_failure():
        from torch.distributed.checkpoint.state_dict_saver import save

        save(
            {},
            checkpoint_id=temporary,
            planner=save_planner({_key(*place): (place, value) for place, value in content.items()}),
        )


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
        ValueError: on every rank alike, with every leaf that the checkpoint lacks, has otherwise or has besides.
        CheckpointError: on every rank alike, if the checkpoint is not trusted or cannot be read.
    """
    label, names = "checkpoint.load_dcp", Names(module)
    check_types(label, str, "a text", model_key=model_key, optimizer_key=optimizer_key)
    check_updates(label, updates)
    trained = hasattr(like, "opt_state")
    entries: dict[str, Entry] = {}
    others: list[str] = []
    with alike(label, directory):
        check_trusted(label, trusted)
        place = check_path(label, "directory", directory)
        refuse_untrusted(str(place / METADATA), trusted)
        entries, others = _contents(place)
    agree(label, {key: str(entry) for key, entry in entries.items()})
    given = _model_leaves(label, like, names)
    model = {name: leaf for name, leaf in given.items() if names.saved_as(name)}
    slots = optimizer_leaves(label, like.opt_state) if trained else {}
    states, groups = _key(optimizer_key, "state"), _key(optimizer_key, "param_groups")
    found = [key for key in entries if _is_under(key, model_key) and not _is_under(key, states)]
    groups_of_keys = names.grouped({key[len(model_key) + 1 if model_key else 0 :]: key for key in found})
    keys = {name: groups_of_keys.get(name, [_key(model_key, name)]) for name in groups_of_keys | model}
    needed = {keys[name][0]: leaf for name, leaf in model.items()}
    needed |= {_key(states, *key): leaf for key, leaf in slots.items()}
    # A tied parameter is there under several names, which are compared.
    twins = {key: leaf for name, leaf in model.items() for key in keys[name][1:]}
    there = [key for key in entries if key in found or (trained and _is_under(key, states))]
    problems = misfits(needed | twins, {key: entries[key] for key in there})
    if problems:
        remedy = "pass a state built as the one that was saved; module= knows which names are tied or not saved"
        raise leaf_error(f"{label}: leaves do not fit", problems, remedy)
    made = {key: empty_like(leaf) for key, leaf in (needed | twins).items()}
    injected = injected_names(like.opt_state) if trained else set()
    wanted = {*injected, "params"} if injected else set()
    values: dict[str, Any] = dict.fromkeys(
        key for key in others if _is_under(key, groups) and key.rpartition(".")[2] in wanted
    )
    with alike(label, directory), _one_failure():
        from torch.distributed.checkpoint.state_dict_loader import load

        load({}, checkpoint_id=directory, planner=load_planner(made, values))
        for name in model:
            for twin in keys[name][1:]:
                check_tied(name, made[keys[name][0]], made[twin])
    restored = given | {name: made[keys[name][0]] for name in model}
    if not trained:
        return _refilled(like, restored)
    members = {key.removesuffix("params"): values[key] for key in values if key.endswith(".params")}

    def number(owner: str, name: str) -> Any:
        prefixes = [_key(groups, owner) + ".", *(prefix for prefix in members if owner in members[prefix])]
        # The state of a class that keeps nothing does not say whose it is.
        keys = (
            [f"{prefix}{name}" for prefix in prefixes] if owner else [key for key in values if key.endswith(f".{name}")]
        )
        return next((values[key] for key in keys if key in values), None)

    opt_state = rebuilt(label, like.opt_state, {key: made[_key(states, *key)] for key in slots}, number, updates)
    return like._replace(
        step=torch.full_like(like.step, updates_of(opt_state)),
        params=_refilled(like.params, restored),
        opt_state=opt_state,
        buffers=_refilled(like.buffers, restored),
    )


def _model_leaves(label: str, state: Tree, names: Names) -> dict[str, Any]:
    if not hasattr(state, "opt_state"):
        return by_name(label, state, names)
    return by_name(label, state.params, names) | by_name(label, state.buffers, names)


def _refilled(tree: Tree, leaves: Mapping[str, Any]) -> Tree:
    flat = flatten(tree)
    return unflatten(flat.treedef, [leaves.get(name) for name in names_of(flat.treedef)])


def _key(*path: str | int) -> str:
    return ".".join(str(part) for part in path if part != "")


def _split(key: str) -> Place:
    return tuple(key.split(".")) if key else ()


def _is_under(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(f"{prefix}.")


def _contents(directory: Path) -> tuple[dict[str, Entry], list[str]]:
    """The tensors of a checkpoint, and the keys of its other values."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    try:
        metadata = FileSystemReader(directory).read_metadata()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds {kind(metadata)}")
    except OSError:
        raise
    except Exception as error:
        # A pickle that is damaged raises anything.
        raise CheckpointError(f"{directory / METADATA}: {type(error).__name__}: {error}") from error
    entries, others = {}, []
    for key, found in metadata.state_dict_metadata.items():
        if not isinstance(found, TensorStorageMetadata):
            others.append(key)
            continue
        entries[key] = Entry(found.properties.dtype, tuple(found.size))
        # Elements that no file has would stay zero unnoticed.
        if sum(chunk.sizes.numel() for chunk in found.chunks) != found.size.numel():
            raise CheckpointError(f"{directory / METADATA}: the chunks of {key} do not cover it")
    return entries, others


@contextmanager
def _one_failure() -> Iterator[None]:
    """Say in one line what torch says in tracebacks of all ranks, and nothing of there being one rank alone."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        if dist.is_initialized():
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{type(first).__name__} on rank {rank}: {first}") from error
