"""Donation: results at the addresses of donated tensors, with the values of a step that donates nothing."""

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard.tree import flatten, is_sharded
from tests.jit.steps import STEPS, train_step, updating
from tests.jit.test_steps import blocks, chain
from tests.optim.test_table import TABLE
from tests.ranks import on_ranks
from tests.trees import assert_alike, copied, normal, one_axis, tensors

X = torch.arange(3.0)
BACKENDS = ("graph", lambda graph, inputs: graph)


def addresses_of(tree):
    return [tensor.data_ptr() for tensor in tensors(tree)]


def plus_one(tree):
    return fs.tree_map(lambda leaf: leaf + 1, tree)


def donated(verb, path):
    return rf"{verb}: arguments were donated\n  {path}: was donated to an earlier call, so it is empty now\n"


@on_ranks(2)
def test_every_leaf_stays_where_it_is():
    """Those of the state that no optimizer writes in place too; and a batch that is not donated is left alone."""
    params = fs.shard(blocks(), fs.zero3(one_axis(), min_shard_elements=0, bucket_bytes=0))
    tx = fs.ema(fs.chain(fs.clip_by_global_norm(0.5), fs.from_torch(torch.optim.AdamW, lr=0.1, fused=True)), 0.9)
    step, expected = train_step(chain, tx), fs.TrainState.create(params, tx)

    def in_place(state, batch):
        value, grads = fs.value_and_grad(chain)(state.params, batch)
        return fs.update(tx, state, grads, donate=True), value

    batches = [normal(n + 10 * torch.distributed.get_rank())(2, 5) for n in range(STEPS)]
    forms, before = [fs.jit(f, donate_argnums=0) for f in (step, in_place)], copied(batches)
    states = [copied(expected) for _ in forms]
    addresses = addresses_of(states)
    for batch in batches:
        old = states[0]
        expected, expected_value = step(expected, batch)
        for n, jitted in enumerate(forms):
            states[n], value = jitted(states[n], batch)
            assert_alike((states[n], value), (expected, expected_value))
        assert addresses_of(states) == addresses
    assert_alike(batches, before)
    with pytest.raises(ValueError, match=donated("jit", r"\[0\]\[0\]\.step")):
        forms[0](old, batches[0])
    assert not any(tensor.numel() for tensor in tensors(old))


@on_ranks(2)
def test_what_was_donated_is_refused_outside_of_jit():
    """By the verbs that check what they are given, whether it is sharded or whole."""
    tx, axis = fs.sgd(0.1), fs.zero3(one_axis(), min_shard_elements=0)
    params = fs.shard({"x": X.clone()}, axis)
    state, grads = fs.TrainState.create(params, tx), fs.tree_map(torch.ones_like, params)
    new = fs.jit(plus_one, donate_argnums=0)(params)
    verbs = {
        "value_and_grad": lambda tree: fs.value_and_grad(lambda p: fs.gather(p)["x"].sum())(tree),
        "unshard": fs.unshard,
        "gather": fs.gather,
        "reshard": lambda tree: fs.reshard(tree, fs.ddp(one_axis())),
        "update": lambda tree: fs.update(tx, state._replace(params=tree), grads),
        "tree_map": lambda tree: fs.tree_map(torch.clone, tree),
        "tree_map: rest": lambda tree: fs.tree_map(torch.add, new, tree),
    }
    for name, call in verbs.items():
        path = r"\.params\['x'\]" if name == "update" else r"\['x'\]"
        with pytest.raises(ValueError, match=donated(name, path)):
            call(params)
        call(new)
    whole = {"x": X.clone()}
    fs.jit(plus_one, donate_argnums=0)(whole)
    with pytest.raises(ValueError, match=donated("value_and_grad", r"\['x'\]")):
        fs.value_and_grad(lambda tree: tree["x"].sum())(whole)
    count = torch.tensor(3)
    fs.jit(plus_one, donate_argnums=0)(count)
    for name, call in {"key": lambda: fs.fold_in(count, 0), "data": lambda: fs.fold_in(0, count)}.items():
        with pytest.raises(ValueError, match=donated("fold_in", rf"\['{name}'\]")):
            call()


def late(tree):
    """What is returned first is needed for what is returned last."""
    a = tree["a"] + 1
    return {"a": a, "b": tree["b"] * tree["a"] + a}


def written_by_a_view(tree):
    """A copy that is not the last to read what it copies, and is written to behind its node."""
    copy = tree["b"].clone()
    product = tree["a"] * tree["b"]
    copy[0] = 7.0
    return {"a": product, "b": copy}


def normalize(tree):
    """The schema of the operator does not say that it writes to its statistics, and nothing uses its result."""
    F.batch_norm(torch.stack([X, X * X]), tree["a"], tree["b"], training=True)
    return tree


def normalize_copies(tree):
    means = tree["a"].clone()
    sums = tree["a"] + tree["b"]
    F.batch_norm(torch.stack([X, X * X]), means, sums, training=True)
    return {"a": means, "b": sums}


READS = (
    written_by_a_view,
    normalize,
    normalize_copies,
    lambda tree: {"a": tree["b"], "b": tree["a"]},
    lambda tree: {"a": tree["b"][1:].clone().new_ones(3) + tree["a"].sum(), "b": tree["a"].flip(0)},
    lambda tree: {"a": tree["a"].expand(3), "b": tree["b"][:]},
    late,
    lambda tree: dict.fromkeys(("a", "b"), tree["a"] * tree["b"]),
)


