"""Plans as tables, without ranks: which neighbours are merged, and what a plan knows of its units."""

from dataclasses import replace

import fshard as fs
from fshard.engine.plan import LeafFacts, ModuleUnit, Unit, make_plan, make_unit, merge_small_units
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


# A model of three blocks, the second of which holds two layers, and a head that is tied to the embedding.
MODULE = (
    ModuleUnit("embedding", ("embedding",), 1, True),
    ModuleUnit("first", ("first",), 2, False),
    ModuleUnit("second", ("second", "plain"), 5, False),
    ModuleUnit("second.0", ("second.0",), 4, False),
    ModuleUnit("second.1", ("second.1",), 5, False),
    ModuleUnit("head", ("embedding", "head"), 6, False),
)
SHAPES = {"embedding": (5, 4), "first": (4, 4), "second": (3,), "second.0": (4, 4), "second.1": (8, 4), "head": (6, 2)}
# Padded bytes of the units; the tied leaf counts in both of those that use it, and a plain leaf in none.
BYTES = {"embedding": 192, "first": 128, "second": 32, "second.0": 128, "second.1": 256, "head": 96 + 192}


def plan_of(ranks=2, **policy):
    """A plan of two ranks, which fill up dims of odd sizes."""
    axis = fs.Axis("shard", ranks, "group")
    strategy, reshard = fs.zero3(axis, min_shard_elements=0), ReshardPolicy(**policy)
    specs = [replace(fs.Spec(s).split(axis, 0), transform=strategy, reshard=reshard) for s in SHAPES.values()]
    return make_plan(MODULE, tuple([LeafFacts(name, spec, 8) for name, spec in zip(SHAPES, specs)]))


def facts(plan, *names):
    """What a plan says of each of its units."""
    return [tuple(getattr(unit, name) for name in names) for unit in plan.units]


def test_a_plan():
    plan = plan_of(bucket_bytes=0)
    assert {unit.name: unit.nbytes for unit in plan.units} == BYTES
    assert facts(plan, "leaf_names", "enclosing", "is_embedding", "last_module_unit", "is_regathered") == [
        (("embedding",), (), True, 0, True),
        (("first",), (), False, 1, True),
        (("second",), (), False, 2, True),
        (("second.0",), (2,), False, 3, True),
        (("second.1",), (2,), False, 4, True),
        (("embedding", "head"), (), False, 5, True),
    ]
    assert (plan.unit_of, plan.ends) == ((0, 1, 2, 3, 4, 5), (1, 2, 5, 4, 5, 6))
    assert not any(unit.is_regathered for unit in plan_of(ranks=1, bucket_bytes=0).units)
    # It depends on values alone: a call only looks it up.
    assert plan_of(bucket_bytes=0) is plan
    assert make_unit("unit", ()) == Unit("unit", (), 0, ReshardPolicy(), False)


def test_a_plan_of_merged_units():
    """By the bytes of their full tensors. Units inside a block are merged with no others."""
    plan = plan_of(bucket_bytes=128 + 256)
    # A table that is merged with a layer comes again with it.
    assert facts(plan, "name", "enclosing", "is_embedding", "last_module_unit") == [
        ("embedding to first", (), False, 1),
        ("second", (), False, 2),
        ("second.0 to second.1", (1,), False, 4),
        ("head", (), False, 5),
    ]
    assert plan.unit_of == (0, 0, 1, 2, 2, 3)
    # A leaf that units share counts once.
    total = sum(BYTES.values())
    plan = plan_of(bucket_bytes=total)
    assert facts(plan, "name", "nbytes", "leaf_names") == [("embedding to head", total - 192, tuple(SHAPES))]
    # A rule decides by the names of units before they are merged.
    plan = plan_of(regather=("second", "second.*"), bucket_bytes=2**20)
    assert facts(plan, "name", "is_regathered") == [
        ("embedding to first", False),
        ("second to second.1", True),
        ("head", False),
    ]
