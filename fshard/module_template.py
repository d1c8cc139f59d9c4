"""A copy of a module without weights, whose attribute reads gather them.

`model.apply` runs the user's own forward, which knows nothing of shards: it reads `self.weight` and calls submodules.
fshard intercepts both, so **reading an attribute of the copy may communicate**:

- Each submodule's `_parameters`, where torch.nn.Module looks up `self.weight`, is a `_Weights` dict. A weight that it
  does not hold yet is fetched by `ModuleTemplate.fetch`, which gathers the weight's unit unless it is there already.
- Submodules that own a unit, or have units inside, get a class of their own, whose `__call__` tells the engine where
  the forward is (`ModelWalk.enter` and `leave`). The engine gathers the next units ahead, and drops those behind.

The copy holds values for one call at a time, and afterwards none: `release` takes back all that the call and the
module's own forward have set.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat
from fshard.engine import EngineCall, GatheredUnit, Leaf, ModelWalk, ModuleUnit
from fshard.tree import ModelDtypes, cast_floating, tree_leaves
from fshard.units import WHOLE_MODEL, Dtypes, list_enclosing


class ModuleTemplate:
    """One copy of a module, for one call at a time.

    Attributes:
        module: The copy, to be called.
        names: Its parameters and buffers, which hold no values, each with the first of its names.
        dtypes: What the running call casts inputs and outputs to, as `choose_dtypes` returns it.
        walk: Where the running call's forward is in the model; None if the call has bound all parameters.
    """

    def __init__(self, module: nn.Module, units: Sequence[ModuleUnit]) -> None:
        """Let a copy of a module fetch weights where it reads them.

        Args:
            module: The copy; its tensors are on the meta device.
            units: Which parameters are gathered together.
        """
        self.module = module
        tensors = (*_compat.named_parameters(self.module), *_compat.named_buffers(self.module))
        self.names: dict[Any, str] = {tensor: name for name, tensor in tensors}
        # Set by each call.
        self._values: Mapping[str, torch.Tensor] = {}
        self.dtypes: Dtypes = {}
        self._call: EngineCall | None = None
        self.walk: ModelWalk | None = None
        self._last_gathered: GatheredUnit | None = None
        self._parametrized = _ParametrizedCache()
        self._hook_submodules(units)
        attributes = [submodule.__dict__ for submodule in self.module.modules()]
        # Each with the dict that holds the buffer, its key there, and its name.
        self._buffer_places: list[tuple[dict[str, Any], str, str]] = []
        for submodule in attributes:
            for key, buffer in submodule["_buffers"].items():
                if buffer is not None:
                    self._buffer_places.append((submodule["_buffers"], key, self.names[buffer]))
        self._restore = _take_snapshot(attributes)
        for tensor, name in self.names.items():
            # As torch tells what isinstance takes for a parameter.
            tensor._is_param = isinstance(tensor, nn.Parameter)
            tensor.__class__ = _StrayTensor
            tensor.name_in_module = name

    def _hook_submodules(self, units: Sequence[ModuleUnit]) -> None:
        """Let submodules fetch weights as they are read, and tell when they begin and end."""
        unit_numbers = {unit.path: number for number, unit in enumerate(units)}
        units_inside = _find_units_inside(units)
        classes: dict[type, type] = {}
        # Children before their parent.
        for path, submodule in reversed(list(_compat.named_modules(self.module))):
            names = {}
            for key, parameter in _compat.parameters_of(submodule).items():
                names[key] = self.names.get(parameter)
            submodule.__dict__["_parameters"] = _Weights(self, names)
            _compat.read_parametrized_by(submodule, self._parametrized.read)
            compiled = submodule.modules() if _compat.is_compiled(submodule) else ()
            scope = _Scope(
                template=self,
                module_unit=unit_numbers.get(path),
                inner_module_units=units_inside.get(path),
                is_recurrent=isinstance(submodule, nn.RNNBase),
                compiled_weights=list(map(_compat.parameters_of, compiled)),
            )
            if scope.module_unit is None and scope.inner_module_units is None and not scope.is_recurrent:
                continue
            cls = type(submodule)
            submodule.__class__ = classes.setdefault(cls, _make_scoped_class(cls))
            submodule.__dict__["_fshard_scope"] = scope

    def bind(self, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], dtypes: Dtypes) -> None:
        """Give the copy what it computes with.

        Args:
            values: Full parameters, by name.
            buffers: All buffers, by name.
            dtypes: As `choose_dtypes` returns them.
        """
        self._values = values
        self.dtypes = dtypes
        for buffers_of_submodule, key, name in self._buffer_places:
            buffers_of_submodule[key] = buffers[name]

    def gather_from(self, call: EngineCall, walk: ModelWalk) -> None:
        """Take the parameters that were not bound from a call of the engine, as they are read.

        Args:
            call: The call, which gathers units.
            walk: Where its forward is in the model.
        """
        self._call = call
        self.walk = walk

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the copy."""
        self._parametrized.begin()
        try:
            dtypes = self.dtypes.get(WHOLE_MODEL) or ModelDtypes()
            args, kwargs = cast_floating((args, kwargs), dtypes.inputs)
            return cast_floating(self.module(*args, **kwargs), dtypes.outputs)
        finally:
            self._parametrized.end()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Read the buffers as the forward left them, by name."""
        values: dict[str, torch.Tensor] = {}
        for buffers, key, name in self._buffer_places:
            # A buffer that several submodules hold is read where it stands first.
            values.setdefault(name, buffers[key])
        return values

    def release(self) -> bool:
        """Let go of all values, and of what a forward has set.

        Returns:
            Whether the copy is as it was made, and may serve another call.
        """
        self._values = {}
        self.dtypes = {}
        self._call = None
        self.walk = None
        self._last_gathered = None
        return self._restore()

    def fetch(self, weights: "_Weights", key: str, name: str) -> torch.Tensor:
        """Read a parameter. This gathers its unit, and so communicates, unless the unit is there already.

        Args:
            weights: The submodule's dict, which keeps the value for the next read until the unit is dropped.
            key: The parameter's name in the submodule.
            name: Its name in the whole module.

        Returns:
            The full parameter.

        Raises:
            RuntimeError: if `apply` has returned.
        """
        leaf = None if self.walk is None else self.walk.leaves.get(name)
        value = self._values.get(name) if leaf is None else self._read_from_unit(weights, key, name, leaf)
        if value is None:
            raise RuntimeError(
                f"apply: parameter {name!r} was read after apply returned, for example because your own backward "
                "recomputes a checkpoint. Call apply inside fs.value_and_grad."
            )
        # A tensor read under no_grad has no graph, so do not keep it for a later read that needs one.
        if torch.is_grad_enabled() or value.requires_grad:
            dict.__setitem__(weights, key, value)
        return value

    def _read_from_unit(self, weights: "_Weights", key: str, name: str, leaf: Leaf) -> torch.Tensor:
        """Read a parameter from its unit, and let the unit take it back from `weights` when it is dropped."""
        gathered = self._last_gathered
        # Mostly the unit that was read last is open, and all of its outputs are there.
        if gathered is not None and not (gathered.is_lazy or gathered.is_closed) and torch.is_grad_enabled():
            value = gathered.outputs.get(leaf)
            if value is not None:
                gathered.register_output(weights, key, value)
                return value

        assert self._call is not None
        assert self.walk is not None
        gathered = self.walk.make_readable(name)
        self._last_gathered = gathered
        value = self._call.get_output(gathered, leaf)
        gathered.register_output(weights, key, value)
        return value


class _Scope(NamedTuple):
    """What a submodule tells the engine when it is called.

    Attributes:
        template: The copy that it belongs to.
        module_unit: The number of the module unit that it owns, if any.
        inner_module_units: The numbers of the module units inside it; None if there are none, and for the whole module.
        is_recurrent: Whether it lists its weights itself, as torch.nn.LSTM does.
        compiled_weights: If torch.compile made it: the parameters of all modules inside it.
    """

    template: ModuleTemplate
    module_unit: int | None
    inner_module_units: range | None
    is_recurrent: bool
    compiled_weights: Sequence[dict[str, Any]]


def _find_units_inside(units: Sequence[ModuleUnit]) -> dict[str, range]:
    """Find the numbers of the module units inside each submodule that has some, except the whole module."""
    firsts: dict[str, int] = {}
    lasts = {}
    for number, unit in enumerate(units):
        # Leave out the submodule of the unit itself and the whole module, which always runs.
        for outer in list(list_enclosing(unit.path))[1:-1]:
            firsts.setdefault(outer, number)
            lasts[outer] = number
    return {path: range(firsts[path], lasts[path] + 1) for path in lasts}


class _Weights(dict[str, Any]):
    """A submodule's `_parameters`: it holds those that were read, and looks others up.

    Only a read of one parameter may gather. So the views use Mapping's methods, which call `__iter__` and
    `__getitem__`.
    """

    get = Mapping.get  # type: ignore[assignment]
    keys = Mapping.keys  # type: ignore[assignment]
    values = Mapping.values  # type: ignore[assignment]
    items = Mapping.items  # type: ignore[assignment]

    def __init__(self, template: ModuleTemplate, names: Mapping[str, str | None]) -> None:
        self._template = template
        self._names = names

    def __missing__(self, key: str) -> torch.Tensor | None:
        """Look up a parameter that was not read yet. This may communicate: see `ModuleTemplate.fetch`."""
        name = self._names[key]
        return None if name is None else self._template.fetch(self, key, name)

    def __delitem__(self, key: str) -> None:
        """Forget a parameter that was read. It stays a parameter, whether it was read or not."""
        self.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# Prefixes of functions that need no values. Attributes are read by `__get__`.
_METADATA = ("__get__", "__len__", "__repr__", "__format__", "is_", "size", "stride", "dim", "numel", "element_size")


class _StrayTensor(torch.Tensor):
    """A parameter or buffer of the copy, which has no values: a forward gets it only past its submodule.

    Some kernels of torch, such as that of matrix products on a CPU, take a tensor on the meta device, and compute with
    memory that nobody has written to.
    """

    name_in_module: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, *operands: Any) -> Any:
        """Let only what needs no values be read, such as the shape, or whether it was written to."""
        name = next(leaf.name_in_module for leaf in tree_leaves(operands) if isinstance(leaf, cls))
        if func.__name__.startswith(_METADATA):
            # Those of a trace do not know this class.
            with _compat.outside_modes():
                result = super().__torch_function__(func, types, *operands)
            if isinstance(result, cls):
                # A view, such as .T
                result.name_in_module = name
            return result
        raise ValueError(
            f"apply: {func.__name__} got {name!r} from a list, a closure or another object that holds it, where it has "
            "no values. Read it as an attribute of its submodule, as in self.weight."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        """Stay one tensor, because there are no values to copy: a forward may copy a submodule."""
        return self


class _ParametrizedCache:
    """The parametrized tensors of one forward, for as long as torch caches such tensors.

    One `parametrize.cached()` may be around calls of several parameters, and torch's own cache would give the tensors
    of the first call to the second.
    """

    def __init__(self) -> None:
        """Start with no forward running."""
        self._torch_cache: object | None = None
        self._tensors: dict[tuple[nn.Module, str], torch.Tensor] | None = None

    def begin(self) -> None:
        """Let a forward begin."""
        self._tensors = {}

    def end(self) -> None:
        """Let it end, and forget its tensors."""
        self._torch_cache = None
        self._tensors = None

    def read(self, submodule: nn.Module, name: str) -> torch.Tensor:
        """Compute a parametrized tensor of a submodule: once while torch caches such tensors and the forward runs."""
        torch_cache = _compat.parametrization_cache()
        if torch_cache is None or self._tensors is None:
            return _compat.compute_parametrized(submodule, name)
        if torch_cache is not self._torch_cache:
            self._torch_cache = torch_cache
            self._tensors = {}
        if (submodule, name) not in self._tensors:
            self._tensors[submodule, name] = _compat.compute_parametrized(submodule, name)
        return self._tensors[submodule, name]


# Exact types only: a subclass may not accept its contents back.
_RESTORED_TYPES = (dict, OrderedDict, defaultdict, list, set, _Weights)


def _take_snapshot(attributes: Iterable[dict[str, Any]]) -> Callable[[], bool]:
    """Copy the attributes of submodules, so that a call does not see the changes of the one before.

    A forward may set attributes, and write to the dicts, lists, sets and plain tensors among them. Its changes to other
    objects stay.

    Args:
        attributes: The attributes of each submodule.

    Returns:
        A function that puts all back; it returns False where that cannot be done, because a tensor was written to.
    """
    contents = {}
    versions = []
    values: list[Any] = list(attributes)
    # The loop also visits values appended below.
    for value in values:
        if torch.is_tensor(value):
            versions.append((value, _compat.version(value)))
        elif type(value) is tuple:
            values.extend(value)
        elif type(value) in _RESTORED_TYPES and id(value) not in contents:
            # _Weights is still empty here.
            content = value.copy()
            contents[id(value)] = value, content
            values.extend(content.values() if isinstance(content, dict) else content)
    # Most are empty, such as dicts of hooks.
    empty = [container for container, content in contents.values() if not content]
    filled = [pair for pair in contents.values() if pair[1]]

    def restore() -> bool:
        for container in filter(None, empty):
            container.clear()
        for container, content in filled:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        return all(_compat.version(tensor) == version for tensor, version in versions)

    return restore


def _make_scoped_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Make a class like `cls` whose calls tell the engine that the submodule begins and ends."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scope: _Scope = self.__dict__["_fshard_scope"]
        walk = scope.template.walk
        if walk is not None:
            walk.enter(scope.module_unit, scope.inner_module_units)
        has_failed = True
        try:
            # A compiler reads parameters past Python's own lookup, so gather them before.
            for weights in scope.compiled_weights:
                for key in weights:
                    weights[key]
            if scope.is_recurrent:
                _compat.set_flat_weights(self)
            dtypes = scope.template.dtypes.get(scope.module_unit) or ModelDtypes()
            args, kwargs = cast_floating((args, kwargs), dtypes.inputs)
            result = cast_floating(cls.__call__(self, *args, **kwargs), dtypes.outputs)
            has_failed = False
            return result
        finally:
            if scope.is_recurrent:
                _compat.forget_flat_weights(self)
            if walk is not None:
                walk.leave(scope.module_unit, scope.inner_module_units, has_failed=has_failed)

    return _compat.make_subclass(cls, {"__call__": call})
