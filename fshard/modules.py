"""Modules as the engine runs them: which parameters form a unit, and a copy without weights that asks for them."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat
from fshard.engine import Call, Leaf, Pass
from fshard.errors import expect
from fshard.tree import matches
from fshard.tree.checks import describe

# They hold submodules and have no forward.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Rule = type[nn.Module] | str | int | Callable[[str, nn.Module], bool]
Units = Rule | Collection[Rule] | None


class ModuleUnit(NamedTuple):
    """Parameters of a module that are gathered when one of its submodules is entered.

    Attributes:
        path: The submodule's name; "" is the whole module.
        names: Their names.
        end: Number of the first unit behind this one that does not lie inside it.
        apart: Whether it lies inside a submodule with a forward of its own, which may choose among its units.
    """

    path: str
    names: tuple[str, ...]
    end: int
    apart: bool


def plan_units(module: nn.Module, units: Units, places: Mapping[str, Sequence[str]]) -> list[ModuleUnit]:
    """Cut a module's parameters into units.

    Args:
        module: The module.
        units: The rule, as `functionalize` takes it.
        places: For each parameter by its first name all its names; tied ones belong to every unit that uses them.

    Returns:
        The units in the order of their gathering. Parameters outside every unit that the rule selects form units of
        their own, one for each submodule that has some.

    Raises:
        ValueError: if the rule selects nothing, or selects a submodule twice.
    """
    if not places:
        return []
    if units is None:
        return [ModuleUnit("", tuple(places), 1, False)]
    compiled = {path for path, submodule in module.named_modules() if _compat.is_compiled(submodule)}
    ranks = select(module, units)
    selected = {_entered(path, compiled): rank for path, rank in sorted(ranks.items(), key=lambda x: -x[1])}
    owned: dict[str, dict[str, None]] = {path: {} for path, _ in module.named_modules()}
    for name, names in places.items():
        for place in names:
            holder = place.rpartition(".")[0]
            owner = next((path for path in _upwards(holder) if path in selected), _entered(holder, compiled))
            owned.setdefault(owner, {})[name] = None
    paths = [path for path, names in owned.items() if names]
    ordered = _in_order(paths, selected)
    ends = [
        next((j for j in range(i + 1, len(ordered)) if not _inside(ordered[j], path)), len(ordered))
        for i, path in enumerate(ordered)
    ]
    running = {path for path, submodule in module.named_modules() if path and _orders(submodule)}
    apart = [any(around in running for around in _upwards(path.rpartition(".")[0])) for path in ordered]
    return [
        ModuleUnit(path, tuple(owned[path]), end, alone) for path, end, alone in zip(ordered, ends, apart, strict=True)
    ]


def _orders(submodule: nn.Module) -> bool:
    """Tell whether a module may run its submodules in an order of its own."""
    return not isinstance(submodule, _CONTAINERS) and type(submodule).forward is not nn.Sequential.forward


def select(module: nn.Module, units: Any) -> dict[str, int]:
    """Find the submodules that a rule selects.

    Args:
        module: The module.
        units: The rule, as `functionalize` takes it, but not None.

    Returns:
        Their names, each with the number of the part of the rule that selected it.

    Raises:
        ValueError: if the rule selects nothing, or selects a submodule twice.
    """
    rules = list(units) if isinstance(units, list | tuple | set | frozenset) else [units]
    if not rules:
        raise ValueError(f"functionalize: units is {units!r}, which matches no submodule; pass None for one unit")
    together = not isinstance(units, list)
    selected: dict[str, int] = {}
    for rank, rule in enumerate(rules):
        found = [path for path, submodule in module.named_modules() if _test(rule)(path, submodule)]
        if isinstance(rule, int):
            found = list(_of_size(module, rule))
        if not found:
            raise ValueError(f"functionalize: units={rule!r} matches no submodule; name one of named_modules()")
        if not any(True for path in found for _ in module.get_submodule(path).parameters()):
            raise ValueError(f"functionalize: units={rule!r} matches only submodules without parameters; name others")
        for path in found:
            if path in selected and not together:
                raise ValueError(
                    f"functionalize: units overlap: {rules[selected[path]]!r} and {rule!r} both match {path!r}; "
                    "let one rule match it"
                )
            selected.setdefault(path, 0 if together else rank)
    return selected


def no_split(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """List the units that a model of transformers declares: its layers, by the `_no_split_modules` of its classes.

    Args:
        model: The model, or a module with such models among its submodules, with values or on the meta device.

    Returns:
        The classes of submodules, for `functionalize(model, units=fs.no_split(model))`.

    Raises:
        ValueError: if no submodule with parameters is of a class that is declared.

    >>> class Block(nn.Linear): ...
    >>> class Model(nn.Sequential):
    ...     _no_split_modules = ["Block"]
    >>> [cls.__name__ for cls in no_split(Model(Block(2, 2), nn.ReLU(), Block(2, 2)))]
    ['Block']
    """
    given = isinstance(model, nn.Module)
    expect(given, "no_split", "model to be an nn.Module", describe(model), "pass the module itself")
    declared: dict[str, None] = {}
    for submodule in model.modules():
        declared.update(dict.fromkeys(getattr(submodule, "_no_split_modules", None) or ()))
    # transformers declares classes by their names.
    named = [part for part in model.modules() if part is not model and type(part).__name__ in declared]
    found = dict.fromkeys(type(part) for part in named if any(True for _ in part.parameters()))
    got = f"{', '.join(sorted(declared))}, of which it has none with parameters" if declared else "none"
    remedy = "pass units= another rule, such as the class of its layers or a glob pattern like 'model.layers.*'"
    expect(found, "no_split", f"model {type(model).__name__} to declare _no_split_modules", got, remedy)
    return tuple(found)


def _test(rule: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        return lambda path, submodule: isinstance(submodule, rule)
    if isinstance(rule, str):
        return lambda path, submodule: _matches(path, rule)
    if isinstance(rule, int) and not isinstance(rule, bool) and rule > 0:
        return lambda path, submodule: False
    if callable(rule) and not isinstance(rule, nn.Module | type):
        return lambda path, submodule: bool(rule(path, submodule))
    needed = (
        "a module class, a glob pattern of names, a number of parameters, a function (name, module), or a list of such"
    )
    raise ValueError(f"functionalize: expected units to be {needed}, got {describe(rule)}")


def _matches(path: str, pattern: str) -> bool:
    """Tell whether a name matches a pattern part by part: `*` stands for one part between dots."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(matches, wanted, parts))


