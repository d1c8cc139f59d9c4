"""A generated table of wrong calls: every argument of every public function in turn is replaced by wrong values.

A call is accepted or refused. Most refusals must name the argument or the leaf and say what was expected, in
fshard's own words. A process of its own makes the calls, so that hangs and aborts are counted.
"""

import contextlib
import faulthandler
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import checkpoint, testing
from fshard.errors import short
from fshard.tree.checks import mark_donated
from tests import house

# Seconds that one call may take.
LIMIT = 30
# Of 100 refusals, how many must be clear; Python and torch refuse the others in their own words.
CLEAR = 85


def donated():
    tensor = torch.ones(4, 4)
    mark_donated([tensor])
    return {"w": tensor}


WRONG = {
    "None": lambda: None,
    "a number": lambda: 5,
    "a negative number": lambda: -1,
    "nan": lambda: math.nan,
    "a huge number": lambda: 10**30,
    "a text": lambda: "x",
    "an empty text": lambda: "",
    "an empty list": lambda: [],
    "an empty dict": lambda: {},
    "an object": object,
    "a class": lambda: int,
    "a tensor of another shape": lambda: torch.ones(7, 3),
    "a tensor of integers": lambda: torch.ones(2, dtype=torch.int64),
    "a tensor on meta": lambda: torch.ones(4, 4, device="meta"),
    "another tree": lambda: {"other": torch.ones(2)},
    "a donated tree": donated,
    "a module": lambda: nn.Linear(2, 2),
}


def loss(params):
    return fs.gather(params)["w"].square().sum()


def step(state):
    return fs.update(fs.sgd(0.1), state, fs.value_and_grad(loss)(state.params)[1])


class Declares(nn.Sequential):
    """Declares its units, as models of transformers do."""

    _no_split_modules = ("Linear",)


class World:
    """The ranks of this process, and what calls need."""

    saves = MappingProxyType(
        {
            "run": lambda place, w: checkpoint.save(place, w.state, 1),
        }
    )

    def __init__(self, directory):
        self.directory = Path(directory)
        self.mesh = fs.init_mesh({"shard": -1}, device="cpu")
        self.axis = fs.axis_of(self.mesh)
        self.grid = fs.init_mesh({"replicate": 1, "shard": -1}, device="cpu")
        self.full = {"w": torch.ones(4, 4)}
        self.params = fs.shard(self.full, fs.zero2(self.mesh))
        self.tx = fs.sgd(0.1)
        self.state = fs.TrainState.create(self.params, self.tx)
        self.module = nn.Linear(4, 4)
        self.model = fs.functionalize(self.module)
        self.weights = self.model.init(fs.zero2(self.mesh), seed=0)
        self.grads = fs.tree_map(torch.ones_like, self.params)

    def saved(self, name):
        """A directory or a file of some format, written once."""
        place = self.directory / name
        if not place.exists():
            self.saves[name](place, self)
        return place

    def fresh(self):
        """A directory that is not there yet."""
        return self.directory / f"fresh-{len(list(self.directory.glob('fresh-*')))}"


