"""Checks of fshard.testing pass what is right, and name each leaf, step and value that is not."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fshard as fs
from fshard.testing import assert_trees_close, check_pure
from tests.checks import find_problems
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import OF_EVERY_LEAF, normal, one_axis


def passes(actual, expected, **options):
    try:
        assert_trees_close(actual, expected, **options)
    except AssertionError:
        return False
    return True


def test_leaves_are_compared_as_torch_does():
    for dtype, most in ((torch.bfloat16, 1e-2), (torch.float64, 1e-7), (torch.complex64, 1e-5)):
        expected = torch.ones(1, dtype=dtype)
        assert [passes(expected + distance, expected) for distance in (1e-8, most, 10 * most)] == [True, True, False]
    nan, wide = torch.tensor([float("nan")]), torch.ones(2, dtype=torch.float64)
    assert passes(nan, nan.clone(), exact=True)
    assert passes(nan, nan.clone())
    assert passes(wide.float(), wide)
    zeros = torch.zeros(2)
    for actual, expected in (
        (wide.float(), wide),
        (zeros.int(), zeros),
        (nan, wide[:1]),
        (wide[:1], wide),
        ({"w": None}, {"w": wide}),
    ):
        assert not passes(actual, expected, exact=True)
    text = "['w']: expected close values, got Mismatched elements: 1 / 2 (50.0%) Greatest absolute difference: 3.0 at "
    with pytest.raises(AssertionError, match=re.escape(text)):
        assert_trees_close({"w": torch.tensor([1.0, 4.0])}, {"w": torch.ones(2)}, rtol=0, atol=0)


def test_numbers_of_python_keep_their_digits():
    for number in (0.1, complex(0.1, 0.3)):
        near, tensor = number + 1e-12, torch.tensor(number, dtype=torch.complex128)
        assert passes(number, number, exact=True)
        assert passes(number, tensor, rtol=0, atol=0)
        for actual, options in ((near, {"exact": True}), (near, {"rtol": 0, "atol": 1e-13}), (number + 1e-6, {})):
            assert not passes([actual], [number], **options)


def test_exact_values_have_the_same_bits():
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    halves = torch.tensor([complex(torch.nan, 0)]), torch.tensor([complex(0, torch.nan)])
    for actual, expected in ((zero, -zero), (nan, nan.view(torch.int32).add(1).view(torch.float32)), halves):
        assert passes(actual, expected)
        text = "  (root): expected equal values, got other bits, as those of 0.0 and -0.0 are\n"
        with pytest.raises(AssertionError, match=re.escape(text)):
            assert_trees_close(actual, expected, exact=True)


def test_exact_values_may_be_stored_in_any_way():
    eye, ones = torch.eye(3), torch.ones(2, dtype=torch.complex64)
    for leaf in (eye.to_sparse(), ones.conj(), ones.conj().imag):
        assert passes(leaf, leaf.clone(), exact=True)
    assert not passes(eye.to_sparse(), 2 * eye.to_sparse(), exact=True)

    def loss(x):
        assert passes(x, x + 0, exact=True)
        return x.sum()

    torch.func.grad(loss)(eye)


def test_what_would_compare_nothing_is_refused():
    ones = torch.ones(2)
    with FakeTensorMode() as fake:
        without_values = fake.from_tensor(ones)
    for leaf in (ones.to("meta"), without_values, "text", torch.nn.Linear(1, 1), iter([ones])):
        for options in ({}, {"exact": True}):
            text = re.escape("trees differ\n  ['w']: expected tensors, arrays or numbers with values, got a")
            with pytest.raises(AssertionError, match=text):
                assert_trees_close({"w": leaf}, {"w": leaf}, **options)
    for options, text in (
        ({"rtol": 0.0, "atol": torch.inf}, "atol to be a finite number, 0 or more, got inf"),
        ({"rtol": torch.nan, "atol": 0.0}, "rtol to be a finite number, 0 or more, got nan"),
        ({"rtol": 0.0, "atol": -1.0}, "atol to be a finite number, 0 or more, got -1.0"),
        ({"rtol": "x", "atol": 0.0}, "rtol to be a finite number, 0 or more, got 'x'"),
        ({"rtol": 0.0, "atol": True}, "atol to be a finite number, 0 or more, got True"),
        ({"rtol": 1e-3}, "atol to be a finite number, 0 or more, got None"),
    ):
        with pytest.raises(ValueError, match=f"^assert_trees_close: expected {text}$"):
            assert_trees_close({"w": ones}, {"w": 2 * ones}, **options)
    # Structures without leaves are compared too: an optimizer may have no state, and a module no buffers.
    assert passes({"buffers": {}, "grad": None}, {"buffers": {}, "grad": None})
    error = "check_pure: expected arguments with tensors, got none; pass the state and the batch behind the step"
    for args in ((), (3, {}), (torch.nn.Linear(1, 1),)):
        with pytest.raises(ValueError, match=error):
            check_pure(lambda *args: ones.zero_(), *args)


TX = fs.from_torch(torch.optim.SGD, lr=0.1)

STRATEGIES = OF_EVERY_LEAF | {"zero3 of whole leaves": partial(fs.zero3, min_shard_elements=1000)}
# Those whose gather hands out the state's own memory, where there are several ranks.
WHOLE = ("ddp", "zero3 of whole leaves")

WRITES = (lambda w: w.data.clamp_(0, 0), lambda w: w.detach().numpy().fill(0))


def make_state(strategy):
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


@on_ranks(1, 2)
def test_writes_past_the_version_counter_are_named(world_size):
    """Where the caller's state has changed; elsewhere they change a copy, and nothing else."""
    error = (
        "check_pure: the step changed its arguments\n"
        "  argument 0.params['w']: expected those before it, got other values after the step\n"
        "To fix: find the write in place to these tensors, to a view of them or to their tree, and make a new one "
        "instead."
    )
    for write, strategy in itertools.product(WRITES, STRATEGIES):
        step = step_that(write)
        state, batch = make_state(strategy)
        changes = world_size == 1 or strategy in WHOLE
        with pytest.raises(AssertionError, match=re.escape(error)) if changes else nullcontext():
            check_pure(step, state, batch)


