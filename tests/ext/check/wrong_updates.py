"""Updates that are wrong as users make them: factors of ranks, norms of parts, and decisions that each rank makes."""

import torch
import torch.nn.functional as F

import fshard as fs
from tests.ext.check.mistakes import mistake
from tests.ext.check.programs import CLASSES, TX, WIDTH, X, Y, split, state_of

FULL = {"w": torch.ones(WIDTH, CLASSES), "b": torch.ones(CLASSES)}
MICROBATCHES = 3


def loss_fn(params, x, y):
    full = fs.gather(params)
    return F.cross_entropy(x @ full["w"] + full["b"], y)


def gradient_of(params, *batch):
    return fs.value_and_grad(loss_fn)(params, *batch)


@mistake("number of ranks")
def rate_divided_by_ranks(mesh):
    def step(state, x, y, axis):
        loss, grads = gradient_of(state.params, x, y)
        rate = 0.1 / axis.size  # right: rate = 0.1
        params = fs.tree_map(lambda p, g: p - rate * g, state.params, grads)  # <- here
        return state._replace(step=state.step + 1, params=params), loss

    return step, state_of(FULL, split(mesh)), X, Y, fs.axis_of(mesh)


@mistake("number of ranks")
def decay_divided_by_ranks(mesh):
    def step(state, x, y, axis):
        loss, grads = gradient_of(state.params, x, y)
        decay = 0.01 / axis.size  # right: decay = 0.01
        grads = fs.tree_map(lambda g, p: g + decay * p, grads, state.params)  # <- here
        return fs.update(TX, state, grads), loss

    return step, state_of(FULL, split(mesh)), X, Y, fs.axis_of(mesh)


@mistake("number of ranks")
def accumulation_divided_by_ranks_too(mesh):
    def step(state, x, y, axis):
        count = MICROBATCHES * axis.size  # right: count = MICROBATCHES
        total = fs.tree_map(torch.zeros_like, state.params)
        for xs, ys in zip(x, y, strict=True):
            loss, grads = gradient_of(state.params, xs, ys)
            total = fs.tree_map(lambda t, g: t + g / count, total, grads)  # <- here
        return fs.update(TX, state, total), loss

    batch = X.expand(MICROBATCHES, -1, -1), Y.expand(MICROBATCHES, -1)
    return step, state_of(FULL, split(mesh)), *batch, fs.axis_of(mesh)


@mistake("missing sum")
def clipping_by_the_norm_of_shards(mesh):
    def step(state, x, y, axis):
        loss, grads = gradient_of(state.params, x, y)
        square = sum(grad.local.square().sum() for grad in grads.values())
        # right: square = fs.psum_invariant(square, axis)
        norm = square.sqrt()  # <- here
        grads = fs.tree_map(lambda g: g * (1 / norm).clamp(max=1.0), grads)  # <- here
        return fs.update(TX, state, grads), loss

    return step, state_of(FULL, split(mesh)), X, Y, fs.axis_of(mesh)


@mistake(
    "missing sum",
    missed="Private and federated training clip what each client has, which may be a rank.",
)
def clipping_before_the_reduction(mesh):
    """Each rank clips the gradient of its own batch."""

    def step(state, x, y):
        full = fs.gather(state.params)
        grads, loss = torch.func.grad_and_value(loss_fn)(full, x, y)
        # right: grads = fs.scatter_grads(grads, like=state.params, reduce="mean")
        squares = [grad.square().sum() for grad in grads.values()]  # right: pass
        norm = torch.stack(squares).sum().sqrt()  # <- here; right: norm = fs.global_norm(grads)
        grads = fs.tree_map(lambda g: g * (1 / norm).clamp(max=1.0), grads)  # <- here
        grads = fs.scatter_grads(grads, like=state.params, reduce="mean")  # right: pass
        return fs.update(TX, state, grads), fs.objective(loss, like=state.params)

    return step, state_of(FULL, split(mesh)), X, Y


@mistake("buffer differs", "missing sum")
def step_skipped_by_each_rank(mesh):
    def step(state, x, y, axis):
        loss, grads = gradient_of(state.params, x, y)
        is_finite = torch.stack([grad.local.isfinite().all() for grad in grads.values()]).all()
        # right: is_finite = fs.pmax((~is_finite).float(), axis) == 0
        after = fs.update(TX, state, grads)
        state = fs.tree_map(lambda new, old: torch.where(is_finite, new, old), after, state)  # <- here
        return state, loss

    return step, state_of(FULL, split(mesh)), X, Y, fs.axis_of(mesh)