# A valid call of each public function of fshard: a function of the world to its arguments.
CALLS = {
    "accumulate": lambda w: dict(f=lambda p, _: loss(p), reduce="mean", communicate="each", sums="tree"),
    "adam": lambda w: dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
    "adamw": lambda w: dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
    "add_decayed_weights": lambda w: dict(weight_decay=0.1),
    "all_gather": lambda w: dict(tree=torch.ones(2), axis=w.axis, dim=0),
    "all_gather_invariant": lambda w: dict(tree=torch.ones(2), axis=w.axis, dim=0),
    "all_to_all": lambda w: dict(tree=torch.ones(2, 2), axis=w.axis, split_dim=0, concat_dim=1),
    "apply": lambda w: dict(model=w.model, params=w.weights, buffers={}, key=1),
    "axis_index": lambda w: dict(axis=w.axis),
    "broadcast": lambda w: dict(tree=torch.ones(2), axis=w.axis, root=0),
    "axis_of": lambda w: dict(mesh=w.mesh, name="shard"),
    "cast": lambda w: dict(gather=torch.bfloat16, scatter=torch.float32),
    "clip_by_global_norm": lambda w: dict(max_norm=1.0, p=2.0, sums="tree"),
    "clip_by_norm": lambda w: dict(max_norm=1.0, p=2.0),
    "clip_by_value": lambda w: dict(max_value=1.0),
    "ddp": lambda w: dict(mesh=w.mesh, axis="shard"),
    "dynamic_loss_scale": lambda w: dict(
        tx=w.tx, init_scale=2.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2
    ),
    "ema": lambda w: dict(tx=w.tx, decay=0.9),
    "fold_in": lambda w: dict(key=1, data=2),
    "freeze": lambda w: dict(tx=w.tx, mask="w"),
    "from_torch": lambda w: dict(cls=torch.optim.SGD, lr=0.1),
    "from_torch_scheduler": lambda w: dict(
        cls=torch.optim.lr_scheduler.StepLR, lr=0.1, steps=3, name="lr", momentum=0.9, step_size=1
    ),
    "fully_shard": lambda w: dict(mesh=w.mesh, dim=0, min_shard_elements=0),
    "functionalize": lambda w: dict(module=nn.Linear(2, 2), units=None),
    "gather": lambda w: dict(tree=w.params),
    "global_norm": lambda w: dict(tree=w.grads, p=2.0, sums="tree"),
    "leaf_norms": lambda w: dict(tree=w.grads, p=2.0, sums="tree"),
    "init_mesh": lambda w: dict(shape={"shard": -1}, device="cpu", timeout=10.0),
    "jit": lambda w: dict(f=loss, donate_argnums=(), static_argnums=(), backend="graph"),
    "masked": lambda w: dict(tx=w.tx, mask="w"),
    "microbatches": lambda w: dict(batches=[1, 2], like=w.params),
    "no_split": lambda w: dict(model=Declares(nn.Linear(2, 2))),
    "objective": lambda w: dict(loss=torch.ones(()), like=w.params, reduce="mean"),
    "partition": lambda w: dict(parts={"*": w.tx}),
    "psum": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "pmax": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "ppermute": lambda w: dict(tree=torch.ones(2), axis=w.axis, perm=[(0, 0)]),
    "ragged_all_to_all": lambda w: dict(tree=torch.ones(2), axis=w.axis, send_sizes=[2], recv_sizes=[2]),
    "pmean": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "pvary": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "psum_invariant": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "reduce_scatter": lambda w: dict(tree=torch.ones(2), axis=w.axis, dim=0),
    "replicate": lambda w: dict(mesh=w.mesh),
    "reshard": lambda w: dict(tree=w.params, transform=fs.ddp(w.mesh), frozen=()),
    "sample_ids": lambda w: dict(step=1, key=2, samples=10, batch=3),
    "scale_by_adam": lambda w: dict(betas=(0.9, 0.99), eps=1e-8),
    "scatter_grads": lambda w: dict(grads=w.full, like=w.params, reduce="mean"),
    "sgd": lambda w: dict(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0),
    "shard": lambda w: dict(full_tree=w.full, transform=fs.zero2(w.mesh), frozen=()),
    "skip_nonfinite": lambda w: dict(tx=w.tx),
    "own_dim": lambda w: dict(mesh=w.mesh, dim=0),
    "split_dim": lambda w: dict(mesh=w.mesh, dim=0),
    "unshard": lambda w: dict(tree=w.params),
    "update": lambda w: dict(tx=w.tx, state=w.state, grads=w.grads, donate=False),
    "value_and_grad": lambda w: dict(f=loss, reduce="mean", has_aux=False),
    "zero1": lambda w: dict(mesh=w.mesh, axis="shard", min_shard_elements=0),
    "zero2": lambda w: dict(mesh=w.mesh, axis="shard", min_shard_elements=0),
    "zero3": lambda w: dict(mesh=w.mesh, axis="shard", regather=True, prefetch=1, merge_bytes=0, min_shard_elements=0),
    "chain": lambda w: dict(transformations=fs.clip_by_global_norm(1.0)),
    "compose": lambda w: dict(transforms=fs.zero2(w.mesh)),
    "hsdp": lambda w: dict(mesh=w.grid, axis="shard", replicate="replicate", min_shard_elements=0),
    "hybrid_shard": lambda w: dict(mesh=w.grid, axis="shard", replicate="replicate", dim=0, min_shard_elements=0),
    "make_graph": lambda w: dict(f=loss),
    "offload": lambda w: dict(device="cpu"),
    "remat": lambda w: dict(f=loss),
    "sync_buffers": lambda w: dict(buffers={"b": torch.ones(2)}, like=w.params, by="mean"),
    "transform_state": lambda w: dict(params=w.params),
    "tree_leaves": lambda w: dict(tree=w.params),
    "tree_map": lambda w: dict(f=torch.add, tree=w.params, rest=w.params),
}
# The same of methods and of what the functions return, and of the packages checkpoint and testing.
METHODS = {
    "TrainState.create": lambda w: dict(params=w.params, tx=w.tx, buffers={}, key=1),
    "model.init": lambda w: dict(strategy=fs.zero2(w.mesh), seed=0, mode="replay"),
    "model.apply": lambda w: dict(params=w.weights, buffers={}, key=1),
    "objective of value_and_grad": lambda w: dict(params=w.params),
    "objective of accumulate": lambda w: dict(params=w.params, microbatches=[1, 2]),
    "jitted step": lambda w: dict(state=w.state),
}
CHECKPOINTS = {
    "Manager": lambda w: dict(directory=w.directory / "managed", keep=2, every=1, asynchronous=False, mesh=w.grid),
    "from_state_dict": lambda w: dict(state_dict=w.module.state_dict(), like=w.weights, module=w.module, cast=False),
    "latest": lambda w: dict(directory=w.saved("run")),
    "restore": lambda w: dict(directory=w.saved("run"), like=w.state, step=1, subtree="", only="*", mesh=w.grid),
    "save": lambda w: dict(
        directory=w.fresh(),
        state=w.state,
        step=1,
        keep=2,
        asynchronous=False,
        mesh=w.grid,
    ),
    "to_state_dict": lambda w: dict(params=w.weights, module=w.module, rank0_only=False),
}
TESTING = {
    "assert_trees_close": lambda w: dict(actual=w.params, expected=w.params, rtol=0.0, atol=0.0, exact=False),
    "check_adjoint": lambda w: dict(
        transform=fs.zero2(w.mesh), shapes=[(4, 4)], dtype=torch.float64, seed=0, error=0.0
    ),
    "check_pure": lambda w: dict(step=step, args=w.state),
    "check_transform": lambda w: dict(
        transform=fs.zero2(w.mesh), shapes=[(4, 4)], dtype=torch.float64, error=0.0, seed=0
    ),
    "check_varying": lambda w: dict(f=loss, params=w.params, has_aux=False),
    "spmd": lambda w: dict(f=int, world=1, timeout=10.0),
}
NUMBERS = ("a number", "a huge number")
EMPTY = ("None", "an empty list", "an empty dict")
TREES = (*EMPTY, "a tensor of another shape", "a tensor of integers", "a tensor on meta", "another tree")
MASKS = ("a text", "an empty text", "a class", "a module")
ACCEPTED = (
    (
        "a number in range",
        NUMBERS,
        "adam.eps adam.weight_decay adamw.eps adamw.weight_decay add_decayed_weights.weight_decay "
        "clip_by_global_norm.max_norm clip_by_norm.max_norm clip_by_norm.p clip_by_value.max_value "
        "dynamic_loss_scale.init_scale dynamic_loss_scale.growth_factor dynamic_loss_scale.growth_interval "
        "dynamic_loss_scale.backoff_factor "
        "from_torch_scheduler.lr from_torch_scheduler.momentum fully_shard.min_shard_elements "
        "scale_by_adam.eps sgd.momentum sgd.weight_decay zero1.min_shard_elements zero2.min_shard_elements "
        "zero3.prefetch zero3.merge_bytes zero3.min_shard_elements hsdp.min_shard_elements "
        "hybrid_shard.min_shard_elements checkpoint.Manager.every "
        "testing.check_adjoint.error testing.check_transform.error",
    ),
    ("a mask of no leaves", ("an empty list",), "shard.frozen reshard.frozen"),
    (
        "a number in range",
        ("a number",),
        "init_mesh.timeout from_torch_scheduler.steps sample_ids.step sample_ids.samples",
    ),
    ("a number in range", ("a number",), "sample_ids.batch testing.spmd.world testing.spmd.timeout"),
    ("a number, or the default", ("None", *NUMBERS), "checkpoint.save.keep"),
    (
        "a number, or the default",
        ("None", *NUMBERS),
        "testing.assert_trees_close.rtol testing.assert_trees_close.atol",
    ),
    ("a number, or the default", ("None", "a number"), "checkpoint.save.step"),
    ("a number, or a schedule", (*NUMBERS, "a class", "a module"), "adam.lr adamw.lr sgd.lr"),
    ("torch's class takes it; int is a schedule", ("a number", "nan", "a class"), "from_torch.lr"),
    ("torch's class takes it", (*NUMBERS, "a negative number", "nan"), "from_torch_scheduler.step_size"),
    (
        "compared when there is a tree",
        (*NUMBERS, "a negative number"),
        "fully_shard.dim own_dim.dim hybrid_shard.dim",
    ),
    ("compared when there is a tree", (*NUMBERS, "a negative number"), "split_dim.dim"),
    ("false to Python", (*EMPTY, "an empty text"), "value_and_grad.has_aux testing.check_varying.has_aux"),
    ("a number in range", (*NUMBERS, "a negative number"), "sgd.dampening"),
    ("places, or none", (*NUMBERS, "an empty list"), "jit.donate_argnums jit.static_argnums"),
    ("seeds and keys", ("a number", "a negative number"), "fold_in.key sample_ids.key"),
    ("seeds and keys", ("a number", "a negative number"), "testing.check_adjoint.seed testing.check_transform.seed"),
    ("seeds and keys", ("a number", "a negative number", "a tensor of integers"), "fold_in.data"),
    ("seeds and keys", ("None", "a number", "a negative number"), "apply.key model.apply.key"),
    ("seeds and keys", ("None", "a number", "a negative number", "a tensor of integers"), "TrainState.create.key"),
    (
        "refused where it is used",
        ("nan", "an empty list", "a tensor of another shape", "a tensor on meta"),
        "TrainState.create.key",
    ),
    ("seeds and keys", ("None", "a number", "a negative number"), "model.init.seed"),
    ("functions", ("a class", "a module"), "jit.backend make_graph.f remat.f"),
    ("functions", ("a class",), "testing.spmd.f"),
    ("functions; None makes a decorator", ("None", "a class", "a module"), "jit.f"),
    ("masks: patterns, and functions of a name", MASKS, "freeze.mask masked.mask zero3.regather"),
    ("masks, or none", ("None", "an empty list"), "reshard.frozen shard.frozen"),
    (
        "the default",
        ("None",),
        "accumulate.sums accumulate.communicate zero3.prefetch zero3.merge_bytes "
        "axis_of.name cast.gather cast.scatter ddp.axis init_mesh.device init_mesh.ranks zero1.axis "
        "zero2.axis clip_by_global_norm.sums global_norm.sums leaf_norms.sums testing.spmd.timeout zero3.axis "
        "offload.device checkpoint.restore.step checkpoint.restore.only checkpoint.Manager.mesh "
        "checkpoint.restore.mesh checkpoint.save.mesh",
    ),
    ("modules", ("a module",), "functionalize.module"),
    ("a depth, a pattern, or the default", ("None", "a number", "an empty text"), "functionalize.units"),
    (
        "modules that have the leaves, or none",
        ("None", "a module"),
        "checkpoint.from_state_dict.module checkpoint.to_state_dict.module",
    ),
    (
        "directories may be made; any sequence holds microbatches",
        ("a text",),
        "microbatches.batches objective of accumulate.microbatches "
        "checkpoint.latest.directory checkpoint.save.directory",
    ),
    (
        "refused by the first save",
        tuple(WRONG),
        "checkpoint.Manager.directory checkpoint.Manager.keep checkpoint.Manager.asynchronous",
    ),
    ("the whole tree", ("an empty text",), "checkpoint.restore.subtree"),
    ("trees of tensors; plain ones stay as they are", TREES, "gather.tree all_gather.tree all_gather_invariant.tree"),
    ("trees of tensors", TREES, "psum.tree pmean.tree pvary.tree psum_invariant.tree reduce_scatter.tree"),
    (
        "trees of tensors",
        TREES,
        "sync_buffers.buffers broadcast.tree pmax.tree ppermute.tree global_norm.tree leaf_norms.tree",
    ),
    ("trees of two dims", (*EMPTY, "a tensor of another shape", "a tensor on meta"), "all_to_all.tree"),
    ("trees of tensors, which one rank sends to itself", TREES, "ragged_all_to_all.tree"),
    ("empty pairs", ("an empty list", "an empty dict", "an empty text"), "ppermute.perm"),
    ("specs are read, no values", (*TREES, "a donated tree"), "objective.like sync_buffers.like"),
    ("specs are read, no values", ("None", *TREES, "a donated tree"), "microbatches.like"),
    ("trees of tensors with values", {*TREES} - {"a tensor on meta"}, "shard.full_tree"),
    ("trees of floating tensors", {*TREES} - {"a tensor of integers"}, "TrainState.create.params"),
    (
        "values that a manifest can hold",
        {*TREES, *NUMBERS, "a negative number", "nan", "a text", "an empty text"} - {"a tensor on meta"},
        "checkpoint.save.state",
    ),
    (
        "other leaves stay as they are: a TrainState may hold numbers and texts",
        tuple(x for x in WRONG if x != "a donated tree"),
        "reshard.tree unshard.tree transform_state.params",
    ),
    ("any tree, of whatever leaves", tuple(WRONG), "tree_leaves.tree TrainState.create.buffers"),
    ("no leaves", EMPTY, "checkpoint.to_state_dict.params"),
    ("no buffers", ("None", "an empty dict"), "apply.buffers model.apply.buffers"),
    ("no shapes", ("an empty list", "an empty dict", "an empty text"), "testing.check_adjoint.shapes"),
    ("no shapes", ("an empty list", "an empty dict", "an empty text"), "testing.check_transform.shapes"),
    (
        "true or false to Python",
        tuple(x for x in WRONG if not x.startswith("a tensor")),
        "testing.assert_trees_close.exact",
    ),
)
# Wrong values that the caller's own function gets, whose error stays as it is.
THEIRS = {
    *(
        "accumulate.f",
        "value_and_grad.f",
        "tree_map.f",
        "tree_map.tree",
        "objective of value_and_grad.params",
        "testing.check_pure.args",
    ),
    *("objective of accumulate.params", "jitted step.state", "testing.check_pure.step"),
    *("testing.check_varying.f", "testing.check_varying.params"),
}
# Public names that are not called, and why.
UNCALLED = {
    "fs": {
        **dict.fromkeys(("Axis", "P", "Spec", "Sharded", "Storage"), "data, which verbs check when they get it"),
        "Model": "made by functionalize; its methods are called",
        **dict.fromkeys(("GradientTransformation", "Optimizer"), "fs.update checks before it calls them"),
        **dict.fromkeys(("ShardTransform", "Wrapped"), "base classes of a user's own"),
        **dict.fromkeys(("checkpoint", "comm", "schedules", "testing"), "modules: their tests"),
        "LayoutError": "raised, not called",
        "TrainState": "TrainState.create is called",
    },
    "checkpoint": {"CheckpointError": "raised, not called", "Saving": "returned, not called"},
    "testing": {
        "RankError": "raised, not called",
        "TransformReport": "returned, not called",
        "Workers": "starts processes: tests/testing/test_workers.py",
        "assert_matches_ddp": "needs a process group that serves DDP: tests/test_law_ddp.py",
        "check_optimizer": "makes ranks of its own: tests/testing/test_check_optimizer.py",
    },
}


