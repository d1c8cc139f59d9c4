"""accumulate: several microbatches give the loss and gradients of one batch, in the bytes of law 8."""

import re
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import RankError, assert_trees_close, spmd
from tests.ranks import my_rank, on_ranks
from tests.test_law_accounting import stack, unit_bytes
from tests.tolerance import within
from tests.transforms.feedback import feedback
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


def is_matrix(_, leaf):
    return len(leaf.shape) == 2


def strategies_over_two_axes(mesh):
    """Which reduce over "shard" first and then over "replicate"."""
    every, alone = {"min_shard_elements": 0}, {"min_shard_elements": 0, "bucket_bytes": 0}
    return {
        "hsdp": fs.hsdp(mesh, **alone),
        "hsdp of merged units": fs.hsdp(mesh, **every),
        "hsdp that keeps": fs.hsdp(mesh, regather=False, **alone),
        "hsdp of small whole leaves": fs.hsdp(mesh, bucket_bytes=0, min_shard_elements=20),
        "zero3 over both": fs.zero3(mesh, ("shard", "replicate"), **alone),
        "zero1 over both": fs.zero1(mesh, ("shard", "replicate"), **every),
        "ddp over both": fs.ddp(mesh, ("shard", "replicate")),
        "hsdp beside ddp": fs.masked(fs.hsdp(mesh, **alone), is_matrix, fs.ddp(mesh, ("shard", "replicate"))),
    }


def modelled():
    """A module and a model of its units."""
    module = stack()
    return module, fs.functionalize(module, units=(nn.Embedding, nn.Linear))


def microbatches(rank=None, reduce="mean"):
    """Of one to four tokens; of up to three for a weighted mean, of which the second rank has none at all."""
    rank = my_rank() if rank is None else rank
    counts = [(2 * rank + 3 * n) % 4 for n in range(MICROBATCHES)]
    if reduce != "weighted":
        counts = [1 + count for count in counts]
    elif rank == 1:
        counts = [0] * MICROBATCHES
    return [(torch.arange(count) + rank + n) % 7 for n, count in enumerate(counts)]


def local(run, reduce, params, batch):
    """A loss of one microbatch, as every `reduce` takes it; where there are no tokens, a constant."""
    values = -run(params, batch).log_softmax(-1)[:, 0]
    if not len(batch):
        return torch.zeros((), dtype=torch.float64), torch.tensor(0)
    return (values.sum(), torch.tensor(len(batch))) if reduce == "weighted" else values.mean()


def in_one_process(module, reduce, ranks):
    """The objective and gradients of all tokens."""
    full = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    run = partial(torch.func.functional_call, module)
    batches = [batch for rank in range(ranks) for batch in microbatches(rank, reduce)]
    losses = [local(run, reduce, full, batch) for batch in batches]
    if reduce == "weighted":
        sums, counts = zip(*losses)
        value = sum(sums) / sum(counts)
    else:
        value = sum(losses) / (1 if reduce == "sum" else len(losses))
    return value.detach(), dict(zip(full, torch.autograd.grad(value, list(full.values()))))


@pytest.mark.rows(3)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("communicate", ("each", "once", "outer_once"))
@pytest.mark.parametrize("reduce", ("mean", "sum", "weighted"))
def test_it_is_one_process_on_all_tokens(reduce, communicate, world_size):
    """Weighted: the true mean over all tokens, though every microbatch of every rank has another number of them."""
    module, model = modelled()
    expected = in_one_process(module, reduce, world_size)
    batches = microbatches(reduce=reduce)
    # Sums over up to four tokens of each microbatch, through the layers forward and backward.
    near = within(expected, 4 * MICROBATCHES * world_size, steps=4)
    table = strategies(one_axis())
    if communicate == "outer_once":
        table = strategies_over_two_axes(two_axes(world_size))
    for transform in table.values():
        params = model.init(transform)
        step = fs.accumulate(partial(local, model.apply, reduce), reduce=reduce, communicate=communicate)
        value, grads = step(params, batches)
        assert_trees_close((value, fs.unshard(grads)), expected, **near)
        assert_same_bits(fs.tree_leaves(step(params, batches)), fs.tree_leaves((value, grads)))


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


