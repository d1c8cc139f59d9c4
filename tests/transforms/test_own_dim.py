"""own_dim in training: experts that ranks of an axis own, next to every other role, are one process's training."""

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close
from fshard.tree import flatten, is_sharded
from tests.ranks import on_ranks
from tests.test_law_ddp import spellings
from tests.tolerance import within
from tests.trees import assert_same_bits, normal

EXPERTS, WIDTH, HIDDEN, ROWS, STEPS = 4, 6, 5, 64, 2


def initial():
    draw = normal(3)
    experts = {"up": draw(EXPERTS, WIDTH, HIDDEN) / 2, "down": draw(EXPERTS, HIDDEN, WIDTH) / 2}
    return {"experts": experts, "mix": draw(WIDTH, WIDTH) / 2, "bias": draw(WIDTH)}


def batches():
    draw = normal(4)
    return [(draw(ROWS, WIDTH), draw(ROWS, WIDTH)) for _ in range(STEPS)]


def loss_fn(params, x, y, axis=None):
    """Row i goes to expert i % EXPERTS, on the rank of `axis` that owns it; without an axis here."""
    full = fs.gather(params)
    rows = torch.tanh(x @ full["mix"] + full["bias"]).unflatten(0, (-1, EXPERTS)).transpose(0, 1)
    rows = rows if axis is None else fs.all_to_all(rows, axis, 0, 1)
    rows = torch.tanh(rows @ full["experts"]["up"]) @ full["experts"]["down"]
    rows = rows if axis is None else fs.all_to_all(rows, axis, 1, 0)
    return (rows.transpose(0, 1).flatten(0, 1) - y).square().sum(1).mean()


def grid(shard, expert):
    return fs.init_mesh({"shard": shard, "expert": expert}, device="cpu")


def layout(mesh, rest, inner):
    return fs.masked(fs.compose(inner, fs.own_dim(mesh["expert"])), "experts.*", otherwise=rest)


def whole(mesh):
    return fs.compose(fs.replicate(mesh["shard"]), fs.replicate(mesh["expert"]))


STRATEGIES = {
    "inside, by the same dim": lambda m: fs.zero3(
        m, layout=layout(m, fs.hybrid_shard(m, axis="shard", replicate_axis="expert"), fs.fully_shard(m["shard"]))
    ),
    "inside, by another dim": lambda m: fs.zero3(
        m,
        layout=layout(m, fs.hybrid_shard(m, axis="expert", replicate_axis="shard"), fs.fully_shard(m["shard"], dim=1)),
        bucket_bytes=0,
    ),
    "of ddp": lambda m: layout(m, whole(m), fs.replicate(m["shard"])),
    "in another dtype": lambda m: fs.zero3(
        m, layout=layout(m, whole(m), fs.fully_shard(m["shard"], dim=-1)), reduce_dtype=torch.float64
    ),
}


def one_process(tx):
    losses = []
    state = fs.TrainState.create(initial(), tx)
    for batch in batches():
        grads, loss = torch.func.grad_and_value(loss_fn)(state.params, *batch)
        state = fs.update(tx, state, grads)
        losses.append(loss)
    return torch.stack(losses), state.params


GRIDS = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (1, 4)], 8: [(2, 4), (4, 2)]}


def trained(start, tx, gradients, axes):
    """Losses and parameters of one process's batches on ranks, and the state they end with."""
    state, losses = fs.TrainState.create(start, tx), []
    for batch in batches():
        loss, grads = gradients(state.params, *cut(batch, axes), axes[1])
        state = fs.update(tx, state, grads)
        losses.append(loss)
    return (torch.stack(losses), fs.unshard(state.params)), state


def check_training_is_that_of_one_process(tx, world_size, reduced=False):
    """By two spellings of the step, bit for bit; the state has the specs of the parameters, or is reduced."""
    expected = one_process(tx)
    # Sums over rows, in parts of ranks, which a step hands on to the next.
    near = within(expected, ROWS, STEPS)
    for sizes in GRIDS[world_size]:
        mesh = grid(*sizes)
        axes = [fs.axis_of(mesh, name) for name in ("shard", "expert")]
        for make in list(STRATEGIES.values())[: None if sizes == (2, 2) else 2]:
            start = fs.shard(initial(), make(mesh))
            ends = []
            for gradients in spellings(loss_fn):
                end, state = trained(start, tx, gradients, axes)
                ends.append(end)
            assert_same_bits(*ends)
            specs = {leaf.spec for leaf in flatten(state.opt_state).leaves if is_sharded(leaf)}
            assert reduced or specs == {leaf.spec for leaf in flatten(start).leaves}
            assert_trees_close(ends[0], expected, **near)


def cut(batch, axes):
    """This rank's rows, a whole number of rounds over the experts."""
    for axis in axes:
        batch = [tensor.chunk(axis.size)[fs.comm.rank(axis)] for tensor in batch]
    return batch


@pytest.mark.rows(2)
@on_ranks(1, 2, 4, 8)
def test_training_is_that_of_one_process(world_size):
    tx = fs.chain(fs.clip_by_global_norm(0.1), fs.adamw(0.01, eps=1e-3))
    check_training_is_that_of_one_process(tx, world_size)


@on_ranks(4)
def test_each_role_moves_its_own_bytes():
    """An owned leaf is gathered and reduced over "shard" alone, and nothing of it travels over "expert"."""
    mesh = grid(2, 2)
    axes = shard, expert = [fs.axis_of(mesh, name) for name in ("shard", "expert")]
    params = fs.shard(initial(), STRATEGIES["inside, by another dim"](mesh))
    spec = params["experts"]["up"].spec
    assert spec.roles == {shard: "gathered", expert: "owned"}
    assert spec.gathered_shape == (EXPERTS // 2, WIDTH, HIDDEN)
    assert params["mix"].spec.roles == {expert: "gathered", shard: "summed"}
    batch = cut(batches()[0], axes)
    with fs.comm.record() as record:
        fs.value_and_grad(loss_fn)(params, *batch, expert)
    places = ("shard", "gather"), ("shard", "scatter"), ("expert", "gather"), ("expert", "scatter")
    sent = [sum(e.sent for e in record if (e.axis, e.label) == place and not e.scalar) for place in places]
    # Dim 1 of "down" is padded by one; the only unit is not gathered again.
    inside = EXPERTS // 2 * WIDTH * (HIDDEN + HIDDEN + 1) * 8
    rest = (WIDTH * WIDTH + WIDTH) * 8
    # Each halved by a ring of two; a piece of `rest` is summed over "shard", there and back.
    assert sent == [inside // 2, inside // 2 + rest // 2, rest // 2, rest // 2]


@on_ranks(2)
def test_sums_by_a_tree_are_refused():
    mesh = grid(1, 2)
    params = fs.shard(initial(), STRATEGIES["of ddp"](mesh))
    with pytest.raises(
        ValueError, match=r'^reduction_order="tree": expected .*, got own_dim; take a strategy without it'
    ):
        fs.value_and_grad(loss_fn, reduction_order="tree")(params, *batches()[0], fs.axis_of(mesh, "expert"))
