"""Losses that mix values that vary and values that agree: those that the tests of collectives plant."""

import torch

import fshard as fs
from tests.ext.check.mistakes import SHARD_TP, mistake
from tests.ext.check.programs import LAYER, TX, WIDTH, from_loss, from_step, parallel
from tests.ext.parallel.test_custom_call import cubes

FULL = {"w": torch.ones(8, 3), "b": torch.ones(5)}


def large(mesh):
    """ZeRO-3 of the leaf "w"; "b" is whole."""
    return fs.zero3(mesh, min_shard_elements=6)


def over_both_axes(mesh):
    return fs.zero3(mesh, axis=("shard", "tp"), min_shard_elements=0)


def squares(params):
    full = fs.gather(params)
    return full["w"].square().sum() + full["b"].square().sum()


@mistake("refused", "doubled sum", make=from_loss(FULL, large))
def objective_in_a_loss(params):
    loss = squares(params)
    return fs.objective(loss, like=params)  # <- here; right: return loss


@mistake("refused", "doubled sum", make=from_loss(FULL, fs.ddp))
def objective_in_a_loss_of_ddp(params):
    loss = squares(params)
    loss = fs.objective(loss, like=params)  # <- here; right: pass
    return 2 * loss


@mistake("refused", "doubled sum", make=from_loss(FULL, large, reduce="sum"))
def sum_in_a_loss(params, axis):
    loss = fs.psum_invariant(squares(params), axis)  # <- here; right: loss = squares(params)
    return 0.5 * loss / 2 + 1


@mistake("refused", "doubled sum", make=from_loss(FULL, large, reduce="weighted"))
def sum_of_a_weighted_loss(params, axis):
    total = fs.psum_invariant(squares(params), axis)  # <- here; right: total = squares(params)
    return total, torch.tensor(2)


@mistake("refused", "missing cast", make=from_loss(FULL, fs.ddp, batch={"x": torch.ones(4, 5)}))
def math_on_a_leaf_of_ddp(params, x):
    bias = params["b"].local  # right: bias = fs.gather(params)["b"]
    return squares(params) + (x * bias).sum()  # <- here


@mistake("refused", "missing cast", make=from_loss(FULL, large, batch={"x": torch.ones(4, 5)}))
def math_on_a_replicated_leaf(params, x, axis):
    bias = params["b"].local  # right: bias = fs.pcast(params["b"].local, axis, to="varying")
    return squares(params) + (x * bias).sum()  # <- here


@mistake("refused", "missing cast", make=from_loss(FULL, large))
def psum_invariant_of_a_replicated_leaf(params, axis):
    bias = fs.psum_invariant({"b": params["b"]}, axis)  # <- here; right: bias = {"b": params["b"]}
    return squares(params) + fs.gather(bias)["b"].sum()


@mistake("refused", "missing cast", make=from_loss(FULL, large))
def pmean_of_a_replicated_leaf(params, axis):
    bias = fs.pmean({"b": params["b"]}, axis)  # <- here; right: bias = {"b": params["b"]}
    return squares(params) + fs.gather(bias)["b"].sum()


@mistake("refused", "superfluous cast", make=from_loss(FULL, large))
def pcast_of_a_split_leaf(params, axis):
    w = fs.pcast({"w": params["w"]}, axis, to="varying")  # <- here; right: w = fs.gather({"w": params["w"]})
    return squares(params) + sum(leaf.sum() for leaf in fs.tree_leaves(w))


@mistake(
    "missing sum",
    mesh=SHARD_TP,
    make=from_loss(
        {"w": torch.ones(8, 4)}, lambda mesh: fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["tp"], dim=1))
    ),
)
def loss_that_differs_over_tp(params, tp):
    """A loss of columns that nobody sums over the axis that splits them."""
    w = fs.gather(params)["w"]
    return w.square().sum()  # <- here; right: return fs.psum_invariant(w.square().sum(), tp)


