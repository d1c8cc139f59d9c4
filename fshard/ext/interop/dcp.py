"""Checkpoints of torch.distributed.checkpoint, under the names that FSDP2 gives its state."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fshard.checkpoint import CheckpointError
from fshard.ext.interop import optimizer_state as states
from fshard.ext.interop.export import new_files
from fshard.ext.interop.module_exchange import ModuleExchange
from fshard.extend import Entry, describe, expect

METADATA = ".metadata"
# Leaves and other values, by their places in nested dicts.
Content = dict[tuple[str | int, ...], Any]
# Values of parameter groups, by the key of the group and their names.
Numbers = dict[str, dict[str, Any]]


def save_dcp(
    directory: str | PathLike[str],
    state: Any,
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
    exchange = ModuleExchange("checkpoint.save_dcp", module)
    trained = hasattr(state, "opt_state")
    with exchange.raise_on_all_ranks():
        _check_keys(exchange, model_key=model_key, optimizer_key=optimizer_key)
        is_whole = not trained or (module is not None and optimizer is not None)
        needed = "module= and optimizer= too, as get_state_dict takes them"
        expect(is_whole, exchange.label, needed, f"a {type(state).__name__} alone")
    leaves = _model_leaves(exchange, state)
    exchange.replicas(leaves, {})
    named = _name_of_fsdp2 if module is not None else str
    content: Content = {
        (*_split(model_key), named(alias)): leaf for name, leaf in leaves.items() for alias in exchange.saved_as(name)
    }
    if trained and optimizer is not None:
        is_flat = flatten_optimizer_state_dict
        for place, value in _optimizer_content(exchange, state.opt_state, optimizer, is_flat).items():
            content[*_split(optimizer_key), *([_key(*place)] if is_flat else place)] = value
    files = [f"__{rank}_0.distcp" for rank in range(exchange.ranks.size)]
    with new_files(exchange, directory, (METADATA,), files) as temporary:
        from fshard.ext.interop import dcp_files

        dcp_files.write(temporary, content)


def _optimizer_content(
    exchange: ModuleExchange, opt_state: Any, optimizer: torch.optim.Optimizer, is_flat: bool
) -> Content:
    """The state and the parameter groups of an optimizer, by their places in its state dict."""
    slots = states.optimizer_leaves(exchange, opt_state)
    exchange.replicas({f"{name} {slot}": leaf for (name, slot), leaf in slots.items()}, {})
    content: Content = {("state", _name_of_fsdp2(name), slot): leaf for (name, slot), leaf in slots.items()}
    order = states.optimizer_names(exchange, optimizer)
    for i, group in enumerate(states.groups_of(opt_state, optimizer, order)):
        members = [_name_of_fsdp2(order[number]) for number in group.pop("params")]
        owners: list[Any] = members if is_flat else [i]
        group |= {} if is_flat else {"params": members}
        content |= {("param_groups", owner, key): group[key] for owner in owners for key in group}
    return content


def _check_trusted(place: Path, trusted: bool) -> None:
    """Refuse to read a checkpoint whose author may run code here, unless the caller trusts it."""
    if trusted is not True:
        remedy = "pass trusted=True if you trust whoever wrote it, or have it written as safetensors"
        raise CheckpointError(f"{place / METADATA} is pickled, and reading it can run code of its author; {remedy}")


def load_dcp(
    directory: str | PathLike[str],
    like: Any,
    *,
    module: nn.Module | None = None,
    updates: int | None = None,
    model_key: str = "model",
    optimizer_key: str = "optim",
    trusted: bool = False,
) -> Any:
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
    exchange = ModuleExchange("checkpoint.load_dcp", module)
    with exchange.raise_on_all_ranks(directory):
        _check_keys(exchange, model_key=model_key, optimizer_key=optimizer_key)
        states.check_updates(exchange, updates)
        place = exchange.path("directory", directory)
        _check_trusted(place, trusted)
        from fshard.ext.interop import dcp_files

        entries, values = dcp_files.contents(place)
    groups, of_slots = _key(optimizer_key, "param_groups"), f"{_key(optimizer_key, 'state')}."
    slots = _entries_under(of_slots, entries)
    others = {key: entry for key, entry in entries.items() if not key.startswith(of_slots)}
    weights = _entries_under(f"{model_key}." if model_key else "", others)
    made = exchange.fill(_under_names(exchange.first, weights), _model_leaves(exchange, like))
    if not hasattr(like, "opt_state"):
        return exchange.with_leaves(like, made)
    slot_names = [_key(name, slot) for name, slot in states.optimizer_leaves(exchange, like.opt_state)]
    slots = _under_names(slot_names, slots)
    injected = {name for state in states.states_of(like.opt_state) for name in state.hyper}
    with exchange.raise_on_all_ranks(directory):
        numbers = _numbers(values, groups, {*injected, "params"}) if injected else {}
    number = partial(_number, numbers, groups)
    opt_state = states.rebuilt(exchange, like.opt_state, slots, number, updates)
    made_updates = [int(state.updates) for state in states.states_of(opt_state)]
    return like._replace(
        step=torch.full_like(like.step, max(made_updates, default=0)),
        params=exchange.with_leaves(like.params, made),
        opt_state=opt_state,
        buffers=exchange.with_leaves(like.buffers, made),
    )


def _numbers(values: Mapping[str, Callable[[], Any]], groups: str, names: set[str]) -> Numbers:
    """Read values of parameter groups, or of parameters where the state was flattened, by their names."""
    found: Numbers = {}
    for key, read in values.items():
        group, _, name = key.rpartition(".")
        if group.startswith(f"{groups}.") and name in names:
            found.setdefault(group, {})[name] = read()
    return found


def _number(numbers: Numbers, groups: str, owner: str, name: str) -> Any:
    """The hyperparameter of a parameter, or of any where a class that keeps nothing does not say whose its state is."""
    owner = _name_of_fsdp2(owner)
    for key, held in numbers.items():
        if not owner or key == f"{groups}.{owner}" or owner in held.get("params", ()):
            return held.get(name)
    return None


def _check_keys(exchange: ModuleExchange, **keys: Any) -> None:
    for name, key in keys.items():
        expect(isinstance(key, str), exchange.label, f"{name} to be a text", describe(key))


def _model_leaves(exchange: ModuleExchange, state: Any) -> dict[str, Any]:
    if not hasattr(state, "opt_state"):
        return exchange.leaves(state)
    return exchange.leaves(state.params) | exchange.leaves(state.buffers)


def _name_of_fsdp2(name: str) -> str:
    """Leave out what torch.compile adds to a name: state_dict() of a module keeps it, and get_state_dict does not."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _entries_under(prefix: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    return {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}


def _under_names(names: Iterable[str], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Give entries that FSDP2 named the names that they have here."""
    by_key = {_name_of_fsdp2(name): name for name in names}
    return {by_key.get(key, key): entry for key, entry in entries.items()}


def _key(*path: str | int) -> str:
    return ".".join(str(part) for part in path if part != "")


def _split(key: str) -> tuple[str, ...]:
    return tuple(key.split(".")) if key else ()
