"""reduction_order="tree" in the optimizers: exact sums over elements, the same bits however leaves are split."""

import math
from dataclasses import replace

import pytest
import torch
from torch import optim

import fshard as fs
from fshard.ext.optim.norms import element_sums, global_norm
from fshard.rounding import tolerance
from fshard.testing import spmd
from tests.bad_input import text_of
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, as_bytes, assert_same_bits, meshes, normal, one_axis, tensors

# No size is a multiple of four, and some leave ranks without elements.
SHAPES = {"w": (5, 3), "wide": (3, 70), "bias": (50,), "one": (1,), "scalar": (), "empty": (0, 3)}
DTYPES = {"single": torch.float32, "half": torch.bfloat16, "double": torch.float64}
LAYOUTS = {name: make for name, make in STRATEGIES.items() if name not in ("zero1", "zero2")}
LAYOUTS |= {
    "zero3 of every leaf": lambda on: fs.zero3(on.line, min_shard_elements=0),
    "hsdp of every leaf": lambda on: fs.hsdp(on.grid, min_shard_elements=0),
}
STEPS = 3


def tree(seed, dtypes=DTYPES, shapes=SHAPES):
    draw = normal(seed)
    return {f"{d}.{name}": draw(*shape, dtype=dtypes[d]) for d in dtypes for name, shape in shapes.items()}


@pytest.mark.rows(1)
@on_ranks(3, 8)
def test_sums_have_the_bits_of_one_rank():
    shapes = SHAPES | {"cube": (9, 5, 7), "rows": (33, 1, 17), "long": (140001,)}
    full = {name: normal(1)(*shape, dtype=torch.float32) for name, shape in shapes.items()}
    expected, on = element_sums(list(full.values()), squares=True), meshes()
    (middle,) = element_sums([full["cube"].double() ** 2], dim=-2)
    for make in LAYOUTS.values():
        sharded = fs.shard(full, make(on))
        assert_same_bits(element_sums(list(sharded.values()), squares=True), expected)
        # A sum over one dim leaves the others split.
        cube = sharded["cube"]
        (actual,) = element_sums([fs.tree_map(lambda x: x.double() ** 2, cube)], dim=-2)
        assert_same_bits(fs.unshard(fs.Sharded(actual, replace(cube.spec, shape=(9, 1, 7)))), middle)


def test_sums_are_exact_but_for_their_digits():
    """Digits leave out less than 2**-52 of the largest term from each; the sum itself is rounded a few times."""
    for count, spread in ((0, 0), (1, 150), (40000, 0), (40000, 150)):
        values = normal(count)(count) * 10.0 ** (spread * normal(1)(count).clamp(-1, 1))
        expected = math.fsum((values**2).tolist())
        for given, times in ((values, 1), (torch.complex(values, 2 * values), 5)):
            actual = element_sums([given], squares=True)[0].item()
            assert abs(actual - times * expected) <= tolerance(torch.float64, count + 1, times * expected)
    for odd in (math.inf, math.nan, 1e300):
        (actual,) = element_sums([torch.tensor([1.0, -odd, 2.0], dtype=torch.float64)], squares=True)
        assert str(actual.item()) == str(odd * odd)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int64, torch.bool))
def test_whole_numbers_are_summed(dtype):
    values = torch.tensor([[200, 1, 0], [3, 0, 1]]).to(dtype)
    for dim in (None, -1, -2):
        expected = [(values.double() ** 2).sum() if dim is None else (values.double() ** 2).sum(dim, keepdim=True)]
        assert_same_bits(element_sums([values], dim, squares=True), expected)
    assert_same_bits(fs.global_norm([values], reduction_order="tree"), values.float().norm())


def with_clip(tx):
    return fs.chain(fs.clip_by_global_norm(0.5, reduction_order="tree"), tx)


def for_halves(tx):
    """torch's kernels round bfloat16 by where an element stands."""
    return fs.partition({"half*": fs.adamw(0.1), "*": tx})