def targets(w):
    """What is called, by name; positional arguments have names here."""
    return {
        "chain": lambda transformations: fs.chain(transformations, w.tx),
        "compose": lambda transforms: fs.compose(transforms),
        "tree_map": lambda f, tree, rest: fs.tree_map(f, tree, rest),
        "TrainState.create": fs.TrainState.create,
        "model.init": w.model.init,
        "model.apply": lambda **given: w.model.apply(input=torch.ones(1, 4), **given),
        "apply": lambda **given: fs.apply(input=torch.ones(1, 4), **given),
        "objective of value_and_grad": lambda params: fs.value_and_grad(loss)(params),
        "objective of accumulate": lambda params, microbatches: fs.accumulate(lambda p, _: loss(p))(
            params, microbatches
        ),
        "accumulate": lambda **given: fs.accumulate(**given)(w.params, [1, 2]),
        "value_and_grad": lambda **given: fs.value_and_grad(**given)(w.params),
        "jitted step": fs.jit(step),
        "testing.check_pure": lambda step, args: testing.check_pure(step, args),
    }


class Walk(NamedTuple):
    """Public functions to call, and what is known of wrong calls of them.

    Attributes:
        calls: By the module that shows a function, None for methods, a valid call of each.
        accepted: Wrong values that are right for an argument: why, which, and for which arguments.
        theirs: As THEIRS.
        world: Makes what calls need, in a directory.
        script: The module that makes the calls in a process of its own.
        refused: At least how many of all calls are refused.
    """

    calls: dict[Any, dict[str, Any]]
    accepted: tuple
    theirs: set[str]
    world: type[World]
    script: str
    refused: int


