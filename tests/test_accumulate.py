"""accumulate: several microbatches give the loss and gradients of one batch, in the bytes of law 8."""

import re
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.test_law_accounting import stack, unit_bytes
from tests.tolerance import within
from tests.trees import assert_same_bits, normal, one_axis, two_axes

MICROBATCHES = 3


def strategies(mesh):
    every, alone = {"min_shard_elements": 0}, {"min_shard_elements": 0, "bucket_bytes": 0}
    return {
        "zero3": fs.zero3(mesh, **alone),
        "zero3 of merged units": fs.zero3(mesh, **every),
        "zero3 that keeps": fs.zero3(mesh, regather=False, **alone),
        "zero3 that keeps some": fs.zero3(mesh, regather="1", **alone),
        "zero3 of small whole leaves": fs.zero3(mesh, bucket_bytes=0, min_shard_elements=20),
        "zero2": fs.zero2(mesh, **every),
        "zero1": fs.zero1(mesh, **every),
        "ddp": fs.ddp(mesh),
    }


def modelled():
    """A module and a model of its units."""
    module = stack()
    return module, fs.functionalize(module, units=(nn.Embedding, nn.Linear))


def microbatches(rank=None):
    """Of one to four tokens."""
    rank = my_rank() if rank is None else rank
    return [(torch.arange(1 + (2 * rank + 3 * n) % 4) + rank + n) % 7 for n in range(MICROBATCHES)]


def local(run, reduce, params, batch):
    """A loss of one microbatch, as every `reduce` takes it."""
    values = -run(params, batch).log_softmax(-1)[:, 0]
    return (values.sum(), torch.tensor(len(batch))) if reduce == "weighted" else values.mean()


def in_one_process(module, reduce, ranks):
    """The objective and gradients of all tokens."""
    full = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    run = partial(torch.func.functional_call, module)
    batches = [batch for rank in range(ranks) for batch in microbatches(rank)]
    losses = [local(run, reduce, full, batch) for batch in batches]
    if reduce == "weighted":
        sums, counts = zip(*losses)
        value = sum(sums) / sum(counts)
    else:
        value = sum(losses) / (1 if reduce == "sum" else len(losses))
    return value.detach(), dict(zip(full, torch.autograd.grad(value, list(full.values()))))


@pytest.mark.rows(1)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("communicate", ("each", "once"))
@pytest.mark.parametrize("reduce", ("mean", "sum", "weighted"))
def test_it_is_one_process_on_all_tokens(reduce, communicate, world_size):
    """Weighted: the true mean over all tokens, though every microbatch of every rank has another number of them."""
    module, model = modelled()
    expected = in_one_process(module, reduce, world_size)
    # Sums over up to four tokens of each microbatch, through the layers forward and backward.
    near = within(expected, 4 * MICROBATCHES * world_size, steps=4)
    for transform in strategies(one_axis()).values():
        params = model.init(transform)
        step = fs.accumulate(partial(local, model.apply, reduce), reduce=reduce, communicate=communicate)
        value, grads = step(params, microbatches())
        assert_trees_close((value, fs.unshard(grads)), expected, **near)
        assert_same_bits(fs.tree_leaves(step(params, microbatches())), fs.tree_leaves((value, grads)))


# Of strategies, the units of `stack` that each microbatch gathers anew, and those it gathers again in its backward.
GATHERED = {
    "zero3": ("0135", "1"),
    "zero3 that keeps": ("", ""),
    "zero3 that keeps some": ("1", "1"),
    **dict.fromkeys(("zero2", "zero1", "ddp"), ("", "")),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("communicate", ("each", "once", None))
def test_bytes_are_those_of_the_law(communicate, world_size):
    """3Mn where each microbatch is reduced, (2M + 1)n where full gradients are summed, and 2n gathered once too."""
    _, model = modelled()
    for strategy, units in GATHERED.items():
        params = model.init(strategies(one_axis())[strategy])
        step = fs.accumulate(partial(local, model.apply, "mean"), communicate=communicate)
        with fs.comm.record() as record:
            step(params, microbatches())
        sizes = unit_bytes(params)
        every = sum(sizes.values())
        anew, again = (sum(sizes[unit] for unit in names) for names in units)
        gathered = 0 if strategy == "ddp" else every + (MICROBATCHES - 1) * anew + MICROBATCHES * again
        is_reduced_once = communicate == "once" or (communicate is None and strategy == "zero1")
        reduced = (1 if is_reduced_once else MICROBATCHES) * every * (2 if strategy == "ddp" else 1)
        sent = (gathered + reduced) * (world_size - 1) / world_size
        assert_trees_close(record.bytes_sent(), sent, **within(sent, len(record)))
        assert [entry.op for entry in record if entry.scalar and not entry.about.is_comparison] == ["all_reduce"]


HALF, SINGLE = torch.bfloat16, torch.float32


@on_ranks(1, 2)
def test_gradients_are_added_up_in_the_dtype_of_the_reduction(world_size):
    """Computed in bfloat16, in which 256 + 1 is 256, and reduced in float32; the result is in the leaf's own dtype."""

    def total(p, x):
        return sum((leaf * x).sum() for leaf in fs.gather(p).values())

    mesh = one_axis()
    options = {"min_shard_elements": 0, "param_dtype": HALF, "reduce_dtype": SINGLE}
    strategies = [make(mesh, **options) for make in (fs.zero3, fs.zero2, fs.zero1)]
    strategies += [fs.hsdp(two_axes(world_size), bucket_bytes=0, **options)]
    strategies += [fs.compose(fs.cast(gather=HALF), fs.ddp(mesh), fs.cast(scatter=SINGLE))]
    full = {"half": torch.ones(5, 3, dtype=HALF), "single": torch.ones(5, dtype=SINGLE)}
    batches = torch.tensor([256.0] + [1.0] * 15, dtype=HALF)
    for strategy, communicate in product(strategies, ("each", "once")):
        step = fs.accumulate(total, reduce="sum", communicate=communicate)
        grads = fs.unshard(step(fs.shard(full, strategy), list(batches))[1])
        assert_same_bits(grads, fs.tree_map(lambda leaf: torch.full_like(leaf, 271.0 * world_size), full))


@on_ranks(2)
def test_every_microbatch_has_its_aux_and_other_arguments_are_passed_on():
    params = fs.shard({"w": normal()(5, 3)}, fs.zero3(one_axis(), min_shard_elements=0))

    def f(params, batch, scale, *, shift):
        value = (fs.gather(params)["w"] * batch * scale + shift).sum()
        return value, (value, int(batch))

    (value, auxes), grads = fs.accumulate(f, has_aux=True)(params, (torch.tensor(1), torch.tensor(3)), 2.0, shift=1)
    total = fs.unshard(params)["w"].sum()
    values, numbers = zip(*auxes)
    assert not any(value.requires_grad for value in values)
    assert numbers == (1, 3)
    results = [value, *values, fs.unshard(grads)["w"]]
    expected = [4 * total + 15, 2 * total + 15, 6 * total + 15, torch.full((5, 3), 4.0).double()]
    assert_trees_close(results, expected, **within(expected, terms=15))


def test_bad_arguments_are_refused():
    micro = "accumulate: batches must be a sequence of one or more microbatches, got"
    for options, batches, text in (
        ({"reduce": "max"}, [1], 'accumulate: reduce must be "mean", "sum" or "weighted", got \'max\''),
        ({}, [], f"{micro} an empty one"),
        ({}, iter([1]), f"{micro} a list_iterator"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            fs.accumulate(lambda p, _: p.sum(), **options)(torch.ones(2), batches)
