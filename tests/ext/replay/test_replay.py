"""replay names the operation that made a wrong value, the same on every rank."""

import inspect
import math
import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.ext.replay import replay
from fshard.ext.replay.observed_run import run_step
from fshard.ext.replay.operations import Operations
from fshard.ext.replay.replay import measure_nonfinite
from fshard.extend import graph_nodes
from fshard.testing import spmd
from tests.ext.replay.steps import make_step
from tests.ranks import my_rank, on_ranks

ROWS = 2
WIDTH = 4
# The messages of a replay besides those of the step: ranks compare their graphs, and exchange what they found, twice.
MORE = 3


class Block(nn.Module):
    """Has infinite derivatives where relu is 0, which relu drops again."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)

    def body(self, x):
        return self.inner(x).relu().sqrt() + x.log()  # body


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).abs()  # call
        return x


def mesh_of(**sizes):
    return fs.init_mesh(sizes or {"shard": -1}, device="cpu")


def rank_of():
    return fs.comm.rank(fs.axis_of(mesh_of()))


def whole(mesh):
    return fs.zero3(mesh, min_shard_elements=0, bucket_bytes=0)


def make_net(zero_at=None, microbatches=1, strategy=whole, mesh=None, reduce="mean", tx=None):
    """A step of a Net. On the rank `zero_at` the last microbatch has a weight of 0, whose square root is taken."""
    model = fs.functionalize(Net(), units=Block)
    # Of few operators.
    tx = tx or fs.sgd(1e-3)
    state = fs.TrainState.create(model.init(strategy(mesh or mesh_of()), seed=0), tx)
    batches = [torch.ones(ROWS, WIDTH) for _ in range(microbatches)]
    weights = [torch.ones(ROWS, WIDTH) for _ in batches]
    if rank_of() == zero_at:
        weights[-1][0, 0] = 0

    def loss_fn(params, pair):
        x, weight = pair
        out = model.apply(params, x + 3).square() * weight + 1e-3 * (weight > 0)
        return (out.sqrt().sum(), weight.sum()) if reduce == "weighted" else out.sqrt().mean()  # loss

    def step(state, batches, weights):
        pairs = list(zip(batches, weights, strict=True))
        loss, grads = fs.accumulate(loss_fn, reduce=reduce)(state.params, pairs)  # accumulate
        return fs.update(tx, state, grads), loss  # update

    return step, (state, batches, weights)


def make_logarithm(x):
    params = fs.shard({"w": torch.ones(WIDTH)}, whole(mesh_of()))

    def loss_fn(params, x):
        return (fs.gather(params)["w"] * x.log()).sum()  # log

    def step(params, x):
        return fs.value_and_grad(loss_fn)(params, x)  # differentiate

    return step, (params, x)


def make_division():
    """An optimizer that divides each shard by its norm; that of rank 1 has no gradient."""
    params = fs.shard({"w": torch.ones(WIDTH)}, whole(mesh_of()))
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])

    def update(grads, state, params):
        return fs.tree_map(lambda p, g: p - g / g.norm(), params, grads), state  # divide

    tx = fs.Optimizer(lambda params: (), update)

    def sum_masked(params):
        return (fs.gather(params)["w"] * mask).sum()  # sum

    def step(state):
        _, grads = fs.value_and_grad(sum_masked)(state.params)  # differentiate sum
        return fs.update(tx, state, grads)  # divide update

    return step, (fs.TrainState.create(params, tx),)


def tensors_of(tree):
    return [getattr(leaf, "local", leaf) for leaf in fs.tree_leaves(tree) if leaf is not None]


def replay_on_all(make, world, **options):
    """What every rank gets from a replay, which leaves the arguments alone."""

    def program():
        step, args = make()
        before = [x.clone().nan_to_num(7.0) for x in tensors_of(args)]
        report = fs.replay(step, *args, **options)
        assert all(map(torch.equal, before, (x.nan_to_num(7.0) for x in tensors_of(args))))
        return report

    reports = spmd(program, world)
    assert all(report == reports[0] for report in reports)
    return reports[0]


def expand(text):
    """Write in the place of "<comment> in function" the number and the text of this file's line with the comment."""
    lines = inspect.getsource(inspect.getmodule(Net)).splitlines()
    places = {}
    for number, line in enumerate(lines, 1):
        places[line.partition("  # ")[2]] = number, line.strip()

    def write(match):
        number, line = places[match[1]]
        return f"test_replay.py:{number} in {match[2]}: {line}"

    return re.sub(r"<(.*?)> in (\S+)", write, text.strip())


