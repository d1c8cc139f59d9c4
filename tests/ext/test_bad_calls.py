"""Wrong calls of the functions of extensions: the generated table of tests/test_bad_calls.py, of their arguments."""

import sys

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import checkpoint, testing
from fshard.ext.plan import Rates
from tests import house, test_bad_calls
from tests.test_bad_calls import EMPTY, EVERY, NUMBERS, WRONG, Walk, made_calls, make_calls, step


class World(test_bad_calls.World):
    """With what other formats need."""

    saves = {  # noqa: RUF012
        "dcp": lambda place, w: checkpoint.save_dcp(place, w.weights),
        "hf": lambda place, w: checkpoint.save_huggingface(place, w.weights),
    }

    def __init__(self, directory):
        super().__init__(directory)
        self.adam = torch.optim.Adam(self.module.parameters())
        adam = fs.from_torch(torch.optim.Adam, lr=0.1)
        used = fs.TrainState.create(self.weights, adam)
        self.adam_state = fs.update(adam, used, fs.tree_map(torch.ones_like, self.weights)).opt_state


CALLS = {
    "adafactor": lambda w: dict(lr=0.1, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0),
    "lamb": lambda w: dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
    "lars": lambda w: dict(lr=0.1, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, eps=0.0),
    "quantize": lambda w: dict(mesh=w.mesh, block=64),
    "ring_attention": lambda w: dict(
        **{name: torch.ones(1, 1, 4, 4) for name in "qkv"}, axis=w.axis, causal=True, order="zigzag", scale=0.5
    ),
    "ring_positions": lambda w: dict(axis=w.axis, time=4, order="zigzag"),
    "scale_by_factored_rms": lambda w: dict(beta2_decay=-0.8, eps=1e-30),
    "scale_by_trust_ratio": lambda w: dict(trust_coefficient=1.0, eps=0.0),
    "ulysses": lambda w: dict(attention=torch.add, axis=w.axis),
    "vocab_parallel_cross_entropy": lambda w: dict(
        h=torch.ones(3, 2),
        weight=torch.ones(5, 2),
        targets=torch.tensor([0, 1, 4]),
        axis=w.axis,
        reduction="sum",
        ignore_index=1,
    ),
    "vocab_parallel_embedding": lambda w: dict(
        ids=torch.tensor([0, 1, 4]), weight=torch.ones(5, 2), axis=w.axis, scatter_dim=0
    ),
    "whole": lambda w: dict(tx=w.tx),
    "with_init_weights": lambda w: dict(module=torch.nn.Linear(2, 2)),
    "from_dtensor": lambda w: dict(tree=fs.to_dtensor(w.params, w.mesh), strategy=fs.zero2(w.mesh)),
    "pipeline": lambda w: dict(
        stage_fn=lambda p, h: h,
        axis=w.axis,
        microbatches=2,
        last=lambda p, h: h.sum(),
        first=None,
        schedule="gpipe",
        reduce="mean",
    ),
    "plan": lambda w: dict(step=step, state=w.state, mesh={"shard": 2}, rank=0, backend="gloo", rates=Rates()),
    "tensor_parallel": lambda w: dict(
        module=nn.Sequential(nn.Linear(4, 4)), axis=w.axis, plan={"0": "column"}, sequence_dim=None, divide=()
    ),
    "to_dtensor": lambda w: dict(tree=w.params, mesh=w.mesh),
    "trace": lambda w: {},
}
CHECKPOINTS = {
    "from_optimizer_state_dict": lambda w: dict(
        state_dict=checkpoint.to_optimizer_state_dict(w.adam_state, w.module, w.adam),
        like=w.adam_state,
        module=w.module,
        optimizer=w.adam,
        updates=0,
    ),
    "load_dcp": lambda w: dict(
        directory=w.saved("dcp"),
        like=w.weights,
        module=w.module,
        updates=0,
        model_key="model",
        optimizer_key="optim",
        trusted=True,
    ),
    "load_huggingface": lambda w: dict(
        directory=w.saved("hf"), like=w.weights, names=str, module=w.module, strict=True, cast=False
    ),
    "save_dcp": lambda w: dict(
        directory=w.fresh(),
        state=w.weights,
        module=w.module,
        optimizer=w.adam,
        model_key="model",
        optimizer_key="optim",
        flatten_optimizer_state_dict=False,
    ),
    "save_huggingface": lambda w: dict(
        directory=w.fresh(), params=w.weights, names=str, module=w.module, max_file_bytes=10**6
    ),
    "to_optimizer_state_dict": lambda w: dict(
        opt_state=w.adam_state, module=w.module, optimizer=w.adam, rank0_only=False
    ),
}
TESTING = {
    "assert_budget": lambda w: dict(
        step=step, args=(w.state,), peak_bytes=1e9, bytes_sent=1e9, collectives=100, mesh={"shard": 2}
    ),
}
ACCEPTED = (
    (
        "a number in range",
        NUMBERS,
        "adafactor.d adafactor.weight_decay lamb.eps lamb.weight_decay lars.momentum lars.weight_decay "
        "lars.eps lars.trust_coefficient pipeline.microbatches quantize.block "
        "scale_by_trust_ratio.trust_coefficient scale_by_trust_ratio.eps "
        "checkpoint.save_huggingface.max_file_bytes",
    ),
    ("an id, or one that does not count", ("a number",), "vocab_parallel_cross_entropy.ignore_index"),
    ("an id that does not count", ("a negative number",), "vocab_parallel_cross_entropy.ignore_index"),
    ("a number in range", ("a negative number",), "adafactor.beta2_decay scale_by_factored_rms.beta2_decay"),
    ("a number, or the default", ("None", *NUMBERS), "scale_by_factored_rms.eps"),
    ("a number, or the default", ("None", "a number"), "checkpoint.from_optimizer_state_dict.updates"),
    ("a number, or the default", ("None", "a number"), "checkpoint.load_dcp.updates"),
    (
        "a budget, or none",
        ("None", "a huge number"),
        "testing.assert_budget.peak_bytes testing.assert_budget.bytes_sent",
    ),
    ("a budget, or none", ("None", *NUMBERS, "an empty dict"), "testing.assert_budget.collectives"),
    ("a number, or a schedule", (*NUMBERS, "a class", "a module"), "adafactor.lr lamb.lr lars.lr"),
    ("no attributes", ("an empty list",), "tensor_parallel.divide"),
    ("functions", ("a class", "a module"), "pipeline.stage_fn pipeline.last ulysses.attention"),
    ("a number, or the default", ("None", *NUMBERS), "ring_attention.scale"),
    ("functions, or none", ("None", "a class", "a module"), "pipeline.first"),
    (
        "the default",
        ("None",),
        "vocab_parallel_embedding.scatter_dim checkpoint.load_huggingface.names checkpoint.save_dcp.optimizer "
        "checkpoint.save_huggingface.names testing.assert_budget.mesh tensor_parallel.sequence_dim "
        "tensor_parallel.divide",
    ),
    (
        "modules that have the leaves, or none",
        ("None", "a module"),
        "checkpoint.load_dcp.module checkpoint.load_huggingface.module checkpoint.save_dcp.module "
        "checkpoint.save_huggingface.module",
    ),
    (
        "directories may be made; any sequence holds microbatches",
        ("a text",),
        "checkpoint.save_dcp.directory checkpoint.save_huggingface.directory",
    ),
    ("keys in a state dict", ("a text", "an empty text"), "checkpoint.load_dcp.optimizer_key"),
    ("keys in a state dict", ("a text", "an empty text"), "checkpoint.save_dcp.model_key"),
    ("keys in a state dict", ("a text", "an empty text"), "checkpoint.save_dcp.optimizer_key"),
    ("ids, and another vocabulary", ("a tensor of integers",), "vocab_parallel_embedding.ids"),
    ("another vocabulary", ("a tensor of another shape",), "vocab_parallel_embedding.weight"),
    (
        "other leaves stay as they are: a TrainState may hold numbers and texts",
        tuple(x for x in WRONG if x != "a donated tree"),
        "to_dtensor.tree",
    ),
    ("another module", ("a module",), "with_init_weights.module"),
    ("any tree, of whatever leaves", tuple(WRONG), "from_dtensor.tree"),
    ("not used for parameters alone", tuple(WRONG), "checkpoint.save_dcp.optimizer"),
    ("true or false to Python", tuple(WRONG), "checkpoint.save_dcp.flatten_optimizer_state_dict"),
    (
        "true or false to Python",
        tuple(x for x in WRONG if not x.startswith("a tensor")),
        "checkpoint.to_optimizer_state_dict.rank0_only",
    ),
    ("no leaves", EMPTY, "checkpoint.save_dcp.state"),
    ("no leaves", EMPTY, "checkpoint.to_optimizer_state_dict.opt_state"),
)
EXTENSIONS = Walk(
    {fs: CALLS, checkpoint: CHECKPOINTS, testing: TESTING},
    ACCEPTED,
    {"plan.step", "testing.assert_budget.step"},
    World,
    "tests.ext.test_bad_calls",
    1500,
)
UNCALLED = {
    fs: {"moe": "a module: its tests"},
    checkpoint: {},
    testing: {"assert_same_bits": "makes ranks of its own: tests/ext/test_same_bits.py"},
}


@pytest.fixture(scope="module", params=EVERY)
def made(request, tmp_path_factory):
    return made_calls(EXTENSIONS, request.param, tmp_path_factory.mktemp("calls") / "rows")


@pytest.mark.timeout(600)
def test_no_call_hangs_or_aborts(made):
    test_bad_calls.check_no_call_hangs_or_aborts(made)


def test_valid_calls_are_accepted(made):
    test_bad_calls.check_valid_calls_are_accepted(made)


def test_refused_calls_are_clear(made):
    test_bad_calls.check_refused_calls_are_clear(made)


def test_accepted_values_are_listed(made):
    test_bad_calls.check_accepted_values_are_listed(made)


@pytest.mark.parametrize("module", UNCALLED, ids=("fs", "checkpoint", "testing"))
def test_every_public_name_is_called(module):
    names = house.names_of_extensions(module)
    assert names <= set(module.__all__)
    test_bad_calls.check_every_public_name_is_called(module, names, EXTENSIONS.calls[module], UNCALLED[module])


if __name__ == "__main__":
    make_calls(EXTENSIONS, sys.argv[1], *map(int, sys.argv[2:]))
