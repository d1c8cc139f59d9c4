"""Checkpoints of torch.distributed.checkpoint, under the names that FSDP2 gives its state."""

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from fshard.checkpoint import CheckpointError
from fshard.ext.interop import dcp_files
from fshard.ext.interop.export import new_files
from fshard.ext.interop.module_exchange import ModuleExchange, name_of_fsdp2, named_leaves
from fshard.ext.interop.optimizer_state import OptimizerStates, ParameterGroup, by_parameter, parameter_of
from fshard.extend import COUNT, Entry, Range, check_arguments, expect

StateDict = dict[str, Any]
TEXT = Range("a text", lambda value: isinstance(value, str))


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

    The files are those that `dcp.save({"model": model_state, "optim": optimizer_state})` writes of the results of
    `get_state_dict(module, optimizer)`. Each rank writes its own shards. The step, the key and the state of transforms
    are not written, because FSDP2 has no place for them; `fs.checkpoint.save` writes everything. A parameter that never
    had a gradient has the state that the torch class begins with. If it begins without, as SGD with dampening does, the
    parameter has none, or zeros before the first update, as torch writes them.

    Args:
        directory: Where the files go; it is made if it is missing. Files appear when they are complete.
        state: A TrainState, or any pytree of parameters and buffers.
        module: The module whose parameters they are, on any device. A tied parameter then has all its names, and
            buffers that are not persistent are left out. A TrainState needs it.
        optimizer: A torch optimizer of that module's parameters, made as the FSDP2 run makes its own. Its parameter
            groups are written, with the injected numbers that the state has. A TrainState needs it.
        model_key: The key of the module's state, with dots for nested dicts.
        optimizer_key: The key of the optimizer's state.
        flatten_optimizer_state_dict: Whether to write parameter groups by parameter, as torch's option of that name.

    Raises:
        ValueError: on every rank, if a leaf is no tensor or ranks hold different leaves, or if the optimizer's state
            holds more than that of `fs.from_torch`, or is of another class or other options than `optimizer`.
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
    has_optimizer = hasattr(state, "opt_state")
    with exchange.raise_on_all_ranks():
        check_arguments(exchange.label, TEXT, model_key=model_key, optimizer_key=optimizer_key)
        if has_optimizer and (module is None or optimizer is None):
            kind = type(state).__name__
            raise ValueError(f"{exchange.label}: a {kind} needs module= and optimizer=, as get_state_dict takes them")
    leaves = _model_leaves(exchange, state, needs_values=True)
    exchange.find_holders(leaves, {})
    state_dict: StateDict = {}
    model = _find_dict(state_dict, model_key)
    for name, leaf in leaves.items():
        for alias in exchange.saved_as(name):
            model[alias if module is None else name_of_fsdp2(alias)] = leaf
    if has_optimizer and optimizer is not None:
        content = _optimizer_content(exchange, state.opt_state, optimizer, flatten_optimizer_state_dict)
        _find_dict(state_dict, optimizer_key).update(content)
    files = [f"__{rank}_0.distcp" for rank in range(exchange.ranks.size)]
    with new_files(exchange, directory, (dcp_files.METADATA,), files) as temporary:
        dcp_files.write(temporary, state_dict)


