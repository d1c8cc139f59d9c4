"""Bad trees: what shard, unshard, reshard, gather and the DTensor conversions refuse, before they communicate."""

from dataclasses import replace

import pytest
import torch

import fshard as fs
from fshard.comm.agree import FIRST
from tests.bad_input import Row, assert_all_refused, assert_refused

FIT = "\nTo fix: pass full tensors whose shapes fit the strategy."
ALIKE = (
    "\nTo fix: build the same tree on every rank, from one seed; simulated ranks share a generator, so build it before "
    "they start."
)
KEEP = "\nTo fix: keep a leaf's shape when mapping over it."
GATHERED = "make them by fs.shard or fs.reshard; give a frozen leaf the spec of the trained one, or detach it"
TEXT = "of hash {hash} split by"
SPLIT = f"{TEXT} P('shard')"
GONE = fs.Axis("shard", 2, "gone")


def differs(name, tree, difference):
    """A row where ranks shard different trees: `tree` is made from whether this is the last rank."""

    def arguments(world):
        return tree(world.rank == world.mesh.size() - 1), world.zero2

    expected, got = difference.split(", got ")
    error = f"shard: ranks hold different trees\n  {expected} as on rank shard=0, got {got} on rank shard={{last}}"
    return Row(name, arguments, fs.shard, error + ALIKE, ("shard", "shard"))


def unfit(name, arguments, *problems):
    """A row of leaves that cannot be sharded."""
    lines = "".join(f"\n  {problem}" for problem in problems)
    return Row(name, arguments, fs.shard, f"shard: leaves cannot be sharded{lines}{FIT}", ("shard",))


ones = torch.ones


class Only(torch.nn.Module):
    """A module of one parameter."""

    def __init__(self, value):
        super().__init__()
        self.a = torch.nn.Parameter(value)

    def forward(self):
        return self.a * 1


def adapted(base, delta):
    """What adds a trained tensor to a frozen one and keeps the spec of the frozen one."""
    return {"a": replace(base["a"], local=base["a"].local + delta["a"].local)}


# Each is one rank's fault, and every rank raises.
DIFFERENT = [
    differs(
        "a leaf more on one rank",
        lambda last: {"a": ones(2), **({"b": ones(3)} if last else {}), "c": ones(1)},
        f"['b']: expected nothing, got float32[3] {SPLIT}",
    ),
    differs(
        "another value",
        lambda last: {"a": ones(2), "b": torch.tensor([0.0, -0.0 if last else 0.0])},
        f"['b']: expected float32[2] {SPLIT}, got float32[2] {SPLIT}",
    ),
    differs(
        "frozen on one rank",
        lambda last: {"a": torch.nn.Parameter(ones(2), requires_grad=not last)},
        f"['a']: expected float32[2] {SPLIT}, got frozen float32[2] {SPLIT}",
    ),
]


def changed_shapes(verb, rest):
    """A verb of shards whose shapes are not those of their specs; `rest` makes its other arguments."""
    return Row(
        f"{verb.__name__} of leaves whose shape was changed",
        lambda world: (fs.tree_map(lambda x: x[:1], world.params), *rest(world)),
        verb,
        f"{verb.__name__}: shards do not match their specs\n"
        "  ['a']: expected a local tensor of shape (3, 3), got a float32 Tensor of shape (1, 3) as local tensor\n"
        "  ['b'][0]: expected a local tensor of shape (2,), got a float32 Tensor of shape (1,) as local tensor" + KEEP,
    )


ROWS = [
    unfit(
        "leaves that are no tensors",
        lambda world: ({"a": ones(2), "n": [3, None], "s": "x", "v": ones(2).numpy()}, world.zero2),
        "['n'][0]: expected a plain full tensor, got an int",
        "['s']: expected a plain full tensor, got a str",
        "['v']: expected a plain full tensor, got a ndarray",
    ),
    unfit(
        "a dim that some leaves lack",
        lambda world: ({"a": ones(4, 2), "b": [ones(4), ones(())]}, fs.fully_shard(world.mesh, dim=1)),
        "['b'][0]: expected a dim 1 to split over 'shard', got shape (4,)",
        "['b'][1]: expected a dim 1 to split over 'shard', got shape ()",
    ),
    *(
        changed_shapes(verb, rest)
        for verb, rest in [
            (fs.gather, lambda world: ()),
            (fs.reshard, lambda world: (fs.ddp(world.mesh),)),
        ]
    ),
    *(
        Row(
            f"{name} of a frozen leaf that was computed from trained ones",
            lambda world: (fs.shard(world.full, world.zero2, frozen="*"), world.params),
            lambda base, params, call=call: fs.value_and_grad(lambda p: call(adapted(base, p)))(params),
            f"{name}: leaves cannot be gathered\n"
            "  ['a']: expected none, because its spec is frozen, got a computed tensor that requires a gradient\n"
            f"To fix: {GATHERED}.",
        )
        for name, call in [
            ("gather", lambda p: fs.gather(p)["a"].sum()),
            ("apply", lambda p: fs.functionalize(Only(torch.ones(5, 3))).apply(p).sum()),
        ]
    ),
    Row(
        "leaves of a mesh that is gone",
        lambda world: ({"a": replace(world.params["a"], spec=fs.Spec((5, 3), fs.P("shard"), (GONE,)))},),
        fs.gather,
        "gather: leaves of another mesh\n"
        "  ['a']: expected a group of that size that this process is in, got axis 'shard' of 2 ranks in group 'gone'\n"
        "To fix: shard the tree on a mesh of this process.",
    ),
]


@pytest.mark.parametrize("world", [3, "processes"])
def test_every_rank_refuses_what_one_rank_has_differently(world, workers):
    size = 2 if world == "processes" else world
    rows = [row._replace(error=row.error.replace("{last}", str(size - 1))) for row in DIFFERENT]
    for row, *ranks in zip(rows, *assert_refused(rows, workers(2) if world == "processes" else size), strict=True):
        for found in ranks:
            (_, digest), *texts = found.issued
            assert digest == FIRST * size, row.name
            assert texts, row.name
        assert len({found.text for found in ranks}) == 1, row.name


def test_bad_trees_are_refused():
    assert_all_refused(ROWS)