FORWARD = """
replay: aten.log made infinities on rank 1
  phase: forward
  at: <log> in loss_fn
  at: <differentiate> in step
  read: [0][1]: float32[4], 0 to 0
  value: float32[4], 4 infinite
"""
BACKWARD = """
replay: aten.div made infinities on rank 0
  phase: backward
  microbatch: 2 of 2
  backward of: <loss> in loss_fn
  backward of: <accumulate> in step
  unit: blocks.1
  leaf: [0].opt_state[0].mean['blocks.1.inner.bias'] and [0].opt_state[0].square['blocks.1.inner.bias']
  read: aten.div.Scalar: float32[2, 4], 0.125 to 0.125
  read: aten.mul.Scalar: float32[2, 4], 0 to 3.29
  value: float32[2, 4], 0.038 to 0.19, 1 infinite
  before it: aten.mul.Scalar at <loss> in loss_fn
  before it: aten.div.Scalar at <loss> in loss_fn
  before it: aten.sqrt at <loss> in loss_fn
"""
UPDATE = """
replay: aten.div made NaN on rank 1
  phase: update
  at: <divide> in <lambda>
  at: <divide> in update
  at: <divide update> in step
  unit: ['w']
  leaf: .params['w']
  read: aten.add_: float32[2], 0 to 0
  read: aten.linalg_vector_norm: float32[], 0 to 0
  value: float32[2], 2 NaN
  before it: aten.linalg_vector_norm at <divide> in <lambda>
  before it: aten.add_ at <differentiate sum> in step
  before it: aten.mul at <sum> in sum_masked
"""
ARGUMENT = """
replay: the argument [0][0].params['blocks.1.inner.weight'] has NaN on rank 1
  value: float32[2, 4], -0.468 to 0.432, 1 NaN
"""


def make_poisoned():
    step, (state, *rest) = make_net()
    if rank_of() == 1:
        state.params["blocks.1.inner.weight"].local[0, 0] = float("nan")
    return step, (state, *rest)


def make_zero_on_rank_1():
    return make_logarithm(torch.full((WIDTH,), float(rank_of() != 1)))


@pytest.mark.parametrize(
    "make, text",
    [
        (make_zero_on_rank_1, FORWARD),
        (lambda: make_net(zero_at=0, microbatches=2, tx=fs.adamw(1e-3)), BACKWARD),
        (make_division, UPDATE),
        (make_poisoned, ARGUMENT),
    ],
    ids=["forward", "backward", "update", "argument"],
)
def test_reports_as_a_user_reads_them(make, text):
    assert str(replay_on_all(make, 2)) == expand(text)


def test_clean_steps_have_no_report_though_gradients_that_relu_drops_are_infinite():
    refused = []

    def watch(tensor, node):
        refused.append(not tensor.isfinite().all())

    assert replay_on_all(make_net, 2) is None
    assert replay_on_all(make_net, 1, watch=watch) is None
    assert any(refused)


def hsdp_net():
    mesh = mesh_of(replicate=2, shard=2)
    return make_net(zero_at=3, strategy=partial(fs.hsdp, min_shard_elements=0), mesh=mesh)


@pytest.mark.parametrize(
    "make, world, rank",
    [
        (lambda: make_net(zero_at=1, reduce="weighted"), 2, 1),
        (lambda: make_net(zero_at=1, strategy=fs.ddp), 2, 1),
        (hsdp_net, 4, 3),
    ],
    ids=["weighted", "ddp", "hsdp"],
)
def test_the_rank_is_the_one_whose_operation_made_the_value(make, world, rank):
    report = replay_on_all(make, world)
    assert (report.operator, report.ranks, report.phase) == ("aten.div", (rank,), "backward")
    assert report.backward_of[0] == expand("<loss> in loss_fn")


def make_unseen():
    """Rank 0 makes NaN of which it keeps nothing: the gradient of the elements of rank 1."""
    params = fs.shard({"w": torch.ones(WIDTH)}, whole(mesh_of()))
    x = torch.ones(WIDTH)
    x[-1] = rank_of()

    def loss_fn(params, x):
        full = fs.gather(params)["w"]
        return (full * x).sqrt().sum().nan_to_num(0.0)

    def step(params, x):
        _, grads = fs.value_and_grad(loss_fn)(params, x)
        return grads

    return step, (params, x)


