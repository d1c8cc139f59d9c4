"""Cached graphs: what is loaded is what a trace would make, and all else is traced again."""

import functools
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import fshard as fs
from fshard.ext.saved_graph import cache as cache_module
from fshard.ext.saved_graph import identity
from fshard.ext.saved_graph.identity import compute_identity, list_sources
from fshard.testing import spmd
from tests.ranks import my_rank, on_ranks
from tests.trees import every_bit, one_axis

FACTOR = 1.0


@dataclass
class Settings:
    rate: float = 0.1


class Base:
    power = 2

    def scale(self, x):
        return x * 2


class Derived(Base):
    pass


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate


class Hiding:
    def __init__(self, rate):
        self.rate = rate

    def __getstate__(self):
        return {}


class Scaling(type):
    """A metaclass, whose members are no attributes of its class."""

    @property
    def factor(cls):
        return FACTOR


class Scaled(metaclass=Scaling):
    pass


@functools.cache
def cached_factor():
    return FACTOR


@torch.no_grad()
def factor_without_gradient():
    return FACTOR


@contextmanager
def factor_in_a_block():
    yield FACTOR


@functools.singledispatch
def dispatched_factor(x):
    return FACTOR


class Named:
    def a(self, x):
        return x

    def b(self, x):
        return x


def identity_of(*values):
    return compute_identity(values, [])


def closing_over(value):
    return lambda x: (x, value)


def with_default(value):
    def f(x, factor=value, *, other=None):
        return x * factor

    return f


def step_of(tx):
    def step(state, grads):
        return fs.update(tx, state, grads)

    return step