def _optimizer_content(
    exchange: ModuleExchange, opt_state: Any, optimizer: torch.optim.Optimizer, is_flat: bool
) -> StateDict:
    """List the state and the parameter groups of an optimizer, as its state dict has them."""
    states = OptimizerStates(exchange, opt_state)
    groups, names = states.describe(optimizer)
    # A first step from zeros would be another one. Where state is missing, FSDP2 refuses the checkpoint.
    updated = {}
    for key, leaf in states.slots.items():
        if int(states.counts.get(parameter_of(key), 1)):
            updated[key] = leaf
    # Before the first update torch's own checkpoint has zeros too.
    state_by_name = by_parameter(updated or states.slots)
    state = {}
    for name, kept in state_by_name.items():
        state[name_of_fsdp2(name)] = kept
    flat = named_leaves({"state": state})
    for group in groups:
        group["params"] = [name_of_fsdp2(names[number]) for number in group["params"]]
        for member in group["params"]:
            flat |= {f"param_groups.{member}.{key}": value for key, value in group.items() if key != "params"}
    return flat if is_flat else {"state": state, "param_groups": groups}


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

    The files are those that `dcp.save({"model": model_state, "optim": optimizer_state})` wrote of the results of
    `get_state_dict(module, optimizer)`, on any number of ranks, whether or not the optimizer's state was flattened.
    Each rank reads its shards.

    Args:
        directory: Where the checkpoint is.
        like: A TrainState with an optimizer of `fs.from_torch`, or a pytree of parameters and buffers. Its leaves give
            the dtype, shape and layout; their values are not used and may be on the meta device.
        module: The module whose parameters they are, on any device. The checkpoint then has a tied parameter under
            several names. Buffers that are not persistent are not in it, and stay as they are.
        updates: The number of updates that were made; None takes the torch class's own count.
        model_key: The key of the module's state, with dots for nested dicts.
        optimizer_key: The key of the optimizer's state.
        trusted: Whether the checkpoint may be read. Its list of contents is pickled, so reading it can run code of
            whoever wrote it.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`. The key, the state of transforms and the
        hyperparameters are those of `like`; injected numbers are those of the checkpoint. A parameter of
        which the checkpoint has no state, because it never had a gradient, keeps the optimizer's state of `like`.

    Raises:
        ValueError: on every rank, with every leaf that is missing in the checkpoint, differs there, or is unexpected.
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
        check_arguments(exchange.label, TEXT, model_key=model_key, optimizer_key=optimizer_key)
        check_arguments(exchange.label, COUNT, updates=updates)
        path = exchange.path("directory", directory)
        if trusted is not True:
            remedy = "pass trusted=True if you trust whoever wrote it, or have it written as safetensors"
            text = "is pickled, and reading it can run code of its author"
            raise CheckpointError(f"{path / dcp_files.METADATA} {text}; {remedy}")
        entries, values = dcp_files.read_contents(path)
    prefix = f"{optimizer_key}.".lstrip(".")
    others = {key: entry for key, entry in entries.items() if not key.startswith(f"{prefix}state.")}
    leaves = _model_leaves(exchange, like, needs_values=False)
    weights = _entries_under(f"{model_key}.".lstrip("."), others, leaves, exchange.label, "model_key")
    filled = exchange.fill(weights, leaves)
    if not hasattr(like, "opt_state"):
        return exchange.with_leaves(like, filled)
    states = OptimizerStates(exchange, like.opt_state)
    names = named_leaves(by_parameter(states.slots))
    stored = _entries_under(f"{prefix}state.", entries, names, exchange.label, "optimizer_key")
    with exchange.raise_on_all_ranks(directory):
        groups = _read_groups(exchange, values, f"{prefix}param_groups.", states)
    opt_state = states.rebuild(_name_slots(exchange, stored), groups, updates)
    step = max([int(state.updates) for state in OptimizerStates(exchange, opt_state).states], default=0)
    return like._replace(
        step=torch.full_like(like.step, step),
        params=exchange.with_leaves(like.params, filled),
        opt_state=opt_state,
        buffers=exchange.with_leaves(like.buffers, filled),
    )


def _name_slots(exchange: ModuleExchange, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Name the entries of an optimizer's state as `OptimizerStates` does: exp_avg.weight for weight.exp_avg."""
    slots = {}
    for key, entry in stored.items():
        parameter, _, name = key.rpartition(".")
        first = exchange.first.get(parameter, parameter)
        slots[f"{name}.{first}"] = entry
    return slots


def _read_groups(
    exchange: ModuleExchange, values: Mapping[str, Callable[[], Any]], prefix: str, states: OptimizerStates
) -> list[ParameterGroup]:
    """Read the values that states take from parameter groups.

    Where the optimizer's state was flattened, each parameter is a group without members.
    """
    injected = {name for state in states.states for name in state.hyper}
    values_of_groups: dict[str, StateDict] = {}
    for key, read in values.items():
        group, _, name = key.rpartition(".")
        if group.startswith(prefix):
            hyper = values_of_groups.setdefault(group, {"params": [group.removeprefix(prefix)]})
            if name in injected or name == "params":
                hyper[name] = read()
    groups = []
    for hyper in values_of_groups.values():
        members = {exchange.first.get(name, name) for name in hyper["params"]}
        groups.append(ParameterGroup(members, hyper))
    return groups


def _model_leaves(exchange: ModuleExchange, state: Any, *, needs_values: bool) -> dict[str, Any]:
    parts = [state.params, state.buffers] if hasattr(state, "opt_state") else [state]
    leaves: dict[str, Any] = {}
    for part in parts:
        leaves |= exchange.leaves(part, needs_values=needs_values)
    return leaves


def _entries_under(
    prefix: str, entries: Mapping[str, Entry], names: Iterable[str], label: str, argument: str
) -> dict[str, Entry]:
    """Take the entries under a prefix. If there are none, say where else the checkpoint has one of these names."""
    taken = {}
    for name, entry in entries.items():
        if name.startswith(prefix):
            taken[name.removeprefix(prefix)] = entry
    name = name_of_fsdp2(min(names, default=""))
    places = [other for other in sorted(entries) if f".{other}".endswith(f".{name}")]
    expected = f"{prefix}{name} in the checkpoint"
    got = " and ".join(places) or "nothing"
    expect(taken or not name, label, expected, got, f'pass its key as {argument}=, which is "" for the top')
    return taken


def _find_dict(state_dict: StateDict, key: str) -> StateDict:
    """Find a nested dict by a key with dots, and make it where there is none."""
    for part in filter(None, key.split(".")):
        state_dict = state_dict.setdefault(part, {})
    return state_dict
