"""Losses that mix values that vary and values that agree: those that the tests of collectives plant."""

import torch

import fshard as fs
from tests.ext.check.mistakes import SHARD_TP, mistake
from tests.ext.check.programs import LAYER, WIDTH, X, parallel, split, state_of, train
from tests.ext.parallel.test_custom_call import cubes

FULL = {"w": torch.ones(8, 3), "b": torch.ones(5)}


def large(mesh):
    """ZeRO-3 of the leaf "w"; "b" is whole."""
    return fs.zero3(mesh, min_shard_elements=6)


def squares(params):
    full = fs.gather(params)
    return full["w"].square().sum() + full["b"].square().sum()


@mistake("refused", "doubled sum")
def objective_in_a_loss(mesh):
    def loss_fn(params):
        loss = squares(params)
        return fs.objective(loss, like=params)  # <- here; right: return loss

    return train(loss_fn), state_of(FULL, large(mesh))


@mistake("refused", "doubled sum")
def objective_in_a_loss_of_ddp(mesh):
    def loss_fn(params):
        loss = squares(params)
        loss = fs.objective(loss, like=params)  # <- here; right: pass
        return 2 * loss

    return train(loss_fn), state_of(FULL, fs.ddp(mesh))


@mistake("refused", "doubled sum")
def sum_in_a_loss(mesh):
    def loss_fn(params, axis):
        loss = fs.psum_invariant(squares(params), axis)  # <- here; right: loss = squares(params)
        return 0.5 * loss / 2 + 1

    return train(loss_fn, reduce="sum"), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("refused", "doubled sum")
def sum_of_a_weighted_loss(mesh):
    def loss_fn(params, axis):
        total = fs.psum_invariant(squares(params), axis)  # <- here; right: total = squares(params)
        return total, torch.tensor(2)

    return train(loss_fn, reduce="weighted"), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("refused", "missing cast")
def math_on_a_leaf_of_ddp(mesh):
    def loss_fn(params, x):
        bias = params["b"].local  # right: bias = fs.gather(params)["b"]
        return squares(params) + (x * bias).sum()  # <- here

    return train(loss_fn), state_of(FULL, fs.ddp(mesh)), torch.ones(4, 5)


@mistake("refused", "missing cast")
def math_on_a_replicated_leaf(mesh):
    def loss_fn(params, x, axis):
        bias = params["b"].local  # right: bias = fs.pcast(params["b"].local, axis, to="varying")
        return squares(params) + (x * bias).sum()  # <- here

    return train(loss_fn), state_of(FULL, large(mesh)), torch.ones(4, 5), fs.axis_of(mesh)


@mistake("refused", "missing cast")
def psum_invariant_of_a_replicated_leaf(mesh):
    def loss_fn(params, axis):
        bias = fs.psum_invariant({"b": params["b"]}, axis)  # <- here; right: bias = {"b": params["b"]}
        return squares(params) + fs.gather(bias)["b"].sum()

    return train(loss_fn), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("refused", "missing cast")
def pmean_of_a_replicated_leaf(mesh):
    def loss_fn(params, axis):
        bias = fs.pmean({"b": params["b"]}, axis)  # <- here; right: bias = {"b": params["b"]}
        return squares(params) + fs.gather(bias)["b"].sum()

    return train(loss_fn), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("refused", "superfluous cast")
def pcast_of_a_split_leaf(mesh):
    def loss_fn(params, axis):
        w = fs.pcast({"w": params["w"]}, axis, to="varying")  # <- here; right: w = fs.gather({"w": params["w"]})
        return squares(params) + sum(leaf.sum() for leaf in fs.tree_leaves(w))

    return train(loss_fn), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("missing sum", mesh=SHARD_TP)
def loss_that_differs_over_tp(mesh):
    """A loss of columns that nobody sums over the axis that splits them."""

    def loss_fn(params, tp):
        w = fs.gather(params)["w"]
        return w.square().sum()  # <- here; right: return fs.psum_invariant(w.square().sum(), tp)

    strategy = fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["tp"], dim=1))
    return train(loss_fn), state_of({"w": torch.ones(8, 4)}, strategy), fs.axis_of(mesh["tp"])


