"""Gathers that a program starts ahead: who takes them over, what is sent when, and what becomes of those left over."""

import copy
import gc
from functools import partial

import pytest
import torch
from torch.func import grad_and_value
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, copied, one_axis
from tests.unit_models import Block, Language, filled, full, tokens, zero3


def language(**options):
    """A model of five units, and its parameters."""
    model = fs.functionalize(filled(Language(), torch.float32), Block)
    return model, model.init(zero3(prefetch=0, **options)(one_axis()))


def parts_of(params, prefix):
    """The leaves of one unit."""
    return {name: leaf for name, leaf in params.items() if name.startswith(prefix)}


def recorded(f, *args):
    """What a call returns, and what it gathers and reduces, by units."""
    with fs.comm.record() as record:
        result = f(*args)
    return result, [(str(entry.label), entry.unit) for entry in record if not entry.scalar]


WAYS = {
    "one microbatch": fs.value_and_grad,
    "reduced once": lambda f: lambda p, x: fs.accumulate(f, communicate="once")(p, [x, x]),
    "each reduced": lambda f: lambda p, x: fs.accumulate(f, communicate="each")(p, [x, x]),
    "in a tree": lambda f: lambda p, x: fs.accumulate(f, reduction_order="tree")(p, [x, x]),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_call_takes_over_what_has_started(way, regather):
    """The first gather of each unit is not sent again; all else is as without, to the bit."""
    model, params = language(regather=regather)
    (batch,) = tokens(2)[my_rank()]
    run = WAYS[way](model.apply)
    expected, messages = recorded(run, params, batch)
    ahead, first = recorded(fs.start_gather, parts_of(params, "blocks.0."))
    assert [verb for verb, _ in first] == ["gather"]
    result, rest = recorded(run, params | ahead, batch)
    assert_same_bits(full(result), full(expected))
    messages.remove(("gather", "blocks.0"))
    assert rest == messages
    # All at once, in a message for each transform.
    result, rest = recorded(run, fs.start_gather(params), batch)
    assert_same_bits(full(result), full(expected))
    units = 6
    assert [verb for verb, _ in rest].count("gather") == [verb for verb, _ in messages].count("gather") + 1 - units


@on_ranks(1, 2)
def test_evaluation_and_the_verb_take_it_over_too():
    model, params = language()
    (batch,) = tokens(2)[my_rank()]
    with torch.no_grad():
        out, messages = recorded(model.apply, fs.start_gather(params), batch)
        assert_same_bits(out, model.apply(params, batch))
    whole, none = recorded(fs.gather, fs.start_gather(params))
    assert_same_bits(whole, fs.gather(params))
    assert messages == none == []


def of_two(schedule, params, x):
    """Two layers, whose weights a schedule gathers."""
    first, second = schedule(params)
    return torch.tanh(torch.tanh(x @ first()) @ second()).square().sum()


def in_turn(params):
    return [lambda name=name: fs.gather(params[name]) for name in "ab"]


def both_ahead(params):
    """The second gather is on its way while the first layer computes."""
    started = {name: fs.start_gather(params[name]) for name in "ab"}
    return [lambda name=name: fs.gather(started[name]) for name in "ab"]


def recomputed(schedule, params, x):
    """A checkpoint around a use of what has started before it, and around a start and its use."""
    started = fs.start_gather(params["a"])
    x = checkpoint(lambda x: torch.tanh(x @ fs.gather(started)), x, use_reentrant=False)
    use = lambda x: torch.tanh(x @ fs.gather(fs.start_gather(params["b"])))  # noqa: E731
    return checkpoint(use, x, use_reentrant=False).square().sum()


SIDE = 4


def two_weights(**options):
    values = {name: torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE) / 50 for name in "ab"}
    return fs.shard(values, zero3(prefetch=0, **options)(one_axis()))


@on_ranks(2)
def test_a_function_starts_gathers_of_its_own():
    """In the order of the program, eager, in a graph and inside checkpoints."""
    params, x = two_weights(), torch.ones(2, SIDE) * (my_rank() + 1)
    expected, messages = recorded(fs.value_and_grad(partial(of_two, in_turn)), params, x)
    for loss in (partial(of_two, both_ahead), partial(recomputed, None)):
        run = fs.value_and_grad(loss)
        result, again = recorded(run, params, x)
        assert_same_bits(full(result), full(expected))
        assert sorted(verb for verb, _ in again) == sorted(verb for verb, _ in messages)
        assert_same_bits(full(fs.jit(run)(params, x)), full(expected))


