"""diff names the first operation that differs, how differences grow, and what one version alone computes."""

import inspect

import pytest
import torch

import fshard as fs
from fshard.testing import spmd
from tests.ext.replay.reuse import reusing_traces
from tests.ext.replay.steps import WIDTH, Block, Net
from tests.ext.replay.versions import Other, make_version, shift
from tests.ranks import on_ranks
from tests.trees import normal, one_axis

SECONDS = 240.0
PLAIN = {"strategy": fs.zero3, "min_shard_elements": 0, "bucket_bytes": 0}


def compare(world, bound=1e-5, **versions):
    """The difference between a plain step and each of some versions, which is one on all ranks."""

    def program():
        step, state, batch = make_version(**PLAIN)
        differences = {}
        for name, options in versions.items():
            other_step, other_state, _ = make_version(**options)
            before = fs.tree_map(torch.clone, (state, other_state))
            differences[name] = fs.diff(step, other_step, state, batch, args_b=(other_state, batch), bound=bound)
            fs.testing.assert_trees_close((state, other_state), before, exact=True)
        same = fs.diff(step, step, state, batch, bound=bound)
        return differences | {"same": same}

    with reusing_traces():
        differences, *others = spmd(program, world, timeout=SECONDS)
    assert others == [differences] * (world - 1)
    return differences


@pytest.fixture(scope="module")
def differences():
    return compare(
        2, ddp={"strategy": fs.ddp}, tanh=PLAIN | {"approximates": ("none", "tanh")}, sum=PLAIN | {"reduce": "sum"}
    )


@pytest.fixture(scope="module")
def of_one_rank():
    return compare(
        1, 1e-3, narrow=PLAIN | {"param_dtype": torch.bfloat16}, lr=PLAIN | {"lr": 20.0}, line=PLAIN | {"net": Other}
    )


def test_a_step_does_not_differ_from_itself(differences):
    same = differences["same"]
    assert set(same.growth.values()) == {0.0}
    assert (same.first, same.leaves, same.only_first, same.only_second) == (None, {}, [], [])


def test_strategies_do_not_differ_in_what_both_compute(differences):
    difference = differences["ddp"]
    assert (difference.first, difference.leaves) == (None, {})
    assert {("forward", "blocks.0.up"), ("backward", "blocks.1"), ("forward", "head")} <= difference.growth.keys()


def test_another_function_of_an_operator_is_named_with_its_line(differences):
    difference = differences["tanh"]
    first = difference.first
    assert (first.operator, first.module, first.unit) == ("aten.gelu", "blocks.1", "blocks.1")
    assert first.at[0].endswith("hidden = F.gelu(self.up(x), approximate=self.approximate)  # gelu")
    assert first.ranks == (0, 1)
    assert difference.growth["forward", "blocks.0"] == 0.0
    assert difference.growth["forward", "blocks.1"] > difference.bound


def test_a_missing_mean_is_listed_as_what_the_first_version_alone_computes(differences):
    difference = differences["sum"]
    assert difference.first.phase == "update"
    line = "loss, grads = fs.value_and_grad(loss_fn, reduce=reduce)(state.params, batch): "
    assert any(entry.startswith(line) and "1 aten.div" in entry for entry in difference.only_first)
    assert difference.only_second == []
    assert difference.leaves["[1]"] == 1.0


def test_a_narrow_dtype_grows_from_the_gathered_leaves(of_one_rank):
    difference = of_one_rank["narrow"]
    assert difference.first.phase == "forward"
    assert any("aten._foreach_copy_" in line or "aten._to_copy" in line for line in difference.only_second)
    assert difference.leaves


def test_a_changed_learning_rate_differs_in_the_update_alone(of_one_rank):
    difference = of_one_rank["lr"]
    assert (difference.first.operator, difference.first.phase) == ("aten.add", "update")
    assert {phase for (phase, _), value in difference.growth.items() if value} == {"update"}
    assert difference.leaves
    assert all(path.startswith("[0].params") for path in difference.leaves)