@mistake("missing cast", mesh=SHARD_TP)
def layer_without_a_cast(mesh):
    def loss_fn(params, x, tp):
        full = fs.gather(params)
        x = x * full["norm"]  # right: x = fs.pcast(x * full["norm"], tp, to="varying")
        hidden = torch.relu(x @ full["up"].T)  # <- here
        x = fs.psum_invariant(hidden @ full["down"].T, tp)
        return ((x * full["norm"]) @ full["head"].T).square().mean()

    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, fs.axis_of(mesh["tp"])


@mistake("missing sum", mesh=SHARD_TP)
def layer_with_psum(mesh):
    def loss_fn(params, x, tp):
        full = fs.gather(params)
        x = fs.pcast(x * full["norm"], tp, to="varying")
        hidden = torch.relu(x @ full["up"].T) @ full["down"].T
        x = fs.psum(hidden, tp)  # <- here; right: x = fs.psum_invariant(hidden, tp)
        return ((x * full["norm"]) @ full["head"].T).square().mean()

    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, fs.axis_of(mesh["tp"])


@mistake("missing sum", mesh=SHARD_TP)
def layer_without_a_sum(mesh):
    def loss_fn(params, x, tp):
        full = fs.gather(params)
        x = fs.pcast(x * full["norm"], tp, to="varying")
        hidden = torch.relu(x @ full["up"].T)
        x = hidden @ full["down"].T  # <- here; right: x = fs.psum_invariant(hidden @ full["down"].T, tp)
        return ((x * full["norm"]) @ full["head"].T).square().mean()  # <- here

    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, fs.axis_of(mesh["tp"])


@mistake("missing sum", mesh=SHARD_TP)
def sum_that_is_missing(mesh):
    def loss_fn(params, tp):
        x = fs.gather(params)["up"] @ torch.ones(WIDTH)
        x = torch.relu(x)
        return x.sum()  # <- here; right: return fs.psum_invariant(x.sum(), tp)

    return train(loss_fn), state_of(LAYER, parallel(mesh)), fs.axis_of(mesh["tp"])


@mistake("superfluous cast", "missing sum", mesh=SHARD_TP)
def sum_that_is_missing_before_a_cast(mesh):
    def loss_fn(params, tp):
        x = fs.gather(params)["up"].sum()
        x = fs.pcast(x, tp, to="varying")  # <- here; right: pass
        return fs.psum_invariant(x, tp)

    return train(loss_fn), state_of(LAYER, parallel(mesh)), fs.axis_of(mesh["tp"])


@mistake("refused", "doubled sum", mesh=SHARD_TP)
def sum_over_the_axis_of_the_batch(mesh):
    def loss_fn(params, shard):
        loss = fs.gather(params)["norm"].sum()
        return fs.psum_invariant(loss, shard)  # <- here; right: return loss

    return train(loss_fn), state_of(LAYER, parallel(mesh)), fs.axis_of(mesh["shard"])


@mistake("refused", "missing cast", mesh=SHARD_TP)
def math_on_a_whole_leaf(mesh):
    def loss_fn(params):
        norm = params["norm"].local  # right: norm = fs.gather(params)["norm"]
        return norm.sum()  # <- here

    return train(loss_fn), state_of(LAYER, parallel(mesh))


@mistake("missing cast", "doubled sum", mesh=SHARD_TP)
def psum_of_what_agrees(mesh):
    def loss_fn(params, tp):
        norm = fs.gather(params)["norm"]
        return fs.psum(norm.sum(), tp)  # <- here; right: return norm.sum()

    return train(loss_fn), state_of(LAYER, parallel(mesh)), fs.axis_of(mesh["tp"])


@mistake("missing sum", mesh={"tp": 8})
def psum_where_ranks_share_a_loss(mesh):
    def loss_fn(params, tp):
        total = fs.gather(params)["w"].sum()
        return fs.psum(total, tp)  # <- here; right: return fs.psum_invariant(total, tp)

    return train(loss_fn), state_of({"w": torch.ones(8)}, fs.split_dim(mesh["tp"], dim=0)), fs.axis_of(mesh)


@mistake("superfluous cast")
def cast_of_a_permuted_value(mesh):
    def loss_fn(params, axis):
        w = fs.ppermute(fs.gather(params)["w"], axis, [(0, 1)])
        w = fs.pcast(w, axis, to="varying")  # <- here; right: pass
        return w.sum()

    return train(loss_fn), state_of(FULL, split(mesh)), fs.axis_of(mesh)


