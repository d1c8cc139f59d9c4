"""verify names the rank and the operation that disagree with themselves or between ranks, and is silent otherwise."""

import threading
import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.ext._compat import origin_of
from fshard.ext.replay import observed_run, verify
from fshard.ext.replay.operations import Operations, name_operator
from fshard.extend import graph_nodes
from fshard.testing import spmd
from tests.ext.replay.reuse import reusing_traces
from tests.ext.replay.steps import line_of, make_step
from tests.ranks import my_rank, on_ranks
from tests.trees import normal, one_axis

ZERO3 = partial(fs.zero3, min_shard_elements=0, bucket_bytes=0)
WAIT = "_c10d_functional.wait_tensor"


def is_operator(name, module=None, phase=None):
    """The operators of a name, in a module or a phase."""

    def is_site(node):
        origin = origin_of(node)
        return name_operator(node) == name and module in (None, origin.module) and phase in (None, origin.phase)

    return is_site


def is_gathered(node):
    """The buffers of all-gathers of the last block, once they have arrived."""
    if not graph_nodes.is_wait(node):
        return False
    collective = graph_nodes.find_collective(node.args[0].args[0])
    return (collective.op, collective.unit) == ("all_gather", "blocks.1")


def is_sum(node):
    """The rows of a sum that ranks send each other, once they have arrived."""
    return graph_nodes.is_wait(node) and name_operator(node.args[0].args[0]) == "fshard.all_reduce"


# By the name of a place whether a node is there, and the operator and the unit that a report names.
SITES = {
    "activation": (is_operator("aten.gelu", "blocks.1"), "aten.gelu", "blocks.1"),
    "gathered buffer": (is_gathered, WAIT, "blocks.1"),
    "gradient": (is_operator("aten.gelu_backward", "blocks.0"), "aten.gelu_backward", "blocks.0"),
    "reduction": (is_operator("aten.add_", phase="backward"), "aten.add_", "head"),
    "objective": (is_operator("aten.add_", phase="forward"), "aten.add_", ""),
    "optimizer state": (is_operator("aten.addcmul"), "aten.addcmul", "head"),
    "sum": (is_sum, WAIT, ""),
}
ONCE = ("activation", "gathered buffer", "gradient", "reduction", "objective", "optimizer state")
ALWAYS = ("gathered buffer", "objective")


class Flip(threading.local):
    """What is wrong on this rank: which bit of the first result at a site flips, in which runs of a call."""

    site = None
    bit = 0
    runs = ()
    runs_begun = 0

    def start_run(self):
        self.remaining = [1] if self.runs_begun in self.runs else []
        self.runs_begun += 1

    def visit(self, node, results):
        if results and self.remaining and self.site(node):
            self.remaining.pop()
            first = results[0].as_strided((1,), (1,), results[0].storage_offset())
            first.view(torch.int32).bitwise_xor_(1 << self.bit)


FLIP = Flip()


def run_with_flip(operations):
    FLIP.start_run()
    for node, operands, results in observed_run.run_step(operations):
        FLIP.visit(node, results)
        yield node, operands, results


def verify_flips(world, flips, rank=1):
    """The reports of flips of (site, runs, bit) on one rank, which are the same on all ranks."""

    def program():
        step, *args = make_step(ZERO3)
        reports = []
        for name, FLIP.runs, FLIP.bit in flips:
            FLIP.site = SITES[name][0] if my_rank() == rank else lambda node: False
            FLIP.runs_begun = 0
            reports.append(fs.verify(step, *args))
        return reports

    with patch.object(verify, "run_step", run_with_flip), reusing_traces():
        reports, *others = spmd(program, world, timeout=240.0)
    assert others == [reports] * (world - 1)
    return reports


def flip_always(*sites):
    """Flips in both runs, of a high bit, because a sum of other rows may lose a low one."""
    return [(site, (0, 1), 20) for site in sites]


@pytest.fixture(scope="module")
def of_two_ranks():
    """The reports of flips in one of two runs, and those of flips in both."""
    once = [(site, (number % 2,), 0) for number, site in enumerate(ONCE)]
    reports = verify_flips(2, once + flip_always(*ALWAYS))
    return reports[: len(ONCE)], reports[len(ONCE) :]


@pytest.fixture(scope="module")
def always_wrong_of_three():
    return verify_flips(3, flip_always(*ALWAYS, "sum"))


def test_a_bit_that_flips_in_one_of_two_runs_is_named(of_two_ranks):
    wrong_once, _ = of_two_ranks
    for report, site in zip(wrong_once, ONCE, strict=True):
        assert (report.verdict, report.ranks) == ("gave other bits in a second run of the same step", (1,))
        assert (report.operator, report.unit) == SITES[site][1:]