def _of_size(module: nn.Module, threshold: int) -> Iterator[str]:
    """Find the smallest submodules that hold at least `threshold` parameters, without those already taken by others."""
    seen: set[nn.Parameter] = set()

    def rest(path: str, submodule: nn.Module) -> Iterator[str | int]:
        size = 0
        for name, child in submodule.named_children():
            for found in rest(f"{path}.{name}" if path else name, child):
                if isinstance(found, int):
                    size += found
                else:
                    yield found
        own = [p for p in submodule.parameters(recurse=False) if p not in seen]
        seen.update(own)
        size += sum(parameter.numel() for parameter in own)
        if size >= threshold:
            yield path
            size = 0
        yield size

    return (found for found in rest("", module) if isinstance(found, str))


def _in_order(paths: list[str], ranks: Mapping[str, int]) -> list[str]:
    """Put siblings in the order of the rule's parts, others where they stand; submodules of a unit stay behind it."""

    def rank_of(path: str, before: int) -> int:
        inside = [rank for other, rank in ranks.items() if _inside(other, path) or other == path]
        return min(inside, default=before)

    siblings: list[tuple[str, list[str]]] = []
    for path in paths:
        if siblings and _inside(path, siblings[-1][0]):
            siblings[-1][1].append(path)
        else:
            siblings.append((path, []))
    keyed, highest = [], 0
    for path, inside in siblings:
        # A submodule that no part of the rule matches stays behind everything before it.
        rank = rank_of(path, highest)
        highest = max(highest, rank)
        keyed.append((rank, path, inside))
    keyed.sort(key=lambda entry: entry[0])
    return [found for _, path, inside in keyed for found in (path, *_in_order(inside, ranks))]