def test_another_line_is_listed_and_the_operation_after_it_is_named(of_one_rank):
    difference = of_one_rank["line"]
    assert difference.first.operator == "aten.pow.Tensor_Scalar"
    assert any(entry.startswith("return self.head(x).squeeze(-1)  # head: ") for entry in difference.only_first)
    assert any(
        entry.startswith("return self.head(1.01 * x).squeeze(-1): 2 aten.mul") for entry in difference.only_second
    )


REPORT = """\
diff: aten.add differs by 1 of its largest value on rank 0
  phase: forward
  at: versions.py:{line} in shift: return 2 * (x + by)  # shift
The largest difference by module:
  forward    (none)               1
Results that differ:
  (root) by 1"""
ALONE = """\
diff: no operation of both versions differs by more than 0.5 of its largest value
The largest difference by module:
In the first version alone:
  return 2 * (x + by)  # shift: 1 aten.add, 1 aten.mul
In the second version alone:
  difference = fs.diff(shift, lambda x, by: x - by, *args, bound=0.5): 1 aten.sub"""


def compare_numbers_of_ranks():
    """The difference between a step of two ranks and the same of one, and of one whose last microbatch is another."""
    alone = fs.init_mesh({"replica": 2, "shard": 1}, device="cpu")["shard"]
    model = fs.functionalize(Net(("none", "tanh")), Block)
    tx = fs.from_torch(torch.optim.SGD, lr=1e-1, reduction_order="tree")

    def make_state(mesh):
        return fs.TrainState.create(model.init(fs.zero3(mesh, min_shard_elements=0), seed=0), tx)

    def loss_fn(params, x):
        return model.apply(params, x).square().mean()

    def step(state, batches):
        loss, grads = fs.accumulate(loss_fn, reduction_order="tree")(state.params, batches)
        return fs.update(tx, state, grads), loss

    state, state_alone = map(make_state, (one_axis(), alone))
    batches = list(normal(7)(4, 4, WIDTH, dtype=torch.float32))
    mine = fs.microbatches(batches, like=state.params)
    equal = fs.diff(step, step, state, mine, args_b=(state_alone, batches))
    changed = fs.diff(step, step, state, mine, args_b=(state_alone, [*batches[:3], batches[3] + 1]))
    return equal, changed


@pytest.fixture(scope="module")
def of_other_ranks():
    with reusing_traces():
        first, second = spmd(compare_numbers_of_ranks, 2, timeout=SECONDS)
    assert first == second
    return first


def test_one_rank_computes_what_two_share_bit_for_bit(of_other_ranks):
    equal, _ = of_other_ranks
    assert set(equal.growth.values()) == {0.0}
    assert {("forward", "blocks.0.up"), ("backward", "blocks.1"), ("forward", "head")} <= equal.growth.keys()
    assert (equal.first, equal.leaves, equal.only_second) == (None, {}, [])


def test_the_microbatch_that_differs_is_named_with_the_rank_that_computes_it(of_other_ranks):
    _, changed = of_other_ranks
    assert (changed.first.microbatch, changed.first.ranks) == ("4 of 4", (1,))
    assert (changed.first.operator, changed.first.module) == ("aten.addmm", "blocks.0.up")


def test_the_texts_of_reports():
    _, line = inspect.getsourcelines(shift)
    args = torch.ones(2), torch.tensor(0.0)
    difference = fs.diff(shift, shift, *args, args_b=(torch.ones(2), torch.tensor(1.0)))
    assert str(difference) == REPORT.format(line=line + 2)
    difference = fs.diff(shift, lambda x, by: x - by, *args, bound=0.5)
    assert str(difference) == ALONE


@on_ranks(2)
def test_infinities_and_nan_that_are_equal_do_not_differ():
    def step(x, factor):
        return (x * factor).log()

    x = torch.tensor([0.0, 1.0, -1.0])
    difference = fs.diff(step, step, x, torch.tensor(1.0), args_b=(x, torch.tensor(1.0)))
    assert difference.first is None
    difference = fs.diff(step, step, x, torch.tensor(1.0), args_b=(x, torch.tensor(0.0)))
    assert difference.first.operator == "aten.mul"
    assert difference.growth["forward", ""] == float("inf")


def test_a_bound_of_zero_is_refused():
    with pytest.raises(ValueError, match="bound"):
        fs.diff(torch.sin, torch.sin, torch.ones(1), bound=0.0)
