"""Donation: results at the addresses of donated tensors, with the values of a step that donates nothing."""

from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import SHOWN
from fshard.tree import flatten, is_sharded
from tests.jit.steps import STEPS, assert_alike, copied, refused, tensors, train_step
from tests.jit.test_functions import blocks, chain
from tests.jit.test_optimizers import updating
from tests.optim.test_table import TABLE
from tests.ranks import on_ranks
from tests.trees import normal, one_axis

X = torch.arange(3.0)


def places(tree):
    return [tensor.data_ptr() for tensor in tensors(tree)]


def prepared(name):
    params = fs.shard(blocks(), fs.zero3(one_axis(), min_shard_elements=0, merge_bytes=0))
    tx = TABLE[name].make()
    rank = torch.distributed.get_rank()
    batches = [normal(step + 10 * rank)(2, 5) for step in range(STEPS)]
    return train_step(chain, tx), fs.TrainState.create(params, tx), batches


NAMES = ["from_torch AdamW fused", "from_torch SGD", "ema", "adam", "clip_by_global_norm"]


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", NAMES)
@on_ranks(1, 2)
def test_every_leaf_stays_where_it_is(name):
    """Those of the state that no optimizer writes in place too; and a batch that is not donated is left alone."""
    step, state, batches = prepared(name)
    jitted, kept = fs.jit(step, donate_argnums=0), fs.jit(step)
    expected, state = state, copied(state)
    where, before = places(state), copied(batches)
    for batch in batches:
        state, value = jitted(state, batch)
        expected, wanted = kept(expected, batch)
        assert_alike((state, value), (expected, wanted))
        assert places(state) == where
    assert_alike(batches, before)