def _inside(path: str, other: str) -> bool:
    return path != other and (other == "" or path.startswith(f"{other}."))


def _upwards(path: str) -> Iterator[str]:
    """List a name and those of the modules around it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _entered(path: str, compiled: set[str]) -> str:
    """Return a module, or the outermost compiled one that it lies inside, which is entered as a whole."""
    return next((found for found in reversed(list(_upwards(path))) if found in compiled), path)


Places = Mapping[str, Sequence[str]]

# By type: classes derived from these may not take back what they held.
_RESTORED = (dict, OrderedDict, defaultdict, list, set)


class Skeleton:
    """One copy of a module, for one call at a time.

    Attributes:
        module: The copy, to be called.
    """

    def __init__(self, module: nn.Module, units: Sequence[ModuleUnit], places: Places) -> None:
        """Copy a module that holds no values.

        Args:
            module: The module; its tensors are on the meta device.
            units: Which parameters are gathered together.
            places: All names of each parameter and buffer, by its first.
        """
        self.module = copy.deepcopy(module)
        self.values: Mapping[str, torch.Tensor] = {}
        self._call: Call | None = None
        self._pass: Pass | None = None
        self._leaves: Mapping[str, Leaf] = {}
        submodules = dict(self.module.named_modules())
        first = {name: canonical for canonical, names in places.items() for name in names}
        self._buffers: dict[str, list[tuple[nn.Module, str]]] = {}
        self._compiled: dict[int, list[dict[str, Any]]] = {}
        for path, submodule in submodules.items():
            prefix = f"{path}." if path else ""
            names = {
                key: p if p is None else first[prefix + key] for key, p in _compat.parameters_of(submodule).items()
            }
            submodule.__dict__["_parameters"] = _Weights(self, names)
            for key, buffer in submodule._buffers.items():
                if buffer is not None:
                    self._buffers.setdefault(first[prefix + key], []).append((submodule, key))
        classes: dict[type, type] = {}
        numbers = {unit.path: number for number, unit in enumerate(units)}
        for path, submodule in submodules.items():
            scope = _Scope(self, numbers.get(path), _units_inside(path, units), isinstance(submodule, nn.RNNBase))
            if scope[1:] == (None, None, False):
                continue
            cls = type(submodule)
            submodule.__class__ = classes.setdefault(cls, _scoped(cls))
            submodule.__dict__["_fshard_scope"] = scope
            if path in numbers and _compat.is_compiled(submodule):
                # A compiler reads parameters past Python's own lookup: they must be there before.
                self._compiled[numbers[path]] = [_compat.parameters_of(m) for m in submodule.modules()]
        self._attributes = _Attributes(submodules.values())

    def bind(self, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Give the copy full parameters and buffers, by name."""
        self.values = values
        for name, buffer in buffers.items():
            for submodule, key in self._buffers[name]:
                submodule._buffers[key] = buffer

    def follow(self, call: Call, one: Pass, leaves: Mapping[str, Leaf]) -> None:
        """Take the other parameters from a call."""
        self._call, self._pass, self._leaves = call, one, leaves

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as the module left them."""
        return {name: places[0][0]._buffers[places[0][1]] for name, places in self._buffers.items()}  # type: ignore[misc]

    def release(self) -> bool:
        """Let go of all values, and of what a forward has set; returns whether the copy is as it was made."""
        self.values, self._leaves, self._call, self._pass = {}, {}, None, None
        return self._attributes.put_back()

    def fetch(self, weights: "_Weights", key: str, name: str) -> torch.Tensor:
        """Read a parameter, gathering its unit where that is not open."""
        value = self.values.get(name)
        if value is None and self._pass is not None and self._call is not None and name in self._leaves:
            leaf = self._leaves[name]
            use = self._pass.find(leaf)
            value = self._call.output(use, leaf)
            use.hand_out(weights, key)
        if value is None:
            raise RuntimeError(
                f"apply: parameter {name!r} was read after apply had returned, as by activation checkpointing in a "
                "backward of your own; call apply inside fs.value_and_grad, which keeps it"
            )
        # What is read without a gradient has none to give to a later read.
        if torch.is_grad_enabled() or value.requires_grad:
            dict.__setitem__(weights, key, value)
        return value

    def enter(self, scope: "_Scope") -> None:
        """A submodule starts to run."""
        if self._pass is not None:
            self._pass.enter(scope.number, scope.inside)
        for weights in self._compiled.get(scope.number, ()) if scope.number is not None else ():
            for key in weights:
                weights[key]

    def leave(self, scope: "_Scope") -> None:
        """It has run."""
        if self._pass is not None:
            self._pass.leave(scope.number, scope.inside)


class _Scope(NamedTuple):
    skeleton: Skeleton
    number: int | None
    inside: range | None
    recurrent: bool


def _units_inside(path: str, units: Sequence[ModuleUnit]) -> range | None:
    """Numbers of the units inside a submodule, if it has several; the whole module always runs, so it has none."""
    found = [i for i, unit in enumerate(units) if path and unit.path.startswith(f"{path}.")]
    return range(found[0], found[-1] + 1) if len(found) > 1 else None


class _Weights(dict[str, Any]):
    """A submodule's `_parameters`: it holds those that were read, and looks others up."""

    def __init__(self, skeleton: Skeleton, names: Mapping[str, str | None]) -> None:
        self._skeleton, self._names = skeleton, names
        self.put_back()

    def put_back(self) -> None:
        """Hold what is None alone, as before anything was read or set."""
        self.clear()
        self.update((key, None) for key, name in self._names.items() if name is None)

    def __missing__(self, key: str) -> torch.Tensor:
        name = self._names[key]
        assert name is not None
        return self._skeleton.fetch(self, key, name)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._names else default

    def keys(self) -> Any:
        return self._names.keys()

    def values(self) -> Any:
        return (self[key] for key in self._names)

    def items(self) -> Any:
        return ((key, self[key]) for key in self._names)


