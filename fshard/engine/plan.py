"""Units and plans: what is gathered together, and in which order, as values that a step only looks up."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fshard.tree import ReshardPolicy, Spec, matches

PLAIN = ReshardPolicy()

# Name, spec and bytes of an element of a leaf.
Facts = tuple[str, Spec, int]


class Unit(NamedTuple):
    """Leaves that are gathered together.

    Attributes:
        name: For errors and labels.
        names: The names of its leaves.
        nbytes: The bytes of their full tensors, as they are stored.
        policy: Their reshard policy, as they share one strategy.
        regathered: Whether it is dropped after its forward and gathered again in the backward.
        lookup: Whether it holds tables of embeddings alone, whose values no backward needs.
        inside: Numbers of the units of its plan that it lies inside.
        last: Number of the last of the module's units that were merged into it.
    """

    name: str
    names: tuple[str, ...]
    nbytes: int
    policy: ReshardPolicy
    regathered: bool
    lookup: bool = False
    inside: tuple[int, ...] = ()
    last: int = -1

    def ahead(self, sizes: Iterable[int], least: int = 1) -> int:
        """Count the units to gather ahead of it: the policy's number, or a few and more while they are small together.

        Args:
            sizes: The bytes of those that come next.
            least: How many at least where the policy names no number; then more, up to its `ahead_bytes` together.

        Returns:
            How many of them.
        """
        number = self.policy.prefetch
        least, most = (least, self.policy.ahead_bytes) if number is None else (number, 0)
        totals = enumerate(itertools.accumulate(sizes), start=1)
        return sum(1 for _ in itertools.takewhile(lambda n: n[0] <= least or n[1] <= most, totals))


class ModuleUnit(NamedTuple):
    """Parameters of a module that are gathered when one of its submodules is entered, before neighbours are merged.

    Attributes:
        path: The submodule's name; "" is the whole module.
        names: The parameters' names.
        end: Number of the first unit behind this one that does not lie inside it.
        lookup: Whether it holds tables of embeddings alone.
    """

    path: str
    names: tuple[str, ...]
    end: int
    lookup: bool


class Plan(NamedTuple):
    """The units of a model, in the order of their gathering.

    Attributes:
        units: The units, each before those that lie inside it.
        unit_of: For each of the module's units the number of the one that it was merged into.
        holders: For each leaf the numbers of the units that it is a part of, by its name.
        ends: For each of the module's units the number of the first behind it that does not lie inside it.
    """

    units: tuple[Unit, ...]
    unit_of: tuple[int, ...]
    holders: Mapping[str, Sequence[int]]
    ends: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def unit_of(name: str, leaves: tuple[Facts, ...]) -> Unit:
    """Describe a unit.

    Args:
        name: Its name.
        leaves: Its leaves.

    Returns:
        The unit.
    """
    specs = [spec for _, spec, _ in leaves]
    policy = next((spec.reshard for spec in specs if spec.reshard), PLAIN)
    nbytes = sum(math.prod(spec.padded_shape) * size for _, spec, size in leaves)
    # A single rank holds everything anyway.
    shared = any(axis.size > 1 for spec in specs if spec.transform for axis in spec.transform.axes)
    regathered = policy.regather if isinstance(policy.regather, bool) else matches(policy.regather, name)
    return Unit(name, tuple([name for name, _, _ in leaves]), nbytes, policy, shared and regathered)


@functools.lru_cache(maxsize=64)
def planned(parts: tuple[ModuleUnit, ...], leaves: tuple[Facts, ...]) -> Plan:
    """Merge small neighbours among a module's units.

    Args:
        parts: The units, each before those that lie inside it.
        leaves: All sharded leaves.

    Returns:
        The plan.
    """
    known = {leaf[0]: leaf for leaf in leaves}

    def joined(first: int, end: int) -> Unit:
        own = dict.fromkeys(name for part in parts[first:end] for name in part.names if name in known)
        paths = [part.path or "(root)" for part in parts[first:end]]
        name = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
        return unit_of(name, tuple([known[name] for name in own]))

    ends, singles = [part.end for part in parts], [joined(i, i + 1) for i in range(len(parts))]
    spans, holders = merged(singles, ends), dict[str, list[int]]()
    units, around = list[Unit](), tuple[int, ...]()
    for first, end in spans:
        lookup = all(part.lookup for part in parts[first:end])
        # Of the last one and those around it, those that hold this one.
        around = tuple(n for n in (*around, len(units) - 1) if n >= 0 and first < ends[spans[n][0]])
        unit = joined(first, end)
        # The only one stays till its backward anyway; what is small stays where another model follows, too.
        kept = len(spans) == 1 and unit.nbytes <= unit.policy.merge_bytes
        regathered = singles[first].regathered and not kept
        for name in unit.names:
            holders.setdefault(name, []).append(len(units))
        units.append(unit._replace(regathered=regathered, lookup=lookup, inside=around, last=end - 1))
    numbers = [n for n, (first, end) in enumerate(spans) for _ in range(first, end)]
    return Plan(tuple(units), tuple(numbers), holders, tuple(ends))


def merged(units: Sequence[Unit], ends: Sequence[int], first: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """Merge small neighbours, because latency would cost more than the transfer.

    Args:
        units: In the order of their gathering, each before those that lie inside it.
        ends: For each the number of the first behind it that does not lie inside it.
        first: Number of the first unit of one parent.
        end: Number of the first unit behind that parent; None for all.

    Returns:
        First and end of each run that is merged. A unit is merged with all units inside it or with none; units inside
        different parents are merged only along with those.
    """
    # The runs, and the last one as one unit, if it holds all units inside its own.
    spans, run = list[tuple[int, int]](), list[Unit]()
    while first < (len(units) if end is None else end):
        after, parts = ends[first], units[first : ends[first]]
        if not _fits(parts):
            spans += [(first, first + 1), *merged(units, ends, first + 1, after)]
            parts = []
        elif run and _fits([*run, *parts]):
            spans[-1] = spans[-1][0], after
            parts = [*run, *parts]
        else:
            spans.append((first, after))
        run = [unit._replace(nbytes=sum([part.nbytes for part in parts])) for unit in parts[:1]]
        first = after
    return spans


def _fits(units: Sequence[Unit]) -> bool:
    """Tell whether units may be merged: one alone, or all regathered or none, and at most `merge_bytes` together."""
    alike = len({unit.regathered for unit in units}) == 1
    return len(units) == 1 or (alike and sum(unit.nbytes for unit in units) <= units[0].policy.merge_bytes)
