"""Units and plans: what is gathered together, and in which order: values that are computed once and cached."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fshard.tree import ReshardPolicy, Spec, matches

DEFAULT_POLICY = ReshardPolicy()


class LeafFacts(NamedTuple):
    """The facts about a leaf that a plan follows from.

    Attributes:
        name: The leaf's name.
        spec: The leaf's spec.
        element_size: The bytes of one element.
    """

    name: str
    spec: Spec
    element_size: int


class Unit(NamedTuple):
    """Leaves that are gathered together.

    Attributes:
        name: The unit's name, for errors and labels.
        leaf_names: The names of its leaves.
        nbytes: The bytes of their full tensors, as they are stored.
        policy: Their reshard policy; the leaves of a unit share one strategy.
        is_regathered: Whether the unit is dropped after its forward and gathered again in the backward.
        is_embedding: Whether it holds only tables of embeddings, whose values no backward needs.
        enclosing: The numbers of the units of its plan that it lies inside.
        last_module_unit: The number of the last of the module's units that were merged into it.
        is_merged: Whether several of the module's units were merged into it.
    """

    name: str
    leaf_names: tuple[str, ...]
    nbytes: int
    policy: ReshardPolicy
    is_regathered: bool
    is_embedding: bool = False
    enclosing: tuple[int, ...] = ()
    last_module_unit: int = -1
    is_merged: bool = False

    def count_ahead(self, sizes: Iterable[int]) -> int:
        """Count the units to gather ahead of this one.

        That is the number that its policy names. If the policy names none, it is one, and more as long as all of them
        have at most the policy's `ahead_bytes` together.

        Args:
            sizes: The bytes of the units that come next.

        Returns:
            How many of the next units to gather ahead.
        """
        min_count = 1
        max_bytes = self.policy.ahead_bytes
        if self.policy.prefetch is not None:
            min_count = self.policy.prefetch
            # An empty unit costs nothing, so gather it as well.
            max_bytes = 0
        count = 0
        total_bytes = 0
        for nbytes in sizes:
            total_bytes += nbytes
            if count >= min_count and total_bytes > max_bytes:
                break
            count += 1
        return count


class ModuleUnit(NamedTuple):
    """Parameters of a module that are gathered when one of its submodules is entered, before neighbors are merged.

    Attributes:
        path: The submodule's name; "" is the whole module.
        leaf_names: The names of the parameters.
        end: The number of the first module unit after this one that does not lie inside it.
        is_embedding: Whether it holds only tables of embeddings.
        is_selected: Whether the user's rule selects the submodule, which is not the whole module.
    """

    path: str
    leaf_names: tuple[str, ...]
    end: int
    is_embedding: bool
    is_selected: bool = False


class Plan(NamedTuple):
    """The units of a model, in the order in which they are gathered.

    Attributes:
        units: The units, each before those that lie inside it.
        unit_of: For each module unit the number of the unit that it was merged into.
        units_holding: For each leaf name the numbers of the units that hold the leaf.
        ends: For each module unit the number of the first module unit after it that does not lie inside it.
    """

    units: tuple[Unit, ...]
    unit_of: tuple[int, ...]
    units_holding: Mapping[str, Sequence[int]]
    ends: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def make_unit(name: str, leaves: tuple[LeafFacts, ...]) -> Unit:
    """Describe a unit of some leaves.

    Args:
        name: The unit's name.
        leaves: The leaves.

    Returns:
        The unit, which lies inside no other and is no embedding.
    """
    nbytes = 0
    policy = None
    for leaf in leaves:
        nbytes += math.prod(leaf.spec.padded_shape) * leaf.element_size
        policy = policy or leaf.spec.reshard
    policy = policy or DEFAULT_POLICY

    regathered = policy.regather
    if not isinstance(regathered, bool):
        regathered = matches(regathered, name)
    # A single rank holds everything anyway.
    regathered = regathered and any(_spans_ranks(leaf.spec) for leaf in leaves)
    leaf_names = tuple([leaf.name for leaf in leaves])
    return Unit(name=name, leaf_names=leaf_names, nbytes=nbytes, policy=policy, is_regathered=regathered)


def _spans_ranks(spec: Spec) -> bool:
    """Tell whether a leaf's transform has an axis of several ranks."""
    return spec.transform is not None and any(axis.size > 1 for axis in spec.transform.axes)