CORE = Walk(
    {fs: CALLS, None: METHODS, checkpoint: CHECKPOINTS, testing: TESTING},
    ACCEPTED,
    THEIRS,
    World,
    "tests.test_bad_calls",
    3000,
)


def rows(world, walk):
    """Each wrong call: its name, the wrong argument and value, and the call."""
    special = targets(world)
    for module, table in walk.calls.items():
        prefix = "" if module in (fs, None) else f"{module.__name__.rpartition('.')[2]}."
        for name, make in table.items():
            f = special.get(prefix + name) or getattr(module, name)
            yield prefix + name, "", "a valid call", lambda f=f, make=make: f(**make(world))
            for argument in make(world):
                for label, value in WRONG.items():

                    def call(f=f, make=make, argument=argument, value=value):
                        f(**{**make(world), argument: value()})

                    yield prefix + name, argument, label, call


# Of how many wrong calls one is made; no divisor of the number of wrong values.
EVERY = [pytest.param(11, id="one in eleven"), pytest.param(1, id="all", marks=pytest.mark.slow)]


class Made(NamedTuple):
    """How each call of a walk ended, by its name, its argument and the value.

    False stands where a process hung or was aborted.
    """

    walk: Walk
    every: int
    ends: dict[tuple[str, str, str], Any]


