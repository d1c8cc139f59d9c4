"""To and from the state of torch.optim's optimizers, for states that `fs.from_torch` made."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fshard import comm
from fshard.checkpoint.exchange import (
    Entry,
    Names,
    agree,
    described,
    entry_of,
    gathered,
    misfits,
    owned,
    read_leaf,
)
from fshard.checks import check_flags, check_types, kind
from fshard.errors import Problem, leaf_error
from fshard.mesh import world
from fshard.optim.from_torch import TorchState
from fshard.tree import Tree, flatten, names_of, tree_map, unflatten

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
        ValueError: on every rank alike, if the state holds more than torch's optimizers do, or parameters that the
            torch optimizer has not.
    """
    label, names = "checkpoint.to_optimizer_state_dict", Names(module)
    check_flags(label, rank0_only=rank0_only)
    order = {name: i for i, name in enumerate(optimizer_names(label, names, optimizer))}
    leaves = optimizer_leaves(label, opt_state)
    agree(label, {f"{name} {slot}": described(leaf) for (name, slot), leaf in leaves.items()})
    problems = [Problem(name, "state", "none: the torch optimizer has no such parameter") for name, _ in leaves]
    problems = [problem for problem in dict.fromkeys(problems) if problem.path not in order]
    if problems:
        raise leaf_error(f"{label}: states do not fit", problems, "pass the optimizer of all that was trained")
    state: dict[int, StateDict] = {}
    never = _never_updated(opt_state)
    keys = {f"{i}": key for i, key in enumerate(leaves) if key[0] not in never}
    for i, full in gathered({i: leaves[key] for i, key in keys.items()}):
        name, slot = keys[i]
        state.setdefault(order[name], {})[slot] = owned(full, leaves[keys[i]])
    if rank0_only and comm.rank(world()):
        return {}
    groups = groups_of(opt_state, optimizer, list(order))
    return {"state": dict(sorted(state.items())), "param_groups": groups}


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
        ValueError: on every rank alike, with every state that is missing, otherwise or besides, or where the class does
            not count and `updates` is not given.
    """
    label = "checkpoint.from_optimizer_state_dict"
    check_updates(label, updates)
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        expected = "the state dict of a torch optimizer, with state and param_groups"
        raise ValueError(f"{label}: expected state_dict to be {expected}, got {kind(state_dict)}")
    order = optimizer_names(label, Names(module), optimizer)
    needed = optimizer_leaves(label, like)
    found: dict[tuple[str, str], Entry] = {}
    groups: dict[str, StateDict] = {}
    for group in state_dict["param_groups"]:
        groups |= {order[i]: group for i in group["params"] if i < len(order)}
    for i, slots in state_dict["state"].items():
        for slot, value in slots.items():
            tensor = torch.tensor(value, dtype=torch.float32) if isinstance(value, int | float) else value
            if tensor is not None:
                found[order[i] if i < len(order) else f"parameter {i}", slot] = entry_of(tensor)
    flat = {f"{name} {slot}": leaf for (name, slot), leaf in needed.items()}
    entries = {f"{name} {slot}": entry for (name, slot), entry in found.items()}
    agree(
        label,
        {name: str(entry) for name, entry in entries.items()}
        | {f"(needed) {n}": described(x) for n, x in flat.items()},
    )
    if problems := misfits(flat, entries):
        remedy = "pass the state of the same torch class and options, for the same module"
        raise leaf_error(f"{label}: states do not fit", problems, remedy)
    made = {key: read_leaf(found[key], leaf) for key, leaf in needed.items()}
    first: StateDict = next(iter(state_dict["param_groups"]), {})
    return rebuilt(label, like, made, lambda name, key: groups.get(name, first).get(key), updates)


def check_updates(label: str, updates: Any) -> None:
    """Refuse a number of updates that is none."""
    if updates is not None and (type(updates) is not int or not 0 <= updates < 2**63):
        expected = "a whole number, 0 or more, or None"
        raise ValueError(f"{label}: expected updates to be {expected}, got {updates!r:.40}")


def optimizer_names(label: str, names: Names, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of a torch optimizer's parameters, in its order."""
    check_types(label, torch.optim.Optimizer, "a torch optimizer", optimizer=optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    unknown = [i for i, param in enumerate(params) if id(param) not in names.by_tensor]
    if unknown:
        found = f"parameter {unknown[0]} of {len(params)}, which is none of the module's"
        raise ValueError(f"{label}: expected optimizer to have the parameters of module, got {found}; make it of them")
    return [names.by_tensor[id(param)] for param in params]


def optimizer_leaves(label: str, opt_state: Tree) -> dict[tuple[str, str], Any]:
    """What a state made by `from_torch` holds, by the name of the parameter and of the slot.

    Raises:
        ValueError: if there is none, or beside it state that torch's optimizers do not have.
    """
    out: dict[tuple[str, str], Any] = {}

    def collect(state: TorchState) -> None:
        for slot, tree in state.slots.items():
            flat = flatten(tree)
            pairs = zip(names_of(flat.treedef), flat.leaves, strict=True)
            out.update({(name, slot): leaf for name, leaf in pairs if leaf is not None})

    rest = flatten(_changed(opt_state, collect))
    problems = [
        Problem(path, kind(leaf), "nothing but the state of fs.from_torch")
        for path, leaf in zip(rest.paths, rest.leaves, strict=True)
        if leaf is not None
    ]
    if problems:
        remedy = "save it by fs.checkpoint.save, or pass the part that fs.from_torch made"
        raise leaf_error(f"{label}: torch's optimizers have no such state", problems, remedy)
    return out


def groups_of(opt_state: Tree, optimizer: torch.optim.Optimizer, order: Sequence[str]) -> list[StateDict]:
    """The parameter groups of a torch optimizer, with the numbers that a state holds for their parameters.

    Args:
        opt_state: The state.
        optimizer: The torch optimizer.
        order: The names of its parameters.
    """
    groups = optimizer.state_dict()["param_groups"]

    def inject(state: TorchState) -> None:
        # The state of a class that keeps nothing does not say whose it is.
        owners = {name for name, _ in _owners(state)} or set(order)
        for group in groups:
            if owners & {order[i] for i in group["params"]}:
                group.update({name: float(value) for name, value in state.hyper.items() if name in group})

    _changed(opt_state, inject)
    return groups


def rebuilt(
    label: str,
    like: Tree,
    made: Mapping[tuple[str, str], Any],
    number: Callable[[str, str], Any],
    updates: int | None,
) -> Tree:
    """A state of leaves by parameter and slot, with the numbers of the parameters' groups.

    Raises:
        ValueError: if the number of updates is not known.
    """

    def change(state: TorchState) -> TorchState:
        owner = next((name for name, _ in _owners(state)), "")
        counts = [made[key] for key in _owners(state) if key[1] == "step"]
        if updates is None and not counts:
            raise ValueError(f"{label}: the torch class does not count its updates; pass how many there were")
        count = updates if updates is not None else max(int(value) for value in counts)
        slots = {}
        for slot, tree in state.slots.items():
            flat = flatten(tree)
            pairs = zip(names_of(flat.treedef), flat.leaves, strict=True)
            leaves = [None if leaf is None else made[name, slot] for name, leaf in pairs]
            slots[slot] = unflatten(flat.treedef, leaves)
        hyper = {}
        for name, old in state.hyper.items():
            value = number(owner, name)
            hyper[name] = old.clone() if value is None else torch.full_like(old, float(value))
        updated = torch.full_like(state.updates, count)
        return TorchState(updated, slots, hyper, tree_map(torch.zeros_like, state.missed))

    return _changed(like, change)


def injected_names(opt_state: Tree) -> set[str]:
    """The names of the numbers that a state holds."""
    names: set[str] = set()
    _changed(opt_state, lambda state: names.update(state.hyper))
    return names


def updates_of(opt_state: Tree) -> int:
    """How many updates a state has seen."""
    counts: list[int] = []
    _changed(opt_state, lambda state: counts.append(int(state.updates)))
    return max(counts, default=0)


def _never_updated(opt_state: Tree) -> set[str]:
    """The names of parameters that no update has changed, of which torch's optimizers have no state."""
    names: set[str] = set()

    def collect(state: TorchState) -> None:
        for tree, none in ((state.slots.get("step", {}), 0), (state.missed, int(state.updates))):
            flat = flatten(tree)
            pairs = zip(names_of(flat.treedef), flat.leaves, strict=True)
            names.update(name for name, count in pairs if count is not None and int(count) == none)

    _changed(opt_state, collect)
    return names


def _owners(state: TorchState) -> list[tuple[str, str]]:
    keys = []
    for slot, tree in state.slots.items():
        flat = flatten(tree)
        pairs = zip(names_of(flat.treedef), flat.leaves, strict=True)
        keys += [(name, slot) for name, leaf in pairs if leaf is not None]
    return keys


def _changed(tree: Tree, change: Callable[[TorchState], Any]) -> Tree:
    """A tree with other things in the place of states that `from_torch` made."""
    if isinstance(tree, TorchState):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: _changed(value, change) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_changed(value, change) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree
