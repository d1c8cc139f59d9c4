"""What `jitted.memory` reports: bytes by kind, the place of the peak, what a budget runs again, and a picture."""

import re
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.jit.steps import adamw, train_step
from tests.ranks import my_rank
from tests.trees import one_axis, tensors

WIDTH, LAYERS, ROWS = 64, 4, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.blocks(x)).square().mean()


def make_case(strategy=fs.zero3, rows=ROWS, **options):
    """A step, and the arguments of a rank."""
    model = fs.functionalize(Model(), units=Block)
    state = fs.TrainState.create(model.init(strategy(one_axis(), **options), seed=0), adamw())
    step = train_step(lambda params, x: model.apply(params, x), adamw())
    return step, (state, torch.ones(rows, WIDTH))


def ask_one_of_two_ranks(program, make=make_case, **options):
    """What a program finds out about a case. Nothing is sent, so the other rank need not ask."""

    def run():
        case = make(**options)
        return program(*case) if my_rank() == 0 else None

    return spmd(run, 2)[0]


def nbytes(tree):
    return sum(tensor.nbytes for tensor in tensors(tree))


def jitted(step, *passes):
    return fs.jit(step, donate_argnums=0, passes=passes)


def find_budget(memory, share):
    """A share of the way from the arguments to the peak."""
    return memory.arguments + int(share * (memory.peak - memory.arguments))


def test_kinds_add_up_to_the_peak_that_the_graph_has():
    def program(step, args):
        return jitted(step).memory(*args), fs.make_graph(jitted(step))(*args).peak_bytes(), args

    report, beyond_arguments, (state, x) = ask_one_of_two_ranks(program)
    memory = report.after
    assert report.before is memory
    assert report.budget is None
    assert report.choices == []
    assert memory.arguments == nbytes((state, x))
    assert memory.peak == memory.arguments + beyond_arguments == sum(memory.kinds.values())
    assert memory.kinds["parameters"] == nbytes(state.params)
    assert memory.kinds["optimizer state"] == nbytes(state.opt_state)
    assert memory.kinds["other arguments"] == nbytes((x, state.step))
    # The backward of a block needs its input, and the argument and result of its gelu.
    of_block = ROWS * 5 * WIDTH * x.itemsize
    assert LAYERS * of_block * 0.8 <= memory.kinds["saved for the backward"] <= LAYERS * of_block * 1.2


def test_full_gradients_are_told():
    """With one row, the peak is where gradients are packed for their reduction: each is there twice."""

    def program(step, args):
        return jitted(step).memory(*args).after.kinds, 2 * nbytes(args[0].params)

    kinds, full = ask_one_of_two_ranks(program, rows=1, min_shard_elements=0)
    assert 1.9 * full <= kinds["full gradients"] <= 2.1 * full
    assert kinds["reduced gradients"] == kinds["full units"] == 0


def make_wide_case():
    """A step that needs its gradient behind its widest place."""
    tx = adamw()
    params = fs.shard({"w": torch.ones(64, 64)}, fs.zero3(one_axis()))

    def step(state, x):
        loss, grads = fs.value_and_grad(lambda params, x: (fs.gather(params)["w"] * x).sum())(state.params, x)
        wide = fs.tree_map(lambda leaf: leaf.repeat(9, 1).sum(0), state.params)
        return fs.update(tx, state, grads), loss, wide

    return step, (fs.TrainState.create(params, tx), torch.ones(64, 64))


def test_gradients_of_an_update_are_reduced():
    memory = ask_one_of_two_ranks(lambda step, args: fs.jit(step).memory(*args).after, make_wide_case)
    assert memory.kinds["reduced gradients"] > 0
    assert memory.kinds["full gradients"] == memory.kinds["saved for the backward"] == 0


def test_a_budget_is_kept_and_said_block_by_block(tmp_path):
    def program(step, args):
        whole = jitted(step).memory(*args).after
        budget = find_budget(whole, 0.5)
        report = jitted(step, fs.fit(budget)).memory(*args)
        report.draw(tmp_path / "memory.svg")
        with pytest.raises(ValueError, match=r"the pass fit: the step needs at least \d+ bytes"):
            jitted(step, fs.fit(1000)).memory(*args)
        return report, whole, budget

    report, whole, budget = ask_one_of_two_ranks(program)
    assert report.before.held == whole.held
    assert report.budget == budget
    assert report.after.peak == sum(report.after.kinds.values()) <= budget < whole.peak
    assert report.after.kinds["saved for the backward"] < whole.kinds["saved for the backward"]
    assert report.choices
    for line in report.choices:
        assert re.fullmatch(r"blocks\.\d( to (blocks\.\d|head))?: [\w ]+(, [\w ]+)*", line), line
    text = str(report)
    assert f"{budget / 1e6:,.2f} MB" in text
    assert "test_report.py:" in text
    picture = ElementTree.parse(tmp_path / "memory.svg")
    words = " ".join(element.text for element in picture.iter("{http://www.w3.org/2000/svg}text"))
    for nbytes_drawn in (whole.peak, report.after.peak, budget, whole.arguments):
        assert f"{nbytes_drawn / 1e6:.1f} MB" in words


def test_a_function_without_operators_holds_its_arguments(tmp_path):
    report = fs.jit(lambda x: x, passes=(fs.fit("1kB"),)).memory(torch.ones(3))
    assert report.before.peak == report.after.arguments == 12
    assert "most is held at" not in str(report)
    report.draw(tmp_path / "memory.svg")


def test_weights_that_are_gathered_again_are_said():
    """Full weights are held from the forward to the backward, and few rows make them a large part of the peak."""

    def program(step, args):
        budget = find_budget(jitted(step).memory(*args).after, 0.6)
        return jitted(step, fs.fit(budget)).memory(*args)

    report = ask_one_of_two_ranks(program, rows=64, min_shard_elements=0, bucket_bytes=0, regather=False)
    assert report.after.kinds["full units"] < report.before.kinds["full units"]
    assert any("weights gathered again" in line for line in report.choices)


def test_views_of_copies_do_not_hold_the_originals():
    """The backward of a plain product transposes the sine, which a copy has made again."""

    def loss(w, x):
        for _ in range(8):
            x = (x @ w).sin()
        return x.sum()

    args = (torch.eye(WIDTH), torch.ones(ROWS, WIDTH))
    whole = fs.jit(torch.func.grad(loss)).memory(*args).after
    budget = find_budget(whole, 0.8)
    report = fs.jit(torch.func.grad(loss), passes=(fs.fit(budget),)).memory(*args)
    assert report.after.peak <= budget < whole.peak
    assert report.choices == ["Operators outside of modules: sin"]