@mistake("missing cast", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def layer_without_a_cast(params, x, tp):
    full = fs.gather(params)
    x = x * full["norm"]  # right: x = fs.pcast(x * full["norm"], tp, to="varying")
    hidden = torch.relu(x @ full["up"].T)  # <- here
    x = fs.psum_invariant(hidden @ full["down"].T, tp)
    return ((x * full["norm"]) @ full["head"].T).square().mean()


@mistake("missing sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def layer_with_psum(params, x, tp):
    full = fs.gather(params)
    x = fs.pcast(x * full["norm"], tp, to="varying")
    hidden = torch.relu(x @ full["up"].T) @ full["down"].T
    x = fs.psum(hidden, tp)  # <- here; right: x = fs.psum_invariant(hidden, tp)
    return ((x * full["norm"]) @ full["head"].T).square().mean()


@mistake("missing sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def layer_without_a_sum(params, x, tp):
    full = fs.gather(params)
    x = fs.pcast(x * full["norm"], tp, to="varying")
    hidden = torch.relu(x @ full["up"].T)
    x = hidden @ full["down"].T  # <- here; right: x = fs.psum_invariant(hidden @ full["down"].T, tp)
    return ((x * full["norm"]) @ full["head"].T).square().mean()  # <- here


@mistake("missing sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def sum_that_is_missing(params, tp):
    x = fs.gather(params)["up"] @ torch.ones(WIDTH)
    x = torch.relu(x)
    return x.sum()  # <- here; right: return fs.psum_invariant(x.sum(), tp)


@mistake("superfluous cast", "missing sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def sum_that_is_missing_before_a_cast(params, tp):
    x = fs.gather(params)["up"].sum()
    x = fs.pcast(x, tp, to="varying")  # <- here; right: pass
    return fs.psum_invariant(x, tp)


@mistake("refused", "doubled sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def sum_over_the_axis_of_the_batch(params, shard):
    loss = fs.gather(params)["norm"].sum()
    return fs.psum_invariant(loss, shard)  # <- here; right: return loss


@mistake("refused", "missing cast", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def math_on_a_whole_leaf(params):
    norm = params["norm"].local  # right: norm = fs.gather(params)["norm"]
    return norm.sum()  # <- here


@mistake("missing cast", "doubled sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def psum_of_what_agrees(params, tp):
    norm = fs.gather(params)["norm"]
    return fs.psum(norm.sum(), tp)  # <- here; right: return norm.sum()


@mistake(
    "missing sum", mesh={"tp": 8}, make=from_loss({"w": torch.ones(8)}, lambda mesh: fs.split_dim(mesh["tp"], dim=0))
)
def psum_where_ranks_share_a_loss(params, tp):
    total = fs.gather(params)["w"].sum()
    return fs.psum(total, tp)  # <- here; right: return fs.psum_invariant(total, tp)


@mistake("superfluous cast", make=from_loss(FULL))
def cast_of_a_permuted_value(params, axis):
    w = fs.ppermute(fs.gather(params)["w"], axis, [(0, 1)])
    w = fs.pcast(w, axis, to="varying")  # <- here; right: pass
    return w.sum()


@mistake("superfluous cast", make=from_loss(FULL))
def cast_of_exchanged_rows(params, axis):
    w = fs.all_to_all(fs.gather(params)["w"], axis, 0, 0)
    w = fs.pcast(w, axis, to="varying")  # <- here; right: pass
    return w.sum()


@mistake("superfluous cast", make=from_loss(FULL))
def cast_of_ragged_rows(params, axis):
    w = fs.ragged_all_to_all(fs.gather(params)["w"], axis, [1] * axis.size, [1] * axis.size)
    w = fs.pcast(w, axis, to="varying")  # <- here; right: pass
    return w.sum()


@mistake("missing cast", make=from_loss(FULL))
def broadcast_without_a_cast(params, axis):
    w = fs.broadcast(fs.gather(params)["w"], axis)
    return w.sum()  # <- here; right: return fs.pcast(w, axis, to="varying").sum()


@mistake(
    "missing sum", mesh=SHARD_TP, make=from_step({"w": torch.ones(8)}, over_both_axes, batch={"x": torch.ones(3, 8)})
)
def loss_reduced_over_one_axis_of_the_batch(state, x):
    """Ranks of `tp` compute the same loss of leaves that are gathered over both axes, and nobody says so."""

    def loss_fn(params):
        loss = (x * fs.gather(params)["w"]).square().sum()  # <- here
        return loss  # <- here

    run = fs.value_and_grad(loss_fn, reduce_over="shard")  # right: run = fs.value_and_grad(loss_fn)
    loss, grads = run(state.params)
    return fs.update(TX, state, grads), loss


@mistake("refused", "missing sum", mesh=SHARD_TP, make=from_step(FULL, over_both_axes))
def gradients_over_an_axis_that_leaves_are_not_on(state):
    over = ("shard", "cp")  # right: over = ("shard", "tp")
    loss, grads = fs.value_and_grad(squares, reduce_over=over)(state.params)  # <- here
    return state._replace(params=fs.tree_map(lambda p, g: p - 0.1 * g, state.params, grads)), loss


@mistake("refused", "missing cast", make=from_loss(FULL, large))
def whole_leaf_in_one_that_is_split(params, axis):
    scale = params["b"].local.sum()  # right: scale = fs.gather(params)["b"].sum()
    merged = fs.tree_map(lambda w: w * scale, params["w"])  # <- here
    return fs.gather(merged).square().sum()


@mistake("refused", "missing cast", make=from_loss(FULL, large))
def sum_that_agrees_in_a_leaf_that_is_split(params, axis):
    total = fs.psum_invariant(params["w"].local.square().sum(), axis)  # <- here
    # right: total = fs.pcast(total, axis, to="varying")
    merged = fs.tree_map(lambda w: w / total, params["w"])  # <- here
    return fs.gather(merged).square().sum()


@mistake("refused", "missing sum", make=from_loss(FULL, large))
def split_leaf_in_one_that_is_whole(params, axis):
    part = params["w"].local.sum()  # right: part = fs.psum_invariant(params["w"].local.sum(), axis)
    merged = fs.tree_map(lambda b: b * part, params["b"])  # <- here
    return fs.gather(merged).square().sum()


@mistake("refused", "missing cast", "doubled sum", make=from_loss(FULL, large))
def sum_of_a_whole_leaf(params, axis):
    total = fs.psum_invariant(params["b"].local.sum(), axis)  # <- here; right: total = params["b"].local.sum()
    merged = fs.tree_map(lambda b: b / total, params["b"])
    return fs.gather(merged).square().sum()


@mistake("superfluous cast", make=from_loss(FULL))
def cast_of_a_collective_of_ones_own(params, axis):
    w = cubes(fs.gather(params)["w"], axis, plain=False)
    w = fs.pcast(w, axis, to="varying")  # <- here; right: pass
    return w.sum()
