"""Trees that the exchange of DTensors refuses."""

import fshard as fs
from tests.bad_input import Row, assert_all_refused
from tests.test_bad_trees import by_no_strategy, changed_shapes, unfit

ROWS = [
    unfit(
        "DTensors",
        lambda world: ({"a": fs.to_dtensor(world.params, world.mesh)["a"]}, world.zero2),
        "['a']: expected a plain full tensor, got a float32 DTensor of shape (5, 3)",
    ),
    changed_shapes(fs.to_dtensor, lambda world: (world.mesh,)),
    by_no_strategy(fs.from_dtensor, "full", "strategy"),
    Row(
        "DTensors of another mesh",
        lambda world: (world.params, world.other),
        fs.to_dtensor,
        "to_dtensor: DTensor has no such layout on this mesh\n"
        "  ['a']: expected dims split evenly, in the order of data=2 in group {group}, unit=1 in group {group}, and "
        "numbers whole, got P('shard') of shape (5, 3) over shard=2 in group {group}\n"
        "  ['b'][0]: expected dims split evenly, in the order of data=2 in group {group}, unit=1 in group {group}, and "
        "numbers whole, got P('shard') of shape (4,) over shard=2 in group {group}\n"
        "To fix: pass the mesh they were sharded with, or reshard these leaves; min_shard_elements keeps small ones "
        "whole.",
    ),
    Row(
        "DTensors taken over by a strategy of another mesh",
        lambda world: ({"a": fs.to_dtensor(world.params, world.mesh)["a"]}, fs.ddp(world.other, "data")),
        fs.from_dtensor,
        "from_dtensor: leaves cannot be taken over\n"
        "  ['a']: expected data=2 in group {group}, got shard=2 in group {group}\n"
        "To fix: use the strategy's mesh and Shard or Replicate.",
    ),
]


def test_bad_trees_are_refused():
    assert_all_refused(ROWS)