@pytest.fixture(scope="module", params=EVERY)
def made(request, tmp_path_factory):
    return made_calls(CORE, request.param, tmp_path_factory.mktemp("calls") / "rows")


def made_calls(walk, every, place):
    """Make the calls of a walk in processes of their own, which write to a file."""
    done, ended = 0, False
    while not ended:
        command = [sys.executable, "-W", "ignore", "-m", walk.script, *map(str, (place, done, every))]
        ended = not subprocess.run(command, check=False).returncode
        lines = [json.loads(line) for line in place.read_text().splitlines()]
        if not ended:
            assert len(lines) % 2, "the process failed between two calls"
            place.write_text(place.read_text() + "false\n")
            lines.append(False)
        done = len(lines) // 2
    return Made(walk, every, {tuple(row): error for row, error in zip(lines[::2], lines[1::2], strict=True)})


def is_clear(name, argument, text):
    """Whether an error names the argument or a leaf, and says in fshard's words what was expected or what to do.

    Python's own and torch's need only name it.
    """
    named = re.search(rf"\b{re.escape(argument)}\b|\n  \S*: expected", text)
    own = re.search(r"expected .+, got |To fix:", text, re.DOTALL) or (
        f"{name.rpartition('.')[2]}: " in text and re.search(r"; |only ", text)
    )
    return bool(named and (own or f"{name.rpartition('.')[2]}: " not in text))


