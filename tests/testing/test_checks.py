"""Checks of fshard.testing pass what is right, and name each leaf, step and value that is not."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.ext.same_bits import _difference
from fshard.testing import assert_same_bits, assert_trees_close, check_pure, check_varying
from tests.ranks import my_rank, on_ranks
from tests.trees import OF_EVERY_LEAF, normal, one_axis
from tests.unit_models import filled

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def passes(check, actual, expected):
    try:
        check(actual, expected)
    except AssertionError:
        return False
    return True


def test_tolerances_are_those_of_torch():
    for dtype in (*FLOATS, *COMPLEX):
        expected, results = torch.ones(1, dtype=dtype), set()
        for distance in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
            result = passes(assert_trees_close, expected + distance, expected)
            assert result == passes(torch.testing.assert_close, expected + distance, expected), (dtype, distance)
            results.add(result)
        assert results == {True, False}


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_distance_of_complex_leaves(dtype):
    actual, expected = torch.tensor([1, 4 + 4j], dtype=dtype), torch.tensor([1, 1 + 0j], dtype=dtype)
    text = "['w']: expected (1+0j) within rtol=0, atol=0, got (4+4j) there (1 of 2 elements differ, most by 5 at (1,))"
    with pytest.raises(AssertionError, match=re.escape(text)):
        assert_trees_close({"w": actual}, {"w": expected}, rtol=0, atol=0)


TX = fs.from_torch(torch.optim.SGD, lr=0.1)

STRATEGIES = OF_EVERY_LEAF | {
    "zero1": partial(fs.zero1, min_shard_elements=0),
    "zero3 of whole leaves": partial(fs.zero3, min_shard_elements=1000),
}
# Those whose gather hands out the state's own memory, where there are several ranks.
WHOLE = ("ddp", "zero3 of whole leaves")

WRITES = {
    "data": lambda w: w.data.clamp_(0, 0),
    "numpy": lambda w: w.detach().numpy().fill(0),
}


def started(strategy):
    params = fs.shard({"w": normal()(5, 3), "v": normal(1)(3)}, STRATEGIES[strategy](one_axis()))
    return fs.TrainState.create(params, TX), normal(2)(4, 5)


def step_that(write):
    def step(state, batch):
        def loss(params):
            full = fs.gather(params)
            value = (batch @ full["w"] + full["v"]).square().sum()
            write(full["w"])
            return value

        value, grads = fs.value_and_grad(loss)(state.params)
        return fs.update(TX, state, grads), value

    return step


@pytest.mark.parametrize("write", WRITES)
@on_ranks(1, 2)
def test_writes_past_the_version_counter_are_named(world_size, write):
    """Where the caller's state has changed; elsewhere they change a copy, and nothing else."""
    step = step_that(WRITES[write])
    error = (
        "check_pure: the step changed its arguments\n"
        "  argument 0.params['w']: expected those before it, got other values after the step\n"
        "To fix: find the write in place to these tensors or to a view of them, and compute a new tensor instead."
    )
    for strategy in STRATEGIES:
        state, batch = started(strategy)
        if world_size == 1 or strategy in WHOLE:
            with pytest.raises(AssertionError, match=re.escape(error)):
                check_pure(step, state, batch)
        else:
            check_pure(step, state, batch)


@pytest.mark.rows(1)
@on_ranks(1, 2)
def test_pure_and_donated_steps_pass():
    step = step_that(lambda w: None)
    for strategy in STRATEGIES:
        state, batch = started(strategy)
        after, value = check_pure(step, state, batch=batch)
        assert torch.equal(value, step(state, batch)[1])
        assert after.step == state.step + 1
        check_pure(fs.jit(step, donate_argnums=0), state, batch)


def test_what_a_tensor_is_counts_as_well():
    tensors = {"nan": torch.tensor([float("nan")]), "conj": torch.ones(2, dtype=torch.complex64).conj(), "empty": None}
    check_pure(lambda tree: None, tensors)
    with pytest.raises(AssertionError, match=r"\['nan'\].*\n  x\['s'\]: expected those before it"):
        check_pure(lambda tree, x: (tree["nan"].zero_(), x["s"].resize_(2, 3)), tensors, x={"s": torch.zeros(3, 2)})


FULL = {"norm": normal(1)(6), "up": normal(2)(8, 6), "down": normal(3)(6, 8), "head": normal(4)(6, 6)}
X = normal(5)(3, 6)


