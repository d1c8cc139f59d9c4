"""assert_same_bits passes a step of sums in a tree, and names the first step, leaf and cause of other bits."""

import re
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.ext.same_bits import _difference
from fshard.testing import assert_same_bits
from tests.ranks import my_rank
from tests.trees import normal

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


def step(state, microbatches, tx=SGD, sums="tree", aux=False, loss_fn=loss_fn):
    make = fs.accumulate(loss_fn, sums=sums)
    loss, grads = make(state.params, microbatches)
    return fs.update(tx, state, grads), loss, *([grads] if aux else [])


def drawn(params, x):
    return loss_fn(params, x + torch.rand(()))


def by_rank(params, x):
    return loss_fn(params, x + (my_rank() == 3))


@pytest.mark.parametrize("strategy", (fs.zero1, fs.zero3))
def test_steps_of_one_tree_pass(strategy):
    make = partial(state, strategy=strategy)
    assert_same_bits(step, make, BATCHES)
    assert_same_bits(partial(step, aux=True), make, BATCHES[:2], (2, 4))
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
        "data by rank",
        partial(step, loss_fn=by_rank),
        state,
        r"\n  loss: expected .* \(1 of 1 elements differ, by \d+ ulp at most, at \(\)\)\n.*\n"
        r"  the state before is equal: the data, the forward or the sum of losses differs\n"
        r"To fix: .*by the microbatch's number, and take",
    ),
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
@pytest.mark.rows(6)
def test_other_bits_are_named(step, state, text):
    with pytest.raises(AssertionError, match=text):
        assert_same_bits(step, state, BATCHES, (1, 4))


single = partial(torch.tensor, dtype=torch.float32)
LEAVES = (
    (single([1.0, 2.0]), single([1.0, 2.0]).nextafter(single(3.0)), "2 of 2 elements differ, by 1 ulp at most"),
    (single([0.0, 1.0]), single([-0.0, 1.0]), "1 of 2 elements differ, by 0 ulp at most"),
    (single([1e-45]), single([-1e-45]), "by 2 ulp at most"),
    (torch.tensor(1e300).double(), -torch.tensor(1e300).double(), "by 18437736874454810624 ulp at most"),
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
