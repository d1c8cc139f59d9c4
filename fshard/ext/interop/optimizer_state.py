"""The state of torch.optim's optimizers, to and from states that `fs.from_torch` made."""

from collections.abc import Container, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard.ext.interop.module_exchange import ModuleExchange, is_full, named_leaves
from fshard.extend import (
    COUNT,
    Entry,
    Problem,
    TorchState,
    check_arguments,
    describe,
    expect,
    refuse,
)

StateDict = dict[str, Any]
# Arguments that do not change what a class keeps, as a trial on the CPU takes them.
_PLAIN = (
    *(("lr", 0.0), ("foreach", False), ("fused", False)),
    *(("capturable", False), ("differentiable", False)),
)


class ParameterGroup(NamedTuple):
    """Parameters of the same hyperparameters: those of a group of a torch optimizer, or of a state.

    Attributes:
        members: The names of the parameters.
        values: The hyperparameters by name.
    """

    members: set[str]
    values: Mapping[str, Any]


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
        ValueError: on every rank, if there is state that torch's optimizers do not have, or state of parameters, a
            class or options that the torch optimizer does not have.

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
    states = OptimizerStates(exchange, opt_state)
    groups, names = states.describe(optimizer)
    updated = {}
    for key, leaf in states.slots.items():
        parameter = parameter_of(key)
        if int(states.slots.get(f"step.{parameter}", states.counts.get(parameter, 1))):
            updated[key] = leaf
    full = exchange.gather(updated, rank0_only)
    if rank0_only and exchange.rank:
        return {}
    state_by_name = by_parameter(full)
    state = {number: state_by_name[name] for number, name in enumerate(names) if name in state_by_name}
    return {"state": state, "param_groups": groups}


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
    groups = []
    with exchange.raise_on_all_ranks():
        check_arguments(exchange.label, COUNT, updates=updates)
        names = dict(enumerate(list_parameter_names(exchange, optimizer)))
        try:
            entries = _entries_of(exchange.label, state_dict["state"], names)
            for group in state_dict["param_groups"]:
                members = {names[number] for number in group["params"] if number in names}
                groups.append(ParameterGroup(members, group))
        except (AttributeError, LookupError, TypeError) as error:
            expect(False, exchange.label, expected, f"{describe(state_dict)}: {error}")
        states = OptimizerStates(exchange, like)
    return states.rebuild(entries, groups, updates)


def _entries_of(label: str, state: Mapping[int, StateDict], names: Mapping[int, str]) -> dict[str, Entry]:
    """Name the tensors of a torch optimizer's state as `OptimizerStates` names its own."""
    entries = {}
    for number, slots in state.items():
        name = names.get(number, f"parameter {number}")
        for slot, value in slots.items():
            if isinstance(value, int | float):
                value = torch.tensor(value, dtype=torch.float32)
            if value is not None:
                key = f"{slot}.{name}"
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


class OptimizerStates:
    """The states that `from_torch` made, in any parts of the state of an optimizer.

    Attributes:
        states: These states.
        slots: What torch classes keep in them, by names such as exp_avg.layer.weight.
        counts: The number of updates of each parameter by name, if its first step is not one from zeros.
    """

    def __init__(self, exchange: ModuleExchange, opt_state: Any) -> None:
        """Take the state of an optimizer apart.

        Args:
            exchange: The exchange.
            opt_state: The state.

        Raises:
            ValueError: if there is state besides that torch's optimizers do not have.
        """
        self._exchange = exchange
        self._opt_state = opt_state
        self.states: list[TorchState] = []
        problems = []
        for name, leaf in named_leaves(TorchState.each(self.states.append, opt_state)).items():
            problems.append(Problem(name, f"is {describe(leaf)}, which is not of the state of fs.from_torch"))
        remedy = "save it by fs.checkpoint.save, or pass the part that fs.from_torch made"
        refuse(f"{exchange.label}: torch's optimizers have no such state", problems, remedy)
        self.slots: dict[str, Any] = {}
        self.counts: dict[str, torch.Tensor] = {}
        for state in self.states:
            self.slots |= named_leaves(state.slots)
            self.counts |= named_leaves(state.counts)

    def describe(self, optimizer: torch.optim.Optimizer) -> tuple[list[StateDict], list[str]]:
        """Describe the torch optimizer that the states belong to.

        Args:
            optimizer: The torch optimizer, whose own state does not count.

        Returns:
            Its groups with the hyperparameters that the states hold for them, and the names of its parameters.

        Raises:
            ValueError: on every rank, if it would have other state, or a group has several numbers.
        """
        exchange = self._exchange
        names = list_parameter_names(exchange, optimizer)
        exchange.find_holders(self.slots, {})
        owners = set(map(parameter_of, self.slots))
        unknown = sorted(owners.difference(names))
        problems = [Problem(name, "has state, but is no parameter of the torch optimizer") for name in unknown]
        refuse(f"{exchange.label}: states do not fit", problems, "pass the optimizer of all that was trained")
        groups_of_states = self._list_groups(names)
        # A class may keep nothing for a momentum that was injected as 0.
        if not any("momentum" in group.values for group in groups_of_states):
            _check_class(exchange, self.slots, optimizer, owners or names)
        groups = optimizer.state_dict()["param_groups"]
        for group in groups:
            members = [names[number] for number in group["params"]]
            group |= _take_numbers(exchange.label, group, members, groups_of_states)
        return groups, names

    def rebuild(self, entries: Mapping[str, Entry], groups: Sequence[ParameterGroup], updates: int | None) -> Any:
        """Read a state of the structure of this one.

        That of a parameter that never had a gradient, of which torch has none, stays as it is.

        Args:
            entries: The entries by the names of slots.
            groups: The torch optimizer's groups. Hyperparameters that they lack stay as they are.
            updates: How many updates were made; None takes the class's own count.

        Raises:
            ValueError: on every rank, if the number of updates is not known, or ranks read different states.
        """
        exchange = self._exchange
        names = set[str]().union(*(group.members for group in groups))
        without_state = names.difference(map(parameter_of, entries)) if entries else set()
        kept = [key for key in self.slots if parameter_of(key) in without_state]
        # Torch's Adagrad keeps state of frozen parameters too.
        passed_over = exchange.frozen.difference(map(parameter_of, self.slots))
        wanted = {key: entry for key, entry in entries.items() if parameter_of(key) not in passed_over}
        remedy = "pass the state of the same torch class and options, for the same module"
        loaded = exchange.fill(wanted, self.slots, optional=kept, remedy=remedy)
        groups_of_states = iter(self._list_groups(names))

        def rebuild(state: TorchState) -> TorchState:
            members, hyper = next(groups_of_states)
            slots = exchange.with_leaves(state.slots, loaded)
            count = _count_updates(exchange.label, slots) if updates is None else updates
            counts = {}
            for name, old in named_leaves(state.counts).items():
                counts[name] = old.clone() if name in without_state else torch.full_like(old, count)
            numbers = _take_numbers(exchange.label, hyper, members, groups)
            new_hyper = {}
            for name, old in hyper.items():
                new_hyper[name] = torch.full_like(old, numbers.get(name, float(old)))
            new_updates = torch.full_like(state.updates, count)
            new_counts = exchange.with_leaves(state.counts, counts)
            return TorchState(new_updates, slots, new_hyper, new_counts)

        with exchange.raise_on_all_ranks():
            rebuilt = TorchState.each(rebuild, self._opt_state)
        # It compares numbers, and not the values of leaves that are split.
        texts = dict.fromkeys(self.slots, "state") | dict.fromkeys(kept, "no state")
        exchange.find_holders(named_leaves(rebuilt), texts)
        return rebuilt

    def _list_groups(self, names: Iterable[str]) -> list[ParameterGroup]:
        """List the parameters and the numbers of each state, of the parameters of some names.

        A class that keeps no tensors does not say whose state this is, so it counts for all trained parameters that
        no other state has.
        """
        owner_sets = [set(map(parameter_of, named_leaves(state.slots))) for state in self.states]
        others = set(names).difference(*owner_sets)
        # All are frozen in a module that only gives names.
        others = others - self._exchange.frozen or others
        groups = []
        for state, owners in zip(self.states, owner_sets, strict=True):
            groups.append(ParameterGroup(owners or others, state.hyper))
        return groups