def parallel(mesh):
    """A strategy under which a layer's columns and rows stay split over the second axis."""
    tp = mesh["tp"]
    split = (fs.masked(fs.split_dim(tp, dim=0), "up"), fs.masked(fs.split_dim(tp, dim=1), "down"))
    return fs.compose(fs.zero3(mesh, min_shard_elements=7), *split)


def loss_of(params, enter, leave):
    full = fs.gather(params)
    x = enter(X * full["norm"])
    x = leave(torch.relu(x @ full["up"].T) @ full["down"].T)
    return ((x * full["norm"]) @ full["head"]).square().mean()


@on_ranks(3)
def test_a_model_passes_under_every_strategy():
    model = fs.functionalize(filled(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5))))
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    for strategy in (fs.ddp(mesh), fs.zero2(mesh), fs.zero3(mesh, min_shard_elements=0)):
        check_varying(lambda p, x: (model.apply(p, x).square().sum(), len(x)), model.init(strategy), X)


def sum_that_varies(params, shard, tp):
    full = fs.gather(params)
    return fs.psum(full["norm"].sum(), tp)  # this line


NOT_GATHERED = (
    "['norm']: expected fs.gather or fs.pvary before its use with varying values, got a leaf that is whole on all "
    "ranks of '{}'"
)
# Losses, and what is wrong with them.
LOSSES = {
    "right": (lambda p, shard, tp: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: fs.psum_invariant(x, tp)), None),
    "pvary forgotten": (
        lambda p, shard, tp: loss_of(p, lambda x: x, lambda x: fs.psum_invariant(x, tp)),
        NOT_GATHERED.format("tp"),
    ),
    "psum for psum_invariant": (
        lambda p, shard, tp: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: fs.psum(x, tp)),
        "expected one that agrees: fs.psum_invariant, whose sum agrees, got psum over 'tp', whose result varies",
    ),
    "partial sums": (
        lambda p, shard, tp: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: x),
        "['down']: expected fs.psum_invariant before its use as an invariant value, got a leaf that is split over 'tp'",
    ),
    "a whole leaf on pieces": (
        lambda p, shard, tp: fs.psum_invariant((p["norm"].local * fs.gather(p)["up"]).sum(), tp),
        NOT_GATHERED.format("tp"),
    ),
    "all_gather of columns": (
        lambda p, shard, tp: fs.all_gather(fs.gather(p)["up"], tp).sum(),
        "expected one that agrees: fs.all_gather_invariant, whose result agrees, got all_gather over 'tp'",
    ),
    "an objective": (
        lambda p, shard, tp: fs.psum_invariant(fs.gather(p)["norm"].sum(), shard),
        "expected one that varies: fs.pvary of it first, got psum_invariant over 'shard', whose result agrees",
    ),
    "a whole leaf past gather": (lambda p, shard, tp: p["norm"].local.sum(), NOT_GATHERED.format("shard")),
    "a line that is named": (
        sum_that_varies,
        'in sum_that_varies return fs.psum(full["norm"].sum(), tp) # this line: expected one that agrees',
    ),
}


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", LOSSES)
@on_ranks(4)
def test_losses(name):
    mesh = fs.init_mesh({"shard": 2, "tp": 2}, device="cpu")
    params, axes = fs.shard(FULL, parallel(mesh)), (fs.axis_of(mesh["shard"]), fs.axis_of(mesh["tp"]))
    loss, error = LOSSES[name]
    forms = {False: lambda p: loss(p, *axes), True: lambda p: ((loss(p, *axes), len(X)), {"rows": X})}
    for has_aux, f in forms.items():
        with nullcontext() if error is None else pytest.raises(AssertionError, match=re.escape(error)):
            check_varying(f, params, has_aux=has_aux)


@on_ranks(4)
def test_columns_may_be_gathered_into_what_agrees():
    """Its transpose takes this rank's piece, where all_gather's sums as many equal cotangents as there are ranks."""
    mesh = fs.init_mesh({"shard": 2, "tp": 2}, device="cpu")
    tp, params = fs.axis_of(mesh["tp"]), fs.shard(FULL, parallel(mesh))

    def loss(params):
        return fs.all_gather_invariant(fs.gather(params)["up"], tp).square().sum()

    check_varying(loss, params)
    value, grads = fs.value_and_grad(loss)(params)
    fs.testing.assert_trees_close((value, fs.unshard(grads)["up"]), (FULL["up"].square().sum(), 2 * FULL["up"]))