@on_ranks(2)
def test_pure_and_donated_steps_pass():
    step = step_that(lambda w: None)
    for strategy in STRATEGIES:
        state, batch = make_state(strategy)
        after, value = check_pure(step, state, batch=batch)
        assert torch.equal(value, step(state, batch)[1])
        assert after.step == state.step + 1
    check_pure(fs.jit(step, donate_argnums=0), state, batch)


def test_what_a_tensor_is_counts_as_well():
    tensors = {"nan": torch.tensor([float("nan")]), "conj": torch.ones(2, dtype=torch.complex64).conj(), "empty": None}
    check_pure(lambda tree: None, tensors)
    with pytest.raises(AssertionError, match=r"\['nan'\].*\n  x\['s'\]: expected those before it"):
        check_pure(lambda tree, x: (tree["nan"].zero_(), x["s"].resize_(2, 3)), tensors, x={"s": torch.zeros(3, 2)})


def replace_in(tree):
    tree["w"] = tree["w"] + 1


def test_writes_to_a_tree_are_named():
    for write in (replace_in, lambda tree: tree.pop("w"), lambda tree: tree.update(w2=tree["w"])):
        text = (
            r"^check_pure: the step changed its arguments\n  argument 0\['w2?'\]: expected those before it, got other"
        )
        with pytest.raises(AssertionError, match=text):
            check_pure(write, {"w": torch.ones(2), "b": torch.ones(2)})


FULL = {"norm": normal(1)(6), "up": normal(2)(8, 6), "down": normal(3)(6, 8), "head": normal(4)(6, 6)}
X = normal(5)(3, 6)


def parallel(mesh):
    """A strategy under which a layer's columns and rows stay split over the second axis."""
    tp = mesh["tp"]
    split = (fs.masked(fs.split_dim(tp, dim=0), "up"), fs.masked(fs.split_dim(tp, dim=1), "down"))
    return fs.compose(fs.zero3(mesh, min_shard_elements=7), *split)


PROGRAM = """
import torch, fshard as fs

def summed(params, tp):
    return fs.psum(fs.gather(params)["w"].sum(), tp)  # this line

def program():
    tp = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    params = fs.shard({"w": torch.ones(4)}, fs.split_dim(tp, dim=0))
    step = lambda params, tp: fs.value_and_grad(summed)(params, tp)
    print(fs.check(step, params, tp, mesh={"tp": 2}))

for check in (program, lambda: fs.jit(lambda x: x.storage_offset())(torch.ones(2))):
    try:
        check()
    except Exception as error:
        print(error)
"""


def test_errors_name_the_users_line_whatever_the_folders_are_called(tmp_path):
    """In a clone that git named fshard, below a folder named torch, in a folder whose name begins with fshard."""
    clone = tmp_path / "torch" / "fshard"
    shutil.copytree(Path(fs.__file__).parent, clone / "fshard", ignore=shutil.ignore_patterns("__pycache__"))
    script = clone / "fshard_runs" / "train.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(clone)}
    run = subprocess.run([sys.executable, script], cwd=clone, env=environment, capture_output=True, text=True)
    line = 1 + PROGRAM[: PROGRAM.index("return")].count("\n")
    place = f'{script}:{line} in summed: return fs.psum(fs.gather(params)["w"].sum(), tp)  # this line'
    assert f"\n  {place}\n" in run.stdout, run.stderr
    assert "jit: Tensor.storage_offset needs the data or the memory of a tensor" in run.stdout


@on_ranks(4)
def test_columns_may_be_gathered_into_what_agrees():
    """Its transpose takes this rank's piece, where all_gather's sums as many equal cotangents as there are ranks."""
    mesh = fs.init_mesh({"shard": 2, "tp": 2}, device="cpu")
    tp, params = fs.axis_of(mesh["tp"]), fs.shard(FULL, parallel(mesh))

    def loss(params, tp):
        return fs.all_gather_invariant(fs.gather(params)["up"], tp).square().sum()

    # A check needs no ranks, and takes a second.
    assert my_rank() or find_problems(loss, params, tp) == []
    value, grads = fs.value_and_grad(loss)(params, tp)
    expected = FULL["up"].square().sum(), 2 * FULL["up"]
    assert_trees_close((value, fs.unshard(grads)["up"]), expected, **within(expected, FULL["up"].numel()))