def whole_numbers(params, batch):
    """A loss whose gradients are whole numbers, which have no order of sums."""
    return sum((leaf * batch).sum() for leaf in fs.gather(params).values())


SIZES = {"w": (17, 3), "v": (9, 2), "b": (5,)}
SLOW_PAIRS_OF_AXES = ((2, 1), (1, 2), (2, 4), (4, 2))


def sent_by_axis(record):
    sent = {}
    for entry in record:
        if not entry.scalar and not entry.about.is_comparison:
            key = entry.op, entry.axis
            sent[key] = sent.get(key, 0) + entry.bytes
    return sent


def accumulate_recorded(params, batches, communicate, *, jitted=False):
    """Return loss and gradients, and the bytes that are sent by kind and axis."""
    step = partial(fs.accumulate(whole_numbers, reduce="sum", communicate=communicate), microbatches=batches)
    if jitted:
        step = fs.jit(step)
        step(params)
    with fs.comm.record() as record:
        result = step(params)
    return result, sent_by_axis(record)


@pytest.mark.parametrize(
    ("outer", "inner"), [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SLOW_PAIRS_OF_AXES)]
)
def test_the_outermost_axis_is_reduced_over_once(outer, inner):
    """M P bytes are reduced within groups as by "each", and P / n bytes across groups as by "once", with equal bits."""

    def program():
        mesh = fs.init_mesh({"replicate": outer, "shard": inner}, device="cpu")
        batches = [torch.tensor(1.0 + 3 * my_rank() + number) for number in range(MICROBATCHES)]
        full = {name: normal()(*shape) for name, shape in SIZES.items()}
        for strategy in strategies_over_two_axes(mesh).values():
            params = fs.shard(full, strategy)
            each, sent_by_each = accumulate_recorded(params, batches, "each")
            once, sent_by_once = accumulate_recorded(params, batches, "once")
            result, sent = accumulate_recorded(params, batches, "outer_once")
            assert_same_bits(fs.tree_leaves(result), fs.tree_leaves(each))
            assert_same_bits(fs.tree_leaves(result), fs.tree_leaves(once))
            assert sent.keys() == sent_by_each.keys()
            for (op, axis), amount in sent.items():
                is_outer = axis == "replicate" and op != "all_gather"
                assert amount == (sent_by_once if is_outer else sent_by_each)[op, axis]

    spmd(program, world=outer * inner)


@on_ranks(4, pytest.param(8, marks=pytest.mark.slow))
def test_a_graph_defers_the_outermost_axis_too(world_size):
    mesh = two_axes(world_size)
    batches = [torch.tensor(1.0 + 3 * my_rank() + number) for number in range(2)]
    params = fs.shard({name: normal()(*shape) for name, shape in SIZES.items()}, fs.hsdp(mesh, min_shard_elements=20))
    eager = accumulate_recorded(params, batches, "outer_once")
    jitted = accumulate_recorded(params, batches, "outer_once", jitted=True)
    assert_same_bits(fs.tree_leaves(jitted[0]), fs.tree_leaves(eager[0]))
    assert jitted[1] == eager[1]


@on_ranks(4)
def test_deferred_sums_hold_leaves_that_only_the_first_microbatch_of_one_rank_uses():
    """The others take part with zeros, and in the last microbatch the sum crosses the outermost axis."""
    params = fs.shard({"w": torch.ones(9), "early": torch.ones(9)}, fs.hsdp(two_axes(4), min_shard_elements=0))

    def loss(p, number):
        full = fs.gather(p["early"]) if number == 0 else None
        value = fs.gather(p["w"]).sum()
        return value + 5 * full.sum() if number == 0 and my_rank() == 2 else value

    _, grads = fs.accumulate(loss, reduce="sum", communicate="outer_once")(params, range(MICROBATCHES))
    expected = {"w": torch.full((9,), 4.0 * MICROBATCHES), "early": torch.full((9,), 5.0)}
    assert_same_bits(fs.unshard(grads), expected)