MATRICES = ("*w", "*wide")
TABLE = {
    "adamw": lambda: with_clip(fs.ema(fs.adamw(0.1), 0.9)),
    "a schedule": lambda: with_clip(fs.adamw(lambda count: 0.1 / (1 + count.double()))),
    "sgd": lambda: with_clip(fs.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1)),
    "clip_by_norm": lambda: fs.chain(
        *(fs.clip_by_norm(0.5, p, reduction_order="tree") for p in (2.0, math.inf)),
        fs.clip_by_global_norm(0.2, reduction_order="tree"),
        fs.sgd(0.1),
    ),
    "from_torch AdamW": lambda: with_clip(for_halves(fs.from_torch(optim.AdamW, lr=0.1, reduction_order="tree"))),
    "from_torch SGD": lambda: with_clip(
        for_halves(fs.from_torch(optim.SGD, lr=0.1, momentum=0.9, reduction_order="tree"))
    ),
    "masked": lambda: fs.chain(fs.masked(fs.clip_by_global_norm(0.3, reduction_order="tree"), MATRICES), fs.adamw(0.1)),
    "guards": lambda: with_clip(fs.skip_nonfinite(fs.adamw(0.1))),
}


def trained(optimizers, strategy):
    """The bytes of parameters and state after some updates, in full, by the optimizer's name."""
    params, *grads = (fs.shard(tree(step), strategy) for step in range(STEPS + 1))
    out = {}
    for name, make in optimizers.items():
        tx, new = make(), params
        state = tx.init(new)
        for grad in grads:
            new, state = tx.update(grad, state, new)
        out[name] = [as_bytes(x) for x in tensors(fs.unshard((new, state)))]
    return out


def check_updates_have_the_same_bits_at_any_world_size(table, world_size=3):
    """Compare other optimizers with one rank under DDP, under each strategy."""
    (expected,) = spmd(lambda: trained(table, fs.ddp(one_axis())), 1)
    optimizers = list(table)

    def program():
        names = [optimizers[(row + 3 * (world_size - 3)) % len(optimizers)] for row in range(len(LAYOUTS))]
        rows = zip(LAYOUTS, names, strict=True)
        return [(name, trained({name: table[name]}, LAYOUTS[layout](meshes()))[name]) for layout, name in rows]

    for rows in spmd(program, world_size, timeout=600.0):
        for name, values in rows:
            assert all(a.equal(b) for a, b in zip(values, expected[name], strict=True)), name


@pytest.mark.parametrize("world_size", (3, pytest.param(4, marks=pytest.mark.slow)))
def test_updates_have_the_same_bits_at_any_world_size(world_size):
    check_updates_have_the_same_bits_at_any_world_size(TABLE, world_size)


@on_ranks(2)
def test_derivatives_are_refused():
    params = fs.shard({"w": torch.ones(5, 3)}, fs.zero2(one_axis(), min_shard_elements=0))
    text = (
        'reduction_order="tree": exact sums have no derivative, but a tensor is differentiated. '
        "Leave out reduction_order if you differentiate updates."
    )
    for derive in (torch.func.grad, lambda f: lambda p: f(fs.tree_map(lambda x: x.clone().requires_grad_(), p))):
        with pytest.raises(ValueError, match=text):
            derive(lambda p: global_norm(p, reduction_order="tree"))(params)


def test_classes_that_round_elements_by_their_place_are_refused():
    rows = (optim.SGD, torch.bfloat16, {}), (optim.Adam, torch.float32, {"fused": True})
    for cls, dtype, how in rows:
        tx = fs.from_torch(cls, lr=0.1, reduction_order="tree", **how)
        text = text_of(lambda: tx.init({"w": torch.ones(3, dtype=dtype)}))  # noqa: B023
        assert text == (
            f"from_torch: kernels of {cls.__name__} for {dtype} round an element by its place in the shard, so "
            'reduction_order="tree" cannot keep the bits. Step such leaves with fs.adamw, or keep float32 and gather '
            "with fs.cast(gather=torch.bfloat16)."
        )