@mistake("doubled sum")
def gradients_averaged_again(mesh):
    """As after a backward of which nothing is reduced; it averages the shards of ranks."""

    def step(state, x, y, axis):
        loss, grads = gradient_of(state.params, x, y)
        grads = fs.tree_map(lambda g: fs.pmean(g, axis), grads)  # <- here; right: pass
        return fs.update(TX, state, grads), loss

    return step, state_of(FULL, split(mesh)), X, Y, fs.axis_of(mesh)


@mistake("buffer differs", "missing sum")
def gradient_of_one_rank(mesh):
    """Under DDP, whose leaves are whole on every rank."""

    def step(state, x, y, axis):
        full = fs.gather(state.params)
        grads, loss = torch.func.grad_and_value(loss_fn)(full, x, y)
        # right: grads = fs.tree_map(lambda g: fs.psum_invariant(g, axis) / axis.size, grads)
        params = {name: fs.Sharded(p.local - 0.1 * grads[name], p.spec) for name, p in state.params.items()}  # <- here
        return state._replace(step=state.step + 1, params=params), fs.objective(loss, like=state.params)

    return step, state_of(FULL, fs.ddp(mesh)), X, Y, fs.axis_of(mesh)


@mistake("unused batch")
def microbatch_that_is_forgotten(mesh):
    def step(state, batches):  # <- here
        batches = batches[:-1]  # <- here; right: pass
        loss, grads = fs.accumulate(lambda p, b: loss_fn(p, *b))(state.params, batches)  # <- here
        return fs.update(TX, state, grads), loss

    return step, state_of(FULL, split(mesh)), [(X, Y)] * MICROBATCHES


@mistake("unused batch")
def microbatch_that_is_used_twice(mesh):
    def step(state, batches):  # <- here
        total = fs.tree_map(torch.zeros_like, state.params)
        for number in range(len(batches)):
            batch = batches[0 * number]  # <- here; right: batch = batches[number]
            loss, grads = gradient_of(state.params, *batch)  # <- here
            total = fs.tree_map(lambda t, g: t + g / MICROBATCHES, total, grads)
        return fs.update(TX, state, total), loss

    return step, state_of(FULL, split(mesh)), [(X + number, Y) for number in range(MICROBATCHES)]


@mistake("unused batch")
def weights_that_are_forgotten(mesh):
    def step(state, x, y, weights):  # <- here
        def loss_of_rows(params):
            full = fs.gather(params)
            losses = F.cross_entropy(x @ full["w"], y, reduction="none")
            return losses.mean()  # <- here; right: return (losses * weights).mean()

        loss, grads = fs.value_and_grad(loss_of_rows)(state.params)  # <- here
        return fs.update(TX, state, grads), loss

    return step, state_of(FULL, split(mesh)), X, Y, torch.ones(len(Y))


@mistake("buffer differs", "rank's own number")
def noise_that_differs_on_replicated_leaves(mesh):
    """Noise is added after each update; under DDP parameters of ranks drift apart."""

    def step(state, x, y, axis):
        loss, grads = gradient_of(state.params, x, y)
        state = fs.update(TX, state, grads)
        key = fs.fold_in(state.key, state.step)
        key = fs.fold_in(key, axis)  # <- here; right: pass
        noise = (fs.fold_in(key, torch.arange(CLASSES)) & 255) / 255  # <- here
        b = fs.tree_map(lambda b: b + 1e-3 * noise, state.params["b"])  # <- here
        return state._replace(params=state.params | {"b": b}), loss

    return step, state_of(FULL, fs.ddp(mesh), key=0), X, Y, fs.axis_of(mesh)


@mistake("buffer differs", "missing sum")
def loss_scale_of_each_rank(mesh):
    def step(state, x, y, axis):
        scale = state.buffers["scale"]
        loss, grads = fs.value_and_grad(lambda p: scale * loss_fn(p, x, y))(state.params)
        grads = fs.tree_map(lambda g: g / scale, grads)
        overflows = ~torch.stack([grad.local.isfinite().all() for grad in grads.values()]).all()
        # right: overflows = fs.pmax(overflows.float(), axis) > 0
        scale = torch.where(overflows, scale / 2, scale * 1.001)  # <- here
        return fs.update(TX, state, grads)._replace(buffers={"scale": scale}), loss / state.buffers["scale"]

    return step, state_of(FULL, split(mesh), buffers={"scale": torch.ones(())}), X, Y, fs.axis_of(mesh)
