"""Unit rules: which of a module's parameters are gathered together, and in which order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from fshard import _compat
from fshard.checks import kind
from fshard.tree import matches

# They hold submodules and have no forward.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Rule = type[nn.Module] | str | int | Callable[[str, nn.Module], bool]
Units = Rule | Sequence[Rule] | None


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
    running = {path for path, submodule in module.named_modules() if path and not isinstance(submodule, _CONTAINERS)}
    apart = [any(around in running for around in _upwards(path.rpartition(".")[0])) for path in ordered]
    return [
        ModuleUnit(path, tuple(owned[path]), end, alone) for path, end, alone in zip(ordered, ends, apart, strict=True)
    ]


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
    rules = list(units) if isinstance(units, list | tuple) else [units]
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
    raise ValueError(f"functionalize: expected units to be {needed}, got {kind(rule)}")


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
