"""The state of torch.optim's optimizers, to and from states that `fs.from_torch` made."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import nn

import fshard as fs
from fshard.ext.interop.module_exchange import ModuleExchange, is_full, named_leaves
from fshard.extend import (
    COUNT,
    Entry,
    Problem,
    TorchState,
    check_arguments,
    describe,
    device_of,
    expect,
    flatten,
    refuse,
    tensor_of,
)

StateDict = dict[str, Any]
# The values of a parameter's group, by the name of the parameter.
Hypers = Mapping[str, Mapping[str, Any]]


def to_optimizer_state_dict(
    opt_state: Any, module: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> StateDict:
    """Gather the state of an optimizer made by `fs.from_torch`, for `optimizer.load_state_dict`. Every rank must call.

    Args:
        opt_state: The state, such as state.opt_state; it may be part of the state of a chain or a partition.
        module: The module whose parameters were trained, on any device.
        optimizer: A torch optimizer of that module's parameters, which gives their order and groups.
        rank0_only: Whether only the first rank gets the state; other ranks get an empty dict.

    Returns:
        What `optimizer.state_dict()` would be after the same updates. A parameter that never had a gradient has no
        state in it.

    Raises:
        ValueError: on every rank, if there is state that torch's optimizers do not have, or state of parameters that
            the torch optimizer does not have.

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
    numbers = {name: number for number, name in enumerate(list_parameter_names(exchange, optimizer))}
    slots = collect_slots(exchange, opt_state)
    exchange.find_holders(slots, {})
    unknown = sorted(_owners_of(slots) - numbers.keys())
    problems = [Problem(name, "has state, but is no parameter of the torch optimizer") for name in unknown]
    refuse(f"{exchange.label}: states do not fit", problems, "pass the optimizer of all that was trained")
    counters: list[Any] = []
    for each in list_states(opt_state):
        counters += [each.slots.get("step", {}), each.counts]
    without_state = names_without_updates(counters)
    updated = {key: leaf for key, leaf in slots.items() if split_slot(key)[0] not in without_state}
    full = exchange.gather(updated, rank0_only)
    if rank0_only and exchange.rank:
        return {}
    state: dict[int, StateDict] = {}
    for key, tensor in full.items():
        parameter, slot = split_slot(key)
        state.setdefault(numbers[parameter], {})[slot] = tensor
    groups = fill_groups(exchange, opt_state, optimizer, list(numbers))
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def from_optimizer_state_dict(
    state_dict: Mapping[str, Any],
    like: Any,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    updates: int | None = None,
) -> Any:
    """Turn the state of a torch optimizer into that of one made by `fs.from_torch`. Every rank must call this.

    Args:
        state_dict: The result of `optimizer.state_dict()` with full tensors, the same on every rank.
        like: A state of the optimizer made by `fs.from_torch`, such as tx.init(params).
        module: The module whose parameters were trained, on any device.
        optimizer: A torch optimizer of that module's parameters, which gives their order and groups.
        updates: The number of updates that were made; None takes the torch class's own count.

    Returns:
        A state of the structure, specs and dtypes of `like`. Injected numbers are those of the parameter's group. A
        parameter of which the torch optimizer has no state, because it never had a gradient, keeps that of `like`.

    Raises:
        ValueError: on every rank, with every tensor that is missing, differs or is unexpected; or if the class does
            not count its updates and `updates` is not given.

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
    expected = "state_dict to be the state dict of a torch optimizer, with state and param_groups"
    hypers: dict[str, StateDict] = {}
    with exchange.raise_on_all_ranks():
        check_arguments(exchange.label, COUNT, updates=updates)
        names = dict(enumerate(list_parameter_names(exchange, optimizer)))
        try:
            entries = _entries_of(exchange.label, state_dict["state"], names)
            for group in state_dict["param_groups"]:
                hypers |= {names[number]: group for number in group["params"] if number in names}
        except (AttributeError, LookupError, TypeError) as error:
            expect(False, exchange.label, expected, f"{describe(state_dict)}: {error}")
    return rebuild_state(exchange, like, entries, hypers, updates)


def _entries_of(label: str, state: Mapping[int, StateDict], names: Mapping[int, str]) -> dict[str, Entry]:
    """Name the tensors of a torch optimizer's state by parameter and slot."""
    entries = {}
    for number, slots in state.items():
        name = names.get(number, f"parameter {number}")
        for slot, value in slots.items():
            if isinstance(value, int | float):
                value = torch.tensor(value, dtype=torch.float32)
            if value is not None:
                key = f"{name}.{slot}"
                expect(is_full(value), label, f"{key} to be a full tensor or a number", describe(value))
                entries[key] = Entry.of(value)
    return entries