@on_ranks(3)
def test_it_switches_nothing_of_the_process():
    """Ranks may be threads, and each that put a switch of the process back would leave the state of another's."""
    params = fs.shard(FULL, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    found = []

    def loss(params):
        found.append(torch.is_anomaly_enabled())
        return (X @ fs.gather(params["head"])).square().mean()

    check_varying(loss, params)
    assert [*found, torch.is_anomaly_enabled()] == [False, False]


# assert_same_bits passes a step of sums in a tree, and names the first step, leaf and cause of other bits.

SGD = fs.sgd(0.1, momentum=0.9)
LAMB = fs.lamb(0.1)
# The form that torch vectorizes along a shard, and finishes one by one.
FUSED = fs.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)
BATCHES = [list(normal(step)(8, 5, 50, dtype=torch.float32)) for step in range(4)]


def state(mesh, tx=SGD, strategy=fs.zero3, of=lambda mesh: 0.0):
    params = {"v": torch.ones(3), "w": normal(9)(50, 3, dtype=torch.float32) + of(mesh)}
    return fs.TrainState.create(fs.shard(params, strategy(mesh, min_shard_elements=0)), tx)


def loss_fn(params, x):
    full = fs.gather(params)
    return torch.tanh(x @ full["w"] * full["v"]).mean()


def step(state, microbatches, tx=SGD, sums="tree", aux=False, loss_fn=loss_fn, communicate=None):
    make = fs.accumulate(loss_fn, sums=sums, communicate=communicate)
    loss, grads = make(state.params, microbatches)
    return fs.update(tx, state, grads), loss, *([grads] if aux else [])


def drawn(params, x):
    return loss_fn(params, x + torch.rand(()))


def by_rank(params, x):
    return loss_fn(params, x + (my_rank() == 3))


def by_rank_in_gradients(params, x):
    full = fs.gather(params)
    return (
        torch.tanh(x @ full["w"] * full["v"]).mean() + (0.0 * full["v"] if my_rank() < 3 else full["v"] * 2 - 2).sum()
    )


@pytest.mark.parametrize("strategy", (fs.zero1, fs.zero3))
def test_steps_of_one_tree_pass(strategy):
    make = partial(state, strategy=strategy)
    assert_same_bits(step, make, BATCHES)
    assert_same_bits(partial(step, aux=True, communicate="once"), make, BATCHES[:2], (2, 4), communicate="once")
    assert_same_bits(fs.jit(step, donate_argnums=0), make, BATCHES, (1, 4))