@on_ranks(2)
def test_a_graph_has_the_start_where_the_program_has_it():
    params, x = two_weights(), torch.ones(2, SIDE)

    def step(params, x):
        started = fs.start_gather(params["b"])
        return fs.gather(params["a"]) @ x.T, fs.gather(started) + 1

    names = [
        str(node.target) for node in fs.make_graph(step)(params, x).module.graph.nodes if node.op == "call_function"
    ]
    starts, waits = ([i for i, name in enumerate(names) if part in name] for part in ("all_gather", "wait"))
    # The first gather is waited for before the one that has started ahead of it.
    assert len(starts) == len(waits) == 2
    assert starts[1] < waits[0] < names.index("aten.mm.default") < waits[1]


@on_ranks(2)
def test_under_torch_func_it_starts_nothing():
    params, x = two_weights(), torch.ones(2, SIDE)
    expected = full(fs.value_and_grad(partial(of_two, in_turn))(params, x))
    objective = lambda p: fs.objective(of_two(both_ahead, p, x), like=p)  # noqa: E731
    grads, value = grad_and_value(objective)(params)
    assert_same_bits(full((value, grads)), expected)
    outer = {name: fs.Sharded(leaf.local.clone().requires_grad_(), leaf.spec) for name, leaf in params.items()}
    assert fs.start_gather(outer) is outer


@on_ranks(2)
def test_a_gather_serves_one_use():
    params = two_weights()
    started = fs.start_gather(params)
    run = fs.value_and_grad(partial(of_two, in_turn))
    run(started, torch.ones(2, SIDE))
    used = r"start_gather: the full tensor of \['a'\] was used before, and one gather serves one use. Start another"
    for again in (partial(run, started, torch.ones(2, SIDE)), partial(fs.gather, started)):
        with pytest.raises(ValueError, match=used):
            again()
    # Maps over it and copies of it are plain parameters.
    expected = fs.gather(params)
    for plain in (fs.tree_map(lambda x: x, started), copy.deepcopy(started)):
        assert_same_bits(fs.gather(plain), expected)
    assert_same_bits(fs.unshard(started), expected)


@on_ranks(2)
def test_values_are_those_at_the_start():
    """An update leaves the memory alone that a gather has started from; a write to that memory is refused."""
    params = two_weights()
    before = copied(fs.unshard(params))
    tx = fs.from_torch(torch.optim.SGD, lr=0.1)
    started = fs.start_gather(params)
    fs.update(tx, fs.TrainState.create(params, tx), copied(params), donate=True)
    assert_same_bits(fs.gather(started), before)
    params = two_weights()
    started = fs.start_gather(params)
    params["a"].local.add_(1.0)
    with pytest.raises(ValueError, match=r"start_gather: \['a'\] was written to after its gather had started"):
        fs.gather(started)


@on_ranks(2)
def test_ranks_that_start_other_gathers_are_named():
    params = two_weights()
    with pytest.raises(ValueError, match=r"start_gather: ranks make different calls\n  \['a'\]: expected "):
        fs.start_gather(params if my_rank() else {"b": params["b"]})
    with pytest.raises(ValueError, match=r"ranks make different calls\n  verb: expected (start_)?gather"):
        (fs.start_gather if my_rank() else fs.gather)(params)


class Waits:
    """Counts the collectives that have started and not been waited for."""

    def __init__(self):
        self.under_way = 0

    def started(self, issued):
        self.under_way += issued.left

    def landed(self, _):
        self.under_way -= 1


NOBODY_USES = r"start_gather: \['a'\], \['b'\] was gathered, and no verb has used it"


# Threads would share the warnings.
@on_ranks("2 processes")
def test_what_nobody_uses_is_waited_for_and_named():
    """Without a hang, and the next calls go on."""
    params = two_weights()
    gc.disable()
    try:
        with fs.comm.watched(Waits()) as waits:
            started = fs.start_gather(params)
            assert waits.under_way
            with pytest.warns(RuntimeWarning, match=NOBODY_USES):
                del started
            assert not waits.under_way
    finally:
        gc.enable()
    fs.value_and_grad(partial(of_two, in_turn))(fs.start_gather(params), torch.ones(2, SIDE))


@on_ranks("2 processes")
def test_a_graph_takes_plain_parameters_and_returns_no_gather():
    params = two_weights()
    expected = fs.gather(params)
    started = fs.start_gather(params)
    assert_same_bits(fs.jit(fs.gather)(started), expected)
    assert_same_bits(fs.gather(started), expected)
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="jit: the function returns leaves whose gather"):
        fs.jit(fs.start_gather)(params)


def test_a_leaf_whose_gather_has_started_is_no_tensor_either():
    leaf = fs.start_gather(fs.shard({"w": torch.ones(4)}, zero3()(one_axis())))["w"]
    with pytest.raises(AttributeError, match=r"Sharded\.gather: a Sharded leaf is not a tensor\. Call fs\.gather"):
        leaf.gather(0, torch.tensor([1]))
    assert fs.gather(leaf).equal(torch.ones(4))