@on_ranks(4)
def test_deferred_sums_keep_states_and_go_through_derived_leaves():
    """The inner stage has its state, and what a function computed from leaves is reduced at once."""
    mesh = two_axes(4)
    layout = fs.compose(fs.replicate(mesh["replicate"]), feedback(mesh["shard"]))
    params = fs.shard({"w": normal()(16, 4), "a": normal(1)(16, 4)}, fs.zero3(mesh, layout=layout))
    batches = [normal(my_rank() + 10 * number)(16, 4) for number in range(MICROBATCHES)]
    results = {}
    for communicate in ("each", "outer_once"):
        step = fs.accumulate(
            lambda p, x: (fs.gather(p)["w"].square() * x).sum(),
            communicate=communicate,
            transform_state=fs.transform_state(params),
        )
        results[communicate] = step(params, batches)
    (_, grads, state), (_, expected, expected_state) = results["outer_once"], results["each"]
    assert_same_bits(fs.tree_leaves(state), fs.tree_leaves(expected_state))
    assert_trees_close(fs.unshard(grads), fs.unshard(expected), **within(fs.unshard(expected), 4 * MICROBATCHES))

    # A transform of a user's own sums over both axes in one stage, so that there is nothing to defer.
    in_one_stage = fs.Wrapped(fs.ddp(mesh, ("shard", "replicate")))
    strategy = fs.masked(in_one_stage, "a", otherwise=fs.hsdp(mesh, min_shard_elements=0))
    plain = fs.shard({"w": normal()(16, 4), "a": normal(1)(16, 4)}, strategy)

    def merged(p, x):
        derived = fs.gather(fs.tree_map(lambda w: w * w, p["w"]))
        return (derived * x * fs.gather(p["a"])).sum() + (fs.gather(p["w"]) * x).sum()

    (_, grads), (_, expected) = (
        fs.accumulate(merged, communicate=communicate)(plain, batches) for communicate in ("outer_once", "each")
    )
    assert_trees_close(fs.unshard(grads), fs.unshard(expected), **within(fs.unshard(expected), 4 * MICROBATCHES))


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
    for strategy, communicate in [*product(strategies, ("each", "once")), (strategies[3], "outer_once")]:
        step = fs.accumulate(total, reduce="sum", communicate=communicate)
        grads = fs.unshard(step(fs.shard(full, strategy), list(batches))[1])
        assert_same_bits(grads, fs.tree_map(lambda leaf: torch.full_like(leaf, 271.0 * world_size), full))


@on_ranks(1, 2)
def test_losses_of_half_precision_are_added_up_in_float32(world_size):
    """In bfloat16 256 + 1 is 256, and in float16 60000 + 60000 is infinite; the objective is in the loss's dtype."""
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis(), min_shard_elements=0))
    sums = [torch.tensor(256.0, dtype=HALF)] + [torch.tensor(1.0, dtype=HALF)] * 16
    large = [torch.tensor(60000.0, dtype=torch.float16)] * 2

    def loss_of(p, number):
        return fs.gather(p)["w"].mean().to(number.dtype) * number

    def weighted(p, number):
        return loss_of(p, number), torch.tensor(1, dtype=number.dtype)

    def through_torch_func(f, **options):
        run = fs.accumulate(f, **options)
        return lambda p, batches: torch.func.vmap(lambda _: run(p, batches)[0])(torch.ones(1))[0]

    def by_engine(f, **options):
        return lambda p, batches: fs.accumulate(f, **options)(p, batches)[0]

    for differentiate in (by_engine, through_torch_func):
        assert_same_bits(
            {
                "sum": differentiate(loss_of, reduce="sum")(params, sums),
                "mean": differentiate(loss_of)(params, large),
                "weighted": differentiate(weighted, reduce="weighted")(params, large),
            },
            {"sum": torch.tensor(272.0 * world_size, dtype=HALF), "mean": large[0], "weighted": large[0]},
        )
    with torch.no_grad():
        assert_same_bits({"objective": fs.objective(large[0], like=params)}, {"objective": large[0]})


