"""The state of torch.optim's optimizers, to and from states that `fs.from_torch` made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fshard import comm
from fshard.errors import Problem, expect, refuse
from fshard.interop.pieces import layout_of
from fshard.interop.ranks import agree
from fshard.interop.state_dict import Entry, Names, entry_of, named_leaves, owned_tensors, read_leaves, with_leaves
from fshard.mesh import world
from fshard.optim.from_torch import TorchState
from fshard.tree import Tree, flatten, map_nodes, tree_map
from fshard.tree.checks import check_flags, check_leaves, check_types, describe

StateDict = dict[str, Any]


def to_optimizer_state_dict(
    opt_state: Tree, module: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
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
    label, names = "checkpoint.to_optimizer_state_dict", Names(module)
    check_flags(label, rank0_only=rank0_only)
    order = {name: i for i, name in enumerate(optimizer_names(label, names, optimizer))}
    leaves = optimizer_leaves(label, opt_state)
    agree(label, {f"{name} {slot}": layout_of(leaf) for (name, slot), leaf in leaves.items()})
    unknown = dict.fromkeys(name for name, _ in leaves if name not in order)
    problems = [Problem(name, "state", "none: the torch optimizer has no such parameter") for name in unknown]
    refuse(f"{label}: states do not fit", problems, "pass the optimizer of all that was trained")
    never = _never_updated(opt_state)
    # Gathering takes texts as keys.
    keys = {f"{i}": key for i, key in enumerate(leaves) if key[0] not in never}
    full = owned_tensors({i: leaves[key] for i, key in keys.items()}, rank0_only)
    if rank0_only and comm.rank(world()):
        return {}
    state: dict[int, StateDict] = {}
    for i, tensor in full.items():
        name, slot = keys[i]
        state.setdefault(order[name], {})[slot] = tensor
    return {"state": dict(sorted(state.items())), "param_groups": groups_of(opt_state, optimizer, list(order))}


def from_optimizer_state_dict(
    state_dict: Mapping[str, Any],
    like: Tree,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    updates: int | None = None,
) -> Tree:
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
    label = "checkpoint.from_optimizer_state_dict"
    check_updates(label, updates)
    known = isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()
    needed = "state_dict to be the state dict of a torch optimizer, with state and param_groups"
    expect(known, label, needed, describe(state_dict))
    order = dict(enumerate(optimizer_names(label, Names(module), optimizer)))
    leaves = {f"{name} {slot}": leaf for (name, slot), leaf in optimizer_leaves(label, like).items()}
    found: dict[str, list[Entry]] = {}
    for i, slots in state_dict["state"].items():
        for slot, value in slots.items():
            tensor = torch.tensor(value, dtype=torch.float32) if isinstance(value, int | float) else value
            if tensor is not None:
                found[f"{order.get(i, f'parameter {i}')} {slot}"] = [entry_of(tensor)]
    made = read_leaves(label, leaves, found, "pass the state of the same torch class and options, for the same module")
    groups: list[StateDict] = state_dict["param_groups"]
    owners = {order[i]: group for group in groups for i in group["params"] if i in order}
    first = groups[0] if groups else {}
    return rebuilt(
        label,
        like,
        lambda name, slot: made[f"{name} {slot}"],
        lambda name, key: owners.get(name, first).get(key),
        updates,
    )


def check_updates(label: str, updates: Any) -> None:
    """Refuse a number of updates that is no whole number."""
    whole = updates is None or (type(updates) is int and 0 <= updates < 2**63)
    expect(whole, label, "updates to be a whole number, 0 or more, or None", f"{updates!r:.40}")


def optimizer_names(label: str, names: Names, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of a torch optimizer's parameters, in its order."""
    check_types(label, torch.optim.Optimizer, "a torch optimizer", optimizer=optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    unknown = next((i for i, param in enumerate(params) if id(param) not in names.by_tensor), None)
    found = f"parameter {unknown} of {len(params)}, which is none of the module's"
    expect(unknown is None, label, "optimizer to have the parameters of module", found, "make it of them")
    return [names.by_tensor[id(param)] for param in params]


def optimizer_leaves(label: str, opt_state: Tree) -> dict[tuple[str, str], Any]:
    """The leaves of a state made by `from_torch`, by the name of the parameter and of the slot.

    Raises:
        ValueError: if there is none, or beside it state that torch's optimizers do not have.
    """

    def misfit(leaf: Any) -> tuple[str, str] | None:
        return None if leaf is None else (describe(leaf), "nothing but the state of fs.from_torch")

    remedy = "save it by fs.checkpoint.save, or pass the part that fs.from_torch made"
    rest = flatten(map_nodes(lambda state: None, opt_state, TorchState))
    check_leaves(f"{label}: torch's optimizers have no such state", rest, misfit, remedy)
    return {(name, slot): leaf for state in states_of(opt_state) for name, slot, leaf in _slots(state)}


def groups_of(opt_state: Tree, optimizer: torch.optim.Optimizer, order: Sequence[str]) -> list[StateDict]:
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
            if owners & {order[i] for i in group["params"]}:
                group.update({name: float(value) for name, value in state.hyper.items() if name in group})
    return groups


def rebuilt(
    label: str,
    like: Tree,
    made: Callable[[str, str], Any],
    number: Callable[[str, str], Any],
    updates: int | None,
) -> Tree:
    """Make a state of new leaves.

    Args:
        label: The public function, for errors.
        like: The state that it replaces.
        made: The new leaf of a parameter and a slot.
        number: The hyperparameter of a parameter's group; None keeps the old one.
        updates: How many updates were made; None takes the class's own count.

    Raises:
        ValueError: if the number of updates is not known.
    """

    def change(state: TorchState) -> TorchState:
        keys = [(name, slot) for name, slot, _ in _slots(state)]
        count = updates
        if count is None:
            counts = [int(made(*key)) for key in keys if key[1] == "step"]
            if not counts:
                raise ValueError(f"{label}: the torch class does not count its updates; pass how many there were")
            count = max(counts)
        slots = {
            slot: with_leaves(tree, {name: made(name, slot) for name, _ in named_leaves(tree)})
            for slot, tree in state.slots.items()
        }
        owner = keys[0][0] if keys else ""
        found = {name: number(owner, name) for name in state.hyper}
        hyper = {
            name: old.clone() if found[name] is None else torch.full_like(old, float(found[name]))
            for name, old in state.hyper.items()
        }
        updated = torch.full_like(state.updates, count)
        return TorchState(updated, slots, hyper, tree_map(torch.zeros_like, state.missed))

    return map_nodes(change, like, TorchState)


def states_of(opt_state: Tree) -> list[TorchState]:
    """The states that `from_torch` made, in any parts of a state."""
    found: list[TorchState] = []
    map_nodes(found.append, opt_state, TorchState)
    return found


def _slots(state: TorchState) -> Iterator[tuple[str, str, Any]]:
    """The name of the parameter, the slot and the leaf of each tensor that a torch class keeps."""
    for slot, tree in state.slots.items():
        yield from ((name, slot, leaf) for name, leaf in named_leaves(tree))


def _never_updated(opt_state: Tree) -> set[str]:
    """The names of parameters that no update has changed, of which torch's optimizers have no state."""
    return {
        name
        for state in states_of(opt_state)
        for tree, none in ((state.slots.get("step", {}), 0), (state.missed, int(state.updates)))
        for name, count in named_leaves(tree)
        if int(count) == none
    }
