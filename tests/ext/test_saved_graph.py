"""save_graph and load_graph: the bits of the jitted function in another process, refused by name for other calls."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal, one_axis

TX = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=0.1))
CLOSED = torch.ones(2)
FULL = {"in": normal(1)(8, 5), "out": [normal(2)(5, 4)]}


def step(state, batch, times=2):
    def loss(params):
        full = fs.gather(params)
        return (torch.tanh(batch["x"] @ full["in"]) @ full["out"][0]).square().mean() * times

    value, grads = fs.value_and_grad(loss)(state.params)
    return {"state": fs.update(TX, state, grads), "losses": [value, (value + 1, grads)]}


def given(seed=0, rows=6):
    params = fs.shard(FULL, fs.zero3(one_axis(), min_shard_elements=0))
    return fs.TrainState.create(params, TX), {"x": normal(seed + my_rank())(rows, 8)}


def run(f, steps=3):
    state, losses = given()[0], []
    for n in range(steps):
        out = f(state, given(n)[1], times=2)
        state, losses = out["state"], [*losses, out["losses"]]
    return state, losses


@pytest.mark.rows(3)
@pytest.mark.parametrize("donated", ((), 0))
@on_ranks(1, 2, 3)
def test_it_is_the_jitted_function_and_sends_the_same(donated, tmp_path):
    jitted = fs.jit(step, donate_argnums=donated)
    fs.save_graph(tmp_path, jitted, *given(), times=2)
    with fs.comm.record() as expected:
        needed = run(jitted)
    loaded = fs.load_graph(tmp_path)
    with fs.comm.record() as found:
        assert_same_bits(fs.tree_leaves(run(loaded)), fs.tree_leaves(needed))
    assert found == expected
    state, batch = given()
    loaded(state, batch, times=2)
    if donated == 0:
        with pytest.raises(ValueError, match="jit: arguments were donated"):
            loaded(state, batch, times=2)


@on_ranks(2)
def test_other_calls_are_refused_by_name(tmp_path):
    fs.save_graph(tmp_path, fs.jit(step), *given(), times=2)
    state, batch = given()
    other = fs.shard(FULL, fs.zero2(one_axis(), min_shard_elements=0))
    for args, times, text in (
        ((state, given(rows=5)[1]), 2, r"\[0\]\[1\]\['x'\]: shape: torch.Size\(\[6, 8\]\), got torch.Size\(\[5, 8\]\)"),
        ((state, batch), 3, r"\[1\]\['times'\]: 2, got 3"),
        ((fs.TrainState.create(other, TX), batch), 2, r"\[0\]\[0\].params\['in'\]: spec: .*, got Spec"),
        ((state, {"y": batch["x"]}), 2, r"structure: .*, got PyTreeSpec"),
    ):
        with pytest.raises(ValueError, match=rf"^load_graph: expected {text}.*; save the graph again, for these"):
            fs.load_graph(tmp_path)(*args, times=times)
    file = tmp_path / f"graph-shard{my_rank()}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "torch": "1.0"}))
    with pytest.raises(ValueError, match=rf"expected torch: 1.0, got {re.escape(torch.__version__)}; save the graph"):
        fs.load_graph(tmp_path)(state, batch, times=2)
    with pytest.raises(FileNotFoundError, match=r"graph-shard\d.json"):
        fs.load_graph(tmp_path / "other")(state, batch, times=2)


@pytest.mark.parametrize(
    ("f", "text"),
    (
        (step, "f to be a function of fs.jit with the backend "),
        (fs.jit(lambda x: x + CLOSED), "no tensor that the function closes over, got 1; pass it as an argument"),
        (fs.jit(lambda x: fs.TrainState(x, x, x, x, x)), "results in tuples, lists and dicts, got "),
    ),
)
def test_what_no_file_can_hold_is_refused(f, text, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"save_graph: expected {text}")):
        fs.save_graph(tmp_path, f, torch.zeros(2))


def test_an_operator_that_is_not_torchs_is_refused(tmp_path):
    """A file is data: it can name operators of tensors alone."""
    fs.save_graph(tmp_path, fs.jit(torch.sin), torch.zeros(2))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace("aten.sin", "os.system"))
    with pytest.raises(ValueError, match=r"load_graph: expected operators of .*, got os.system"):
        fs.load_graph(tmp_path)(torch.zeros(2))


def test_where_a_jitted_function_runs_as_it_is_there_is_none(tmp_path):
    fs.save_graph(tmp_path, fs.jit(torch.sin), torch.zeros(2))
    with pytest.raises(ValueError, match=r"^load_graph: expected a call outside of .*; call the function itself"):
        torch.func.vmap(fs.load_graph(tmp_path))(torch.zeros(2, 2))


@on_ranks("2 processes", timeout=30.0)
def test_a_rank_whose_trace_fails_is_named_on_all(tmp_path):
    def failing(state, batch):
        return 1 / 0 if my_rank() else step(state, batch)

    error, text = (
        (ZeroDivisionError, "division by zero") if my_rank() else (fs.comm.CollectiveError, "rank shard=1|rank 1")
    )
    with pytest.raises(error, match=text):
        fs.save_graph(tmp_path, fs.jit(failing), *given())


def test_another_process_runs_it(tmp_path):
    x = normal(3)(2)
    fs.save_graph(tmp_path, fs.jit(lambda x: {"y": x.exp().sum()}), x)
    given = f"torch.tensor({x.tolist()}, dtype=torch.float64)"
    script = f"import torch, fshard as fs; print(fs.load_graph({str(tmp_path)!r})({given}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == str({"y": x.exp().sum()}), done.stderr
