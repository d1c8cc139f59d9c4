"""save_graph and load_graph: the bits of the jitted function in another process, refused by name for other calls."""

import math
import re
import resource
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.ext.saved_graph.file import write_file
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal, one_axis

TX = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=0.1))
CLOSED = torch.ones(2)
FULL = {"in": normal(1)(8, 5), "out": [normal(2)(5, 4)]}
FILE = "graph-rank-00000.json"


class Pair(NamedTuple):
    first: Any
    second: Any


def step(state, batch, times=2):
    def loss(params):
        full = fs.gather(params)
        return (torch.tanh(batch["x"] @ full["in"]) @ full["out"][0]).square().mean() * times

    value, grads = fs.value_and_grad(loss)(state.params)
    return {"state": fs.update(TX, state, grads), "losses": [value, (value + 1, grads)]}


def state_by(strategy):
    return fs.TrainState.create(fs.shard(FULL, strategy(one_axis(), min_shard_elements=0)), TX)


def batch_of(seed=0, rows=6):
    return {"x": normal(seed + my_rank())(rows, 8)}


def train(step):
    state, losses = state_by(fs.zero3), []
    for n in range(3):
        out = step(state, batch_of(n), times=2)
        state = out["state"]
        losses.append(out["losses"])
    return fs.tree_leaves((state, losses))


@pytest.mark.rows(2)
@pytest.mark.parametrize("donated", ((), 0))
@on_ranks(1, 2, 3)
def test_it_is_the_jitted_function_and_sends_the_same(donated, tmp_path):
    jitted, arguments = fs.jit(step, donate_argnums=donated), (state_by(fs.zero3), batch_of())
    fs.save_graph(tmp_path, jitted, *arguments, times=2)
    with fs.comm.record() as expected:
        results = train(jitted)
    loaded = fs.load_graph(tmp_path)
    with fs.comm.record() as record:
        assert_same_bits(train(loaded), results)
    assert record == expected
    if donated == 0:
        loaded(*arguments, times=2)
        with pytest.raises(ValueError, match="jit: arguments were donated"):
            loaded(*arguments, times=2)


@on_ranks(2)
def test_other_calls_are_refused_by_name(tmp_path):
    state, batch, other = state_by(fs.zero3), batch_of(), state_by(fs.zero2)
    fs.save_graph(tmp_path, fs.jit(step), state, batch, times=2)
    shapes = r"torch.Size\(\[6, 8\]\), got torch.Size\(\[5, 8\]\)"
    for arguments, times, text in (
        ((state, batch_of(rows=5)), 2, rf"\[0\]\[1\]\['x'\]: shape: {shapes}"),
        ((state, batch), 3, r"\[1\]\['times'\]: 2, got 3"),
        ((other, batch), 2, r"\[0\]\[0\].params\['in'\]: spec: .*, got Spec"),
        ((state, {"y": batch["x"]}), 2, r"structure: .*, got PyTreeSpec"),
    ):
        with pytest.raises(ValueError, match=rf"^load_graph: the graph is for {text}.*\. Save it again for these"):
            fs.load_graph(tmp_path)(*arguments, times=times)


def test_a_result_has_keys_of_its_own_where_arguments_have_equal_ones(tmp_path):
    """The order of keys, and whether they are 1 or True, tell no structures apart, nor those of classes."""

    def rebuild(state, pair):
        return Pair({"b": state["b"], "a": {1: state["a"][True]}}, pair)

    state = {"a": {True: torch.ones(1)}, "b": torch.ones(2)}
    arguments = state, Pair(state, torch.ones(3))
    fs.save_graph(tmp_path, fs.jit(rebuild), *arguments)
    assert repr(fs.load_graph(tmp_path)(*arguments)) == repr(rebuild(*arguments))


def test_numbers_are_keys_of_a_result(tmp_path):
    """Of parts that no argument has, whatever the size of a whole number, and in the order of the function."""

    def step(state):
        return {"state": state, "norms": {key: leaf.norm() for key, leaf in state.items()}, 0: {0.25: state["w"]}}

    keys = 7, -(2**40), 2**70, 0.1, -0.5, 1e300, math.inf
    state = {key: torch.full((2,), 3.0) for key in keys} | {"w": torch.ones(1)}
    fs.save_graph(tmp_path, fs.jit(step), state)
    result = fs.load_graph(tmp_path)(state)
    assert_same_bits(result, step(state))
    assert list(result) == list(step(state))


