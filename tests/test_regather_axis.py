"""regather_axis: ranks keep pieces of what the forward gathered, and backwards gather inside a group alone."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import spmd
from tests.ranks import my_rank, on_ranks
from tests.test_law_accounting import stack
from tests.test_units_memory import Log, Watched
from tests.trees import assert_same_bits, normal, tensors
from tests.unit_models import filled

AXES = ("local", "node")
EVERY_LEAF = {"min_shard_elements": 0, "bucket_bytes": 0}


def mesh_of(nodes, locals_=-1):
    return fs.init_mesh({"node": nodes, "local": locals_}, device="cpu")


def modelled():
    return fs.functionalize(stack(), units=(nn.Embedding, nn.Linear))


def differentiate(model, params, microbatches=1):
    """Loss and gradients of some microbatches of this rank's own."""
    batches = [torch.arange(4) + my_rank() + number for number in range(microbatches)]
    return fs.accumulate(lambda p, x: model.apply(p, x % 7).square().mean())(params, batches)


def weights():
    return {name: torch.ones(64, 64) for name in "abc"}


def product(params, x, hook=lambda grad: None):
    """A loss that gathers one weight after another."""
    for name in "abc":
        x = x @ fs.gather(params[name])
        if x.requires_grad:
            x.register_hook(hook)
    return x.sum()


def gathered_over(record, axis):
    """The bytes of each gather over an axis, by its unit."""
    gathers = [entry for entry in record if not entry.scalar and entry.op == "all_gather" and entry.axis == axis]
    return [(entry.unit, entry.bytes) for entry in gathers]


def recorded(run, *args, jitted=False):
    run = fs.jit(run) if jitted else run
    if jitted:
        run(*args)
    with fs.comm.record() as record:
        result = run(*args)
    return result, record


def assert_equal_runs(run, full, mesh, *, frozen=(), jitted=False, **options):
    """Compare a step with that of ZeRO-3 over the same axes: equal bits, and equal gathers inside a group.

    Returns:
        The gathers across groups, with `regather_axis` and without.
    """
    plain = fs.shard(full, fs.zero3(mesh, AXES, **options), frozen=frozen)
    keeping = fs.shard(full, fs.zero3(mesh, AXES, regather_axis="local", **options), frozen=frozen)
    # A graph has the bits and the collectives of the eager step, which takes less time than a trace.
    expected, expected_record = recorded(run, plain)
    result, record = recorded(run, keeping, jitted=jitted)
    assert_same_bits(fs.unshard(fs.tree_leaves(result)), fs.unshard(fs.tree_leaves(expected)))
    assert gathered_over(record, "local") == gathered_over(expected_record, "local")
    return gathered_over(record, "node"), gathered_over(expected_record, "node")


