"""Modules as the engine runs them: which parameters form a unit, and a copy without weights that asks for them."""

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat
from fshard.engine import Call, Leaf, ModuleUnit, Pass, Use
from fshard.errors import expect
from fshard.tree import matches

Rule = type[nn.Module] | str | int | Callable[[str, nn.Module], bool]
Units = Rule | Collection[Rule] | None


def plan_units(module: nn.Module, units: Units) -> list[ModuleUnit]:
    """Cut a module's parameters into units.

    Args:
        module: The module.
        units: The rule, as `functionalize` takes it.

    Returns:
        The units in the module's order. Tied parameters belong to every unit that uses them, by the first of their
        names. Parameters outside every unit that the rule selects form units of their own, one for each submodule that
        has some.

    Raises:
        ValueError: if the rule selects nothing.
    """
    first = {parameter: name for name, parameter in _compat.named_parameters(module)}
    modules = dict(_compat.named_modules(module))
    selected = select(module, "" if units is None else units)
    owned: dict[str, dict[str, None]] = {}
    for path, submodule in modules.items():
        around = list(_upwards(path))
        # What is compiled is entered as a whole.
        owners = [other for other in reversed(around) if _compat.is_compiled(modules[other])]
        owners += [other for other in around if other in selected]
        owned[path] = {}
        names = owned[owners[0] if owners else path]
        for parameter in submodule.parameters(recurse=False):
            names[first[parameter]] = None
    ordered = [path for path, names in owned.items() if names]
    sizes = Counter(around for path in ordered for around in _upwards(path))
    return [
        ModuleUnit(path, tuple(owned[path]), i + sizes[path], _is_lookup(modules[path]))
        for i, path in enumerate(ordered)
    ]


def _is_lookup(submodule: nn.Module) -> bool:
    """Tell whether a module holds tables of embeddings alone."""
    return all(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in submodule.modules())


def select(module: nn.Module, rule: Any) -> set[str]:
    """Find the submodules that a rule selects.

    Args:
        module: The module.
        rule: The rule, as `functionalize` takes it, but not None.

    Returns:
        Their names.

    Raises:
        ValueError: if it or a part of it selects nothing.
    """
    if isinstance(rule, list | tuple | set | frozenset):
        found = {path for part in rule for path in select(module, part)}
    else:
        found = {path for path, submodule in _compat.named_modules(module) if _fits(rule, path, submodule)}
    remedy = "name some of named_modules()"
    expect(found, "functionalize", "units to match submodules", repr(rule), remedy)
    return found


def _fits(rule: Any, path: str, submodule: nn.Module) -> bool:
    """Tell whether a rule selects a submodule."""
    if isinstance(rule, str):
        # As many dots, so that `*` stands for one part between dots.
        return path.count(".") == rule.count(".") and matches(rule, path)
    if isinstance(rule, int):
        return _size(submodule) >= rule > max(map(_size, submodule.children()), default=0)
    if isinstance(rule, type):
        return isinstance(submodule, rule)
    return bool(rule(path, submodule))


def _size(submodule: nn.Module) -> int:
    return sum(parameter.numel() for parameter in submodule.parameters())


def _upwards(path: str) -> Iterator[str]:
    """List a name and those of the modules around it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


class Skeleton:
    """One copy of a module, for one call at a time.

    Attributes:
        module: The copy, to be called.
        names: Its parameters and buffers, which hold no values, each with the first of its names.
    """

    def __init__(self, module: nn.Module, units: Sequence[ModuleUnit]) -> None:
        """Copy a module that holds no values.

        Args:
            module: The module; its tensors are on the meta device.
            units: Which parameters are gathered together.
        """
        self.module = copy.deepcopy(module)
        self.values: Mapping[str, torch.Tensor] = {}
        self._call: Call | None = None
        self._pass: Pass | None = None
        self._use: Use | None = None
        self._leaves: Mapping[str, Leaf] = {}
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._compiled: dict[int, list[dict[str, Any]]] = {}
        self._is_running = False
        self._cache: object | None = None
        self._cached: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self.names: dict[torch.Tensor, str] = {}
        for name, tensor in (*_compat.named_parameters(self.module), *_compat.named_buffers(self.module)):
            self.names[tensor] = name
        classes: dict[type, type] = {}
        numbers = {unit.path: number for number, unit in enumerate(units)}
        inside = _units_inside(units)
        # Children before their parent.
        for path, submodule in reversed(list(_compat.named_modules(self.module))):
            own = _compat.parameters_of(submodule)
            named = {key: None if empty is None else self.names[empty] for key, empty in own.items()}
            submodule.__dict__["_parameters"] = _Weights(self, named)
            _compat.read_parametrized_by(submodule, self.read_parametrized)
            scope = _Scope(self, numbers.get(path), inside.get(path), isinstance(submodule, nn.RNNBase))
            if scope[1:] == (None, None, False):
                continue
            cls = type(submodule)
            submodule.__class__ = classes.setdefault(cls, _scoped(cls))
            submodule.__dict__["_fshard_scope"] = scope
            if path in numbers and _compat.is_compiled(submodule):
                # A compiler reads parameters past Python's own lookup: they must be there before.
                self._compiled[numbers[path]] = [_compat.parameters_of(m) for m in submodule.modules()]
        attributes = [submodule.__dict__ for submodule in self.module.modules()]
        pairs = [(own["_buffers"], key) for own in attributes for key in own["_buffers"]]
        self._places = [(own, key, self.names[own[key]]) for own, key in pairs if own[key] is not None]
        self._first_places = {name: (own, key) for own, key, name in reversed(self._places)}
        self._put_back = _snapshot(attributes)

    def bind(self, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Give the copy full parameters and buffers, by name."""
        self.values, self._buffers = values, buffers
        for own, key, name in self._places:
            own[key] = buffers[name]

    def follow(self, call: Call, one: Pass, leaves: Mapping[str, Leaf]) -> None:
        """Take the other parameters from a call."""
        self._call, self._pass, self._leaves = call, one, leaves

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the copy."""
        self._is_running = True
        try:
            return self.module(*args, **kwargs)
        finally:
            # One parametrize.cached() may be around calls of several parameters.
            self._is_running = False
            self._cache = None
            self._cached = {}

    def read_parametrized(self, submodule: nn.Module, key: str) -> torch.Tensor:
        """Compute a parametrized tensor of a submodule: once while torch caches such tensors and the copy runs."""
        cache = _compat.parametrization_cache()
        if cache is None or not self._is_running:
            return _compat.compute_parametrized(submodule, key)
        if cache is not self._cache:
            self._cache = cache
            self._cached = {}
        if (submodule, key) not in self._cached:
            self._cached[submodule, key] = _compat.compute_parametrized(submodule, key)
        return self._cached[submodule, key]

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as the module left them."""
        after = dict[str, torch.Tensor]()
        for name in self._buffers:
            own, key = self._first_places[name]
            after[name] = own[key]
        return after

    def release(self) -> bool:
        """Let go of all values, and of what a forward has set; returns whether the copy is as it was made."""
        self.values, self._buffers, self._leaves = {}, {}, {}
        self._call = self._pass = self._use = None
        return self._put_back()

    def fetch(self, weights: "_Weights", key: str, name: str) -> torch.Tensor:
        """Read a parameter, gathering its unit where that is not open."""
        value = self.values.get(name)
        if value is None and self._pass is not None and self._call is not None and name in self._leaves:
            leaf, use = self._leaves[name], self._use
            # Mostly the unit that was read last is open, and has handed out all of its leaves.
            if use is not None and not (use.lazy or use.closed) and torch.is_grad_enabled():
                value = use.outputs.get(use.places.get(leaf, -1))
            if value is None or use is None:
                use = self._use = self._pass.find(name)
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

    def leave(self, scope: "_Scope", failed: bool) -> None:
        """It has run, or raised."""
        if self._pass is not None:
            self._pass.leave(scope.number, scope.inside, failed)