# For each row a function that makes a value of a number: another number must give another identity.
CHANGES = {
    "closure": closing_over,
    "closure in a closure": lambda number: closing_over(closing_over(number)),
    "list": lambda number: closing_over([1, {"rate": (number,)}]),
    "set": lambda number: closing_over({number, 7}),
    "default": with_default,
    "argument of a partial": lambda number: functools.partial(with_default(0), factor=number),
    "field of a dataclass": lambda number: closing_over(Settings(number)),
    "attribute": lambda number: closing_over(SimpleNamespace(rate=number)),
    "bound method": lambda number: Settings(number).__repr__,
    "bound method of C": lambda number: closing_over({"rate": number}.get),
    "operator of C": lambda number: SimpleNamespace(rate=number).__eq__,
    "type": lambda number: closing_over(float(number) if number > 1 else 1),
    "sign of zero": lambda number: closing_over(-0.0 if number > 1 else 0.0),
    "order of keys": lambda number: closing_over({"a": 1, "b": 2} if number > 1 else {"b": 2, "a": 1}),
    "code": lambda number: (lambda x: x + 1) if number > 1 else (lambda x: x + 2),
    "code inside code": lambda number: (lambda: lambda x: x + 1) if number > 1 else (lambda: lambda x: x + 2),
    "native optimizer": lambda number: step_of(fs.chain(fs.clip_by_global_norm(1.0), fs.adam(number))),
    "optimizer of torch": lambda number: step_of(fs.from_torch(torch.optim.SGD, lr=number)),
    "schedule": lambda number: step_of(fs.from_torch(torch.optim.SGD, lr=lambda count: number * 0.9**count)),
    "wrapped optimizer": lambda number: step_of(fs.ema(fs.sgd(0.1), 1 / (1 + number))),
    "module": lambda number: fs.functionalize(torch.nn.Sequential(torch.nn.LayerNorm(3, eps=number))).apply,
    "class with slots": lambda number: closing_over(Slotted(number)),
    "hidden from pickle": lambda number: closing_over(Hiding(number)),
    "union of types": lambda number: closing_over(int | (None if number > 1 else str)),
    "name of code": lambda number: getattr(Named, "ab"[number - 1]),
    "constant": lambda number: (lambda x: x in {"a", "b"}) if number > 1 else (lambda x: x in {"a", "c"}),
    "shape": lambda number: closing_over(torch.ones(number)),
    "dtype": lambda number: closing_over(torch.float16 if number > 1 else torch.float32),
    "donated argument": lambda number: fs.jit(with_default(0), donate_argnums=number - 1),
    "static argument": lambda number: fs.jit(with_default(0), static_argnums=number - 1),
    "pass": lambda number: fs.jit(with_default(0), passes=(fs.fit(number),)),
    "function behind many others": lambda number: functools.reduce(lambda f, _: closing_over(f), range(999), number),
    "axis": lambda number: closing_over(fs.Axis("shard", number, "0")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_trace_can_read_is_part_of_the_identity(name):
    make = CHANGES[name]
    assert identity_of(make(1)) == identity_of(make(1))
    assert identity_of(make(1)) != identity_of(make(2))


def test_values_of_tensors_and_names_of_groups_are_no_part_of_it():
    assert identity_of(torch.zeros(2)) == identity_of(torch.ones(2))
    assert identity_of(fs.Axis("shard", 2, "4")) == identity_of(fs.Axis("shard", 2, "9"))
    model = fs.functionalize(torch.nn.Linear(2, 2))
    before = identity_of(model)
    model.apply(model.init(fs.ddp(one_axis()), seed=0), torch.ones(1, 2))
    assert identity_of(model) == before


# Functions that read a global of this module where other modules made what is called, or Python calls it.
READERS = {
    "cached function": lambda x: x * cached_factor(),
    "function decorated by torch": lambda x: x * factor_without_gradient(),
    "function decorated by Python": lambda x: x * factor_in_a_block().__enter__(),
    "function that dispatches": lambda x: x * dispatched_factor(x),
    "metaclass": lambda x: x * Scaled.factor,
}
OTHERS = ("global", "module", "text", "class", "base class", "method", "environment")


@pytest.mark.rows(len(OTHERS) + len(READERS))
@pytest.mark.parametrize("where", (*OTHERS, *READERS))
def test_what_changes_outside_of_a_function_is_part_of_its_identity(where, monkeypatch):
    this = sys.modules[__name__]
    instance = Derived()
    functions = {
        "global": lambda x: x * FACTOR,
        "module": lambda x: x * this.FACTOR,
        "text": lambda x: x * getattr(this, "FACTOR"),  # noqa: B009
        "environment": lambda x: x * float(os.environ.get("SOME_RATE", "1")),
        **READERS,
    }
    f = functions.get(where, lambda x: instance.scale(x))
    before = identity_of(f)
    if where == "environment":
        monkeypatch.setenv("SOME_RATE", "2")
    elif where in functions:
        monkeypatch.setattr(this, "FACTOR", 2.0)
    elif where == "method":
        monkeypatch.setattr(Base, "scale", lambda self, x: x * 3)
    else:
        monkeypatch.setattr(Derived if where == "class" else Base, "power", 3, raising=False)
    assert identity_of(f) != before


def make_jitted(cache, factor=2.0, **options):
    def step(params, x):
        loss, grads = fs.value_and_grad(lambda params: (x @ fs.gather(params)["w"]).square().sum() * factor)(params)
        return fs.tree_map(torch.sub, params, grads), loss

    return fs.jit(step, donate_argnums=0, cache=cache, **options)


def make_arguments():
    params = fs.shard({"w": torch.arange(12.0).reshape(4, 3)}, fs.zero3(one_axis(), min_shard_elements=0))
    return params, torch.ones(2, 4)


def run(cache, **options):
    jitted = make_jitted(cache, **options)
    return every_bit(jitted(*make_arguments())), jitted.traces


READ = ["read from a file"]
TRACED = ["the first call"]


@on_ranks(2)
def test_a_graph_is_loaded_on_all_ranks_and_gives_the_same_bits_and_collectives(tmp_path):
    cache = fs.graph_cache(tmp_path)
    results = []
    for _ in range(2):
        with fs.comm.record() as record:
            results.append(run(cache))
        results.append(record.bytes_sent())
    (first, first_traces), sent, (second, second_traces), sent_again = results
    assert (first_traces, second_traces) == (TRACED, READ)
    assert first == second
    assert sent == sent_again
    assert run(cache, factor=3.0)[1] == TRACED
    assert run(cache)[1] == READ
    # A rank that loaded the first graph traces another one without asking others.
    jitted = make_jitted(cache)
    params, x = make_arguments()
    params, _ = jitted(params, x)
    jitted(params, torch.ones(5, 4))
    assert jitted.traces[0] == READ[0]
    assert "shape was" in jitted.traces[1]


def files_in(directory):
    return sorted(directory.glob("*/graph-rank-*.json"))


def test_ranks_trace_together_if_one_has_no_file_or_a_damaged_one(tmp_path):
    cache = fs.graph_cache(tmp_path)
    expected = spmd(lambda: run(cache), 2)
    path = files_in(tmp_path)[-1]
    path.write_bytes(path.read_bytes().replace(b"sum", b"sun", 1))
    with pytest.warns(UserWarning, match="graph_cache: a file is not used, and the function is traced: load_graph: "):
        assert spmd(lambda: run(cache), 2) == expected
    assert [traces for _, traces in spmd(lambda: run(cache), 2)] == [READ, READ]
    files_in(tmp_path)[0].unlink()
    assert spmd(lambda: run(cache), 2) == expected


def test_a_rank_that_uses_other_leaves_is_traced_and_right(tmp_path):
    def program():
        params = fs.shard({name: torch.ones(2) for name in "ab"}, fs.zero3(one_axis(), min_shard_elements=0))
        name = "ab"[my_rank()]

        def step(params):
            return fs.value_and_grad(lambda params: fs.gather(params)[name].sum())(params)

        jitted = fs.jit(step, cache=fs.graph_cache(tmp_path))
        return every_bit(jitted(params)), jitted.traces

    assert spmd(program, 2) == spmd(program, 2)


def lock_in_closure():
    lock = threading.Lock()
    return lambda x: x + (lock is None)


def tensor_in_closure():
    tensor = torch.ones(2)
    return lambda x: x + tensor


NOT_KEPT = {
    "lock": (
        lock_in_closure,
        "graph_cache: <lambda> is traced in each process: cannot pickle '_thread.lock' object, "
        "which was reached from lock_in_closure.<locals>.<lambda>",
    ),
    "tensor": (tensor_in_closure, "graph_cache: a graph is not stored: save_graph: the function closes over tensors"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_a_function_that_cannot_be_kept_is_traced_with_a_warning(name, tmp_path):
    make, text = NOT_KEPT[name]
    for _ in range(2):
        jitted = fs.jit(make(), cache=fs.graph_cache(tmp_path))
        with pytest.warns(UserWarning, match="graph_cache") as caught:
            jitted(torch.ones(2))
        assert [str(warning.message)[: len(text)] for warning in caught] == [text]
        assert jitted.traces == TRACED
    assert not files_in(tmp_path)


def test_other_arguments_of_the_program_are_traced_again(tmp_path, monkeypatch):
    cache = fs.graph_cache(tmp_path)
    assert [run(cache)[1], run(cache)[1]] == [TRACED, READ]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--lr", "0.1"])
    assert [run(cache)[1], run(cache)[1]] == [TRACED, READ]


def test_a_file_that_was_edited_while_the_program_ran_is_not_trusted(tmp_path, monkeypatch):
    cache = fs.graph_cache(tmp_path)
    monkeypatch.setattr(identity, "find_process_start", lambda: 0.0)
    with pytest.warns(UserWarning, match="was changed after this process had started"):
        run(cache)
    assert not files_in(tmp_path)


def test_neither_a_hard_link_nor_a_first_import_changes_an_installed_file(tmp_path, monkeypatch):
    """An installer that links files of one environment into another does; what it replaces has another directory."""
    package = tmp_path / "installed"
    package.mkdir()
    path = package / "library.py"
    path.write_text("")
    monkeypatch.setattr(identity, "_INSTALLED", (str(package),))
    for changed in (path, package):
        os.utime(changed, (1.0, 1.0))
    monkeypatch.setattr(identity, "find_process_start", lambda: 2.0)
    os.link(path, tmp_path / "linked.py")
    assert not identity.find_late_changes([str(path)])
    # The first import of a package makes a directory in it.
    after_the_file = os.stat(path).st_ctime + 60
    monkeypatch.setattr(identity, "find_process_start", lambda: after_the_file)
    os.utime(package, (after_the_file, after_the_file))
    assert not identity.find_late_changes([str(path)])
    monkeypatch.setattr(identity, "find_process_start", lambda: 2.0)
    os.utime(package, (1.0, 1.0))
    new = package / "new.py"
    new.write_text("")
    os.utime(new, (1.0, 1.0))
    new.replace(path)
    assert identity.find_late_changes([str(path)]) == [str(path)]
    os.utime(package, (1.0, 1.0))
    path.write_text("edited")
    assert identity.find_late_changes([str(path)]) == [str(path)]


def test_other_files_of_source_are_traced_again(tmp_path, monkeypatch):
    """Those that are new, edited or gone."""
    path = tmp_path / "helper_of_a_step.py"
    monkeypatch.setattr(identity, "find_process_start", lambda: float("inf"))
    cache = fs.graph_cache(tmp_path)
    assert run(cache)[1] == TRACED
    path.write_text("RATE = 1\n")
    monkeypatch.setitem(sys.modules, path.stem, SimpleNamespace(__file__=str(path)))
    assert [run(cache)[1], run(cache)[1]] == [TRACED, READ]
    path.write_text("RATE = 2\n")
    assert [run(cache)[1], run(cache)[1]] == [TRACED, READ]
    monkeypatch.delitem(sys.modules, path.stem)
    path.unlink()
    assert run(cache)[1] == TRACED


def test_files_that_inductor_has_written_are_no_sources(tmp_path, monkeypatch):
    """Each lies in a folder with the second and third letter of its name."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    kernel, other = tmp_path / "ab" / "cab1.py", tmp_path / "helper.py"
    kernel.parent.mkdir()
    for path in (kernel, other):
        path.write_text("")
        monkeypatch.setitem(sys.modules, path.stem, SimpleNamespace(__file__=str(path)))
    sources = list_sources()
    assert str(other) in sources
    assert str(kernel) not in sources


# Inductor and what it imports warn of their own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_kernels_of_inductor_are_no_sources():
    fs.jit(lambda x: x.sin() + x.cos(), backend="inductor")(torch.ones(2))
    directory = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    paths = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
    assert any(path.startswith(directory) for path in paths)
    assert not any(path.startswith(directory) for path in list_sources())


def test_old_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_KEPT", 2)
    cache = fs.graph_cache(tmp_path)
    for factor in (1.0, 2.0, 3.0):
        run(cache, factor=factor)
    assert len(files_in(tmp_path)) == 2
    assert run(cache, factor=3.0)[1] == READ


def test_a_cache_is_refused_where_it_cannot_serve(tmp_path):
    with pytest.raises(ValueError, match="graph_cache: expected directory to be a path, got 3"):
        fs.graph_cache(3)
    with pytest.raises(ValueError, match='jit: expected backend to be "graph", whose graphs a cache can keep'):
        fs.jit(abs, cache=fs.graph_cache(tmp_path), backend="inductor")


PROGRAM = """
import sys
import torch
import fshard as fs

params = fs.shard({"w": torch.ones(3)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
rate = 0.5


def step(params):
    loss, grads = fs.value_and_grad(lambda params: fs.gather(params)["w"].sum())(params)
    return fs.tree_map(lambda p, g: p - rate * g, params, grads)


jitted = fs.jit(step, cache=fs.graph_cache(sys.argv[1]))
print(jitted(params)["w"].local.tolist(), jitted.traces)
"""


@pytest.mark.slow
def test_a_program_that_is_started_again_traces_only_changed_code(tmp_path):
    path = tmp_path / "train.py"
    outputs = []
    for text in (PROGRAM, PROGRAM, PROGRAM.replace("rate = 0.5", "rate = 0.25"), PROGRAM):
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            # The start of a process is known to 10 ms, and a file that is as new as the process is not trusted.
            subprocess.run([sys.executable, "-c", ""], timeout=60, check=True)
        command = [sys.executable, "-W", "error", str(path), str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        outputs.append(result.stdout.strip())
    half, quarter = "[0.5, 0.5, 0.5]", "[0.75, 0.75, 0.75]"
    assert outputs == [f"{half} {TRACED}", f"{half} {READ}", f"{quarter} {TRACED}", f"{half} {READ}"]
