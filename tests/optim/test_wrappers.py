"""skip_nonfinite, dynamic_loss_scale and ema: one decision on all ranks, and torch's own numbers.

And what every optimizer does with leaves that are frozen or absent.
"""

import math
from functools import partial

import pytest
import torch
from torch import optim
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fshard as fs
from fshard.tree import flatten
from tests.optim.test_from_torch import CASES
from tests.optim.test_table import TABLE
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis, padded_with

SHAPES = {"w": (5, 3), "vector": (7,), "scalar": (), "empty": (0, 3)}
LAYOUTS = ("ddp", "zero2 of every leaf", "hsdp", "two dims")


def sgd():
    return fs.from_torch(optim.SGD, lr=0.1, momentum=0.9)


def tree(seed, dtype=torch.float32):
    draw = normal(seed)
    return {name: draw(*shape, dtype=dtype) for name, shape in SHAPES.items()}


def copied(tree):
    return fs.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def assert_same_shards(actual, expected):
    """As assert_same_bits, of what each rank holds."""
    assert flatten(actual).treedef == flatten(expected).treedef
    assert_same_bits(fs.tree_leaves(actual), fs.tree_leaves(expected))


def poisoned(grads, value, name="vector"):
    """With one element bad in what this rank holds of a leaf."""
    local = grads[name].local.clone()
    local.view(-1)[0] = value
    return grads | {name: fs.Sharded(local, grads[name].spec)}


@pytest.mark.rows(2)
@pytest.mark.parametrize("donate", (False, True))
@pytest.mark.parametrize("value", (math.inf, math.nan))
@on_ranks(3)
def test_one_bad_rank_skips_on_all(value, donate):
    """As if the update had never been; what fills shards up does not count."""
    tx = fs.skip_nonfinite(fs.chain(fs.clip_by_global_norm(0.5), sgd()))
    run = tx.update_donated if donate else tx.update
    for name in LAYOUTS:
        strategy = STRATEGIES[name](meshes())
        params, *grads = (fs.shard(tree(seed), strategy) for seed in range(3))
        params, state = run(grads[0], tx.init(params), params)
        good = {path: padded_with(leaf, value) for path, leaf in grads[1].items()}
        for culprit in (0, 2):
            bad = poisoned(good, value) if torch.distributed.get_rank() == culprit else good
            new, after = run(bad, copied(state), copied(params))
            assert (after.skipped.item(), after.skipped.dtype) == (1, torch.int64)
            assert_same_shards((new, after.inner), (params, state.inner))
        assert run(good, copied(state), copied(params))[1].skipped.item() == 0


@on_ranks(2)
def test_transforms_look_at_every_rank():
    """Under torch.func both outcomes are computed, and one is chosen on every rank alike."""
    tx, full = fs.skip_nonfinite(fs.sgd(0.5)), tree(0, torch.float64)
    params = fs.shard(full, fs.zero2(one_axis(), min_shard_elements=0))
    for grads in (params, poisoned(params, math.inf) if torch.distributed.get_rank() == 1 else params):

        def loss(params, grads=grads):
            new, _ = tx.update(grads, tx.init(params), params)
            return fs.objective(sum(leaf.sum() for leaf in fs.gather(new).values()), params)

        assert_same_bits(fs.unshard(torch.func.grad(loss)(params)), fs.tree_map(torch.ones_like, full))


SCALES = {
    "powers of two": {"init_scale": 2.0**4, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2},
    "others": {"init_scale": 11.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1},
}
FINITE = (True, True, False, True, True, True, False, False, True, True, True, True)


