"""Generated wrong calls: every argument of every public function in turn is replaced by wrong values.

A call is accepted or refused. Most refusals must name the argument or the leaf and say what was expected, in
fshard's own words. A process of its own makes the calls, so that hangs and aborts are counted.
"""

import contextlib
import faulthandler
import functools
import importlib
import inspect
import itertools
import json
import math
import re
import tempfile
import warnings
from dataclasses import make_dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import checkpoint, testing
from fshard.errors import shorten
from fshard.tree.checks import mark_donated
from tests import house
from tests.forked_programs import run_on_ranks

# Seconds that one call may take.
LIMIT = 30
# Of 100 refusals, how many must be clear; Python and torch refuse the others in their own words.
CLEAR = 87


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


# Of public functions, the arguments whose right values are others than the world's, or that are not to be left out.
GIVEN = {
    **dict.fromkeys(("gather", "reshard", "start_gather", "unshard"), lambda w: dict(tree=w.params)),
    **dict.fromkeys(("hsdp", "hybrid_shard"), lambda w: dict(mesh=w.grid)),
    "apply": lambda w: dict(model=w.model, params=w.weights, buffers={}, key=1),
    "model.apply": lambda w: dict(params=w.weights, buffers={}, key=1),
    "model.init": lambda w: dict(strategy=w.transform, seed=0, mode="replay"),
    "accumulate": lambda w: dict(f=lambda p, _: loss(p)),
    "all_to_all": lambda w: dict(tree=torch.ones(2, 2), split_dim=0, concat_dim=1),
    "from_torch": lambda w: dict(lr=0.1),
    "jit": lambda w: dict(f=loss),
    "pcast": lambda w: dict(to="varying"),
    "ragged_all_to_all": lambda w: dict(send_sizes=[2], recv_sizes=[2]),
    "register_dataclass": lambda w: dict(cls=make_dataclass("Fresh", ["w"]), meta_fields=["w"]),
    "scatter_grads": lambda w: dict(grads=w.full_tree),
    "checkpoint.Manager": lambda w: dict(directory=w.place / "managed", mesh=w.grid),
    "checkpoint.latest_step": lambda w: dict(directory=w.place / "run"),
    "checkpoint.restore": lambda w: dict(directory=w.place / "run", like=w.state, mesh=w.grid),
    "checkpoint.save": lambda w: dict(mesh=w.grid),
    "testing.spmd": lambda w: dict(f=int),
}


NUMBERS = ("a number", "a huge number")
EMPTY = ("None", "an empty list", "an empty dict")
PLAIN = (*EMPTY, "a tensor of another shape", "another tree")
TREES = (*PLAIN, "a tensor of integers", "a tensor on meta")
READ = tuple(value for value in WRONG if value != "a donated tree")
# Wrong values that are right for some arguments: which, and for which arguments of any or of one function.
ACCEPTED = (
    (("None",), "ddp.axis zero1.axis zero2.axis zero3.axis apply.key model.apply.key model.init.seed"),
    (("None", "a module"), "jit.cache"),
    (("an empty list",), "jit.passes"),
    (("None",), "apply.buffers model.apply.buffers transform_state meta_fields"),
    (NUMBERS, "backoff_factor donate_argnums eps error every growth_factor growth_interval init_scale keep lr"),
    (NUMBERS, "max_norm max_value bucket_bytes min_shard_elements momentum p prefetch static_argnums weight_decay"),
    (("a number",), "batch batch_size dataset_size steps timeout units world checkpoint.save.step"),
    (("a number", "a negative number"), "data key seed"),
    ((*NUMBERS, "a negative number"), "dampening step_size fully_shard.dim hybrid_shard.dim own_dim.dim split_dim.dim"),
    (("a negative number",), "argnums"),
    (NUMBERS, "memory_every"),
    (("an empty list", "an empty dict"), "from_torch.inject"),
    (("nan",), "step_size from_torch.lr"),
    (("a text",), "batches directory memory"),
    (("an empty text",), "subtree units perm shapes has_aux nesterov"),
    (("an empty list",), "donate_argnums frozen perm save shapes static_argnums reduce_over"),
    (("an empty list",), "meta_fields static_argnames"),
    (("an empty dict",), "apply.buffers model.apply.buffers perm shapes reduce_over"),
    (("a text", "an empty text", "a class", "a module"), "mask regather"),
    (("a class",), "testing.spmd.f"),
    (("a class", "a module"), "backend jit.f make_graph.f remat.f lr"),
    (("a module",), "module"),
    (("a tensor of integers",), "data TrainState.create.key"),
    (("a tensor on meta",), "TrainState.create.key all_to_all.tree TrainState.create.params"),
    (("a tensor of another shape",), "TrainState.create.key all_to_all.tree"),
    (EMPTY, "has_aux nesterov all_to_all.tree"),
    (PLAIN, "full_tree TrainState.create.params checkpoint.save.state"),
    (("a tensor of integers",), "full_tree checkpoint.save.state"),
    ((*NUMBERS, "a negative number", "nan", "a text", "an empty text"), "checkpoint.save.state"),
    (TREES, "sync_buffers.buffers sync_buffers.like microbatches.like objective.like gather.tree global_norm.tree"),
    (TREES, "leaf_norms.tree all_gather.tree all_gather_invariant.tree broadcast.tree pmax.tree pmean.tree"),
    (TREES, "ppermute.tree psum.tree psum_invariant.tree pcast.tree ragged_all_to_all.tree reduce_scatter.tree"),
    (TREES, "start_gather.tree"),
    (("a donated tree",), "sync_buffers.like microbatches.like objective.like"),
    (READ, "transform_state.params reshard.tree unshard.tree"),
    (tuple(WRONG), "TrainState.create.buffers update.transform_state tree_leaves.tree"),
    # Until they are used: a save refuses them, or Python and torch do.
    (tuple(WRONG), "make_graph.f remat.f"),
    (tuple(WRONG), "checkpoint.Manager.asynchronous checkpoint.Manager.keep"),
    (("a negative number",), "broadcast.root"),
)
# Wrong values that the caller's own function gets, whose error stays as it is.
THEIRS = {
    *("accumulate.f", "value_and_grad.f", "tree_map.f", "tree_map.tree", "jitted step.state"),
    *("objective of value_and_grad.params", "objective of accumulate.params"),
}
# Public names that are not called: modules, records, errors, base classes, and what starts processes of its own.
UNCALLED = {
    *("Axis", "P", "Spec", "Sharded", "Storage", "Model", "TrainState", "GradientTransformation", "Optimizer"),
    *("ShardTransform", "Wrapped", "LayoutError", "__version__", "checkpoint", "comm", "testing"),
    *("checkpoint.CheckpointError", "checkpoint.Saving", "testing.RankError", "testing.Workers"),
}