def test_a_value_is_followed_through_a_collective_to_the_rank_that_sent_it():
    report = replay_on_all(make_unseen, 2)
    assert (report.operator, report.ranks, report.verdict) == ("aten.div", (0,), "made infinities")


def test_a_gradient_is_found_where_the_update_leaves_the_step_out():
    tx = fs.skip_nonfinite(fs.sgd(1e-3))
    report = replay_on_all(lambda: make_net(zero_at=1, tx=tx), 2)
    assert (report.operator, report.ranks, report.phase) == ("aten.div", (1,), "backward")


def make_attention(masks_all):
    params = fs.shard({"w": torch.ones(WIDTH)}, whole(mesh_of()))
    mask = torch.ones(WIDTH, WIDTH).triu(1).bool()
    mask[0] |= masks_all

    def step(params, mask):
        def loss_fn(params):
            scores = fs.gather(params)["w"].expand(WIDTH, WIDTH).masked_fill(mask, float("-inf")) + 1
            share = mask.float().mean(-1)
            entropy = torch.where(share > 0, share * share.log(), 0.0)
            return scores.softmax(-1).square().sum() + entropy.sum()

        return fs.value_and_grad(loss_fn)(params)

    return step, (params, mask)


def test_masks_and_what_where_drops_are_legal_and_a_row_that_is_all_masked_is_not():
    assert replay_on_all(lambda: make_attention(False), 2) is None
    report = replay_on_all(lambda: make_attention(True), 2)
    assert (report.operator, report.verdict, report.ranks) == ("aten._softmax", "made NaN", (0, 1))


def fill_empty(x):
    poisoned = torch.empty(4).fill_(float("nan"))
    del poisoned
    rows = x.new_empty(4)
    rows[:2] = x
    rows[2:] = x
    return (rows / x.repeat(2)).sum()


def test_memory_that_was_empty_makes_no_value():
    report = fs.replay(fill_empty, torch.tensor([0.0, 1.0]))
    assert (report.operator, report.verdict) == ("aten.div", "made NaN")


def test_what_the_caller_allows_is_not_reported():
    lines = [expand("<log> in loss_fn").partition(" ")[0]]
    for allow in (lines, ["aten.log"]):
        report = replay_on_all(make_zero_on_rank_1, 2, allow=allow)
        assert report is None
    for allow in (["aten.exp"], ["log"]):
        assert replay_on_all(make_zero_on_rank_1, 2, allow=allow) is not None


def test_ranks_at_the_same_line_in_another_turn_of_a_loop_are_not_named():
    def program():
        x = torch.ones(2, 2)
        x[my_rank(), 0] = 0.0
        report = fs.replay(lambda x: sum(row.log().sum() for row in x), x)
        return report.operator, report.ranks

    assert spmd(program, 2) == [("aten.log", (0,))] * 2


def test_watch_may_be_a_function_of_a_value_and_its_node():
    report = replay_on_all(
        make_net, 2, watch=lambda tensor, node: node.op != "placeholder" and bool((tensor > 3.5).any())
    )
    assert (report.operator, report.verdict) == ("aten.add", "made values that watch refuses")
    assert report.ranks == (0, 1)


def make_pipeline():
    """Stage 1 takes the logarithm of 0 in the second of two microbatches."""
    mesh = mesh_of(shard=1, pipe=2)
    pipe = fs.axis_of(mesh, "pipe")
    layout = fs.compose(fs.fully_shard(fs.axis_of(mesh, "shard"), dim=1), fs.split_dim(pipe, dim=0))
    params = fs.shard({"layers": torch.tensor([[0.0], [1.0]])}, fs.zero3(mesh, layout=layout))
    x = torch.ones(4, 1)

    def stage(params, h):
        return h.log() * params["layers"].sum()  # stage

    loss_fn = fs.pipeline(stage, pipe, microbatches=2, last=lambda params, h: h.square().mean())
    return fs.value_and_grad(loss_fn), (params, x)


def test_a_stage_of_a_pipeline_is_named():
    report = replay_on_all(make_pipeline, 2)
    assert (report.operator, report.ranks) == ("aten.log", (1,))
    assert report.at[0] == expand("<stage> in stage")