class _Attributes:
    """The attributes of submodules, put back after a call, so that the next one does not see its changes.

    A forward may set attributes, and write to the dicts, lists, sets and plain tensors among them. Its changes to other
    objects stay.
    """

    def __init__(self, submodules: Iterable[nn.Module]) -> None:
        self._dicts = [(submodule.__dict__, dict(submodule.__dict__)) for submodule in submodules]
        self._weights: list[_Weights] = []
        # Nearly all containers of a module are empty, such as those of its hooks.
        self._empty: list[Any] = []
        self._filled: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, int]] = []
        seen: set[int] = set()
        found = [value for _, values in self._dicts for value in values.values()]
        while found:
            value = found.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, _Weights):
                self._weights.append(value)
            elif isinstance(value, torch.Tensor):
                self._tensors.append((value, _compat.version(value)))
            elif type(value) in (*_RESTORED, tuple):
                found.extend(value.values() if isinstance(value, dict) else value)
                if isinstance(value, tuple):
                    continue
                if value:
                    self._filled.append((value, copy.copy(value)))
                else:
                    self._empty.append(value)

    def put_back(self) -> bool:
        """Put all back; returns False where that cannot be done, because a tensor was written to."""
        for attributes, values in self._dicts:
            attributes.clear()
            attributes.update(values)
        for weights in self._weights:
            weights.put_back()
        if any(self._empty):
            for container in self._empty:
                container.clear()
        for container, content in self._filled:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        return all(_compat.version(tensor) == version for tensor, version in self._tensors)


def _scoped(cls: type[nn.Module]) -> type[nn.Module]:
    """A class like `cls` whose calls open and close the scope of a unit."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scope: _Scope = self.__dict__["_fshard_scope"]
        scope.skeleton.enter(scope)
        if scope.recurrent:
            _compat.set_flat_weights(self)
        try:
            return cls.__call__(self, *args, **kwargs)
        finally:
            if scope.recurrent:
                _compat.forget_flat_weights(self)
            scope.skeleton.leave(scope)

    run: Callable[..., Any] = call
    return type(cls.__name__, (cls,), {"__call__": run, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
