"""Passes of the caller: same bits, another graph, facts that ranks compare, and failures that are named everywhere."""

import re

import pytest
import torch

import fshard as fs
from tests.faults import outcome
from tests.jit import graph_passes
from tests.jit.graph_passes import Change, Decide, Recompute, Unhashable, Watch, waves
from tests.jit.steps import assert_jitted_is_eager, refused
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_alike, assert_same_bits, copied, normal, one_axis


@pytest.mark.rows(1)
@pytest.mark.parametrize("strategy", (fs.zero2, fs.zero3))
@on_ranks(2)
def test_bits_and_collectives_are_those_of_the_eager_step(strategy):
    for options in ({}, {"donate_argnums": 0}):
        watch = Watch()
        assert_jitted_is_eager(waves(strategy), passes=[Recompute(), watch], **options)
        assert watch.graphs[0].count("aten.sin.default") == 4


@on_ranks(2)
def test_passes_run_in_their_order_once_a_trace_over_the_graph_with_donation():
    before, after = Watch("before"), Watch("after")
    case = waves()
    jitted = fs.jit(case.step, donate_argnums=0, passes=(before, Recompute(), after))
    plain = fs.jit(case.step, donate_argnums=0)
    state = copied(case.state)
    for batch in case.batches:
        state, _ = jitted(state, *batch)
    expected = [str(node.target) for node in plain.trace_call((case.state, *case.batches[0]), {}).module.graph.nodes]
    assert before.graphs == [expected]
    assert "aten._fused_adamw_.default" in expected
    assert len(after.graphs) == 1
    assert after.graphs[0].count("aten.sin.default") == 2 * expected.count("aten.sin.default") == 4
    # Another shape is another trace.
    jitted(state, case.batches[0][0][:2].clone())
    assert len(before.graphs) == len(after.graphs) == len(jitted.traces) == 2


@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_ranks_whose_passes_decide_differently_are_named_on_every_rank():
    """In the first call, and for another shape; nothing has been donated, and equal passes run afterwards."""
    case, last = waves(), fs.axis_of(one_axis()).size - 1
    state, (batch,) = copied(case.state), case.batches[0]
    text = (
        "jit: ranks make different calls\n  passes: expected decide: a as on the rank at shard=0, "
        f"got decide: b on the rank at shard={last}\n"
    )
    jitted = fs.jit(case.step, donate_argnums=0, passes=(Decide("b" if my_rank() == last else "a"),))
    for x in (batch, batch[:2].clone()):
        with fs.comm.record() as record, pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            jitted(state, x)
        assert all(entry.about.is_comparison for entry in record)
    agreeing = fs.jit(case.step, donate_argnums=0, passes=(Decide("a"),))
    assert_alike(agreeing(state, batch), case.step(case.state, batch))


# Passes by the rank, and how ranks then differ: also in collectives that a pass does not speak of.
DIFFERENT = [
    (lambda rank: (Recompute(),) if rank else (), "passes: expected nothing as on the rank at shard=0, got"),
    (lambda rank: (Change(graph_passes.repeat),), "collectives: expected .* as on the rank at shard=0, got"),
]


@on_ranks(2)
def test_ranks_with_other_passes_are_named():
    case = waves()
    for passes_of, text in DIFFERENT:
        with pytest.raises(ValueError, match=rf"different calls\n  {text}"):
            fs.jit(case.step, passes=passes_of(my_rank()))(case.state, *case.batches[0])


def returns_none(traced):
    return None


returns_none.name = "returns_none"


@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_a_pass_that_fails_is_named_and_the_state_is_kept():
    case = waves()
    state = copied(case.state)
    with refused("jit: the pass fail: there is no such graph"):
        fs.jit(case.step, donate_argnums=0, passes=(Recompute(), Change(graph_passes.fail)))(state, *case.batches[0])
    broken = {
        Change(graph_passes.drop): r"the pass drop: zip\(\) argument 2 is longer",
        Change(graph_passes.disorder): "the pass disorder: Argument .* was used before",
        returns_none: "the pass returns_none: cannot unpack non-iterable NoneType object",
    }
    for graph_pass, text in broken.items():
        with pytest.raises(ValueError, match=f"^jit: {text}"):
            fs.jit(case.step, donate_argnums=0, passes=(graph_pass,))(state, *case.batches[0])
    jitted = fs.jit(case.step, donate_argnums=0)
    assert_alike(jitted(state, *case.batches[0]), case.step(case.state, *case.batches[0]))


@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_a_pass_that_fails_on_one_rank_is_named_on_every_rank():
    """In the first call and for another shape: others hear of it in the message that would begin the step."""
    case = waves()
    state, (batch,) = copied(case.state), case.batches[0]
    jitted = fs.jit(case.step, donate_argnums=0, passes=(Change(graph_passes.fail_for_few_rows),))
    state, _ = jitted(state, batch)
    error = "jit: the pass fail_for_few_rows: there is no such graph"
    report = f"rank 1 failed in jit: ValueError: {error}\nTo fix: correct the error above. jit has not sent any data."
    for function in (jitted, fs.jit(case.step, donate_argnums=0, passes=jitted.passes)):
        with fs.comm.record() as record:
            text = outcome(lambda: function(state, batch[:3].clone())).text  # noqa: B023
        assert text == (error if my_rank() else report)
        assert all(entry.about.is_comparison for entry in record)
    fs.unshard(state.params)


@on_ranks(2)
def test_passes_run_again_once_ranks_have_agreed_on_the_leaves_that_any_of_them_uses():
    """Rank 1 uses a leaf more. What ranks decide before the agreement is not compared."""
    params = fs.shard({name: normal()(4, 4) for name in "ab"}, fs.zero3(one_axis(), min_shard_elements=0))

    def step(params, x):
        def loss(params, x):
            full = fs.gather(params)
            y = (x @ full["a"]).sin()
            total = (y * y).sum()
            return total + full["b"].square().sum() if my_rank() else total

        return fs.value_and_grad(loss)(params, x)

    watch = Watch()
    jitted = fs.jit(step, passes=(watch, Recompute()))
    x = normal(1 + my_rank())(2, 4)
    expected = step(params, x)
    for _ in range(2):
        assert_alike(jitted(params, x), expected)
    assert len(watch.graphs) == 2 - my_rank()


def test_a_backend_that_is_a_function_gets_the_graph_after_passes():
    graphs = []

    def backend(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return module

    def f(x):
        y = x.sin()
        return y.exp() * y

    x = normal()(3)
    jitted = fs.jit(f, donate_argnums=0, backend=backend, passes=(Recompute(),))
    assert_same_bits(jitted(x.clone()), f(x))
    assert graphs[0].count("aten.sin.default") == 2


PASSES = "jit: expected passes to be a tuple of hashable functions of a graph, each with a name, got "


def test_what_is_no_tuple_of_passes_is_refused():
    for passes in (Recompute(), "fit", ("fit",), (abs,), (Recompute, 1), [Unhashable(graph_passes.fail)], None):
        with pytest.raises(ValueError, match=f"^{re.escape(PASSES + repr(passes))}"):
            fs.jit(torch.sin, passes=passes)