def test_a_missing_file_is_an_error_of_the_load(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"^load_graph: .*other/{FILE}: there is no such file"):
        fs.load_graph(tmp_path / "other")


def test_a_write_that_fails_names_the_file_and_loses_nothing(tmp_path):
    """Such as on a full disk: a graph that was saved before stays, and no part of the new one does."""
    x, saved, path = torch.ones(2), fs.jit(torch.cos), tmp_path / FILE
    fs.save_graph(tmp_path, saved, x)
    kept = fs.jit(torch.sin, cache=fs.graph_cache(tmp_path))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            fs.save_graph(tmp_path, fs.jit(torch.sin), x)
        with pytest.warns(UserWarning, match=rf"a graph is not stored: .* File too large: '{tmp_path}/.*/{FILE}'"):
            kept(x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert_same_bits(fs.load_graph(tmp_path)(x), saved(x))
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]


def test_two_threads_write_one_file(tmp_path, monkeypatch):
    replace = Path.replace

    def replace_after_another_thread(draft, path):
        monkeypatch.setattr(Path, "replace", replace)
        other = threading.Thread(target=write_file, args=(path, b"other"))
        other.start()
        other.join()
        return replace(draft, path)

    monkeypatch.setattr(Path, "replace", replace_after_another_thread)
    path = tmp_path / FILE
    write_file(path, b"last")
    assert path.read_bytes() == b"last"
    assert list(tmp_path.iterdir()) == [path]


@on_ranks(2)
def test_each_rank_reads_its_own_file(tmp_path):
    """By the number of the rank in the run: two stages of a pipeline have the same places on their axes."""
    stages = fs.axis_of(fs.init_mesh({"stage": 2, "shard": 1}, device="cpu"), "shard")
    params = fs.shard({"w": torch.ones(2)}, fs.fully_shard(stages))
    rank = my_rank()
    fs.save_graph(tmp_path, fs.jit(lambda params: fs.gather(params)["w"] * (rank + 2)), params)
    assert fs.load_graph(tmp_path)(params).tolist() == [rank + 2] * 2


@on_ranks(2)
def test_axes_of_the_same_ranks_are_told_apart_by_their_names(tmp_path):
    """Their process group is one."""
    names = ["first", "second"]
    axes = [fs.axis_of(fs.init_mesh({name: 2}, device="cpu")) for name in names]
    assert axes[0].group_name == axes[1].group_name
    params = [fs.shard(torch.arange(4.0), fs.fully_shard(axis)) for axis in axes]
    fs.save_graph(tmp_path, fs.jit(lambda params: [fs.gather(leaf) for leaf in params]), params)
    with fs.comm.record() as record:
        assert [leaf.tolist() for leaf in fs.load_graph(tmp_path)(params)] == [[0, 1, 2, 3]] * 2
    assert [entry.axis for entry in record if not entry.scalar] == names


@on_ranks(2)
def test_an_axis_that_no_argument_has_is_refused(tmp_path):
    """The number of its process group would be another group's in another process."""
    axis = fs.axis_of(one_axis())
    with pytest.raises(ValueError, match=r"^save_graph: the graph has a collective over 'shard', and no argument is"):
        fs.save_graph(tmp_path, fs.jit(lambda x: fs.psum(x, axis)), torch.ones(2))


def dropout(x):
    model = fs.functionalize(nn.Sequential(nn.Dropout(0.5)))
    return model.apply({}, x, key=x.argmax())


