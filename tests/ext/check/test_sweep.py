"""fs.check reports nothing of the steps of examples, of the laws of extensions, and of models of transformers."""

import math

import pytest

import fshard as fs
from fshard.extend import flatten
from tests.ext import test_architectures as architectures
from tests.ext import test_laws as laws
from tests.ext.check import example_steps
from tests.ext.check.closed_axes import open_axes
from tests.ext.check.mistakes import check
from tests.ranks import my_rank, on_ranks
from tests.trees import one_axis

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", example_steps.TABLE)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step, args = example_steps.take_step(name)
    assert fs.check(step, *args, mesh=example_steps.TABLE[name].mesh).problems == ()


@pytest.mark.parametrize("name", example_steps.WRITTEN_OUT)
def test_examples_whose_step_is_no_function(name):
    assert check(*example_steps.WRITTEN_OUT[name]).problems == ()


def test_every_example_that_trains_is_checked():
    programs = {path.stem for path in example_steps.EXAMPLES.glob("*.py") if "value_and_grad(" in path.read_text()}
    checked = {*example_steps.TABLE, *example_steps.WRITTEN_OUT, *example_steps.ELSEWHERE}
    assert programs - checked == set()


# A row of `right_steps` has a module of tensor_parallel, which holds its axis; those that jit refuses have no graph.
WITH_GRAPHS = [name for name, row in laws.TABLE.items() if row.refused is None and "tensor_parallel" not in name]


@pytest.mark.parametrize("name", WITH_GRAPHS)
@on_ranks(laws.RANKS, timeout=300.0)
def test_laws_of_extensions(name):
    program = laws.program(name)
    if my_rank() == 0:
        axes = flatten(program.state.params).axes
        step, mesh = open_axes(program.step, axes), {axis.name: axis.size for axis in axes}
        assert math.prod(mesh.values()) == laws.RANKS
        assert fs.check(step, program.state, *program.batch, *axes, mesh=mesh).problems == ()


# Models whose ranks keep statistics of their own in these steps, and are told so.
WITH_STATISTICS = ("resnet",)


@pytest.mark.parametrize("name", architectures.CASES)
def test_models_of_transformers(name):
    case = architectures.CASES[name]
    one_axis()
    state, train_step = architectures.begun(case.build())
    problems = fs.check(train_step, state, case.batches()[0][0], mesh={"shard": 8}).problems
    kinds = {str(problem.kind) for problem in problems}
    assert kinds == ({"buffer differs"} if name in WITH_STATISTICS else set())