@mistake("superfluous cast")
def cast_of_exchanged_rows(mesh):
    def loss_fn(params, axis):
        w = fs.all_to_all(fs.gather(params)["w"], axis, 0, 0)
        w = fs.pcast(w, axis, to="varying")  # <- here; right: pass
        return w.sum()

    return train(loss_fn), state_of(FULL, split(mesh)), fs.axis_of(mesh)


@mistake("superfluous cast")
def cast_of_ragged_rows(mesh):
    def loss_fn(params, axis):
        w = fs.ragged_all_to_all(fs.gather(params)["w"], axis, [1] * axis.size, [1] * axis.size)
        w = fs.pcast(w, axis, to="varying")  # <- here; right: pass
        return w.sum()

    return train(loss_fn), state_of(FULL, split(mesh)), fs.axis_of(mesh)


@mistake("missing cast")
def broadcast_without_a_cast(mesh):
    def loss_fn(params, axis):
        w = fs.broadcast(fs.gather(params)["w"], axis)
        return w.sum()  # <- here; right: return fs.pcast(w, axis, to="varying").sum()

    return train(loss_fn), state_of(FULL, split(mesh)), fs.axis_of(mesh)


@mistake("missing sum", mesh=SHARD_TP)
def loss_reduced_over_one_axis_of_the_batch(mesh):
    """Ranks of `tp` compute the same loss of leaves that are gathered over both axes, and nobody says so."""

    def loss_fn(params, x):
        loss = (x * fs.gather(params)["w"]).square().sum()  # <- here
        return loss  # <- here

    strategy = fs.zero3(mesh, axis=("shard", "tp"), min_shard_elements=0)
    step = train(loss_fn, reduce_over="shard")  # right: step = train(loss_fn)
    return step, state_of({"w": torch.ones(8)}, strategy), torch.ones(3, 8)


@mistake("refused", "missing sum", mesh=SHARD_TP)
def gradients_over_an_axis_that_leaves_are_not_on(mesh):
    def step(state):
        over = ("shard", "cp")  # right: over = ("shard", "tp")
        loss, grads = fs.value_and_grad(squares, reduce_over=over)(state.params)  # <- here
        return state._replace(params=fs.tree_map(lambda p, g: p - 0.1 * g, state.params, grads)), loss

    return step, state_of(FULL, fs.zero3(mesh, axis=("shard", "tp"), min_shard_elements=0))


@mistake("refused", "missing cast")
def whole_leaf_in_one_that_is_split(mesh):
    def loss_fn(params, axis):
        scale = params["b"].local.sum()  # right: scale = fs.gather(params)["b"].sum()
        merged = fs.tree_map(lambda w: w * scale, params["w"])  # <- here
        return fs.gather(merged).square().sum()

    return train(loss_fn), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("refused", "missing cast")
def sum_that_agrees_in_a_leaf_that_is_split(mesh):
    def loss_fn(params, axis):
        total = fs.psum_invariant(params["w"].local.square().sum(), axis)  # <- here
        # right: total = fs.pcast(total, axis, to="varying")
        merged = fs.tree_map(lambda w: w / total, params["w"])  # <- here
        return fs.gather(merged).square().sum()

    return train(loss_fn), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("refused", "missing sum")
def split_leaf_in_one_that_is_whole(mesh):
    def loss_fn(params, axis):
        part = params["w"].local.sum()  # right: part = fs.psum_invariant(params["w"].local.sum(), axis)
        merged = fs.tree_map(lambda b: b * part, params["b"])  # <- here
        return fs.gather(merged).square().sum()

    return train(loss_fn), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("refused", "missing cast", "doubled sum")
def sum_of_a_whole_leaf(mesh):
    def loss_fn(params, axis):
        total = fs.psum_invariant(params["b"].local.sum(), axis)  # <- here; right: total = params["b"].local.sum()
        merged = fs.tree_map(lambda b: b / total, params["b"])
        return fs.gather(merged).square().sum()

    return train(loss_fn), state_of(FULL, large(mesh)), fs.axis_of(mesh)


@mistake("superfluous cast")
def cast_of_a_collective_of_ones_own(mesh):
    def loss_fn(params, axis):
        w = cubes(fs.gather(params)["w"], axis, plain=False)
        w = fs.pcast(w, axis, to="varying")  # <- here; right: pass
        return w.sum()

    return train(loss_fn), state_of(FULL, split(mesh)), fs.axis_of(mesh)