OPTIONS = {
    "a unit each": EVERY_LEAF,
    "nothing ahead": {**EVERY_LEAF, "prefetch": 0},
    "some again": {**EVERY_LEAF, "regather": ("1", "3")},
    "small whole leaves": {"bucket_bytes": 0, "min_shard_elements": 20},
    "cast": {**EVERY_LEAF, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


SLOW_SIZES = (1, 1), (2, 1), (1, 2), (2, 4), (4, 2)


@pytest.mark.parametrize(
    ("nodes", "locals_"), [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SLOW_SIZES)]
)
def test_the_backward_gathers_inside_a_group(nodes, locals_):
    """With the bits of ZeRO-3, and across groups each unit once in a step, however many microbatches it has."""

    def program():
        mesh, model, full = mesh_of(nodes, locals_), modelled(), dict(stack().named_parameters())
        for name, options in OPTIONS.items():
            for microbatches in (1, 2) if name == "a unit each" else (2,):
                run = partial(differentiate, model, microbatches=microbatches)
                across, expected = assert_equal_runs(run, full, mesh, **options)
                if nodes > 1:
                    assert across == list(dict.fromkeys(expected)), name

    spmd(program, world=nodes * locals_)


@on_ranks(4, 8)
def test_bytes_are_those_of_the_law(world_size):
    """Across groups P (R - 1) / N; inside P (n - 1) / n, and as much again of the units that were dropped."""
    params = fs.shard(weights(), fs.zero3(mesh_of(2), AXES, regather_axis="local", prefetch=0, **EVERY_LEAF))
    _, record = recorded(fs.value_and_grad(product), params, torch.ones(2, 64))
    gathers = [entry for entry in record if entry.op == "all_gather" and not entry.scalar]
    sent = {axis: sum(entry.sent for entry in gathers if entry.axis == axis) for axis in AXES}
    total, inner = 3 * 64 * 64 * 4, world_size // 2
    # The backward begins with the last of three units as the forward left it.
    assert sent == {"node": total / world_size, "local": total * (1 + 2 / 3) * (inner - 1) / inner}


@on_ranks(4, pytest.param(8, marks=pytest.mark.slow))
def test_graphs_gather_inside_a_group_too(world_size):
    run = partial(fs.value_and_grad(product), x=torch.ones(2, 64))
    across, expected = assert_equal_runs(run, weights(), mesh_of(2), jitted=True, **EVERY_LEAF)
    assert across == list(dict.fromkeys(expected))


class Blocks(nn.Module):
    """A layer that is used twice, inside of checkpoints and outside."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = checkpoint(lambda x: self.second(torch.tanh(self.first(x))), x, use_reentrant=False)
        return self.third(torch.tanh(self.first(torch.tanh(x))))


@on_ranks(4)
def test_checkpoints_tied_and_frozen_leaves_and_derived_ones():
    mesh = mesh_of(2)
    module = filled(Blocks())
    full = dict(module.named_parameters())
    model = fs.functionalize(module, units=nn.Linear)

    def by_model(params):
        batches = [normal(my_rank() + number)(3, 6) for number in range(2)]
        return fs.accumulate(lambda p, x: model.apply(p, x).square().mean())(params, batches)

    def by_function(params):
        def loss(p, x):
            h = torch.tanh(x @ fs.gather(p["first.weight"]))
            merged = fs.tree_map(lambda w, v: w + w * v, p["second.weight"], p["third.weight"])
            return (torch.tanh(h @ fs.gather(merged)) @ fs.gather(p["first.weight"])).square().mean()

        return fs.accumulate(loss)(params, [normal(my_rank() + number)(3, 6) for number in range(2)])

    for run, frozen in ((by_model, ()), (by_model, ["first.*"]), (by_model, ["*"]), (by_function, ())):
        across, expected = assert_equal_runs(run, full, mesh, frozen=frozen, **EVERY_LEAF)
        assert len(across) < len(expected)


@on_ranks(4)
def test_it_goes_with_masks_layouts_and_sums_in_a_tree():
    mesh = mesh_of(2)
    full = {name: normal(number)(8, 6) for number, name in enumerate(("0", "1", "whole"))}

    def run(params, **options):
        def loss(p, x):
            for name in full:
                x = torch.tanh(x @ fs.gather(p[name]) @ fs.gather(p[name]).T)
            return x.square().sum()

        return fs.accumulate(loss, **options)(params, [normal(my_rank() + number)(3, 8) for number in range(2)])

    columns = fs.compose(fs.fully_shard(mesh["node"]), fs.fully_shard(mesh["local"], dim=1))
    for layout, options in ((None, {"reduction_order": "tree"}), (columns, {"communicate": "outer_once"})):
        sizes = {"layout": layout} if layout else {"axis": AXES, "min_shard_elements": 0}
        results = []
        for axis in (None, "local"):
            strategy = fs.zero3(mesh, bucket_bytes=0, regather_axis=axis, **sizes)
            params = fs.shard(full, fs.masked(strategy, ["0", "1"], otherwise=fs.ddp(mesh, AXES)))
            results.append(fs.unshard(run(params, **options)[1]))
        assert_same_bits(*results)


@on_ranks(4)
def test_with_deferred_sums_a_step_crosses_between_nodes_once():
    """As `hsdp` whose ranks each keep a part of the optimizer state: P / N of parameters, and as much of gradients."""
    mesh = mesh_of(2)
    params = fs.shard(weights(), fs.zero3(mesh, AXES, regather_axis="local", prefetch=0, **EVERY_LEAF))
    tx = fs.adamw(1e-3)
    state = fs.TrainState.create(params, tx)
    step = fs.accumulate(product, communicate="outer_once")
    (_, grads), record = recorded(step, params, [torch.ones(2, 64)] * 3)
    across = [(entry.op, entry.sent) for entry in record if entry.axis == "node" and not entry.scalar]
    piece = 64 * 64 * 4 / 2
    assert across == [("all_gather", piece / 2)] * 3 + [("reduce_scatter", piece / 2)] * 3
    updated = fs.update(tx, state, grads)
    moments = [tensor for tensor in tensors(updated.opt_state) if tensor.dim()]
    assert {moment.numel() for moment in moments} == {64 * 64 // 4}


class Noting(nn.Linear):
    """A layer that runs a function at its beginning."""

    def forward(self, pair):
        x, note = pair
        note()
        return super().forward(x), note


def watch_pieces(axis, run):
    """Run a function of a strategy and a note, which writes down the bytes that are held between its two gathers."""
    mesh, log, notes = mesh_of(2, 2), Log(), []
    layout = fs.compose(fs.fully_shard(mesh["node"]), Watched(log), fs.fully_shard(mesh["local"]))

    def note(_=None):
        pieces = {piece.cdata: nbytes for _, piece, nbytes in log.gathered if not piece.expired()}
        notes.append(sum(pieces.values()))

    run(fs.zero3(mesh, layout=layout, bucket_bytes=0, prefetch=0, regather_axis=axis), note)
    note()
    return notes


@on_ranks(4)
def test_pieces_are_held_from_the_forward_to_the_last_backward():
    """P / n bytes of them, and none where no backward follows."""
    piece = 64 * 64 * 4 // 2

    def train(strategy, note):
        params = fs.shard(weights(), strategy)
        fs.accumulate(partial(product, hook=note))(params, [torch.ones(2, 64)] * 2)

    def evaluate(strategy, note):
        model = fs.functionalize(nn.Sequential(*[Noting(64, 64, bias=False) for _ in range(3)]), units=Noting)
        params = model.init(strategy, seed=0)
        with torch.no_grad():
            model.apply(params, (torch.ones(2, 64), note))

    assert watch_pieces("local", train) == [3 * piece] * 6 + [0]
    assert max(watch_pieces(None, train)) <= piece
    assert max(watch_pieces("local", evaluate)) <= piece


@on_ranks(2)
def test_axes_that_make_no_pieces_are_refused():
    mesh = mesh_of(2, 1)
    text = "zero3: expected regather_axis to be the last of several axes to be gathered over, got 'node' of the stages"
    wrapped = fs.Wrapped(fs.compose(fs.fully_shard(mesh["node"]), fs.fully_shard(mesh["local"])))
    for options in (
        {"axis": AXES},
        {"axis": "node"},
        {"layout": fs.compose(fs.fully_shard(mesh["node"]), fs.fully_shard(mesh["local"]))},
        {"layout": wrapped},
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            fs.zero3(mesh, regather_axis="node", **options)
    for make in (fs.ddp, fs.zero1, fs.zero2):
        with pytest.raises(ValueError, match=f"{make.__name__}: regather_axis is decided by {make.__name__} itself"):
            make(mesh, AXES, regather_axis="local")
    with pytest.raises(ValueError, match="hsdp: regather_axis is decided by hsdp itself"):
        fs.hsdp(mesh, axis="local", replicate_axis="node", regather_axis="local")
    whole = fs.Wrapped(fs.zero3(mesh, AXES, regather_axis="local", **EVERY_LEAF))
    params = fs.shard({"w": torch.ones(4)}, whole)
    with pytest.raises(ValueError, match=r"regather_axis='local' has no stage of its own in Wrapped. Compose"):
        fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