def test_values_are_read_before_they_are_written_over():
    for f in READS:
        tree = {"a": X + 1, "b": 2 * X}
        expected = f(copied(tree))
        for backend in BACKENDS:
            given = copied(tree)
            addresses = addresses_of(given)
            actual = fs.jit(f, donate_argnums=0, backend=backend)(given)
            assert_alike(actual, expected)
            # Others may not keep the order of what reads and writes an input.
            assert (addresses_of(actual) == addresses) or backend != "graph"
    # What is returned beside its successor keeps its values.
    new, old = fs.jit(lambda x: ({"x": x + 1}, x), donate_argnums=0)(X.clone())
    assert_alike((new["x"], old), (X + 1, X))


def test_only_the_part_with_the_argument_s_structure_is_written():
    jitted = fs.jit(lambda a, b: (a["x"] + b["y"], {"y": b["y"] * 2}, {"x": a["x"] * 3}), donate_argnums=(0, 1))
    a, b = {"x": X.clone()}, {"y": X.clone()}
    addresses = addresses_of((b, a))
    total, *new = jitted(a, b)
    assert_alike((total, *new), (2 * X, {"y": 2 * X}, {"x": 3 * X}))
    assert addresses_of(new) == addresses
    # Another shape or dtype is not written over, nor memory that elements share, such as counts of torch.func.vmap.
    actual = fs.jit(lambda t: {"a": t["a"][:2], "b": t["b"].double()}, donate_argnums=0)({"a": X + 1, "b": X.clone()})
    assert_alike(actual, {"a": (X + 1)[:2], "b": X.double()})
    assert_alike(fs.jit(plus_one, donate_argnums=0)({"n": X[1:2].expand(4)}), {"n": torch.full((4,), 2.0)})
    assert X.equal(torch.arange(3.0))
    # Gradients have the structure of the new state's parameters, which are the state's own.
    tx = fs.from_torch(torch.optim.SGD, lr=0.1)
    given = fs.TrainState.create({"w": torch.ones(3)}, tx), {"w": torch.ones(3)}
    with pytest.raises(ValueError, match=r"^jit: argument 1 is donated, but no part of the result has its structure"):
        fs.jit(lambda *args: fs.update(tx, *args), donate_argnums=(0, 1))(*given)
    # Nor do they take the place of a part of the state, which comes behind them.
    with pytest.raises(ValueError, match=r"^jit: argument 0 is donated, but no part of the result has its structure"):
        fs.jit(lambda grads, state: fs.update(tx, state, grads), donate_argnums=(0, 1))(*reversed(given))


def test_a_copy_that_is_laid_out_otherwise_is_made():
    def f(x):
        rows = x.clone(memory_format=torch.contiguous_format)
        rows.add_(1)
        return rows, rows.view(-1).sum()

    x = torch.arange(6.0).view(2, 3).t()
    expected = f(x)
    assert_alike(fs.jit(lambda x: f(x), donate_argnums=0)(x), expected)


# Arguments that share memory, and whether what is not donated stays.
OVERLAPS = (
    lambda x: (x, x),
    lambda x: ({"a": x, "b": x}, X),
    lambda x: (x[:2], x),
    lambda x: ({"a": x[:2], "b": x[1:]}, X),
    lambda x: (x.detach(), x),
)


def test_memory_that_other_tensors_have_is_copied_before_it_is_written_to():
    def f(a, b):
        return plus_one(a), fs.tree_map(lambda leaf: leaf * 3, b)

    for overlap in OVERLAPS:
        for backend in BACKENDS:
            actual = fs.jit(f, donate_argnums=0, backend=backend)(*overlap(X.clone()))
            assert_alike(actual, f(*overlap(X)))
            assert len(set(addresses_of(actual))) == len(addresses_of(actual))
    a, b = torch.arange(6.0).split(3)
    assert_alike(fs.jit(plus_one, donate_argnums=0)({"a": a, "b": b}), {"a": X + 1, "b": X + 4})


def test_what_the_function_closes_over_is_not_donated():
    """The next call would read it again."""
    mine = X.clone()
    jitted = fs.jit(lambda state, x: ({**state, "n": state["n"] + mine.sum()}, x * mine), donate_argnums=0)
    first, _ = jitted({"kept": X.clone(), "n": X.clone()}, X)
    with pytest.raises(
        ValueError, match=r"^jit: the function closes over .*, which this call donates\. Use the argument"
    ):
        jitted({**first, "kept": mine}, X)
    assert mine.equal(X)
    assert jitted(first, X)[1].equal(X * X)


def test_an_array_keeps_its_values():
    """A tensor of from_numpy has its memory."""
    array = X.clone().numpy()
    jitted = fs.jit(plus_one, donate_argnums=0)
    first = jitted({"x": torch.from_numpy(array)})
    assert array.tolist() == X.tolist()
    addresses = addresses_of(first)
    assert addresses_of(jitted(first)) == addresses


@on_ranks(1)
def test_no_optimizer_begins_with_shared_memory_that_it_writes_to():
    """The average of a frozen parameter is the parameter."""
    for row in TABLE.values():
        leaves = flatten(updating(row.make)().state).leaves
        trained = [leaf for leaf in leaves if leaf is not None and not (is_sharded(leaf) and leaf.spec.frozen)]
        addresses = [tensor.data_ptr() for tensor in tensors(trained) if tensor.numel()]
        assert len(set(addresses)) == len(addresses)