@functools.lru_cache(maxsize=64)
def make_plan(
    module_units: tuple[ModuleUnit, ...],
    names: tuple[str, ...],
    specs: tuple[Spec, ...],
    element_sizes: tuple[int, ...],
) -> Plan:
    """Merge small neighbors among a module's units.

    Args:
        module_units: The module's units, each before those that lie inside it.
        names: The names of all sharded leaves.
        specs: Their specs.
        element_sizes: The bytes of one element of each.

    Returns:
        The plan.
    """
    # Each forward asks for its plan, so facts of thousands of leaves are put together only where it is new.
    facts = dict(zip(names, map(LeafFacts, names, specs, element_sizes), strict=True))
    singles = [_merge([module_unit], facts) for module_unit in module_units]
    ends = tuple([module_unit.end for module_unit in module_units])
    runs = merge_small_units(singles, ends)

    units = []
    unit_of = []
    units_holding: dict[str, list[int]] = {}
    enclosing: tuple[int, ...] = ()
    for number, run in enumerate(runs):
        merged_units = module_units[run.start : run.stop]
        # Only the unit before this one, and the units around that one, can be around this one.
        candidates = enclosing if number == 0 else (*enclosing, number - 1)
        enclosing = tuple([outer for outer in candidates if run.start < ends[runs[outer].start]])
        unit = _merge(merged_units, facts)
        # The only unit of a model stays until its backward anyway. If it is small, it stays even where another model
        # follows.
        stays = len(runs) == 1 and unit.nbytes <= unit.policy.bucket_bytes
        units.append(
            unit._replace(
                is_regathered=singles[run.start].is_regathered and not stays,
                is_embedding=all(module_unit.is_embedding for module_unit in merged_units),
                enclosing=enclosing,
                last_module_unit=run.stop - 1,
                is_merged=len(run) > 1,
            )
        )
        unit_of += [number] * len(merged_units)
        for name in unit.leaf_names:
            units_holding.setdefault(name, []).append(number)
    return Plan(tuple(units), tuple(unit_of), units_holding, ends)


def _merge(module_units: Sequence[ModuleUnit], facts: Mapping[str, LeafFacts]) -> Unit:
    """Describe module units as one unit. Parameters that are not sharded are left out; a tied one counts once."""
    names: dict[str, None] = {}
    for module_unit in module_units:
        names.update(dict.fromkeys(module_unit.leaf_names))
    first = module_units[0].path or "(root)"
    last = module_units[-1].path or "(root)"
    name = first if len(module_units) == 1 else f"{first} to {last}"
    return make_unit(name, tuple([facts[leaf_name] for leaf_name in names if leaf_name in facts]))


def merge_small_units(
    units: Sequence[Unit], ends: Sequence[int], first: int = 0, end: int | None = None
) -> list[range]:
    """Choose the neighbors to merge, because latency would cost more than the transfer.

    A unit is merged with all units inside it or with none. Units inside different parents are merged only along with
    their parents.

    Args:
        units: The module's units in the order in which they are gathered, each before those that lie inside it.
        ends: For each unit the number of the first after it that does not lie inside it.
        first: The number of the first unit inside one parent.
        end: The number of the first unit after that parent; None for all units.

    Returns:
        The numbers of the units of each run that is merged into one. Each unit is in one run.
    """
    end = len(units) if end is None else end
    runs = []
    # The last run described as one unit; None if nothing may join it.
    open_run: Unit | None = None
    while first < end:
        after = ends[first]
        family = units[first:after]
        if not _may_merge(family):
            runs.append(range(first, first + 1))
            runs += merge_small_units(units, ends, first + 1, after)
            open_run = None
        elif open_run is not None and _may_merge([open_run, *family]):
            runs[-1] = range(runs[-1].start, after)
            open_run = _describe_merged([open_run, *family])
        else:
            runs.append(range(first, after))
            open_run = _describe_merged(family)
        first = after
    return runs


def _describe_merged(units: Sequence[Unit]) -> Unit:
    """Describe merged units by the first one, with the bytes of all."""
    return units[0]._replace(nbytes=sum([unit.nbytes for unit in units]))


def _may_merge(units: Sequence[Unit]) -> bool:
    """Tell whether units may be merged: one policy holds for all of them, and together they are small enough.

    Either all of them are regathered or none, because a policy may choose units by their names.
    """
    if len(units) == 1:
        return True
    # A unit without sharded leaves has no policy of its own.
    policies = {unit.policy for unit in units if unit.leaf_names}
    are_alike = len(policies) <= 1 and len({unit.is_regathered for unit in units}) == 1
    return are_alike and sum(unit.nbytes for unit in units) <= units[0].policy.bucket_bytes