def scaled_gradients(dtype):
    made = [tree(seed, dtype) for seed in range(1, len(FINITE) + 1)]
    for k, finite in enumerate(FINITE):
        if not finite:
            made[k]["w"][k % 5, 1] = math.inf if k % 2 else math.nan
    return made


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("case", SCALES)
def test_loss_scale_is_that_of_torch(case, dtype):
    cls, hyper = optim.AdamW, {"lr": 0.1}
    scaler = torch.amp.GradScaler(device="cpu", **SCALES[case])
    scaler.scale(torch.ones(()))
    theirs = {name: torch.nn.Parameter(leaf) for name, leaf in tree(0, dtype).items()}
    optimizer = cls(list(theirs.values()), **hyper)
    tx = fs.dynamic_loss_scale(fs.from_torch(cls, **hyper), **SCALES[case])
    ours = {donate: (tree(0, dtype), tx.init(tree(0, dtype))) for donate in (False, True)}
    for grads in scaled_gradients(dtype):
        for name, param in theirs.items():
            param.grad = grads[name].clone()
        scaler.step(optimizer)
        scaler.update()
        for donate, (params, state) in ours.items():
            params, state = (tx.update_donated if donate else tx.update)(grads, state, params)
            assert (state.scale.item(), state.scale.dtype) == (scaler.get_scale(), torch.float32)
            assert state.good.item() == scaler._get_growth_tracker()
            assert_same_shards(params, {name: param.detach() for name, param in theirs.items()})
            ours[donate] = params, state
    assert all(state.inner.skipped.item() == FINITE.count(False) for _, state in ours.values())


def test_scales_at_the_ends_of_their_range():
    """The inverse of 2 ** 26 is no number of float16, and yet gradients times it are; no scale grows to infinity."""
    tx = fs.dynamic_loss_scale(fs.sgd(1.0), init_scale=2.0**26)
    grads, params = torch.full((3,), 2.0**14, dtype=torch.float16), torch.zeros(3, dtype=torch.float16)
    assert_same_shards(tx.update(grads, tx.init(params), params)[0], torch.full_like(params, -(2.0**-12)))
    tx = fs.dynamic_loss_scale(fs.sgd(0.1), init_scale=2.0**126, growth_interval=1)
    params = tree(0)
    state, scales = tx.init(params), []
    for _ in range(3):
        params, state = tx.update(params, state, params)
        scales.append(state.scale.item())
    assert scales == [2.0**127] * 3


@pytest.mark.rows(1)
@pytest.mark.parametrize("donate", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("decay", (0.0, 0.3, 0.999, 1.0))
@on_ranks(2)
def test_ema_gets_the_bits_of_torch(decay, dtype, donate):
    inner = fs.from_torch(optim.AdamW, lr=0.1)
    tx, average = fs.ema(inner, decay), get_ema_multi_avg_fn(decay)
    for name in LAYOUTS:
        strategy = STRATEGIES[name](meshes())
        params = fs.shard(tree(0, dtype), strategy)
        state = tx.init(params)
        assert_same_bits(fs.unshard(state.average), tree(0, dtype))
        expected = list(tree(0, dtype).values())
        alone = params, inner.init(params)
        params = copied(params)
        for seed in range(1, 4):
            grads = fs.shard(tree(seed, dtype), strategy)
            alone = inner.update(grads, alone[1], alone[0])
            params, state = (tx.update_donated if donate else tx.update)(grads, state, params)
            assert_same_shards((params, state.inner), alone)
            average(expected, list(fs.unshard(params).values()), seed)
            assert_same_bits(list(fs.unshard(state.average).values()), expected)


def test_nothing_to_train():
    """Of every optimizer of the table and every class: an empty tree, and one whose leaves are all frozen."""
    frozen = fs.shard({"w": torch.ones(3)}, fs.ddp(one_axis()), frozen="*")
    makes = [row.make for name, row in TABLE.items() if not name.startswith(("add", "masked", "part", "freeze"))]
    for make in (*makes, *(partial(fs.from_torch, cls, **how) for cls, how in CASES.values())):
        tx = make()
        for params, grads in (({}, {}), (frozen, {"w": None})):
            for update in (tx.update, tx.update_donated or tx.update):
                new, _ = update(grads, tx.init(params), params)
                assert fs.tree_leaves(new) == fs.tree_leaves(params)