def test_operators_of_every_kind_are_read_as_they_were_written(tmp_path):
    """Each is run twice: by the function, and by its file."""
    x = normal(4)(4, 4)
    functions = (
        lambda x: x.masked_fill(x > 0, -math.inf).softmax(-1),
        lambda x: torch.full_like(x, math.nan).nan_to_num(nan=2.5, posinf=math.inf),
        lambda x: x.to(torch.bfloat16, memory_format=torch.contiguous_format).view(torch.int16),
        lambda x: torch.zeros(3, dtype=torch.int32, device="cpu") + 2**40,
        lambda x: x[:, None, ..., x.sum(0).argsort()],
        lambda x: tuple(torch.linalg.qr(x, mode="complete")),
        lambda x: torch.linalg.svd(x)[1],
        lambda x: torch.cholesky_inverse(torch.linalg.cholesky(x @ x.mT + torch.eye(4, dtype=x.dtype))),
        lambda x: torch.div(x, 0.3, rounding_mode="floor"),
        lambda x: x.nonzero().sum() * x.nonzero().shape[0],
        lambda x: torch.ones(x.nonzero().shape[0] ** 2 // 3 + 1),
        lambda x: [*x.unbind(), x.split([1, 3])],
        lambda x: F.layer_norm(x, (4,)) + F.gelu(x, approximate="tanh"),
        lambda x: F.conv2d(x[None, None], x[None, None, :3, :3], padding="same"),
        lambda x: F.max_pool2d(x[None, None], 2),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
        lambda x: fs.value_and_grad(lambda w: F.cross_entropy(w, w.argmax(1), ignore_index=2))(x),
        lambda x: x.new_zeros(4, 4).index_add_(0, x.argmax(0), x),
        lambda x: x.repeat_interleave(2, dim=0).scatter_reduce(0, x.argsort(0), x, "amax"),
        dropout,
    )
    for number, function in enumerate(functions):
        jitted, directory = fs.jit(function), tmp_path / f"{number}"
        fs.save_graph(directory, jitted, x)
        assert_same_bits(fs.tree_leaves(fs.load_graph(directory)(x)), fs.tree_leaves(jitted(x)))


def test_a_graph_that_was_read_can_be_written_again(tmp_path):
    arguments = state_by(fs.zero3), batch_of()
    fs.save_graph(tmp_path / "first", fs.jit(step, donate_argnums=0), *arguments)
    fs.save_graph(tmp_path / "second", fs.load_graph(tmp_path / "first"), *arguments)
    assert (tmp_path / "first" / FILE).read_bytes() == (tmp_path / "second" / FILE).read_bytes()


@pytest.mark.parametrize(
    ("f", "text"),
    (
        (step, 'f must be a function of fs.jit with the backend "graph", not a function.'),
        (fs.jit(lambda x: x + CLOSED), "the function closes over tensors (1 of them), which a file does not hold"),
        (fs.jit(lambda x: fs.TrainState(x, x, x, x, x)), "a part of the result is PyTreeSpec(TrainState("),
        (fs.jit(lambda x: {(1, 2): x}), "a part of the result is PyTreeSpec({(1, 2): *}, NoneIsLeaf), and "),
        (
            fs.jit(lambda x: torch.ops.prims.sin(x)),
            "node 1: prims.sin.default is no operator of torch on tensors, or of fshard; leave it out of the function",
        ),
        (fs.jit(lambda x: x * (1 + 2j)), "a file holds numbers and texts, and the graph has a complex"),
    ),
)
def test_what_no_file_can_hold_is_refused(f, text, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"save_graph: {text}")):
        fs.save_graph(tmp_path, f, torch.zeros(2))


def test_where_a_jitted_function_runs_as_it_is_there_is_none(tmp_path):
    fs.save_graph(tmp_path, fs.jit(torch.sin), torch.zeros(2))
    text = r"^load_graph: a saved graph cannot run inside .*\. Call the function that it"
    with pytest.raises(ValueError, match=text):
        torch.func.vmap(fs.load_graph(tmp_path))(torch.zeros(2, 2))


@on_ranks("2 processes", timeout=30.0)
def test_a_rank_whose_trace_fails_is_named_on_all(tmp_path):
    def failing(state, batch):
        return 1 / 0 if my_rank() else step(state, batch)

    error, text = (
        (ZeroDivisionError, "division by zero") if my_rank() else (fs.comm.CollectiveError, "rank shard=1|rank 1")
    )
    with pytest.raises(error, match=text):
        fs.save_graph(tmp_path, fs.jit(failing), state_by(fs.zero3), batch_of())


def run_graph(directory, numbers):
    print(fs.load_graph(directory)(torch.tensor(numbers, dtype=torch.float64)))


def test_another_process_runs_it(tmp_path):
    x = normal(3)(2)
    fs.save_graph(tmp_path, fs.jit(lambda x: {"y": x.exp().sum()}), x)
    (other,) = run_on_ranks(1, run_graph, tmp_path, x.tolist())
    assert other.output.strip() == str({"y": x.exp().sum()}), other.errors