def list_parameter_names(exchange: ModuleExchange, optimizer: torch.optim.Optimizer) -> list[str]:
    """List the names of a torch optimizer's parameters, in its order."""
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    expect(is_optimizer, exchange.label, "optimizer to be a torch optimizer", describe(optimizer))
    names: list[str] = []
    for group in optimizer.param_groups:
        names += [exchange.by_tensor.get(id(parameter), "") for parameter in group["params"]]
    if "" in names:
        text = f"parameter {names.index('')} of {len(names)} of the optimizer is none of the module's"
        raise ValueError(f"{exchange.label}: {text}; make the optimizer of the parameters of module")
    return names


def collect_slots(exchange: ModuleExchange, opt_state: Any) -> dict[str, Any]:
    """Collect the leaves of a state made by `from_torch`, by the names of parameter and slot with a dot between.

    Raises:
        ValueError: if it has state besides that torch's optimizers do not have.
    """

    def describe_misfit(leaf: Any) -> str | None:
        return None if leaf is None else f"is {describe(leaf)}, which is not of the state of fs.from_torch"

    rest = flatten(TorchState.each(lambda state: None, opt_state))
    remedy = "save it by fs.checkpoint.save, or pass the part that fs.from_torch made"
    refuse(f"{exchange.label}: torch's optimizers have no such state", rest.problems(describe_misfit), remedy)
    slots: dict[str, Any] = {}
    for state in list_states(opt_state):
        slots |= _slots_of(state)
    return slots


def split_slot(key: str) -> list[str]:
    """Split the name of a parameter's slot, such as exp_avg, into that of the parameter and that of the slot."""
    return key.rsplit(".", 1)


def _owners_of(slots: Iterable[str]) -> set[str]:
    """Name the parameters of some slots."""
    return {split_slot(key)[0] for key in slots}