def check_no_call_hangs_or_aborts(made):
    assert [row for row, error in made.ends.items() if error is False] == []


def check_valid_calls_are_accepted(made):
    assert {row: error for row, error in made.ends.items() if not row[1] and error} == {}


def check_refused_calls_are_clear(made):
    refused = {
        row: error
        for row, error in made.ends.items()
        if row[1] and error and f"{row[0]}.{row[1]}" not in made.walk.theirs
    }
    unclear = [(*row, error[:100]) for row, error in refused.items() if not is_clear(*row[:2], error)]
    assert len(refused) > made.walk.refused // made.every
    assert 100 * len(unclear) <= (100 - CLEAR) * len(refused), "\n".join(map(str, unclear))


def check_accepted_values_are_listed(made):
    accepted = {(f"{name}.{argument}", label) for (name, argument, label), error in made.ends.items() if error is None}
    arguments = sorted({f"{name}.{argument}" for name, argument, _ in made.ends}, key=len, reverse=True)
    listed = set()
    for _, labels, text in made.walk.accepted:
        for argument in arguments:
            if re.search(rf"(^| ){re.escape(argument)}( |$)", text):
                listed |= {(argument, label) for label in labels if (*argument.rsplit(".", 1), label) in made.ends}
    found = {row for row in accepted if row[0] not in made.walk.theirs and not row[0].endswith(".")}
    assert (found - listed, listed - found) == (set(), set())