def _check_class(
    exchange: ModuleExchange, slots: Iterable[str], optimizer: torch.optim.Optimizer, owners: Container[str]
) -> None:
    """Refuse state of another class of torch.optim than that of an optimizer, or of other options."""
    cls: Any = type(optimizer)
    # The arguments of another's class may have other names in its groups.
    if cls not in vars(torch.optim).values():
        return
    groups = []
    with torch.device("cpu"):
        for group in optimizer.param_groups:
            dims = {tensor.dim() for tensor in group["params"] if exchange.by_tensor[id(tensor)] in owners}
            tensors = [torch.zeros((1,) * dim) for dim in dims]
            for tensor in tensors:
                tensor.grad = tensor.clone()
            groups.append(group | dict(_PLAIN) | {"params": tensors})
        trial = cls(groups)
        trial.step()
    expected = set().union(*trial.state.values())
    names = {key.partition(".")[0] for key in slots}
    text = f"a state with {sorted(expected)}, which this {cls.__name__} keeps"
    remedy = "pass an optimizer of the class and options that the state was made with"
    expect(names == expected, exchange.label, text, f"{sorted(names)}", remedy)


def _count_updates(label: str, slots: Mapping[str, Any]) -> int:
    """Return the largest count of updates that a torch class has of its parameters."""
    counts = [float(step) for step in named_leaves(slots.get("step")).values()]
    if not counts:
        raise ValueError(f"{label}: the torch class does not count its updates; pass their number as updates=")
    for count in counts:
        is_count = count >= 0 and count.is_integer()
        expect(is_count, label, "counts of updates from 0", f"{count}", "pass their number as updates=")
    return int(max(counts))


def _take_numbers(
    label: str, values: Iterable[str], members: Iterable[str], groups: Iterable[ParameterGroup]
) -> dict[str, float]:
    """Take those of some hyperparameters that groups have for some parameters, or refuse groups that differ."""
    remedy = "give each group of parameters a part of fs.partition that keeps tensors, or all groups one"
    numbers: dict[str, float] = {}
    for name in values:
        for group in groups:
            if name not in group.values or group.members.isdisjoint(members):
                continue
            value = group.values[name]
            is_number = isinstance(value, Real) or (is_full(value) and value.numel() == 1)
            expect(is_number, label, f"{name} of a group of parameters to be a number", describe(value))
            number = float(value)
            first = numbers.setdefault(name, number)
            expected = f"one {name} in each state, and in each group of parameters"
            expect(number == first, label, expected, f"{first} and {number}", f"{remedy} {name}")
    return numbers


def parameter_of(key: str) -> str:
    """Name the parameter of what a torch class keeps: layer.weight of exp_avg.layer.weight."""
    return key.partition(".")[2]


def by_parameter(slots: Mapping[str, Any]) -> dict[str, StateDict]:
    """Group what torch classes keep by parameter, and then by the name in the class."""
    grouped: dict[str, StateDict] = {}
    for key, leaf in slots.items():
        name, _, parameter = key.partition(".")
        grouped.setdefault(parameter, {})[name] = leaf
    return grouped
