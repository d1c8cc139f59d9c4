"""Units: which parameters of a module are gathered together, by the rule that a user gives."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fshard import _compat
from fshard.engine import ModuleUnit
from fshard.errors import shorten
from fshard.tree import ModelDtypes, is_sharded, matches

Rule = type[nn.Module] | str | int | Callable[[str, nn.Module], bool]
Units = Rule | Collection[Rule] | None

# What units cast to, by their numbers; None keeps all dtypes.
Dtypes = dict[int | None, ModelDtypes | None]

# Stands for the whole model where a unit has its number.
WHOLE_MODEL = -1


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
    first_names = {parameter: name for name, parameter in _compat.named_parameters(module)}
    modules = dict(_compat.named_modules(module))
    selected = select(module, "" if units is None else units)
    # For each module the names of the parameters that it gathers; in a dict, which keeps their order.
    names_by_path: dict[str, dict[str, None]] = {path: {} for path in modules}
    for path, submodule in modules.items():
        names = names_by_path[_find_gathering_module(path, modules, selected)]
        for parameter in submodule.parameters(recurse=False):
            names[first_names[parameter]] = None
    paths = [path for path, names in names_by_path.items() if names]
    units_inside = Counter(outer for path in paths for outer in list_enclosing(path))
    planned = []
    for number, path in enumerate(paths):
        end = number + units_inside[path]
        is_selected = path != "" and path in selected
        planned.append(ModuleUnit(path, tuple(names_by_path[path]), end, _is_lookup(modules[path]), is_selected))
    return planned


def _find_gathering_module(path: str, modules: Mapping[str, nn.Module], selected: Collection[str]) -> str:
    """Find the module that gathers the parameters of a submodule: the submodule itself where no rule selects one."""
    enclosing = list(list_enclosing(path))
    for outer in reversed(enclosing):
        # A compiled submodule is entered as a whole, so all of its parameters must be there before.
        if _compat.is_compiled(modules[outer]):
            return outer
    for outer in enclosing:
        if outer in selected:
            return outer
    return path


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
        selected = set().union(*(select(module, part) for part in rule))
    else:
        selected = {path for path, submodule in _compat.named_modules(module) if _fits(rule, path, submodule)}
    if not selected:
        raise ValueError(
            f"functionalize: units={shorten(repr(rule))} matches no submodule. Use names that module.named_modules() "
            "lists, a module class, a number of parameters, or a function of (name, module)."
        )
    return selected


def _fits(rule: Any, path: str, submodule: nn.Module) -> bool:
    """Tell whether a rule selects a submodule."""
    if isinstance(rule, str):
        # As many dots, so that `*` stands for one part between dots.
        return path.count(".") == rule.count(".") and matches(rule, path)
    if type(rule) is int:
        return _size(submodule) >= rule > max(map(_size, submodule.children()), default=0)
    if isinstance(rule, type):
        return isinstance(submodule, rule)
    if isinstance(rule, nn.Module) or not callable(rule):
        return False
    return bool(rule(path, submodule))


def _size(submodule: nn.Module) -> int:
    return sum(parameter.numel() for parameter in submodule.parameters())


def list_enclosing(path: str) -> Iterator[str]:
    """List the name of a submodule and those of the modules around it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def choose_dtypes(units: Sequence[ModuleUnit], params: Mapping[str, Any]) -> Dtypes:
    """Choose the dtypes that a module, or the submodules of its units, cast their inputs and outputs to.

    Args:
        units: The units of the module.
        params: Its parameters by name.

    Returns:
        By the numbers of units the dtypes of the strategy that most of a unit's elements have. If all parameters have
        the same dtypes, the module casts, for which WHOLE_MODEL stands, and units that the user's rule selects cast
        their inputs again, as FSDP2 does: the module may have mixed them with a buffer of another dtype.
    """
    dtypes = {leaf.spec.model_dtypes for leaf in params.values() if is_sharded(leaf)}
    chosen: Dtypes = {}
    if len(dtypes) == 1:
        common = dtypes.pop()
        chosen[WHOLE_MODEL] = common
        for number, unit in enumerate(units):
            if common and unit.is_selected:
                chosen[number] = ModelDtypes(common.inputs)
        return chosen
    for number, unit in enumerate(units):
        elements: Counter[ModelDtypes | None] = Counter({None: 0})
        for name in unit.leaf_names:
            leaf = params[name]
            if is_sharded(leaf):
                elements[leaf.spec.model_dtypes] += leaf.numel()
        chosen[number] = max(elements, key=elements.__getitem__)
    return chosen
