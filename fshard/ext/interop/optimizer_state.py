"""The state of torch.optim's optimizers, to and from states that `fs.from_torch` made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import fshard as fs
from fshard.ext.interop.module_exchange import ModuleExchange
from fshard.extend import Entry, TorchState, describe, expect, flatten, refuse

StateDict = dict[str, Any]


def to_optimizer_state_dict(
    opt_state: Any, module: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> StateDict:
    """Gather the state of an optimizer made by `fs.from_torch`, for `optimizer.load_state_dict`. Every rank must call.

    Args:
        opt_state: The state, such as state.opt_state; parts of a chain or a partition may hold it.
        module: The module whose parameters were trained, on any device.
        optimizer: A torch optimizer of that module's parameters, which says their order and groups.
        rank0_only: Whether the first rank alone gets it; other ranks get an empty dict.

    Returns:
        What `optimizer.state_dict()` would be after the same updates; one that never had a gradient has no state in it.

    Raises:
        ValueError: on every rank, if the state holds more than torch's optimizers do, or parameters that the
            torch optimizer has not.

    >>> import torch, fshard as fs
    >>> module = torch.nn.Linear(2, 1, bias=False)
    >>> params = fs.functionalize(module).init(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> tx = fs.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    >>> _, state = tx.update(fs.tree_map(torch.ones_like, params), tx.init(params), params)
    >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    >>> optimizer.load_state_dict(fs.checkpoint.to_optimizer_state_dict(state, module, optimizer))
    >>> optimizer.state[module.weight]
    {'momentum_buffer': tensor([[1., 1.]])}
    """
    exchange = ModuleExchange("checkpoint.to_optimizer_state_dict", module)
    order = {name: i for i, name in enumerate(optimizer_names(exchange, optimizer))}
    leaves = optimizer_leaves(exchange, opt_state)
    exchange.replicas({f"{name}.{slot}": leaf for (name, slot), leaf in leaves.items()}, {})
    unknown = dict.fromkeys(name for name, _ in leaves if name not in order)
    problems = [(name, "state", "none: the torch optimizer has no such parameter") for name in unknown]
    refuse(f"{exchange.label}: states do not fit", problems, "pass the optimizer of all that was trained")
    never = _never_updated(opt_state)
    kept = {key: leaf for key, leaf in leaves.items() if key[0] not in never}
    full = exchange.gathered(kept, rank0_only)
    if rank0_only and exchange.rank:
        return {}
    state: dict[int, StateDict] = {}
    for (name, slot), tensor in full.items():
        state.setdefault(order[name], {})[slot] = tensor
    groups = groups_of(opt_state, optimizer, list(order))
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def from_optimizer_state_dict(
    state_dict: Mapping[str, Any],
    like: Any,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    updates: int | None = None,
) -> Any:
    """Take over the state of a torch optimizer into that of one made by `fs.from_torch`. Every rank must call this.

    Args:
        state_dict: What `optimizer.state_dict()` returned, the same on every rank, with full tensors.
        like: The state as it shall be, such as tx.init(params).
        module: The module whose parameters it is of, on any device.
        optimizer: A torch optimizer of that module's parameters, which says their order and groups.
        updates: How many updates were made; None takes the torch class's own count.

    Returns:
        A state of the structure, specs and dtypes of `like`. Numbers that were injected are those of the group.

    Raises:
        ValueError: on every rank, with every state that is missing, otherwise or besides, or where the class does
            not count and `updates` is not given.

    >>> import torch, fshard as fs
    >>> module = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    >>> module(torch.ones(2)).backward()
    >>> optimizer.step()
    >>> params = fs.functionalize(module).init(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> like = fs.from_torch(torch.optim.Adam, lr=0.1).init(params)
    >>> state = fs.checkpoint.from_optimizer_state_dict(optimizer.state_dict(), like, module, optimizer)
    >>> state.updates
    tensor(1)
    """
    exchange = ModuleExchange("checkpoint.from_optimizer_state_dict", module)
    check_updates(exchange, updates)
    known = isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()
    needed = "state_dict to be the state dict of a torch optimizer, with state and param_groups"
    expect(known, exchange.label, needed, describe(state_dict))
    order = dict(enumerate(optimizer_names(exchange, optimizer)))
    found: dict[str, Entry] = {}
    for i, slots in state_dict["state"].items():
        for slot, value in slots.items():
            tensor = torch.tensor(value, dtype=torch.float32) if isinstance(value, int | float) else value
            if tensor is not None:
                found[f"{order.get(i, f'parameter {i}')}.{slot}"] = Entry.of(tensor)
    groups: list[StateDict] = state_dict["param_groups"]
    owners = {order[i]: group for group in groups for i in group["params"] if i in order}
    first = groups[0] if groups else {}
    return rebuilt(exchange, like, found, lambda name, key: owners.get(name, first).get(key), updates)


def check_updates(exchange: ModuleExchange, updates: Any) -> None:
    """Refuse a number of updates that is no whole number."""
    whole = updates is None or (type(updates) is int and 0 <= updates < 2**63)
    expect(whole, exchange.label, "updates to be a whole number, 0 or more, or None", f"{updates!r:.40}")


def optimizer_names(exchange: ModuleExchange, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of a torch optimizer's parameters, in its order."""
    known = isinstance(optimizer, torch.optim.Optimizer)
    expect(known, exchange.label, "optimizer to be a torch optimizer", describe(optimizer))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    unknown = next((i for i, param in enumerate(params) if id(param) not in exchange.by_tensor), None)
    found = f"parameter {unknown} of {len(params)}, which is none of the module's"
    expect(unknown is None, exchange.label, "optimizer to have the parameters of module", found, "make it of them")
    return [exchange.by_tensor[id(param)] for param in params]


def optimizer_leaves(exchange: ModuleExchange, opt_state: Any) -> dict[tuple[str, str], Any]:
    """The leaves of a state made by `from_torch`, by the name of the parameter and of the slot.

    Raises:
        ValueError: if there is none, or beside it state that torch's optimizers do not have.
    """

    def misfit(leaf: Any) -> tuple[str, str] | None:
        return None if leaf is None else (describe(leaf), "nothing but the state of fs.from_torch")

    remedy = "save it by fs.checkpoint.save, or pass the part that fs.from_torch made"
    rest = flatten(TorchState.each(lambda state: None, opt_state))
    refuse(f"{exchange.label}: torch's optimizers have no such state", rest.problems(misfit), remedy)
    return {(name, slot): leaf for state in states_of(opt_state) for name, slot, leaf in _slots(state)}


def groups_of(opt_state: Any, optimizer: torch.optim.Optimizer, order: Sequence[str]) -> list[StateDict]:
    """The parameter groups of a torch optimizer, with the numbers that a state holds for their parameters.

    Args:
        opt_state: The state.
        optimizer: The torch optimizer.
        order: The names of its parameters.
    """
    groups = optimizer.state_dict()["param_groups"]
    for state in states_of(opt_state):
        # The state of a class that keeps nothing does not say whose it is.
        owners = {name for name, *_ in _slots(state)} or set(order)
        for group in groups:
            if owners.isdisjoint(order[i] for i in group["params"]):
                continue
            for name in group.keys() & state.hyper.keys():
                group[name] = float(state.hyper[name])
    return groups


def rebuilt(
    exchange: ModuleExchange,
    like: Any,
    found: Mapping[str, Entry],
    number: Callable[[str, str], Any],
    updates: int | None,
) -> Any:
    """Read a state.

    Args:
        exchange: The exchange.
        like: The state as it shall be.
        found: The entry of each parameter and slot, by their names with a dot between.
        number: The hyperparameter of a parameter's group; None keeps the old one.
        updates: How many updates were made; None takes the class's own count.

    Raises:
        ValueError: if the number of updates is not known.
    """
    leaves = {f"{name}.{slot}": leaf for (name, slot), leaf in optimizer_leaves(exchange, like).items()}
    remedy = "pass the state of the same torch class and options, for the same module"
    made = exchange.read(leaves, {key: [entry] for key, entry in found.items()}, remedy)

    def change(state: TorchState) -> TorchState:
        owners = [name for name, *_ in _slots(state)]
        own = [int(made[f"{name}.step"]) for name, _ in _named(state.slots.get("step", {}))]
        counts = own if updates is None else [updates]
        if not counts:
            remedy = "pass how many there were"
            raise ValueError(f"{exchange.label}: the torch class does not count its updates; {remedy}")
        slots = {
            slot: exchange.with_leaves(tree, {name: made[f"{name}.{slot}"] for name, _ in _named(tree)})
            for slot, tree in state.slots.items()
        }
        hyper = {}
        for name, old in state.hyper.items():
            new = number(owners[0] if owners else "", name)
            hyper[name] = old.clone() if new is None else torch.full_like(old, float(new))
        updated = torch.full_like(state.updates, max(counts))
        each = fs.tree_map(lambda count: torch.full_like(count, max(counts)), state.counts)
        return TorchState(updated, slots, hyper, each)

    return TorchState.each(change, like)


def states_of(opt_state: Any) -> list[TorchState]:
    """The states that `from_torch` made, in any parts of a state."""
    found: list[TorchState] = []
    TorchState.each(found.append, opt_state)
    return found


def _named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree that are not None, with their names."""
    flat = flatten(tree)
    return [(name, leaf) for name, leaf in zip(flat.names, flat.leaves, strict=True) if leaf is not None]


def _slots(state: TorchState) -> Iterator[tuple[str, str, Any]]:
    """The name of the parameter, the slot and the leaf of each tensor that a torch class keeps."""
    for slot, tree in state.slots.items():
        yield from ((name, slot, leaf) for name, leaf in _named(tree))


def _never_updated(opt_state: Any) -> set[str]:
    """The names of parameters that no update has changed, of which torch's optimizers have no state."""
    return {
        name
        for state in states_of(opt_state)
        for tree in (state.slots.get("step", {}), state.counts)
        for name, count in _named(tree)
        if not int(count)
    }