def count_messages():
    step, args = make_net(zero_at=0)
    clean_step, clean_args = make_net()
    with fs.comm.record() as of_step:
        step(*args)
    with fs.comm.record() as of_replay:
        assert fs.replay(step, *args) is not None
    with fs.comm.record() as of_clean:
        assert fs.replay(clean_step, *clean_args) is None
    return len(of_step), len(of_replay), len(of_clean)


def test_a_replay_sends_few_messages_besides_those_of_the_step():
    of_step, of_replay, of_clean = spmd(count_messages, 2)[0]
    assert (of_replay - of_step, of_clean - of_step) == (MORE, MORE)


def test_each_value_is_looked_at_once_and_ranges_are_those_of_a_report_alone():
    step, *args = make_step()
    measured = []
    made = []

    def measure(tensor):
        measured.append(tensor)
        return measure_nonfinite(tensor)

    with patch.object(replay, "measure_nonfinite", measure), patch.object(replay, "_describe_range", None):
        assert fs.replay(step, *args) is None
    for node, _, results in run_step(Operations("test", [], step, args)):
        made.extend([] if graph_nodes.is_view(node) else results)
    assert len(measured) == len(made)


def donate_and_replay():
    step, (state, *rest) = make_net(zero_at=0)
    jitted = fs.jit(step, donate_argnums=0)
    kept = fs.tree_map(torch.clone, state)
    jitted(state, *rest)
    with pytest.raises(ValueError, match=r"replay: arguments were donated") as caught:
        fs.replay(jitted, state, *rest)
    return str(caught.value), fs.replay(jitted, kept, *rest).operator


def test_donated_arguments_are_refused_and_a_copy_from_before_is_replayed():
    text, operator = spmd(donate_and_replay, 2)[0]
    assert operator == "aten.div"
    assert "[0][0].params['blocks.0.inner.weight']: was donated to an earlier call" in text
    assert "keep the argument of the step that went wrong" in text


def branch_on_value(x):
    return x if x.sum() > 0 else -x


def test_a_step_that_cannot_be_one_graph_is_refused_by_name():
    with pytest.raises(ValueError, match=r"replay: branch_on_value cannot be made one graph, .* reads the value"):
        fs.replay(branch_on_value, torch.ones(2))


@pytest.mark.parametrize("options", [{"watch": "nan"}, {"allow": "aten.log"}, {"allow": [1]}])
def test_options_that_make_no_sense_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"replay: expected {name} to be"):
        fs.replay(torch.log, torch.ones(2), **options)


@on_ranks("2 processes")
def test_processes_get_the_report_that_simulated_ranks_get():
    step, args = make_division()
    assert str(fs.replay(step, *args)) == expand(UPDATE)


def test_a_constant_that_is_returned_as_it_is_is_looked_at():
    constant = torch.tensor([1.0, math.nan])
    report = fs.replay(lambda x: (x, constant), torch.ones(2))
    first, _, values = str(report).partition("\n")
    assert re.fullmatch(r"replay: the constant \S+ has NaN on rank 0", first)
    assert values.endswith("float32[2], 1 to 1, 1 NaN")


@pytest.mark.parametrize("make_tx", [fs.adamw, fs.sgd, fs.lamb])
def test_what_all_leaves_need_is_of_no_unit_and_not_of_one_leaf(make_tx):
    tx = make_tx(lambda updates: updates * math.nan)

    def program():
        step, args = make_net(tx=tx)
        leaves = len(fs.tree_leaves(args[0].params))
        report = fs.replay(step, *args)
        assert (report.phase, report.unit, report.at[0].split()[-1]) == ("update", "", "math.nan)")
        assert re.fullmatch(rf"\[0\]\.params\S+ and {leaves - 1} more", report.leaf)

    spmd(program, 2)


def test_an_update_of_one_leaf_behind_a_norm_is_of_its_unit():
    path = "blocks.1.inner.weight"

    def spoil(grads, state, params):
        return grads | {path: fs.tree_map(lambda leaf: leaf * math.nan, grads[path])}, state  # spoil

    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.GradientTransformation(lambda params: (), spoil), fs.sgd(1e-3))

    def program():
        step, args = make_net(tx=tx)
        report = fs.replay(step, *args)
        assert (report.phase, report.unit) == ("update", "blocks.1")
        assert report.at[0].endswith("# spoil")
        assert report.leaf == f"[0].params[{path!r}]"

    spmd(program, 2)
