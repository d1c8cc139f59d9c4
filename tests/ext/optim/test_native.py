"""sgd, adam and adamw: their dtypes, states of other optimizers or layouts, and their derivatives."""

import re
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.rounding import tolerance
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis

STEPS = 5
SHAPES = {"w": (5, 3), "vector": (7,), "one": (1,), "scalar": (), "empty": (0, 3)}
ELEMENTS = 15 + 7 + 1 + 1
LAYOUTS = {name: STRATEGIES[name] for name in ("ddp", "zero2 of every leaf", "last dim", "hsdp", "two dims")} | {
    "some whole": lambda on: fs.zero2(on.line, min_shard_elements=10)
}


def tree(seed, dtype=torch.float64, shapes=SHAPES):
    """Of seed 0 the parameters, of k the gradients of step k."""
    draw = normal(seed)
    return {name: draw(*shape, dtype=dtype) for name, shape in shapes.items()}


def as_chain(state):
    """The states of an optimizer's parts, and of theirs."""
    return [part for parts in state for part in as_chain(parts)] if type(state) is tuple else [state]


def run(tx, place=lambda full: full, make=tree):
    params = place(make(0))
    state = tx.init(params)
    for step in range(1, STEPS + 1):
        params, state = tx.update(place(make(step)), state, params)
    counts = [part.updates for part in as_chain(state) if hasattr(part, "updates")]
    assert counts
    assert all(count.item() == STEPS and count.dtype == torch.int64 for count in counts)
    return params, state


def number(value):
    return torch.tensor(value, dtype=torch.float64)


OURS = {
    "sgd momentum": (fs.sgd, {"lr": 0.3, "momentum": 0.7, "dampening": 0.2, "weight_decay": 0.1}),
    "adam": (fs.adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}),
    "adamw": (fs.adamw, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}),
}