def test_a_bit_that_one_rank_always_gets_wrong_is_named_where_ranks_must_agree(always_wrong_of_three):
    *of_values, of_sum = always_wrong_of_three
    for report, site in zip(of_values, ALWAYS, strict=True):
        assert (report.verdict, report.ranks) == ("did not give the bits of ranks 0 and 2", (1,))
        assert (report.operator, report.unit) == SITES[site][1:]
    # Rows that one rank receives wrong.
    assert (of_sum.operator, of_sum.ranks, of_sum.collective) == (WAIT, (1,), "all_reduce")


def test_of_two_ranks_nothing_says_which_is_wrong(of_two_ranks):
    _, always_wrong = of_two_ranks
    for report, site in zip(always_wrong, ALWAYS, strict=True):
        assert report.verdict == "gave different bits, and nothing tells which are right,"
        assert (report.operator, report.ranks) == (SITES[site][1], (0, 1))


def test_a_wrong_replica_of_an_argument_is_named():
    def program():
        params = fs.shard({"w": torch.ones(2)}, fs.ddp(one_axis()))
        if my_rank() == 2:
            params["w"].local.add_(1)
        return str(fs.verify(lambda params: fs.gather(params)["w"].sum(), params))

    assert spmd(program, 3) == ["verify: the argument [0][0]['w'] did not give the bits of ranks 0 and 1 on rank 2"] * 3


def test_a_wrong_replica_of_a_result_is_named():
    """A learning rate of each rank makes replicas of the parameters differ, although no operands were to agree."""

    def program():
        params = fs.shard({"w": torch.ones(2)}, fs.ddp(one_axis()))
        tx = fs.sgd(0.1)
        state = fs.TrainState.create(params, tx)
        rate = torch.tensor(0.2 if my_rank() == 2 else 0.1)
        return fs.verify(lambda state, rate: fs.update(fs.sgd(rate), state, state.params), state, rate)

    for report in spmd(program, 3):
        assert (report.phase, report.leaf, report.ranks) == ("update", ".params['w']", (2,))
        assert report.verdict == "did not give the bits of ranks 0 and 1"


@pytest.mark.parametrize("strategy", [fs.ddp, ZERO3])
def test_a_wrong_plain_tensor_of_a_state_is_named(strategy):
    def program():
        params = fs.shard({"w": torch.ones(6)}, strategy(one_axis()))
        tx = fs.adamw(0.1)
        state = fs.TrainState.create(params, tx)
        # Each rank may have buffers of its own.
        state = state._replace(buffers={"mean": torch.tensor(float(my_rank()))})
        step = partial(fs.update, tx)
        assert fs.verify(step, state, params) is None
        if my_rank() == 2:
            state.opt_state[0].counts["w"].add_(1)
        return str(fs.verify(step, state, params))

    text = "verify: the argument [0][0].opt_state[0].counts['w'] did not give the bits of ranks 0 and 1 on rank 2"
    assert spmd(program, 3) == [text] * 3


def test_each_buffer_of_a_collective_is_compared():
    """A gather of leaves of two dtypes brings two."""
    full = {"v": torch.ones(2, dtype=torch.float64), "w": torch.ones(2)}

    def is_buffer(number):
        return lambda node: my_rank() == 1 and graph_nodes.is_wait(node) and node.args[0].args[1] == number

    def program():
        params = fs.shard(full, ZERO3(one_axis()))
        places = []
        for FLIP.site in map(is_buffer, range(2)):
            FLIP.runs, FLIP.bit, FLIP.runs_begun = (0, 1), 20, 0
            report = fs.verify(fs.gather, params)
            places.append(report and (report.operator, report.ranks))
        return places

    with patch.object(verify, "run_step", run_with_flip):
        assert spmd(program, 3) == [[(WAIT, (1,))] * 2] * 3


def test_each_of_several_equal_operations_of_a_line_is_compared():
    """The first one is wrong, and the second one is right."""

    def program():
        params = fs.shard({"w": torch.ones(2)}, ZERO3(one_axis()))
        FLIP.site = lambda node: my_rank() == 1 and name_operator(node) == "aten.sin"
        FLIP.runs, FLIP.bit, FLIP.runs_begun = (0, 1), 20, 0
        return fs.verify(lambda x, _: x.sin() - x.sin(), torch.ones(2), params).ranks

    with patch.object(verify, "run_step", run_with_flip):
        assert spmd(program, 3) == [(1,)] * 3