@pytest.mark.parametrize("order", (1, -1), ids=("state first", "gradients first"))
def test_arguments_that_are_donated_take_no_part_of_the_result_twice(order):
    """Gradients have the structure of the new state's parameters, which are the state's own."""
    tx = fs.from_torch(torch.optim.SGD, lr=0.1)
    state = fs.TrainState.create({"w": torch.ones(3)}, tx)
    grads = {"w": torch.ones(3)}

    def update(*given):
        state, grads = given[::order]
        return fs.update(tx, state, grads)

    number = (0, 1)[::order].index(1)
    text = (
        "jit: expected the result to have a part of its own with the structure of donated argument "
        f"{number}, got none; return its successor, such as the new state, or do not donate it"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        fs.jit(update, donate_argnums=(0, 1))(*(state, grads)[::order])
    swapped = fs.jit(lambda a, b: (b, a + 1), donate_argnums=(0, 1))(X.clone(), X + 5)
    assert [found.tolist() for found in swapped] == [[5, 6, 7], [1, 2, 3]]


def given_up(what, paths):
    lines = [
        f"  {path}: expected what that call returned in its place, got a tensor that was donated to an earlier call\n"
        for path in paths
    ]
    more = [f"  and {len(lines) - SHOWN} more\n"] if len(lines) > SHOWN else []
    remedy = "To fix: go on with the new state, or do not donate the old one."
    return f"{what}: arguments were donated\n{''.join(lines[:SHOWN] + more)}{remedy}"


@on_ranks(2)
def test_what_was_given_up_is_refused_outside_of_jit():
    """By the verbs that check what they are given, whether it is sharded or whole."""
    model = fs.functionalize(nn.Linear(3, 2))
    for smallest in (0, 100):
        params = model.init(fs.zero3(one_axis(), min_shard_elements=smallest), seed=0)
        step = fs.jit(lambda tree: fs.tree_map(torch.sin, tree), donate_argnums=0)
        tx = fs.sgd(0.1)
        state, grads = fs.TrainState.create(params, tx), fs.tree_map(torch.ones_like, params)
        new = step(params)
        update = partial(fs.update, tx, grads=grads)
        verbs = {
            "value_and_grad": lambda tree: fs.value_and_grad(lambda p: model.apply(p, X).sum())(tree),
            "apply": lambda tree: model.apply(tree, X),
            "unshard": fs.unshard,
            "gather": fs.gather,
            "reshard": lambda tree: fs.reshard(tree, fs.ddp(one_axis())),
            "update": lambda tree, state=state, update=update: update(state._replace(params=tree)),
        }
        for what, verb in verbs.items():
            with refused(given_up(what, ["['bias']", "['weight']"])):
                verb(params)
            verb(new)
    whole = {"x": X.clone()}
    fs.jit(lambda tree: {"x": tree["x"] + 1}, donate_argnums=0)(whole)
    with refused(given_up("value_and_grad", ["['x']"])):
        fs.value_and_grad(lambda tree: tree["x"].sum())(whole)


@on_ranks(2)
def test_what_was_given_up_is_refused_and_holds_no_memory():
    step, state, batches = prepared("from_torch AdamW fused")
    jitted = fs.jit(step, donate_argnums=0)
    old = copied(state)
    state, _ = jitted(old, batches[0])
    paths = [path for path, leaf in zip(flatten(old).paths, flatten(old).leaves) if leaf is not None]
    with refused(given_up("jit", [f"[0][0]{path}" for path in paths])):
        jitted(old, batches[0])
    assert not any(tensor.numel() for tensor in tensors(old))
    jitted(state, batches[1])


def test_an_error_in_the_trace_leaves_what_was_donated_whole():
    def f(tree):
        raise KeyError("mine")

    x = X.clone()
    with pytest.raises(KeyError, match="mine"):
        fs.jit(f, donate_argnums=0)(x)
    assert x.equal(X)


def late(tree):
    """What is returned first is needed for what is returned last."""
    a = tree["a"] + 1
    b = tree["b"] * tree["a"] + a
    return {"a": a, "b": b}


READS = {
    "swapped": lambda tree: {"a": tree["b"], "b": tree["a"]},
    "shifted": lambda tree: {"a": tree["b"][1:].clone().new_ones(3) + tree["a"].sum(), "b": tree["a"].flip(0)},
    "viewed": lambda tree: {"a": tree["a"].expand(3), "b": tree["b"][:]},
    "late": late,
    "same": lambda tree: {"a": tree["a"] + 1, "b": tree["a"] + 1},
    "once": lambda tree: dict.fromkeys(("a", "b"), tree["a"] * tree["b"]),
}


@pytest.mark.parametrize("name", READS)
def test_values_are_read_before_they_are_written_over(name):
    f = READS[name]
    tree = {"a": X + 1, "b": 2 * X}
    expected, where = f(tree), places(tree)
    for backend in ("graph", lambda graph, inputs: graph):
        given = copied(tree)
        where = places(given)
        found = fs.jit(f, donate_argnums=0, backend=backend)(given)
        assert_alike(found, expected)
        # Others may not keep the order of what reads and writes an input.
        assert (places(found) == where) or backend != "graph"


def test_what_is_returned_beside_its_successor_keeps_its_values():
    new, old = fs.jit(lambda x: ({"x": x + 1}, x), donate_argnums=0)(X.clone())
    assert_alike((new["x"], old), (X + 1, X))


@pytest.mark.parametrize("backend", ("graph", lambda graph, inputs: graph), ids=("graph", "a function"))
def test_donated_arguments_may_change_places(backend):
    f = fs.jit(lambda a, b: (b, a), donate_argnums=(0, 1), backend=backend)
    assert_alike(f(X.clone(), 2 * X), (2 * X, X))


def test_only_the_part_with_the_argument_s_structure_is_written():
    jitted = fs.jit(lambda a, b: (a["x"] + b["y"], {"y": b["y"] * 2}, {"x": a["x"] * 3}), donate_argnums=(0, 1))
    a, b = {"x": X.clone()}, {"y": X.clone()}
    where = places((b, a))
    total, new_b, new_a = jitted(a, b)
    assert_alike((total, new_b, new_a), (2 * X, {"y": 2 * X}, {"x": 3 * X}))
    assert places((new_b, new_a)) == where


def test_another_shape_or_dtype_is_not_written_over():
    jitted = fs.jit(lambda tree: {"a": tree["a"][:2], "b": tree["b"].double()}, donate_argnums=0)
    tree = {"a": X.clone(), "b": X.clone()}
    found = jitted(tree)
    assert_alike(found, {"a": X[:2], "b": X.double()})


def test_a_returned_argument_stays_a_tensor_of_its_own():
    """Undonated: what the caller does to the result must not reach the argument, or jitted and eager would differ."""
    x = X.clone()
    eager, jitted = (lambda x: (x, x + 1)), fs.jit(lambda x: (x, x + 1))
    assert jitted(x)[0].data_ptr() == eager(x)[0].data_ptr() == x.data_ptr()


SHARED = {"donated and kept": lambda x: (x, x), "donated twice": lambda x: ({"a": x, "b": x}, X)}


@pytest.mark.parametrize("name", SHARED)
def test_a_tensor_that_is_given_twice_is_copied_before_it_is_written_to(name):
    """And consumed: the one that was kept is the same."""

    def f(a, b):
        return fs.tree_map(lambda leaf: leaf + 1, a), b * 3

    x = X.clone()
    found = fs.jit(f, donate_argnums=0)(*SHARED[name](x))
    assert_alike(found, f(*SHARED[name](X)))
    assert len(set(places(found))) == len(places(found))
    with refused(given_up("value_and_grad", ["['x']"])):
        fs.value_and_grad(lambda tree: tree["x"].sum())({"x": x})


OVERLAPS = {
    "views of what is kept": lambda x: (x[:2], x),
    "what is kept is a view": lambda x: (x, x[1:]),
    "parts that overlap": lambda x: ({"a": x[:2], "b": x[1:]}, X),
    "an alias": lambda x: (x.detach(), x),
}


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("backend", ("graph", lambda graph, inputs: graph), ids=("graph", "a function"))
def test_memory_that_other_tensors_have_is_copied_before_it_is_written_to(name, backend):
    def f(a, b):
        return fs.tree_map(lambda leaf: leaf + 1, a), fs.tree_map(lambda leaf: leaf * 3, b)

    given = X.clone()
    expected = f(*OVERLAPS[name](X))
    assert_alike(fs.jit(f, donate_argnums=0, backend=backend)(*OVERLAPS[name](given)), expected)
    if name != "what is kept is a view":
        assert given.equal(X)


@on_ranks(1, 2)
def test_what_the_function_closes_over_is_not_given_up():
    """The next call would read it again."""
    text = (
        "jit: donated leaves would be read again in the next call\n"
        "  [0][0]['kept']: expected one of the arguments alone, got a tensor that the function closes over too\n"
        "To fix: read it from the argument inside of the function, such as state.buffers, or close over a "
        "clone."
    )
    mine = X.clone()
    params = fs.shard({"w": X}, fs.zero3(one_axis()))

    def f(state, x):
        return {**state, "params": fs.tree_map(lambda leaf: leaf + mine.sum(), state["params"])}, x * mine

    jitted = fs.jit(f, donate_argnums=0)
    first, _ = jitted({"kept": X.clone(), "params": params}, X)
    for state in ({**first, "kept": mine}, {"kept": mine, "params": fs.shard({"w": X}, fs.zero3(one_axis()))}):
        with refused(text):
            jitted(state, X)
    assert mine.equal(X)
    assert jitted(first, X)[1].equal(X * X)


def test_memory_that_elements_share_is_not_written_to():
    """Such as counts that torch.func.vmap makes of a number."""
    count = X[1:2].expand(4)
    found = fs.jit(lambda tree: fs.tree_map(lambda leaf: leaf + 1, tree), donate_argnums=0)({"count": count})
    assert_alike(found, {"count": torch.full((4,), 2.0)})
    assert X.equal(torch.arange(3.0))


def test_parts_of_one_tensor_that_do_not_overlap_may_be_given_up():
    a, b = torch.arange(6.0).split(3)
    found = fs.jit(lambda tree: fs.tree_map(lambda leaf: leaf + 1, tree), donate_argnums=0)({"a": a, "b": b})
    assert_alike(found, {"a": X + 1, "b": X + 4})


def check_no_optimizer_begins_with_shared_memory_that_it_writes_to(row):
    state = updating(row.make)().state
    frozen = {tensor.data_ptr() for tensor in tensors([leaf for leaf in flatten(state).leaves if is_frozen(leaf)])}
    where = [tensor.data_ptr() for tensor in tensors(state) if tensor.numel() and tensor.data_ptr() not in frozen]
    assert len(set(where)) == len(where)


@pytest.mark.parametrize("name", TABLE)
@on_ranks(1)
def test_no_optimizer_begins_with_shared_memory_that_it_writes_to(name):
    """The average of a frozen parameter is the parameter."""
    check_no_optimizer_begins_with_shared_memory_that_it_writes_to(TABLE[name])


def is_frozen(leaf):
    return is_sharded(leaf) and leaf.spec.frozen


@pytest.mark.parametrize("backend", ("graph", lambda graph, inputs: graph), ids=("graph", "a function"))
@on_ranks(1, 2)
def test_frozen_parameters_and_their_average_stay_one_tensor(backend):
    """They are not copied, jitted or eager; and both leaves of the old state say that they were donated."""
    full = {"frozen": normal()(5, 3), "trained": normal(1)(5, 3)}
    params = fs.shard(full, fs.zero3(one_axis(), min_shard_elements=0), frozen="frozen")
    tx = fs.ema(fs.adamw(0.1), 0.9)

    def step(state):
        def loss(params):
            full = fs.gather(params)
            return (full["trained"] * full["frozen"]).square().sum()

        _, grads = fs.value_and_grad(loss)(state.params)
        return fs.update(tx, state, grads, donate=True)

    def frozen_of(state):
        return [state.params["frozen"], state.opt_state.average["frozen"]]

    begin = fs.TrainState.create(params, tx)
    eager, state = copied(begin), copied(begin)
    for tree in (eager, state):
        tree.opt_state.average["frozen"] = tree.params["frozen"]
    jitted = fs.jit(step, donate_argnums=0, backend=backend)
    where = [places(frozen_of(tree)) for tree in (eager, state)]
    for _ in range(STEPS):
        before, eager, state = state, step(eager), jitted(state)
        assert_alike(state, eager)
        assert [places(frozen_of(tree)) for tree in (eager, state)] == where
        assert [leaf.local.shape for leaf in frozen_of(before)] == [(0,), (0,)]
        with pytest.raises(ValueError, match="arguments were donated"):
            jitted(before)
    assert_alike(fs.unshard(state.params)["frozen"], full["frozen"])


def test_donated_leaves_let_go_of_their_tensors():
    """A Sharded leaf's goes on in the new state, also where the caller holds it; a plain leaf is emptied."""
    mesh = fs.init_mesh({"shard": 1}, device="cpu")
    old = {"sharded": fs.shard({"a": X}, fs.zero3(mesh)), "plain": X.clone()}
    held, plain = old["sharded"]["a"].local, old["plain"]
    new = fs.jit(lambda tree: fs.tree_map(lambda leaf: leaf + 1, tree), donate_argnums=0)(old)
    assert_alike(fs.unshard(new), {"sharded": {"a": X + 1}, "plain": X + 1})
    assert new["sharded"]["a"].local is held
    assert [tensor.shape for tensor in (plain, old["sharded"]["a"].local)] == [(0,)] * 2


@on_ranks(2)
def test_specs_stay():
    step, state, batches = prepared("ema")
    new, _ = fs.jit(step, donate_argnums=0)(copied(state), batches[0])
    pairs = zip(flatten(new).leaves, flatten(state).leaves, strict=True)
    assert all(a.spec == b.spec for a, b in pairs if is_sharded(a))