class _Scope(NamedTuple):
    skeleton: Skeleton
    number: int | None
    inside: range | None
    recurrent: bool


def _units_inside(units: Sequence[ModuleUnit]) -> dict[str, range]:
    """Numbers of the units inside each submodule that has some, but the whole module, which always runs."""
    pairs = [(path, i) for i, unit in enumerate(units) for path in list(_upwards(unit.path))[1:-1]]
    last = dict(pairs)
    first = dict(reversed(pairs))
    return {path: range(first[path], last[path] + 1) for path in last}


class _Weights(dict[str, Any]):
    """A submodule's `_parameters`: it holds those that were read, and looks others up."""

    get = Mapping.get  # type: ignore[assignment]
    keys = Mapping.keys  # type: ignore[assignment]
    values = Mapping.values  # type: ignore[assignment]
    items = Mapping.items  # type: ignore[assignment]

    def __init__(self, skeleton: Skeleton, names: Mapping[str, str | None]) -> None:
        self._skeleton = skeleton
        self._names = names

    def __missing__(self, key: str) -> torch.Tensor | None:
        name = self._names[key]
        return None if name is None else self._skeleton.fetch(self, key, name)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# By type: classes derived from these may not take back what they held.
_RESTORED = (dict, OrderedDict, defaultdict, list, set, _Weights)


def _snapshot(held: list[Any]) -> Callable[[], bool]:
    """Copy the attributes of submodules, so that a call does not see the changes of the one before.

    A forward may set attributes, and write to the dicts, lists, sets and plain tensors among them. Its changes to other
    objects stay.

    Args:
        held: The dicts of attributes; what they hold is added.

    Returns:
        A function that puts all back; it returns False where that cannot be done, because a tensor was written to.
    """
    contents = {}
    tensors = []
    for value in held:
        if isinstance(value, torch.Tensor):
            tensors.append((value, _compat.version(value)))
        elif type(value) is tuple:
            held.extend(value)
        elif type(value) in _RESTORED and id(value) not in contents:
            # A dict of weights has none yet.
            content = value.copy()
            contents[id(value)] = value, content
            held.extend(content.values() if isinstance(content, dict) else content)

    # Nearly all are empty, such as those of hooks.
    empty = [value for value, content in contents.values() if not content]
    others = [pair for pair in contents.values() if pair[1]]

    def put_back() -> bool:
        for value in filter(None, empty):
            value.clear()
        for value, content in others:
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)
        return all(_compat.version(tensor) == version for tensor, version in tensors)

    return put_back


def _scoped(cls: type[nn.Module]) -> type[nn.Module]:
    """A class like `cls` whose calls open and close the scope of a unit."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scope: _Scope = self.__dict__["_fshard_scope"]
        scope.skeleton.enter(scope)
        if scope.recurrent:
            _compat.set_flat_weights(self)
        failed = True
        try:
            out = cls.__call__(self, *args, **kwargs)
            failed = False
            return out
        finally:
            if scope.recurrent:
                _compat.forget_flat_weights(self)
            scope.skeleton.leave(scope, failed)

    run: Callable[..., Any] = call
    return type(cls.__name__, (cls,), {"__call__": run, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