# Each makes a function of parameters that sums a loss over ranks.
SUMS_OF_LOSSES = {
    "value_and_grad": fs.value_and_grad,
    "in a graph": lambda f: fs.jit(fs.value_and_grad(f)),
    "under torch.func": lambda f: (
        lambda params: torch.func.vmap(lambda _: fs.value_and_grad(f)(params)[0])(torch.ones(1))
    ),
    "objective": lambda f: lambda params: fs.objective(f(params), like=params),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", SUMS_OF_LOSSES)
def test_ranks_whose_losses_differ_in_dtype_are_told(name):
    """Each would have the objective in the dtype of its own loss, and one of them rounded."""

    def program():
        params = fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis(), min_shard_elements=0))
        dtype = HALF if my_rank() else torch.float32
        SUMS_OF_LOSSES[name](lambda p: (fs.gather(p)["w"].sum() / 3).to(dtype))(params)

    with pytest.raises(RankError, match=r"a loss of torch\.bfloat16"):
        spmd(program, 2)


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


# Three of these: the sum wraps in uint8, is true in bool, rounds in bfloat16 and is infinite in float16.
NARROW = {"uint8": 200, "bool": 1, "bfloat16": 129, "float16": 40000, "float64": 3}


@on_ranks(1)
def test_counts_of_any_dtype_are_not_rounded_and_leave_that_of_gradients():
    params = fs.shard({"w": torch.ones(())}, fs.ddp(one_axis()))
    for dtype, number in NARROW.items():
        count = torch.tensor(number).to(getattr(torch, dtype))
        step = fs.accumulate(lambda p, _: (fs.gather(p)["w"] * 1.0, count), reduce="weighted")  # noqa: B023
        value, grads = step(params, range(3))
        assert_trees_close(3 / value.item(), 3.0 * number, **within(3.0 * number, terms=3, dtype=torch.float32))
        assert grads["w"].local.dtype is torch.float32


@on_ranks(1)
def test_counts_that_require_a_gradient_are_refused():
    """The division by them has one that no form adds; nor does a derivative in forward mode."""
    params, count = fs.shard({"w": torch.ones(())}, fs.ddp(one_axis())), torch.full((), 6.0, requires_grad=True)

    def objective(count):
        return fs.objective((torch.ones(()), count), like=params, reduce="weighted")

    forms = {
        "value_and_grad": lambda: fs.value_and_grad(lambda p: (fs.gather(p)["w"], count), reduce="weighted")(params),
        "scatter_grads": lambda: fs.scatter_grads(fs.gather(params), like=params, reduce="weighted", count=count),
        "objective": lambda: objective(count),
    }
    text = "{}: the count requires a gradient, but it is treated as a constant. Pass count.detach()."
    for name, form in forms.items():
        with pytest.raises(ValueError, match=f"^{re.escape(text.format(name))}$"):
            form()
    with pytest.raises(ValueError, match=re.escape(text.format("objective"))):
        torch.func.jvp(objective, (torch.full((), 6.0),), (torch.ones(()),))


def test_bad_arguments_are_refused():
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis()))
    for communicate, text in (
        ("inner", "communicate to be one of (None, 'each', 'once', 'outer_once'), got 'inner'"),
        ("outer_once", 'communicate="outer_once" needs leaves that are reduced over one axis after another'),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            fs.accumulate(lambda p, _: fs.gather(p)["w"].sum(), communicate=communicate)(params, [1])
    micro = "accumulate: batches must be a sequence of one or more microbatches, got"
    for options, batches, text in (
        ({"reduce": "max"}, [1], 'accumulate: reduce must be "mean", "sum" or "weighted", got \'max\''),
        ({}, [], f"{micro} an empty one"),
        ({}, iter([1]), f"{micro} a list_iterator"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            fs.accumulate(lambda p, _: p.sum(), **options)(torch.ones(2), batches)


def test_auxes_of_plain_parameters_are_a_list_too():
    f = fs.accumulate(lambda params, number: (params["w"] * number, number), has_aux=True)
    (_, auxes), _ = f({"w": torch.ones(())}, [torch.tensor(1.0), torch.tensor(3.0)])
    assert auxes == [1.0, 3.0]
