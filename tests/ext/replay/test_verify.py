"""verify names the rank and the operation that disagree with themselves or between ranks, and is silent otherwise."""

from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.ext.replay.places import Operations, name_operator
from fshard.ext.replay.repeat import trace_call
from fshard.testing import spmd
from tests.ext.replay.flips import arrival, flipping, operator
from tests.ext.replay.steps import line_of, make_step
from tests.ranks import my_rank, on_ranks
from tests.trees import normal, one_axis

ZERO3 = partial(fs.zero3, min_shard_elements=0, bucket_bytes=0)
SITES = {
    "activation": operator("aten.gelu", "blocks.1"),
    "gathered buffer": arrival("all_gather", "blocks.1"),
    "gradient": operator("aten.gelu_backward", "blocks.0"),
    "reduction": operator("aten.add_", phase="backward"),
    "objective": operator("aten.add_", phase="forward"),
    "optimizer state": operator("aten.sqrt"),
}
# By the site the operator, and the unit.
PLACES = {
    "activation": ("aten.gelu", "blocks.1"),
    "gathered buffer": ("_c10d_functional.wait_tensor", "blocks.1"),
    "gradient": ("aten.gelu_backward", "blocks.0"),
    "reduction": ("aten.add_", "head"),
    "objective": ("aten.add_", ""),
    "optimizer state": ("aten.sqrt", "head"),
}


def verified(strategy=ZERO3, **options):
    return fs.verify(*make_step(strategy, **options))


def verify_with_flip(world_size, site, **options):
    """The report, which is one on all ranks."""
    with flipping(1, SITES[site], **options):
        report, *others = spmd(verified, world_size)
    assert others == [report] * (world_size - 1)
    return report


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("run", [0, 1])
def test_a_bit_that_flips_in_one_of_two_runs_is_named(world_size, site, run):
    report = verify_with_flip(world_size, site, runs=(run,))
    assert (report.between, report.place.ranks, report.others) == ("runs", (1,), ())
    assert (report.place.operator, report.place.unit) == PLACES[site]


# Of what ranks share; a high bit, because a sum of other rows may lose a low one.
@pytest.mark.parametrize("site", ["gathered buffer", "objective"])
def test_a_bit_that_one_rank_always_gets_wrong_is_named_where_ranks_must_agree(site):
    report = verify_with_flip(4, site, runs=(0, 1), bit=20)
    assert (report.between, report.place.ranks, report.others) == ("ranks", (1,), (0, 2, 3))
    assert (report.place.operator, report.place.unit) == PLACES[site]
    # Of two ranks nothing says which is wrong.
    report = verify_with_flip(2, site, runs=(0, 1), bit=20)
    assert (report.between, report.place.ranks, report.others) == ("ranks", (0, 1), ())
    assert report.place.operator == PLACES[site][0]


def test_a_wrong_replica_of_an_argument_is_named():
    def program():
        step, state, batch = make_step(fs.ddp)
        if my_rank() == 2:
            state.params["head.bias"].local.add_(1)
        return fs.verify(step, state, batch)

    report, *others = spmd(program, 4)
    assert others == [report] * 3
    assert (report.between, report.place.ranks, report.others) == ("ranks", (2,), (0, 1, 3))
    assert report.place.operator == "[0][0].params['head.bias']"


GELU = f"""\
  phase: forward
  at: steps.py:{line_of("gelu")} in body: hidden = F.gelu(self.up(x))  # gelu
  at: steps.py:{line_of("gelu") - 3} in forward: return checkpoint(self.body, x, use_reentrant=False) \
if self.checkpointed else self.body(x)
  at: steps.py:{line_of("head") - 1} in forward: x = block(x)
  module: blocks.1
  unit: blocks.1"""
ARRIVAL = f"""\
  phase: forward
  at: steps.py:{line_of("head") - 1} in forward: x = block(x)
  at: steps.py:{line_of("loss")} in loss_fn: return model.apply(params, x).square().mean()  # loss
  at: steps.py:{line_of("update") - 1} in step: loss, grads = fs.accumulate(loss_fn)(state.params, parts)
  collective: all_gather
  unit: blocks.1"""