@pytest.mark.parametrize(
    ("tx", "other", "expected", "got"),
    [
        (fs.sgd(0.1), fs.adamw(0.1), "an empty state", "an AdamState"),
        (fs.sgd(0.1, momentum=0.9), fs.adam(0.1), "a state of class MomentumState", "an AdamState"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(tx, other, expected, got):
    """Its averages would be passed on as they are, by an update that does not read them."""
    params = tree(0)
    text = f"update: expected {expected}, got {got}; pass the state that init of this optimizer made"
    with pytest.raises(ValueError, match=f"^{text}$"):
        tx.update(tree(1), other.init(params), params)


@on_ranks(2)
def test_gradients_of_another_tree_are_refused_by_each_optimizer_that_is_called_itself():
    params = fs.shard({"v": torch.ones(5), "w": torch.ones(4, 3)}, fs.zero2(one_axis(), min_shard_elements=0))
    adam = fs.from_torch(torch.optim.Adam)
    optimizers = [fs.sgd(0.1, momentum=0.9), fs.adam(0.1), fs.adamw(0.1), fs.lamb(0.1), fs.lars(0.1), fs.adafactor(0.1)]
    optimizers += [fs.partition({"v": adam, "w": fs.sgd(0.1)}), fs.freeze(adam, "v"), fs.whole(adam)]
    optimizers += [fs.ema(fs.adam(0.1), 0.9), fs.skip_nonfinite(adam), fs.add_decayed_weights(0.1)]
    for tx in optimizers:
        state = tx.init(params)
        for grads in ({**params, "x": params["v"]}, {"w": params["w"]}, None, {"u": params["v"], "w": params["w"]}):
            with pytest.raises(ValueError, match=r"^update: trees differ in structure\n"):
                tx.update(grads, state, params)


@pytest.mark.parametrize("shape", [(1,), (2, 3), ()])
def test_gradients_of_other_shapes_are_refused_by_each_optimizer_that_is_called_itself(shape):
    """They would be broadcast against the parameters."""
    params = {"b": torch.ones(3), "w": torch.ones(1, 3)}
    adam = fs.from_torch(torch.optim.Adam)
    optimizers = [fs.sgd(0.1), fs.sgd(0.1, momentum=0.9, weight_decay=0.1), fs.adam(0.1), fs.lamb(0.1), fs.lars(0.1)]
    optimizers += [adam, fs.whole(adam), fs.partition({"b": adam, "w": fs.sgd(0.1)}), fs.ema(fs.adamw(0.1), 0.9)]
    got = re.escape(f"a tensor of shape {shape}")
    for tx in optimizers:
        state = tx.init(params)
        for name, leaf in params.items():
            expected = re.escape(f"  ['{name}']: expected a tensor of shape {tuple(leaf.shape)}, got ")
            with pytest.raises(ValueError, match=f"^update: leaves do not fit the parameters\n{expected}{got}\n"):
                tx.update({**params, name: torch.ones(shape)}, state, params)


def test_leaves_keep_their_dtype():
    """A schedule from torch gives float64, which must not widen a leaf of shape (); nor do gradients narrow one."""
    for ours, hyper in OURS.values():
        for lr in (0.1, number(0.1), lambda count: 0.05 * count.double()):
            actual = run(ours(**hyper | {"lr": lr}), make=lambda seed: tree(seed, torch.bfloat16))
            assert {leaf.dtype for leaf in fs.tree_leaves(actual)} == {torch.bfloat16, torch.int64}
        params, tx = tree(0, torch.float32), ours(**hyper)
        actual = tx.update(tree(1, torch.bfloat16), tx.init(params), params)
        assert {leaf.dtype for leaf in fs.tree_leaves(actual)} == {torch.float32, torch.int64}


def test_a_rate_may_have_a_dtype_without_a_sign():
    """Its negative would be another number, or none."""
    for make in (fs.sgd, partial(fs.adamw, weight_decay=0.5)):
        expected, _ = run(make(number(1.0)))
        assert_same_bits(run(make(torch.tensor(1, dtype=torch.uint8)))[0], expected)
        assert_same_bits(run(make(lambda count: count >= 0))[0], expected)


def test_a_chain_of_pieces_is_the_optimizer():
    """And the rate that a schedule gives counts from 0, also for complex leaves."""
    pieces = fs.chain(fs.scale_by_adam((0.8, 0.9), 1e-3), fs.sgd(0.1))
    assert_same_bits(run(pieces)[0], run(fs.adam(0.1, (0.8, 0.9), 1e-3))[0])
    make = lambda seed: torch.view_as_complex(normal(seed)(5, 3, 2))  # noqa: E731
    expected = make(0) - sum(0.1 * 0.5**step * make(step + 1) for step in range(STEPS))
    actual, _ = run(fs.sgd(lambda count: 0.1 * 0.5 ** int(count)), make=make)
    assert_trees_close(actual, expected, **within(expected, terms=STEPS + 1))


def learned(row, updates, grad_of, outer):
    """The loss after some updates as a function of parameters and the optimizer's numbers."""

    def loss(params, numbers):
        tx = row[0](**numbers)
        state = tx.init(params)
        for step in range(1, updates + 1):
            params, state = tx.update(grad_of(params, step), state, params)
        return outer(params)

    return loss


def inner_loss(full, step):
    target = tree(step)
    return sum((target[name] * leaf).sin().sum() + (leaf**2).sum() for name, leaf in full.items())


def dense(row, updates):
    return learned(row, updates, torch.func.grad(inner_loss), lambda params: inner_loss(params, STEPS))


@pytest.mark.rows(1)
@pytest.mark.parametrize("case", OURS)
def test_derivatives_of_full_trees(case):
    full = {name: leaf for name, leaf in tree(0).items() if leaf.numel()}
    numbers = fs.tree_map(number, OURS[case][1])

    def loss(*values):
        params, rest = dict(zip(full, values)), list(values[len(full) :])
        return dense(OURS[case], 2)(params, fs.tree_map(lambda _: rest.pop(0), numbers))

    leaves = [leaf.clone().requires_grad_() for leaf in [*full.values(), *fs.tree_leaves(numbers)]]
    # Central differences leave the square of a step of a sixth of the third derivative, below 1,000 here, and the
    # rounding of the loss, below 100, divided by the step.
    step = 1e-5
    left = 1000 * step**2 + tolerance(torch.float64, terms=1, scale=100) / step
    assert torch.autograd.gradcheck(loss, leaves, eps=step, atol=left, rtol=0.0)

    def after(param):
        """Second derivatives are finite where gradients are zero, or were before."""
        tx = OURS[case][0](**OURS[case][1] | ({"eps": 1e-8} if "eps" in numbers else {}))
        params = {"w": param, "idle": 0 * param, "still": param + 2}
        grads = {"w": 2 * param, "idle": 0 * param, "still": 0 * param}
        params, state = tx.update(grads, tx.init(params), params)
        return sum((leaf**2).sum() for leaf in tx.update(grads | {"still": param.cos()}, state, params)[0].values())

    assert torch.func.hessian(after)(number([0.0, 0.5, -1.0])).isfinite().all()


def test_second_derivatives_of_small_gradients_are_those_of_float64():
    """A power of -3/2 of their squares is infinite in float32."""

    def first_update(grad):
        tx = fs.adam(1.0)
        zeros = torch.zeros_like(grad)
        return tx.update(grad, tx.init(zeros), zeros)[0].sum()

    for size in (1e-13, 1e-18):
        expected = torch.func.hessian(first_update)(number([size])).float()
        actual = torch.func.hessian(first_update)(number([size]).float())
        assert_trees_close(actual, expected, **within(expected, terms=1, steps=2))


def check_derivatives_of_shards_are_those_of_full_trees(row, world_size, layout):
    full, numbers = tree(0), fs.tree_map(number, row[1])
    expected = torch.func.grad(dense(row, 2), argnums=(0, 1))(full, numbers)
    share = (1 + torch.distributed.get_rank()) / sum(range(1, world_size + 1))
    params = fs.shard(full, LAYOUTS[layout](meshes()))

    def local(params, step):
        return fs.objective(share * inner_loss(fs.gather(params), step), params, reduce="sum")

    loss = learned(row, 2, torch.func.grad(local), lambda params: local(params, STEPS))
    of_params, of_numbers = torch.func.grad(loss, argnums=(0, 1))(params, numbers)
    # Two updates and three losses, each with sums over the elements and the ranks.
    near = within(expected, ELEMENTS + world_size, steps=5)
    assert_trees_close((fs.unshard(of_params), of_numbers), expected, **near)


@pytest.mark.rows(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("case", OURS)
def test_derivatives_of_shards_are_those_of_full_trees(case, world_size, layout):
    check_derivatives_of_shards_are_those_of_full_trees(OURS[case], world_size, layout)


@pytest.mark.parametrize("make", (fs.adam, fs.adamw))
def test_small_gradients_in_float16_make_steps_of_their_size(make):
    """Their squares are 0 in float16, and so is eps there."""
    params, grads = {"w": torch.ones(3, dtype=torch.float16)}, {"w": torch.full((3,), 1e-5, dtype=torch.float16)}
    tx = make(1e-5, eps=1e-7)
    state = tx.init(params)
    for _ in range(STEPS):
        new, state = tx.update(grads, state, params)
        step = (params["w"] - new["w"]).double()
        # The rate times the gradient over eps.
        assert_trees_close(step, torch.full_like(step, 1e-3), **within(params["w"], terms=3))
        assert step.all()


@pytest.mark.parametrize("make", (partial(fs.from_torch, torch.optim.AdamW), fs.adamw, fs.adafactor, fs.lars))
@on_ranks(4)
def test_a_state_that_was_resharded_without_its_parameters_is_refused(make):
    """Its shards would be broadcast against those of the parameters, taken for means of theirs, or for other shards."""
    mesh = fs.init_mesh({"a": 2, "b": 2}, device="cpu")
    params = fs.shard({"w": normal(1)(4, 4)}, fs.fully_shard(mesh["a"]))
    tx = make(lr=0.1)
    state = fs.TrainState.create(params, tx)
    for strategy in (fs.fully_shard(mesh["a"], dim=1), fs.fully_shard(mesh["b"])):
        moved = state._replace(opt_state=fs.reshard(state.opt_state, strategy))
        # Rows of adafactor are computed from gradients, and moved ones look right.
        split = rf"split by P\(({strategy.dim * 'None, '}'{strategy.axis.name}'|'a')\)"
        with pytest.raises(ValueError, match=rf"{split}, got .*, {split}\nTo fix: .*reshard them together"):
            fs.update(tx, moved, params)


@pytest.mark.parametrize("make", (partial(fs.from_torch, torch.optim.AdamW), fs.adamw, fs.adafactor, fs.lars))
@on_ranks(2)
def test_parameters_that_were_resharded_alone_to_the_same_shards_are_updated(make):
    """An axis of one rank splits nothing."""
    mesh = fs.init_mesh({"a": 2, "b": 1}, device="cpu")
    a, b = fs.fully_shard(mesh["a"]), fs.fully_shard(mesh["b"])
    for first, second in ((a, fs.compose(b, a)), (fs.replicate(mesh["b"]), b), (b, fs.fully_shard(mesh["b"], dim=1))):
        params = fs.shard({"w": normal(1)(4, 4)}, first)
        tx = make(lr=0.1)
        state = fs.TrainState.create(params, tx)
        moved = state._replace(params=fs.reshard(params, second))
        expected, actual = [fs.update(tx, s, fs.tree_map(torch.ones_like, s.params)).params for s in (state, moved)]
        assert_same_bits(fs.unshard(actual), fs.unshard(expected))


@pytest.mark.parametrize("make", [fs.sgd, fs.adam, lambda lr: fs.from_torch(torch.optim.Adam, lr=lr)])
@on_ranks(2)
def test_a_call_that_one_rank_corrects_leaves_nothing_for_others_to_compare(make):
    axis = fs.axis_of(one_axis())
    params = fs.shard({"v": torch.ones(5), "w": torch.ones(4, 3)}, fs.zero2(axis, min_shard_elements=0))
    for tx in (make(0.1), fs.ema(make(0.1), 0.9)):
        state = tx.init(params)
        if my_rank() == 0:
            with pytest.raises(ValueError, match=r"^update: trees differ in structure\n"):
                tx.update({"w": params["w"]}, state, params)
        tx.update(params, state, params)
        assert fs.psum(torch.ones(()), axis) == 2