def returned(f, *arguments):
    """A function that calls what a function returns as well."""

    @functools.wraps(f)
    def call(**given):
        f(**given)(*arguments)

    return call


class World:
    """One rank, and by the name of a parameter a value that is right for most functions.

    The calls of a world are of functions of extensions, or of others; at least `refused` of all are refused.
    """

    extensions, refused = False, 2400
    given, accepted, theirs, uncalled = GIVEN, ACCEPTED, THEIRS, UNCALLED

    lr = max_norm = max_value = weight_decay = 0.1
    f, mask, shape, loss, tree = staticmethod(loss), "w", {"shard": -1}, torch.ones(()), torch.ones(2)
    key, data, dataset_size, batch_size, batch, steps, decay, dim, world = 1, 2, 10, 3, 3, 3, 0.9, 0, 1
    batches, shapes, perm = (1, 2), [(4, 4)], [(0, 0)]
    cls, buffers, step = torch.optim.SGD, {"b": torch.ones(2)}, 1

    def __init__(self, directory):
        self.place = Path(directory)
        self.mesh = fs.init_mesh({"shard": -1}, device="cpu")
        self.axis = fs.axis_of(self.mesh)
        self.grid = fs.init_mesh({"replicate": 1, "shard": -1}, device="cpu")
        self.full_tree = {"w": torch.ones(4, 4)}
        self.transform = fs.zero2(self.mesh)
        self.params = self.like = self.actual = self.expected = fs.shard(self.full_tree, self.transform)
        self.tx = fs.sgd(0.1)
        self.parts = {"*": self.tx}
        self.state = fs.TrainState.create(self.params, self.tx)
        self.module = nn.Linear(4, 4)
        self.model = fs.functionalize(self.module)
        self.weights = self.model.init(self.transform, seed=0)
        self.grads = fs.tree_map(torch.ones_like, self.params)
        checkpoint.save(self.place / "run", self.state, 1)

    @property
    def directory(self):
        """One that is not there yet."""
        return self.place / f"fresh-{len(list(self.place.glob('fresh-*')))}"

    def named(w):  # noqa: N805
        """Functions whose positional arguments get names here, methods, and what functions return."""
        return {
            "chain": lambda transformations=w.tx: fs.chain(fs.clip_by_norm(1), transformations),
            "compose": lambda transforms=w.transform: fs.compose(transforms),
            "tree_map": lambda f=torch.add, tree=w.params, rest=w.params: fs.tree_map(f, tree, rest),
            "TrainState.create": fs.TrainState.create,
            "model.init": lambda **given: w.model.init(**given),
            "model.apply": lambda **given: w.model.apply(input=torch.ones(1, 4), **given),
            "apply": lambda **given: fs.apply(input=torch.ones(1, 4), **given),
            "objective of value_and_grad": lambda params: fs.value_and_grad(loss)(params),
            "objective of accumulate": lambda params, batches: fs.accumulate(lambda p, _: loss(p))(params, batches),
            "accumulate": returned(fs.accumulate, w.params, [1, 2]),
            "value_and_grad": returned(fs.value_and_grad, w.params),
            "jitted step": fs.jit(step),
        }