def test_the_texts_of_reports():
    assert str(verify_with_flip(2, "activation")) == (
        f"verify: rank 1 gives other bits for aten.gelu in a second run of the same step\n{GELU}"
    )
    operator_name = "_c10d_functional.wait_tensor"
    assert str(verify_with_flip(4, "gathered buffer", runs=(0, 1))) == (
        f"verify: rank 1 differs from ranks 0, 2 and 3 in the result of {operator_name}, on which all must agree\n"
        + ARRIVAL
    )
    assert str(verify_with_flip(2, "gathered buffer", runs=(0, 1))) == (
        f"verify: ranks 0 and 1 differ in the result of {operator_name}, on which all must agree; "
        f"any of them may be wrong\n{ARRIVAL}"
    )


def units_of(operator_name, step, *args):
    """The units of all operators of a name."""
    operations = Operations(trace_call("verify", step, args))
    return {operations.locate(node).unit for node in operations.nodes if name_operator(node) == operator_name}


def square_gathered(params):
    full = fs.gather(params)
    return full["w"].square().sum() + full["v"].sum()


def scale_gathered(params):
    return (2 * fs.gather(params)["w"].abs()).sum()


def units_of_gathered_leaves():
    params = fs.shard({"w": torch.ones(4), "v": torch.ones(4)}, ZERO3(one_axis()))
    squares = units_of("aten.pow.Tensor_Scalar", square_gathered, params)
    squares |= units_of("aten.mul", scale_gathered, params)
    return squares, units_of("aten.split_with_sizes_copy", *make_step(ZERO3))


def test_the_unit_of_a_leaf_that_is_taken_out_of_a_gathered_buffer_is_found():
    """Also of what is computed of that leaf alone."""
    for squares, copies in spmd(units_of_gathered_leaves, 2):
        assert squares == {"['v'], ['w']"}
        assert copies >= {"blocks.0", "blocks.1", "head"}


class Dropped(nn.Module):
    """Layers of uneven shapes with dropout, a buffer that is updated and a leaf that nobody uses."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(7, 3)
        self.unused = nn.Linear(3, 2)

    def forward(self, x):
        return self.down(self.drop(self.norm(self.up(x))))


def verify_dropped(strategy, key, reduce="mean"):
    """A step with dropout, whose keys may differ between ranks."""
    model = fs.functionalize(Dropped(), nn.Linear)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=0.01, fused=True))
    axis = fs.axis_of(one_axis())
    params = model.init(strategy(one_axis()), seed=0)
    state = fs.TrainState.create(params, tx, key=3, buffers=model.buffers)

    def loss_fn(params, x, key, buffers):
        out, buffers = model.apply(params, x, key=key, buffers=buffers)
        loss = out.square().mean()
        return ((loss * len(x), torch.tensor(float(len(x)))) if reduce == "weighted" else loss), buffers

    def step(state, x):
        step_key = fs.fold_in(state.key, axis) if key == "of ranks" else state.key
        grad = fs.value_and_grad(loss_fn, reduce=reduce, has_aux=True)
        (loss, buffers), grads = grad(state.params, x, step_key, state.buffers)
        buffers = fs.sync_buffers(buffers, state.params)
        return fs.update(tx, state, grads)._replace(buffers=buffers), loss

    batch = normal(my_rank())(4, 5, dtype=torch.float32)
    return fs.testing.check_pure(partial(fs.verify, step), state, batch)


@pytest.mark.parametrize("key", ["of ranks", "one"])
@pytest.mark.parametrize("strategy", [ZERO3, fs.ddp, fs.zero1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_clean_runs_with_dropout_and_uneven_shards_are_silent(strategy, key, world_size):
    assert spmd(lambda: verify_dropped(strategy, key), world_size) == [None] * world_size


@on_ranks("2 processes")
def test_clean_runs_on_processes_are_silent():
    assert verify_dropped(ZERO3, "of ranks", "weighted") is None


@pytest.mark.parametrize(
    "options",
    [{"checkpointed": True}, {"microbatches": 2}, {"strategy": fs.zero2}],
    ids=["checkpointed", "microbatches", "zero2"],
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_clean_runs_of_other_steps_are_silent(options, world_size):
    assert spmd(lambda: verified(**options), world_size) == [None] * world_size


def test_a_jitted_step_is_verified_without_a_write_to_what_it_donates():
    def program():
        step, state, batch = make_step()
        jitted = fs.jit(step, donate_argnums=0)
        return fs.testing.check_pure(partial(fs.verify, jitted), state, batch)

    assert spmd(program, 2) == [None, None]


def test_a_step_that_cannot_be_traced_is_refused():
    with pytest.raises(ValueError, match="the function reads the value of a tensor"):
        fs.verify(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