@pytest.mark.timeout(600)
def test_no_call_hangs_or_aborts(made):
    check_no_call_hangs_or_aborts(made)


def test_valid_calls_are_accepted(made):
    check_valid_calls_are_accepted(made)


def test_refused_calls_are_clear(made):
    check_refused_calls_are_clear(made)


def test_accepted_values_are_listed(made):
    check_accepted_values_are_listed(made)


def check_every_public_name_is_called(module, names, table, uncalled):
    assert not table.keys() & uncalled.keys()
    assert set(names) == table.keys() | uncalled.keys(), module


@pytest.mark.parametrize("module", (fs, checkpoint, testing), ids=UNCALLED)
def test_every_public_name_is_called(module):
    names = set(module.__all__) - house.names_of_extensions(module)
    uncalled = UNCALLED[{fs: "fs"}.get(module, module.__name__.rpartition(".")[2])]
    check_every_public_name_is_called(module, names, CORE.calls[module], uncalled)


def make_calls(walk, place, done, every):
    """Make calls but the first ones, and write how each ended to the file: one without an end hung or aborted."""
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), Path(place).open("a") as file:
        made = (row for n, row in enumerate(rows(walk.world(directory), walk)) if not row[1] or n % every == 0)
        for *row, call in itertools.islice(made, done, None):
            print(json.dumps(row), file=file, flush=True)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                call()
            except Exception as error:
                ended = f"{type(error).__name__}: {short(str(error))}"
            else:
                ended = None
            print(json.dumps(ended), file=file, flush=True)


if __name__ == "__main__":
    make_calls(CORE, sys.argv[1], *map(int, sys.argv[2:]))