def rows(world):
    """Each wrong call: its name, the wrong argument and value, and the call."""
    called = {}
    for module in (fs, checkpoint, testing):
        prefix = "" if module is fs else f"{module.__name__.rpartition('.')[2]}."
        held = house.names_of_extensions(module)
        names = [name for name in module.__all__ if (name in held) == world.extensions]
        called |= {prefix + name: getattr(module, name) for name in names if prefix + name not in world.uncalled}
    for name, f in (called | world.named()).items():
        parameters = [
            parameter
            for parameter in inspect.signature(f).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        defaults = {parameter.name: parameter.default for parameter in parameters}
        right = functools.partial(right_arguments, world, name, defaults)
        yield name, "", "a valid call", lambda f=f, right=right: f(**right())
        for argument, (label, make) in itertools.product({**defaults, **right()}, WRONG.items()):
            # What is left out is not wrong.
            if label != "None" or defaults.get(argument, ...) is not None:
                yield name, argument, label, functools.partial(call_wrongly, f, right, argument, make)


def right_arguments(world, name, defaults):
    """Arguments that a function takes: those of the table, and the world's for others that it needs."""
    given = world.given.get(name, lambda world: {})(world)
    for argument, default in defaults.items():
        if default is inspect.Parameter.empty and argument not in given:
            given[argument] = getattr(world, argument)
    return given


def call_wrongly(f, right, argument, make):
    f(**{**right(), argument: make()})


# Of how many wrong calls one is made; no divisor of the number of wrong values.
EVERY = pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])


def ends_of_calls(world, every, place):
    """Make the calls of a world in processes of their own, which write to a file, and return how each ended.

    None stands for no error, False where a process hung or was aborted.
    """
    done, ended = 0, False
    while not ended:
        (process,) = run_on_ranks(1, make_calls, world.__module__, place, done, every, timeout=600.0)
        ended = process.code == 0
        lines = [json.loads(line) for line in place.read_text().splitlines()]
        if not ended:
            assert len(lines) % 2, process.errors
            place.write_text(place.read_text() + "false\n")
            lines.append(False)
        done = len(lines) // 2
    return {tuple(row): error for row, error in zip(lines[::2], lines[1::2], strict=True)}


def is_clear(name, argument, text):
    """Whether an error names the argument or a leaf, and says in fshard's words what was expected or what to do.

    Python's own and torch's need only name it.
    """
    named = re.search(rf"\b{re.escape(argument)}\b|\n  \S*: ", text)
    begin = f"{name.rpartition('.')[2]}: "
    says_what_is_allowed = re.search(r"expected .+, got |To fix:", text, re.DOTALL)
    says_it_in_a_sentence = begin in text and re.search(r"; |only |must |cannot |\. [A-Z]", text)
    return bool(named and (says_what_is_allowed or says_it_in_a_sentence or begin not in text))


def check_calls(world, every, place):
    """No call hangs or aborts, right ones are accepted, refusals of wrong ones are clear, others are known."""
    ends = ends_of_calls(world, every, place)
    assert [row for row, error in ends.items() if error is False] == []
    assert {row: error for row, error in ends.items() if not row[1] and error} == {}
    wrong = {row: error for row, error in ends.items() if row[1] and f"{row[0]}.{row[1]}" not in world.theirs}
    refused = {row: error for row, error in wrong.items() if error}
    unclear = [(*row, error[:100]) for row, error in refused.items() if not is_clear(*row[:2], error)]
    assert len(refused) > world.refused // every
    assert 100 * len(unclear) <= (100 - CLEAR) * len(refused), "\n".join(map(str, unclear))
    known = {(name, label) for labels, names in world.accepted for name in names.split() for label in labels}
    unknown = [
        (name, argument, label)
        for name, argument, label in wrong.keys() - refused.keys()
        if not {(argument, label), (f"{name}.{argument}", label)} & known
    ]
    assert unknown == []


@pytest.mark.timeout(600)
@EVERY
def test_wrong_calls_are_refused_in_clear_words_and_right_ones_accepted(every, tmp_path):
    check_calls(World, every, tmp_path / "rows")


def make_calls(module, place, done, every):
    """Make calls of a module's World but the first, and write how each ended: one without an end hung or aborted."""
    warnings.simplefilter("ignore")
    world = importlib.import_module(module).World
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), Path(place).open("a") as file:
        made = (row for n, row in enumerate(rows(world(directory))) if not row[1] or n % every == 0)
        for *row, call in itertools.islice(made, done, None):
            print(json.dumps(row), file=file, flush=True)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                call()
            except Exception as error:
                ended = f"{type(error).__name__}: {shorten(str(error))}"
            else:
                ended = None
            print(json.dumps(ended), file=file, flush=True)
