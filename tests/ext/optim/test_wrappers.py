"""skip_nonfinite, ema and dynamic_loss_scale: one decision on all ranks, and torch's own numbers."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import optim
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fshard as fs
from tests.bad_input import text_of
from tests.ext.optim.test_native import tree
from tests.optim.test_from_torch import CASES
from tests.optim.test_table import TABLE
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_alike, assert_same_bits, copied, meshes, one_axis, padded_with

LAYOUTS = ("ddp", "zero2 of every leaf", "two dims")


def poisoned(grads, value):
    """With one element bad in what this rank holds of a leaf."""
    local = grads["vector"].local.clone()
    local.view(-1)[0] = value
    return grads | {"vector": fs.Sharded(local, grads["vector"].spec)}


@pytest.mark.rows(1)
@pytest.mark.parametrize("value", (math.inf, math.nan))
@on_ranks(3)
def test_one_bad_rank_skips_on_all(value):
    """As if the update had never been; what fills shards up does not count. So it is under torch.func."""
    tx = fs.skip_nonfinite(fs.chain(fs.clip_by_global_norm(0.5), fs.from_torch(optim.SGD, lr=0.1, momentum=0.9)))
    rank = torch.distributed.get_rank()
    for name, run in product(LAYOUTS, (tx.update, tx.update_donated)):
        strategy = STRATEGIES[name](meshes())
        params, *grads = (fs.shard(tree(seed, torch.float32), strategy) for seed in range(3))
        params, state = run(grads[0], tx.init(params), params)
        good = {path: padded_with(leaf, value) for path, leaf in grads[1].items()}
        for culprit in (0, 2):
            new, after = run(poisoned(good, value) if rank == culprit else good, copied(state), copied(params))
            assert (after.skipped.item(), after.skipped.dtype) == (1, torch.int64)
            assert_alike((new, after.inner), (params, state.inner))
        assert run(good, copied(state), copied(params))[1].skipped.item() == 0
    tx, full = fs.skip_nonfinite(fs.sgd(0.5)), tree(0)
    params = fs.shard(full, fs.zero2(one_axis(), min_shard_elements=0))
    for grads in (params, poisoned(params, value) if rank == 1 else params):

        def loss(params, grads=grads):
            new, _ = tx.update(grads, tx.init(params), params)
            return fs.objective(sum(leaf.sum() for leaf in fs.gather(new).values()), params)

        assert_same_bits(fs.unshard(torch.func.grad(loss)(params)), fs.tree_map(torch.ones_like, full))


@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("decay", (0.0, 0.999))
@on_ranks(2)
def test_ema_gets_the_bits_of_torch(decay, dtype):
    inner = fs.from_torch(optim.AdamW, lr=0.1)
    tx, average = fs.ema(inner, decay), get_ema_multi_avg_fn(decay)
    for name, run in product(LAYOUTS, (tx.update, tx.update_donated)):
        strategy = STRATEGIES[name](meshes())
        params = fs.shard(tree(0, dtype), strategy)
        state, alone, expected = tx.init(params), (params, inner.init(params)), list(tree(0, dtype).values())
        params = copied(params)
        for seed in range(1, 4):
            grads = fs.shard(tree(seed, dtype), strategy)
            alone = inner.update(grads, alone[1], alone[0])
            params, state = run(grads, state, params)
            assert_alike((params, state.inner), alone)
            average(expected, list(fs.unshard(params).values()), seed)
            assert_same_bits(list(fs.unshard(state.average).values()), expected)


def test_averages_are_differentiated():
    """By a learning rate: after one update the average is w + (1 - decay) * (-rate * gradient)."""
    params, grads = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 5.0])}

    def mean_of_average(rate, params):
        tx = fs.ema(fs.sgd(rate), decay=0.75)
        return tx.update(grads, tx.init(params), params)[1].average["w"].sum()

    slope, by_params = torch.func.grad(mean_of_average, argnums=(0, 1))(torch.tensor(0.1), params)
    assert slope == -2.0
    assert by_params["w"].tolist() == [1.0, 1.0]


SCALES = {
    "powers of two": {"init_scale": 2.0**4, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2},
    "others": {"init_scale": 11.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1},
    "the largest": {"init_scale": 2.0**126, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1},
}
FINITE = (True, True, False, True, True, True, False, False, True, True, True, True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("case", SCALES)
def test_loss_scale_is_that_of_torch(case, dtype):
    scaler = torch.amp.GradScaler(device="cpu", **SCALES[case])
    scaler.scale(torch.ones(()))
    theirs = {name: torch.nn.Parameter(leaf) for name, leaf in tree(0, dtype).items()}
    optimizer = optim.AdamW(list(theirs.values()), lr=0.1)
    tx = fs.dynamic_loss_scale(fs.from_torch(optim.AdamW, lr=0.1), **SCALES[case])
    ours = {run: (tree(0, dtype), tx.init(tree(0, dtype))) for run in (tx.update, tx.update_donated)}
    for k, finite in enumerate(FINITE):
        grads = tree(1 + k, dtype)
        if not finite:
            grads["w"][k % 5, 1] = math.inf if k % 2 else math.nan
        for name, param in theirs.items():
            param.grad = grads[name].clone()
        scaler.step(optimizer)
        scaler.update()
        for run, (params, state) in ours.items():
            params, state = ours[run] = run(grads, state, params)
            assert (state.scale.item(), state.scale.dtype) == (scaler.get_scale(), torch.float32)
            assert state.good.item() == scaler._get_growth_tracker()
            assert_alike(params, {name: param.detach() for name, param in theirs.items()})
    assert all(state.inner.skipped.item() == FINITE.count(False) for _, state in ours.values())


SCALE, INTERVAL = "init_scale to be a number from 1.2e-38 to 3.4e38", "growth_interval to be a whole number from 1"
OUT_OF_RANGE = (
    ({"init_scale": 1e39}, SCALE),
    ({"init_scale": 1e-39}, SCALE),
    ({"growth_factor": 1.0}, "growth_factor to be a finite number above 1"),
    ({"backoff_factor": 1.0}, "backoff_factor to be a number above 0 and below 1"),
    ({"growth_interval": 2.5}, INTERVAL),
    ({"growth_interval": 0}, INTERVAL),
)


def test_scales_that_would_skip_for_ever_or_never_grow_are_refused():
    for options, expected in OUT_OF_RANGE:
        (value,) = options.values()
        refusal = f"dynamic_loss_scale: expected {expected}, got {value}"
        assert text_of(partial(fs.dynamic_loss_scale, fs.sgd(0.1), **options)) == refusal


def test_nothing_to_train():
    """Of every optimizer of the table and every class: an empty tree, and one whose leaves are all frozen."""
    frozen = fs.shard({"w": torch.ones(3)}, fs.ddp(one_axis()), frozen="*")
    makes = [row.make for name, row in TABLE.items() if not name.startswith(("add", "masked", "part", "freeze"))]
    for make in (*makes, *(partial(fs.from_torch, cls, **how) for cls, how in CASES.values())):
        tx = make()
        for params, grads in (({}, {}), (frozen, {"w": None})):
            for update in (tx.update, tx.update_donated or tx.update):
                assert fs.tree_leaves(update(grads, tx.init(params), params)[0]) == fs.tree_leaves(params)