def test_parameters_alone_and_processes_pass(workers):
    def descend(params, microbatches):
        loss, grads = fs.accumulate(loss_fn, sums="tree")(params, microbatches)
        return fs.tree_map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    def params(mesh):
        # Two axes, which the function makes for the number of ranks.
        mesh = fs.init_mesh({"replicate": -(-mesh.size() // 2), "shard": -1}, device="cpu")
        return fs.shard({"v": torch.ones(3), "w": normal(9)(50, 3, dtype=torch.float32)}, fs.hsdp(mesh))

    assert_same_bits(descend, params, BATCHES, (1, 4, workers(2)))


KERNELS = "one thread and kernels whose bits depend on shape and dtype alone"
DIFFERENT = (
    (
        "sums in turn",
        partial(step, sums=None, aux=True),
        state,
        r"assert_same_bits: step 0 \(counted from 0\) has other bits on 4 ranks than on 1\n"
        r"  aux\['v'\]: expected \S+, got \S+ \(\d of 3 elements differ, by \d+ ulp at most, at \(\d,\)\)\n"
        r"  leaves that differ: \d of 2 in aux, (\d of 2 in state.params, )?\d of 5 in state.opt_state\n"
        r"  the state before and the loss are equal: the backward, the sums of gradients, or what else aux holds\n"
        rf'To fix: pass sums="tree" to accumulate or value_and_grad, and take {KERNELS}\.$',
    ),
    (
        "sums in turn, and nothing beside the loss",
        partial(step, sums=None),
        state,
        r"the sums of gradients, or the update\nTo fix: .*; return the gradients as a third value",
    ),
    (
        "data by rank",
        partial(step, loss_fn=by_rank),
        state,
        r"\n  loss: expected .* \(1 of 1 elements differ, by \d+ ulp at most, at \(\)\)\n.*\n"
        r"  the state before is equal: the data, the forward or the sum of losses differs\n"
        r"To fix: .*by the microbatch's number, and take",
    ),
    ("gradients by rank", partial(step, aux=True, loss_fn=by_rank_in_gradients), state, r"\n  aux\['v'\]: expected"),
    (
        "an update by the length of a shard",
        partial(step, tx=FUSED, aux=True),
        partial(state, tx=FUSED),
        r"step \d .*\n  state\.\w+.*\n  leaves that differ: .*\n"
        r"  the state before, the loss and aux are equal: the update\nTo fix: .* no fused optimizer of torch",
    ),
    (
        "norms",
        partial(step, tx=LAMB, sums=None),
        partial(state, tx=LAMB),
        r"\n  sums over ranks in that step beside those of gradients and losses: psum_invariant \(1\)\nTo fix:",
    ),
    ("random numbers", partial(step, loss_fn=drawn), state, r"\n  two runs on 1 rank differ from each other\n"),
    (
        "another beginning",
        step,
        partial(state, of=lambda mesh: mesh.size()),
        r"the states to start from have other bits on 4 ranks than on 1\n  state\.params\['w'\]: expected .*\n.*\n"
        r"  the function that makes the state\nTo fix: make it of the same values",
    ),
)


@pytest.mark.parametrize(("step", "state", "text"), [row[1:] for row in DIFFERENT], ids=[row[0] for row in DIFFERENT])
@pytest.mark.rows(8)
def test_other_bits_are_named(step, state, text):
    with pytest.raises(AssertionError, match=text):
        assert_same_bits(step, state, BATCHES, (1, 4))


single = partial(torch.tensor, dtype=torch.float32)
LEAVES = (
    (single([1.0, 2.0]), single([1.0, 2.0]).nextafter(single(3.0)), "2 of 2 elements differ, by 1 ulp at most"),
    (single([0.0, 1.0]), single([-0.0, 1.0]), "1 of 2 elements differ, by 0 ulp at most"),
    (single([1e-45]), single([-1e-45]), "by 2 ulp at most"),
    (torch.tensor(1e300).double(), -torch.tensor(1e300).double(), "by 2**62 ulp or more"),
    (torch.ones(3).bfloat16(), torch.tensor([1, 1.0078125, 1.015625]).bfloat16(), "by 2 ulp at most, at (2,)"),
    (torch.ones(2, dtype=torch.complex64), single([1, 0, 1, 1e-45]).view(2, 2), "expected torch.complex64 of (2,)"),
    (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64).conj(), "2 of 4 elements differ"),
    (torch.tensor([3, 5]), torch.tensor([3, 9]), "expected 5, got 9 (1 of 2 elements differ, by 4 ulp at most"),
    (torch.tensor(True), torch.tensor(False), "expected True, got False"),
    (None, torch.tensor(0), "expected None, got an int64 Tensor of shape ()"),
)


@pytest.mark.parametrize(("a", "b", "text"), LEAVES, ids=str)
@pytest.mark.rows(len(LEAVES))
def test_differences_are_counted_in_the_last_place(a, b, text):
    assert text in _difference(a, b)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, state, BATCHES), "assert_same_bits: expected"),
        ((step, state(fs.init_mesh({"shard": -1}, device="cpu")), BATCHES), "expected state to be a function, got"),
        ((step, state, []), "expected batches of one step or more, got none"),
        ((step, state, BATCHES, (4,)), "expected world_sizes to be two or more, got (4,)"),
        (
            (lambda state, microbatches: state, lambda mesh: state(mesh).params, BATCHES, (1, 2)),
            "assert_same_bits: expected step to return (state, loss) or (state, loss, aux), got",
        ),
    ],
    ids=("step", "state", "batches", "world sizes", "result"),
)
@pytest.mark.rows(5)
def test_what_makes_no_sense_is_refused(arguments, text):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(text)):
        assert_same_bits(*arguments)


def test_one_number_of_threads_computes_everywhere(workers):
    text = (
        "assert_same_bits: expected torch to compute with one number of threads at every world size, "
        "got 2 on 1 rank, 1 on 2 ranks; call torch.set_num_threads(1) in every process first, because sums of "
        "torch's kernels depend on it"
    )
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        assert_same_bits(step, state, BATCHES, (1, workers(2)))
