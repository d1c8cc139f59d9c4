"""diff names the first operation that differs, how differences grow, and what one version alone computes."""

import inspect
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.ext.replay.places import show_frame
from fshard.testing import spmd
from tests.ext.replay.versions import Other, make_version, shift
from tests.ranks import on_ranks

SHARDED = {"min_shard_elements": 0, "bucket_bytes": 0}
PLAIN = {"strategy": fs.zero3} | SHARDED


def compare(first, second, world_size=2, **options):
    """The difference between two versions of a step, which is one on all ranks."""

    def program():
        step_a, state_a, batch = make_version(**first)
        step_b, state_b, _ = make_version(**second)
        run = partial(fs.diff, step_a, step_b, args_b=(state_b, batch), **options)
        return fs.testing.check_pure(run, state_a, batch)

    difference, *others = spmd(program, world_size)
    assert others == [difference] * (world_size - 1)
    return difference


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_does_not_differ_from_itself(world_size):
    difference = compare(PLAIN, PLAIN, world_size)
    assert difference.first is None
    assert {row.difference for row in difference.growth} == {0.0}
    assert (difference.leaves, difference.only_first, difference.only_second) == ([], [], [])
    assert difference.uncompared == 0


@pytest.mark.parametrize("strategy", [fs.ddp, fs.zero1])
def test_strategies_do_not_differ_in_what_both_compute(strategy):
    difference = compare({"strategy": strategy}, PLAIN)
    assert (difference.first, difference.leaves) == (None, [])
    modules = {(row.phase, row.module) for row in difference.growth}
    assert {("forward", "blocks.0.up"), ("backward", "blocks.1"), ("forward", "head")} <= modules
    assert difference.uncompared > 0


def test_another_function_of_an_operator_is_named_with_its_line():
    difference = compare(PLAIN, PLAIN | {"approximates": ("none", "tanh")})
    place = difference.first
    assert (place.operator, place.module, place.unit) == ("aten.gelu", "blocks.1", "blocks.1")
    assert show_frame(place.frames[0]).endswith("hidden = F.gelu(self.up(x), approximate=self.approximate)  # gelu")
    assert place.ranks == (0, 1)
    by_module = {(row.phase, row.module): row.difference for row in difference.growth}
    assert by_module["forward", "blocks.0"] == 0.0
    assert by_module["forward", "blocks.1"] >= difference.difference > difference.bound


def test_a_narrow_dtype_grows_from_the_gathered_leaves():
    difference = compare(PLAIN, PLAIN | {"param_dtype": torch.bfloat16}, bound=1e-3)
    assert difference.first.phase == "forward"
    assert any("aten._foreach_copy_" in line for line in difference.only_second)
    assert difference.leaves


def test_a_changed_learning_rate_differs_in_the_update_alone():
    difference = compare(PLAIN, PLAIN | {"lr": 2e-2})
    assert (difference.first.operator, difference.first.phase) == ("aten.mul", "update")
    assert {row.phase for row in difference.growth if row.difference} == {"update"}
    assert difference.leaves
    assert all(path.startswith("[0].params") for path, _ in difference.leaves)


def test_a_missing_mean_is_listed_as_what_the_first_version_alone_computes():
    difference = compare(PLAIN, PLAIN | {"reduce": "sum"})
    assert difference.first.phase == "update"
    line = "loss, grads = fs.value_and_grad(loss_fn, reduce=reduce)(state.params, batch): "
    assert any(entry.startswith(line) and "1 aten.div" in entry for entry in difference.only_first)
    assert difference.only_second == []
    assert ("[1]", 1.0) in difference.leaves


def test_another_line_is_listed_and_the_operation_after_it_is_named():
    difference = compare(PLAIN, PLAIN | {"net": Other})
    assert difference.first.operator == "aten.pow.Tensor_Scalar"
    assert any(entry.startswith("return self.head(x)  # head: ") for entry in difference.only_first)
    assert any(entry.startswith("return self.head(1.01 * x): 2 aten.mul") for entry in difference.only_second)


REPORT = """\
diff: aten.add is the first operation that differs by more than 1e-05 of its largest value: by 1, on rank 0
  phase: forward
  at: versions.py:{line} in shift: return 2 * (x + by)  # shift
The largest difference by module:
  forward    (none)               1
Results that differ:
  (root) by 1"""
ALONE = """\
diff: no operation that both versions have differs by more than 0.5 of its largest value
The largest difference by module:
In the first version alone:
  return 2 * (x + by)  # shift: 1 aten.add, 1 aten.mul
In the second version alone:
  difference = fs.diff(shift, lambda x, by: x - by, *args, bound=0.5): 1 aten.sub"""


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
    assert difference.growth[0].difference == float("inf")


def test_a_bound_of_zero_is_refused():
    with pytest.raises(ValueError, match="bound"):
        fs.diff(torch.sin, torch.sin, torch.ones(1), bound=0.0)
