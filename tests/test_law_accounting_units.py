"""Law 8 for units: what zero3 gathers, gathers again and reduces, in one order on every rank."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.transforms import strategies
from tests.ranks import my_rank, on_ranks
from tests.trees import normal, one_axis
from tests.unit_models import filled

# What the units of `stack` are, in the order of its forward.
UNITS = ("0", "1", "3", "5")


def stack():
    """An embedding and three layers, of sizes that tell them apart and that no number of ranks divides."""
    layers = nn.Embedding(7, 5), nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 3), nn.Tanh(), nn.Linear(3, 13)
    return filled(nn.Sequential(*layers))


def every_leaf(mesh, **keywords):
    """Strategies that split every leaf and gather every unit by itself."""
    return fs.zero3(mesh, **{"merge_bytes": 0, "min_shard_elements": 0, **keywords})


def told(record):
    """A record without the few numbers by which ranks agree, and without the objective."""
    return [entry for entry in record if not entry.scalar]


def bytes_of(record, label):
    return [entry.bytes for entry in told(record) if entry.label == label]


def unit_bytes(params):
    """The padded bytes of each unit; its first number is its name."""
    sizes = {}
    for name, leaf in params.items():
        unit = name.partition(".")[0]
        sizes[unit] = sizes.get(unit, 0) + math.prod(leaf.spec.padded_shape) * leaf.local.element_size()
    return sizes


def recorded(module, strategy, loss=None, frozen=(), **keywords):
    """The collectives of one call of value_and_grad on this rank, and the padded bytes of the units."""
    model = fs.functionalize(module, **{"units": (nn.Embedding, nn.Linear), **keywords})
    params = fs.shard(dict(module.named_parameters()), strategy, frozen=[f"{unit}.*" for unit in frozen])
    tokens = torch.arange(4) + my_rank()
    with fs.comm.record() as record:
        fs.value_and_grad(loss or (lambda p: model.apply(p, tokens).square().mean()))(params)
    return record, unit_bytes(params)


# Which units are dropped and saved for the backward: not an embedding, whose backward needs no weight.
RULES = {
    "all": (True, "531"),
    "none": (False, ""),
    "a pattern": ("[13]", "31"),
    "patterns": (("3", "5", "none of them"), "53"),
    "a function": (lambda name: name == "1", "1"),
    "the last one": ("5", "5"),
}


@pytest.mark.rows(8)
@on_ranks(2, 3, 4)
@pytest.mark.parametrize("prefetch", (0, 1, 2, 9))
@pytest.mark.parametrize("rule", RULES)
def test_zero3_moves_n_and_what_is_gathered_again_and_n(rule, prefetch, world_size):
    """Of those that are dropped, the last unit and as many before it as are prefetched stay for the backward."""
    regather, dropped = RULES[rule]
    again = [unit for unit in dropped if unit in UNITS[: max(0, len(UNITS) - 1 - prefetch)]]
    record, sizes = recorded(stack(), every_leaf(one_axis(), regather=regather, prefetch=prefetch))
    assert bytes_of(record, "gather") == [sizes[unit] for unit in (*UNITS, *again)]
    assert bytes_of(record, "scatter") == [sizes[unit] for unit in reversed(UNITS)]
    n, regathered = sum(sizes.values()), sum(sizes[unit] for unit in again)
    assert record.bytes_sent() == pytest.approx((n + regathered + n) * (world_size - 1) / world_size, rel=1e-12)
    return record


TWO_N = {
    "ddp": fs.ddp,
    "zero1": partial(fs.zero1, min_shard_elements=0),
    "zero2": partial(fs.zero2, min_shard_elements=0),
    "kept": partial(fs.zero3, min_shard_elements=0, regather=False, prefetch=2),
}


def tied():
    """The unit between lies inside another, so that the two that share a weight are not merged."""
    nested = nn.Sequential(nn.Sequential(nn.Linear(5, 11), nn.Linear(11, 5)))
    module = nn.Sequential(nn.Embedding(7, 5), nested, nn.Linear(5, 7, bias=False))
    module[2].weight = module[0].weight
    return filled(module)


MODELS = {
    "one unit": (stack, None),
    "units": (stack, (nn.Embedding, nn.Linear)),
    "a tied weight, small units gathered ahead": (tied, ("0", "1", "1.0.0", "1.0.1", "2")),
}


@pytest.mark.rows(6)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", TWO_N)
@on_ranks(2, 3, 4)
def test_the_others_move_two_n(strategy, model, world_size):
    """Units are gathered once a step, and what ddp does not gather it sums, which counts twice."""
    build, units = MODELS[model]
    record, sizes = recorded(build(), TWO_N[strategy](one_axis()), units=units)
    assert record.bytes_sent() == pytest.approx(2 * sum(sizes.values()) * (world_size - 1) / world_size, rel=1e-12)
    return record


@on_ranks(2, 3)
@pytest.mark.parametrize(
    "frozen, again",
    [
        # Gradients pass through a unit inside, which therefore is needed again.
        ("3", "1"),
        ("35", "1"),
        # Nothing before the first trained unit is; that unit is, though its input needs no gradient.
        ("0", "1"),
        ("01", ""),
        ("013", ""),
        # Then there is an objective, and no gradient.
        ("0135", ""),
    ],
)
@pytest.mark.rows(12)
def test_frozen_units_are_gathered_and_never_reduced(frozen, again):
    record, sizes = recorded(stack(), every_leaf(one_axis()), frozen=frozen)
    assert bytes_of(record, "gather") == [sizes[unit] for unit in (*UNITS, *again)]
    assert bytes_of(record, "scatter") == [sizes[unit] for unit in reversed(UNITS) if unit not in frozen]


@on_ranks(2, 3)
def test_a_unit_that_a_rank_skips_is_gathered_and_reduced_in_its_turn():
    """And is gathered again for those that did not skip it."""

    class Skipping(nn.Sequential):
        def forward(self, tokens):
            x = self[2](self[1](self[0](tokens)))
            # Tokens begin with the number of the rank.
            return self[5](self[4](self[3](x)) if int(tokens[0]) else x[:, :3])

    record, sizes = recorded(Skipping(*stack()), every_leaf(one_axis()))
    assert bytes_of(record, "gather") == [sizes[unit] for unit in (*UNITS, *"1")]
    assert bytes_of(record, "scatter") == [sizes[unit] for unit in reversed(UNITS)]
    return record


# Bytes that may travel together, and which of the units "0" (1152 bytes), "1" (2496), "3" (2400) and "5" (1248) do.
MERGES = [
    (0, ("0", "1", "3", "5")),
    (2400 + 1248 - 1, ("0", "1", "3", "5")),
    (2400 + 1248, ("01", "35")),
    (1152 + 2496 + 2400, ("013", "5")),
    (1152 + 2496 + 2400 + 1248, ("0135",)),
]


def even():
    """As `stack`, of sizes that all numbers of ranks below five divide."""
    layers = nn.Embedding(12, 12), nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 12)
    return filled(nn.Sequential(*layers))


@on_ranks(2, 3)
@pytest.mark.parametrize("merge_bytes, groups", MERGES)
def test_small_neighbours_are_gathered_together(merge_bytes, groups):
    record, sizes = recorded(even(), every_leaf(one_axis(), merge_bytes=merge_bytes))
    assert sizes == {"0": 1152, "1": 2496, "3": 2400, "5": 1248}
    found = [sum(sizes[unit] for unit in group) for group in groups]
    # An embedding alone is not gathered again, as part of a group it is; the last two groups stay, or what fits.
    again = [n for n, group in zip(found, groups) if group != "0"][:-1]
    fits = [sum(again[n:]) <= 2 * merge_bytes or n == len(again) - 1 for n in range(len(again))]
    assert bytes_of(record, "gather") == found + [n for n, stays in zip(again, fits) if not stays][::-1]


# Three leaves large enough to be reduced by themselves where messages are so small, of sizes that tell them apart.
SMALL = 16_000


@pytest.fixture
def small_messages(monkeypatch):
    monkeypatch.setattr(strategies, "HOST_BYTES", SMALL)


LARGE = {"first": (64, 512), "second": (512, 128), "third": (128, 257)}

# What is issued in the forward, and in the backward around the hooks of the activations between the leaves. Behind the
# gradient of a large leaf the one before it is gathered, in its place.
FORWARD = "gather first, gather second, gather third, "
EARLY = "scatter third, hook second, scatter second, hook first, scatter first"
ORDERS = {
    "zero1": (fs.zero1, FORWARD + "hook second, hook first, scatter third, scatter second, scatter first"),
    "zero2": (fs.zero2, FORWARD + EARLY),
    "zero3": (
        fs.zero3,
        FORWARD + EARLY.replace("hook second", "gather second, hook second").replace("hook f", "gather first, hook f"),
    ),
    "zero3 without prefetch": (
        partial(fs.zero3, prefetch=0),
        FORWARD + EARLY.replace("hook second", "gather second, hook second").replace("hook f", "gather first, hook f"),
    ),
    "ddp": (fs.ddp, EARLY),
}


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize("strategy", ORDERS)
@on_ranks(2)
def test_gradients_are_reduced_as_they_appear_except_by_zero1(strategy):
    make, order = ORDERS[strategy]
    draw = normal()
    full = {name: draw(*shape) / 16 for name, shape in LARGE.items()}
    x = draw(3, 64)
    names = {math.prod(shape) * 8: name for name, shape in LARGE.items()}
    params = fs.shard(full, make(one_axis()))
    with fs.comm.record() as record:

        def f(params):
            h = torch.tanh(x @ fs.gather(params["first"]))
            h.register_hook(lambda _: record.append("hook first"))
            h = torch.tanh(h @ fs.gather(params["second"]))
            h.register_hook(lambda _: record.append("hook second"))
            return (h @ fs.gather(params["third"])).square().sum()

        fs.value_and_grad(f)(params)
    entries = [e for e in record if isinstance(e, str) or not e.scalar]
    assert ", ".join(e if isinstance(e, str) else f"{e.label} {names[e.bytes]}" for e in entries) == order
