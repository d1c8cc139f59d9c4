"""What runs while collectives are under way: gathers ahead of their units, and reductions behind them.

In an order F0 stands for the forward of unit 0, B0 for its backward; + for a collective that starts, - for one that is
waited for: ag is an all-gather, rs a reduce-scatter, ar an all-reduce.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import comm
from fshard.testing import spmd

UNITS, WIDTH, HIDDEN = 4, 256, 1024
UNIT_BYTES = 2 * WIDTH * HIDDEN * 4
AXES = {"zero2": {"shard": -1}, "zero3": {"shard": -1}, "hsdp": {"replicate": 2, "shard": -1}}
SHORT = {"all_gather": "ag", "reduce_scatter": "rs", "all_reduce": "ar"}


class Block(nn.Module):
    """A unit of two weights, each of which is a message of its own where buckets are small."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


class Order(TorchDispatchMode):
    """Writes down when collectives start and are waited for, and when units compute."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.products = 0

    def starts(self, issued, _):
        self.note("+", issued.collective)

    def waits(self, issued):
        self.note("-", issued.collective)

    def note(self, sign, collective):
        if not collective.scalar:
            event = f"{sign}{SHORT[collective.op]}{collective.unit}"
            # The messages of one unit stand together.
            if event not in self.events[-1:]:
                self.events.append(event)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.mm.default:
            # Two products a unit in the forward, and four in the backward.
            backward = self.products - 2 * UNITS
            name = f"F{self.products // 2}" if backward < 0 else f"B{UNITS - 1 - backward // 4}"
            self.products += 1
            if name not in self.events:
                self.events.append(name)
        return operator(*args, **(kwargs or {}))

    def text(self):
        return " ".join(self.events)


def order_of(strategy, axes, jitted, **options):
    """Return the order of one step on rank 0."""
    torch.manual_seed(0)
    module = nn.Sequential(*[Block() for _ in range(UNITS)])

    def program():
        model = fs.functionalize(module, units=Block)
        mesh = fs.init_mesh(axes, device="cpu")
        params = model.init(strategy(mesh, min_shard_elements=0, **options))
        # The gradient by its input lets the first unit compute as much as the others.
        x = torch.ones(4, WIDTH, requires_grad=True)

        def step(params):
            return fs.value_and_grad(lambda params: model.apply(params, x).square().mean())(params)

        run = fs.jit(step) if jitted else step
        run(params)
        with comm.watched(Order()) as order:
            if dist.get_rank() == 0:
                with order:
                    run(params)
            else:
                run(params)
        return order.text()

    ranks = 4 if len(axes) == 2 else 2
    return spmd(program, world=ranks)[0]


FORWARD_1 = "+ag0 +ag1 +ag2 -ag0 F0 +ag3 -ag1 F1 -ag2 F2 -ag3 F3 "
FORWARD_4 = "+ag0 +ag1 -ag0 F0 +ag2 -ag1 F1 +ag3 -ag2 F2 -ag3 F3 "
# How many buckets a unit is large, and the order.
ORDERS = {
    "zero2, 1": FORWARD_1 + "B3 +rs3 B2 +rs2 B1 -rs3 +rs1 B0 -rs2 +rs0 -rs1 -rs0",
    # The messages of a unit take the place of those of the unit before, one by one.
    "zero2, 4": FORWARD_4 + "B3 +rs3 B2 -rs3 +rs2 -rs3 +rs2 B1 -rs2 +rs1 -rs2 +rs1 B0 -rs1 +rs0 -rs1 +rs0 -rs0",
    "zero3, 1": FORWARD_1 + "B3 +rs3 +ag0 B2 +rs2 B1 -rs3 +rs1 -ag0 B0 -rs2 +rs0 -rs1 -rs0",
    "zero3, 4": FORWARD_4
    + "B3 +rs3 +ag1 B2 -rs3 +rs2 -rs3 +rs2 +ag0 -ag1 B1 -rs2 +rs1 -rs2 +rs1 -ag0 B0 -rs1 +rs0 -rs1 +rs0 -rs0",
    # The second sum of a unit starts a unit after the first one, and is waited for a unit after that.
    "hsdp, 1": FORWARD_1
    + "B3 +rs3 +ag0 B2 +rs2 -rs3 +ar3 B1 +rs1 -ar3 -rs2 +ar2 -ag0 B0 +rs0 -ar2 -rs1 +ar1 -rs0 +ar0 -ar1 -ar0",
    "hsdp, 4": FORWARD_4 + "B3 +rs3 +ag1 B2 -rs3 +ar3 +rs2 -rs3 +ar3 +rs2 +ag0 "
    "-ag1 B1 -rs2 +ar2 +rs1 -rs2 +ar2 +rs1 -ar3 -ag0 B0 -rs1 +ar1 +rs0 -rs1 +ar1 +rs0 -ar2 -rs0 +ar0 -rs0 +ar0 "
    "-ar1 -ar0",
}


QUICK = ("zero2, 4", False), ("hsdp, 1", False), ("hsdp, 4", False), ("zero3, 4", True)
ROWS = [
    row if row in QUICK else pytest.param(*row, marks=pytest.mark.slow)
    for row in itertools.product(ORDERS, (False, True))
]


@pytest.mark.rows(len(QUICK))
@pytest.mark.parametrize("name, jitted", ROWS)
def test_a_unit_is_under_way_each_way_while_another_one_computes(name, jitted):
    """Where nothing is set, whatever the size of a unit."""
    strategy, size = name.split(", ")
    assert order_of(getattr(fs, strategy), AXES[strategy], jitted, bucket_bytes=UNIT_BYTES // int(size)) == ORDERS[name]


@pytest.mark.parametrize("jitted", [False, True])
def test_a_unit_that_is_gathered_in_its_turn_takes_the_place_of_another(jitted):
    """Without gathers ahead no two units are full at a time in the backward."""
    order = order_of(fs.zero3, AXES["zero3"], jitted, bucket_bytes=UNIT_BYTES // 4, prefetch=0)
    forward = "+ag0 -ag0 F0 +ag1 -ag1 F1 +ag2 -ag2 F2 +ag3 -ag3 F3 "
    backward = "B3 +rs3 +ag2 -ag2 B2 -rs3 +rs2 -rs3 +rs2 +ag1 -ag1 B1 -rs2 +rs1 -rs2 +rs1 +ag0 -ag0 B0 "
    assert order == forward + backward + "-rs1 +rs0 -rs1 +rs0 -rs0"
