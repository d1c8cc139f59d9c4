"""Plans as tables, without ranks: which neighbours are merged, and how many units are gathered ahead."""

from dataclasses import replace

import fshard as fs
from fshard.engine.plan import ModuleUnit, Unit, make_plan, make_unit, merge_small_units
from fshard.tree import ReshardPolicy

# Sizes of units and where those inside each end, the limit, and the first and last unit of each run that is merged.
MERGED = [
    ([(4, 1), (4, 2), (4, 3), (4, 4)], 100, "0-3"),
    ([(4, 1), (4, 2), (4, 3), (4, 4)], 8, "0-1 2-3"),
    ([(4, 1), (4, 2), (4, 3)], 0, "0-0 1-1 2-2"),
    ([(4, 1), (50, 2), (4, 3)], 10, "0-0 1-1 2-2"),
    ([(4, 1), (0, 2), (4, 3)], 4, "0-1 2-2"),
    # Units inside others.
    ([(4, 3), (4, 2), (4, 3), (4, 4)], 100, "0-3"),
    ([(9, 3), (4, 2), (4, 3), (4, 4)], 16, "0-0 1-2 3-3"),
    ([(9, 4), (4, 3), (4, 3), (9, 4)], 17, "0-0 1-3"),
    ([], 100, ""),
]


def unit(nbytes, limit, is_regathered=True):
    return Unit("unit", (), nbytes, ReshardPolicy(bucket_bytes=limit), is_regathered)


def test_merge_small_units():
    for sizes, limit, expected in MERGED:
        runs = merge_small_units([unit(nbytes, limit) for nbytes, _ in sizes], [end for _, end in sizes])
        assert " ".join(f"{run.start}-{run.stop - 1}" for run in runs) == expected
        # Each unit is in one of them.
        assert [n for run in runs for n in run] == list(range(len(sizes)))
    units = [unit(4, 100), unit(4, 100, is_regathered=False), unit(4, 100), unit(4, 100)]
    assert merge_small_units(units, [1, 2, 3, 4]) == [range(1), range(1, 2), range(2, 4)]
    # A unit without sharded leaves, which has no policy of its own, does not part its neighbors.
    first, last = (unit(4, 100, is_regathered=False)._replace(leaf_names=(name,)) for name in "ab")
    assert merge_small_units([first, make_unit("empty", ()), last], [1, 2, 3]) == [range(3)]


# How far a policy lets gathers run ahead, the sizes of the next units, and how many of them are gathered.
AHEAD = [
    ({"prefetch": 0}, (4, 4), 0),
    ({"prefetch": 2}, (4, 4, 4), 2),
    # An empty unit costs nothing.
    ({"prefetch": 0}, (0, 4), 1),
    # As many as fit into two buckets, and at least one.
    ({"bucket_bytes": 4}, (4, 4, 4), 2),
    ({"bucket_bytes": 4}, (4, 9), 1),
    ({"bucket_bytes": 4}, (9, 4), 1),
]


def test_units_that_are_gathered_ahead():
    for policy, sizes, number in AHEAD:
        ahead = Unit("unit", (), 4, ReshardPolicy(**policy), is_regathered=True)
        assert ahead.count_ahead(sizes) == number, (policy, sizes)


def plan_of(ranks):
    """A plan of one unit beside another."""
    axis = fs.Axis("shard", ranks, "group")
    spec = fs.Spec((4, 4)).split(axis, 0)
    spec = replace(spec, transform=fs.zero3(axis, min_shard_elements=0), reshard=ReshardPolicy(bucket_bytes=0))
    units = (ModuleUnit("first", ("first",), 1, False), ModuleUnit("second", ("second",), 2, False))
    return make_plan(units, ("first", "second"), (spec, spec), (8, 8))


def test_a_plan_depends_on_values_alone_and_one_rank_gathers_nothing_again():
    """A call only looks it up."""
    assert plan_of(ranks=2) is plan_of(ranks=2)
    assert [unit.is_regathered for ranks in (1, 2) for unit in plan_of(ranks).units] == [False, False, True, True]