def fill_groups(
    exchange: ModuleExchange, opt_state: Any, optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> list[StateDict]:
    """Return the parameter groups of a torch optimizer, with the numbers that a state holds for their parameters.

    Args:
        exchange: The exchange.
        opt_state: The state.
        optimizer: The torch optimizer.
        names: The names of its parameters.

    Raises:
        ValueError: if states have different numbers for the parameters of one group.
    """
    groups = optimizer.state_dict()["param_groups"]
    owner_sets = _owners_of_states(exchange, opt_state, names)
    for group in groups:
        members = [names[number] for number in group["params"]]
        hypers = []
        for state, owners in owner_sets:
            if not owners.isdisjoint(members):
                hypers.append(state.hyper)
        for name in group.keys() & {*chain.from_iterable(hypers)}:
            numbers = [hyper[name] for hyper in hypers if name in hyper]
            group[name] = _one_number(exchange.label, name, numbers)
    return groups


def rebuild_state(
    exchange: ModuleExchange, like: Any, entries: Mapping[str, Entry], hypers: Hypers, updates: int | None
) -> Any:
    """Read a state. That of a parameter that never had a gradient, of which torch has none, is as in `like`.

    Args:
        exchange: The exchange.
        like: The state as it shall be.
        entries: The entry of each parameter and slot, by their names with a dot between.
        hypers: The values of each parameter's group. What they lack stays as it is in `like`.
        updates: How many updates were made; None takes the class's own count.

    Raises:
        ValueError: on every rank, if the number of updates is not known, or ranks read different states.
    """
    remedy = "pass the state of the same torch class and options, for the same module"
    leaves = collect_slots(exchange, like)
    with_state = _owners_of(entries)
    without_state = hypers.keys() - with_state if with_state else set()
    kept, read = _keep_state(like, leaves, without_state)
    # Torch's Adagrad keeps state of frozen parameters too.
    passed_over = exchange.frozen - _owners_of(leaves)
    wanted = {key: [entry] for key, entry in entries.items() if split_slot(key)[0] not in passed_over}
    loaded = kept | exchange.read(read, wanted, remedy)
    owner_sets = iter(_owners_of_states(exchange, like, hypers))

    def rebuild(state: TorchState) -> TorchState:
        count = _count_updates(exchange, state, loaded) if updates is None else updates
        _, owners = next(owner_sets)
        slots = {}
        for slot, tree in state.slots.items():
            # The other leaves of the tree are None, because another part of a partition has their state.
            names = named_leaves(flatten(tree))
            slots[slot] = exchange.with_leaves(tree, {name: loaded[f"{name}.{slot}"] for name in names})
        counts = {}
        for name, old in named_leaves(flatten(state.counts)).items():
            counts[name] = old.clone() if name in without_state else torch.full_like(old, count)
        return TorchState(
            updates=torch.full_like(state.updates, count),
            slots=slots,
            hyper=_rebuild_hyper(exchange.label, state, owners, hypers),
            counts=exchange.with_leaves(state.counts, counts),
        )

    with exchange.raise_on_all_ranks():
        rebuilt = TorchState.each(rebuild, like)
    facts = dict.fromkeys(read, "state") | dict.fromkeys(kept, "no state") | _facts_of_numbers(rebuilt)
    exchange.check_agreement(facts, "ranks read different states", "pass the same state on every rank")
    return rebuilt


def _keep_state(
    like: Any, leaves: Mapping[str, Any], without_state: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keep the leaves of parameters without a state as `like` has them, and return these and those to read."""
    counts_of_states = [named_leaves(flatten(state.counts)) for state in list_states(like)]
    kept = {}
    read = {}
    for key, leaf in leaves.items():
        parameter = split_slot(key)[0]
        if parameter not in without_state:
            read[key] = leaf
        elif not tensor_of(leaf).is_meta:
            kept[key] = fs.tree_map(torch.clone, leaf)
        elif any(parameter in counts for counts in counts_of_states):
            # A first update does not read them.
            kept[key] = fs.tree_map(partial(torch.zeros_like, device=device_of(leaf)), leaf)
        else:
            read[key] = leaf
    return kept, read


def _facts_of_numbers(tree: Any) -> dict[str, str]:
    """Say which numbers the states of a tree have, by the places of the states."""
    facts = {}
    for number, state in enumerate(list_states(tree)):
        facts[f"[{number}].updates"] = f"{int(state.updates)}"
        for name, value in state.hyper.items():
            facts[f"[{number}].hyper.{name}"] = f"{float(value)}"
    return facts


def _count_updates(exchange: ModuleExchange, state: TorchState, loaded: Mapping[str, torch.Tensor]) -> int:
    """Return the largest count of updates that a torch class has of its parameters."""
    steps = flatten(state.slots.get("step", {}))
    counts = [float(loaded[f"{name}.step"]) for name in named_leaves(steps)]
    if not counts:
        raise ValueError(f"{exchange.label}: the torch class does not count its updates; pass their number as updates=")
    for count in counts:
        is_count = count >= 0 and count.is_integer()
        expect(is_count, exchange.label, "counts of updates from 0", f"{count}", "pass their number as updates=")
    return int(max(counts))


def _rebuild_hyper(label: str, state: TorchState, owners: Iterable[str], hypers: Hypers) -> dict[str, torch.Tensor]:
    """Read the hyperparameters of a state from the groups of its parameters."""
    hyper = {}
    for name, old in state.hyper.items():
        numbers = [hypers[owner][name] for owner in owners if name in hypers.get(owner, {})]
        hyper[name] = torch.full_like(old, _one_number(label, name, numbers)) if numbers else old.clone()
    return hyper


def _one_number(label: str, name: str, values: Iterable[Any]) -> float:
    """Return the only one of some numbers, or refuse them."""
    numbers = set()
    for value in values:
        is_number = isinstance(value, Real) or (is_full(value) and value.numel() == 1)
        expect(is_number, label, f"{name} of a group of parameters to be a number", describe(value))
        numbers.add(float(value))
    remedy = f"give each group of parameters a part of fs.partition that keeps tensors, or all groups one {name}"
    texts = " and ".join(map(str, sorted(numbers)))
    expect(len(numbers) == 1, label, f"one {name} in each state, and in each group of parameters", texts, remedy)
    return numbers.pop()


def _owners_of_states(
    exchange: ModuleExchange, opt_state: Any, names: Iterable[str]
) -> list[tuple[TorchState, set[str]]]:
    """Pair the states that `from_torch` made with the names of their parameters.

    A class that keeps no tensors does not say whose state this is, so it counts for all trained parameters that
    no other state has.
    """
    states = list_states(opt_state)
    owner_sets = [_owners_of(_slots_of(state)) for state in states]
    others = set(names).difference(*owner_sets)
    # All are frozen in a module that only gives names.
    others = others - exchange.frozen or others
    return [(state, owners or others) for state, owners in zip(states, owner_sets, strict=True)]


def list_states(opt_state: Any) -> list[TorchState]:
    """List the states that `from_torch` made, in any parts of a state."""
    states: list[TorchState] = []
    TorchState.each(states.append, opt_state)
    return states


def _slots_of(state: TorchState) -> dict[str, Any]:
    """List the leaves that a torch class keeps, by the names of parameter and slot."""
    slots = {}
    for slot, tree in state.slots.items():
        for name, leaf in named_leaves(flatten(tree)).items():
            slots[f"{name}.{slot}"] = leaf
    return slots


def names_without_updates(counters: Iterable[Any]) -> set[str]:
    """Name the parameters that no update has changed, by trees of their counts."""
    names: set[str] = set()
    for tree in counters:
        counts = named_leaves(flatten(tree))
        names |= {name for name in counts if not int(counts[name])}
    return names