GELU = f"""\
verify: aten.gelu gave other bits in a second run of the same step on rank 1
  phase: forward
  at: steps.py:{line_of("gelu")} in body: hidden = F.gelu(self.up(x), approximate=self.approximate)  # gelu
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


def test_the_texts_of_reports(of_two_ranks, always_wrong_of_three):
    wrong_once, always_wrong_of_two = of_two_ranks
    assert str(wrong_once[0]) == GELU
    wrong = f"verify: {WAIT} did not give the bits of ranks 0 and 2 on rank 1\n"
    assert str(always_wrong_of_three[0]) == wrong + ARRIVAL
    wrong = f"verify: {WAIT} gave different bits, and nothing tells which are right, on ranks 0 and 1\n"
    assert str(always_wrong_of_two[0]) == wrong + ARRIVAL


def square_gathered(params):
    full = fs.gather(params)
    return full["w"].square().sum() + full["v"].sum(), (2 * full["w"].abs()).sum()


def test_the_unit_of_a_leaf_that_is_taken_out_of_a_gathered_buffer_is_found():
    """Also of what is computed of that leaf alone. What copies leaves out of the buffer is part of the gather."""

    def program():
        params = fs.shard({"w": torch.ones(4), "v": torch.ones(4)}, ZERO3(one_axis()))
        operations = Operations("test", [], square_gathered, [params])
        located = {name_operator(node): operations.locate(node, verdict="", ranks=()) for node in operations.nodes}
        computed = [located[name].unit for name in ("aten.pow.Tensor_Scalar", "aten.mul")]
        return computed, located["aten.split_with_sizes_copy"].collective

    assert spmd(program, 2) == [(["['v'], ['w']"] * 2, "all_gather")] * 2


def test_the_unit_of_a_leaf_that_is_gathered_from_one_rank_is_that_of_its_gradient():
    def program():
        mesh = fs.init_mesh({"replicate": 2, "shard": 1}, device="cpu")
        params = fs.shard({"w": torch.ones(4)}, fs.hsdp(mesh, min_shard_elements=0))
        step = fs.value_and_grad(lambda params: fs.gather(params)["w"].square().sum())
        operations = Operations("test", [], step, [params])
        squares = [node for node in operations.nodes if name_operator(node) == "aten.pow.Tensor_Scalar"]
        return operations.locate(squares[0], verdict="", ranks=()).unit

    assert spmd(program, 2) == ["['w']"] * 2


def test_what_the_program_joins_is_no_buffer_of_a_collective():
    def program():
        params = fs.shard({"w": torch.ones(4), "v": torch.ones(4)}, ZERO3(one_axis()))
        operations = Operations("test", [], lambda params: torch.cat(list(fs.gather(params).values())), [params])
        joined = [node for node in operations.nodes if name_operator(node) == "aten.cat" and origin_of(node).is_users]
        reports = [operations.locate(node, verdict="", ranks=()) for node in joined]
        return [(report.collective, report.unit) for report in reports]

    assert spmd(program, 2) == [[("", "['v'], ['w']")]] * 2


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
    """A step with dropout, whose keys may differ between ranks, and which writes to what it donates elsewhere."""
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
    jitted = fs.jit(step, donate_argnums=0)
    return fs.testing.check_pure(partial(fs.verify, jitted), state, batch)


@pytest.mark.parametrize(
    "strategy, key, world",
    [
        (ZERO3, "of ranks", 3),
        pytest.param(fs.ddp, "one", 2, marks=pytest.mark.slow),
        pytest.param(fs.zero1, "of ranks", 2, marks=pytest.mark.slow),
    ],
)
def test_clean_runs_with_dropout_and_uneven_shards_are_silent(strategy, key, world):
    assert spmd(lambda: verify_dropped(strategy, key), world) == [None] * world


@on_ranks("2 processes")
def test_clean_runs_on_processes_are_silent():
    assert verify_dropped(ZERO3, "of ranks", "weighted") is None


@pytest.mark.parametrize("strategy, world", [(fs.zero2, 2), (ZERO3, 1)])
def test_clean_runs_with_checkpoints_and_microbatches_are_silent(strategy, world):
    def program():
        return fs.verify(*make_step(strategy, checkpointed=True, microbatches=2))

    assert spmd(program, world) == [None] * world


def write_through_view(x, y):
    """Of equal x and other y on each rank."""
    z = x.clone()
    once = z.sin()
    z[0].add_(y)
    return once, z.sin()


def test_memory_that_a_rank_has_written_its_own_values_to_may_differ():
    def program():
        params = fs.shard({"w": torch.ones(2)}, ZERO3(one_axis()))
        return fs.verify(lambda x, y, _: write_through_view(x, y), torch.ones(2), torch.tensor(my_rank() + 1.0), params)

    assert spmd(program, 2) == [None, None]


def test_a_step_that_cannot_be_traced_is_refused():
    with pytest.raises(ValueError, match="the function reads the value of a tensor"):
        fs.verify(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))


def test_the_results_of_the_first_run_are_freed_when_the_second_begins():
    made: list[weakref.ref] = []
    alive = []

    def run(operations):
        for node, operands, results in observed_run.run_step(operations):
            if node.op == "call_function":
                alive.append(sum(each() is not None for each in made))
                made.extend(map(weakref.ref, results))
            yield node, operands, results

    with patch.object(verify, "run_step", run):
        assert fs.verify(torch.sin, torch.ones(3)) is None
    assert alive == [0, 0]
