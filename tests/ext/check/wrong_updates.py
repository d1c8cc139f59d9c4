"""Updates that are wrong as users make them: factors of ranks, norms of parts, and decisions that each rank makes."""

import torch
import torch.nn.functional as F

import fshard as fs
from tests.ext.check.mistakes import mistake
from tests.ext.check.programs import CLASSES, TX, WIDTH, X, Y, from_step

FULL = {"w": torch.ones(WIDTH, CLASSES), "b": torch.ones(CLASSES)}
MICROBATCHES = 3
BATCHES = [(X + number, Y) for number in range(MICROBATCHES)]


def loss_fn(params, x, y):
    full = fs.gather(params)
    return F.cross_entropy(x @ full["w"] + full["b"], y)


def gradient_of(params, *batch):
    return fs.value_and_grad(loss_fn)(params, *batch)


@mistake("number of ranks", make=from_step(FULL))
def rate_divided_by_ranks(state, x, y, axis):
    loss, grads = gradient_of(state.params, x, y)
    rate = 0.1 / axis.size  # right: rate = 0.1
    params = fs.tree_map(lambda p, g: p - rate * g, state.params, grads)  # <- here
    return state._replace(step=state.step + 1, params=params), loss


@mistake("number of ranks", make=from_step(FULL))
def decay_divided_by_ranks(state, x, y, axis):
    loss, grads = gradient_of(state.params, x, y)
    decay = 0.01 / axis.size  # right: decay = 0.01
    grads = fs.tree_map(lambda g, p: g + decay * p, grads, state.params)  # <- here
    return fs.update(TX, state, grads), loss


@mistake(
    "number of ranks",
    make=from_step(FULL, batch={"x": X.expand(MICROBATCHES, -1, -1), "y": Y.expand(MICROBATCHES, -1)}),
)
def accumulation_divided_by_ranks_too(state, x, y, axis):
    count = MICROBATCHES * axis.size  # right: count = MICROBATCHES
    total = fs.tree_map(torch.zeros_like, state.params)
    for xs, ys in zip(x, y, strict=True):
        loss, grads = gradient_of(state.params, xs, ys)
        total = fs.tree_map(lambda t, g: t + g / count, total, grads)  # <- here
    return fs.update(TX, state, total), loss


@mistake("missing sum", make=from_step(FULL))
def clipping_by_the_norm_of_shards(state, x, y, axis):
    loss, grads = gradient_of(state.params, x, y)
    square = sum(grad.local.square().sum() for grad in grads.values())
    # right: square = fs.psum_invariant(square, axis)
    norm = square.sqrt()  # <- here
    grads = fs.tree_map(lambda g: g * (1 / norm).clamp(max=1.0), grads)  # <- here
    return fs.update(TX, state, grads), loss


@mistake(
    "missing sum",
    missed="Private and federated training clip what each client has, which may be a rank.",
    make=from_step(FULL),
)
def clipping_before_the_reduction(state, x, y):
    """Each rank clips the gradient of its own batch."""
    full = fs.gather(state.params)
    grads, loss = torch.func.grad_and_value(loss_fn)(full, x, y)
    # right: grads = fs.scatter_grads(grads, like=state.params, reduce="mean")
    squares = [grad.square().sum() for grad in grads.values()]  # right: pass
    norm = torch.stack(squares).sum().sqrt()  # <- here; right: norm = fs.global_norm(grads)
    grads = fs.tree_map(lambda g: g * (1 / norm).clamp(max=1.0), grads)  # <- here
    grads = fs.scatter_grads(grads, like=state.params, reduce="mean")  # right: pass
    return fs.update(TX, state, grads), fs.objective(loss, like=state.params)


@mistake("buffer differs", "missing sum", make=from_step(FULL))
def step_skipped_by_each_rank(state, x, y, axis):
    loss, grads = gradient_of(state.params, x, y)
    is_finite = torch.stack([grad.local.isfinite().all() for grad in grads.values()]).all()
    # right: is_finite = fs.pmax((~is_finite).float(), axis) == 0
    after = fs.update(TX, state, grads)
    state = fs.tree_map(lambda new, old: torch.where(is_finite, new, old), after, state)  # <- here
    return state, loss


@mistake("doubled sum", make=from_step(FULL))
def gradients_averaged_again(state, x, y, axis):
    """As after a backward of which nothing is reduced; it averages the shards of ranks."""
    loss, grads = gradient_of(state.params, x, y)
    grads = fs.tree_map(lambda g: fs.pmean(g, axis), grads)  # <- here; right: pass
    return fs.update(TX, state, grads), loss


@mistake("buffer differs", "missing sum", make=from_step(FULL, fs.ddp))
def gradient_of_one_rank(state, x, y, axis):
    """Under DDP, whose leaves are whole on every rank."""
    full = fs.gather(state.params)
    grads, loss = torch.func.grad_and_value(loss_fn)(full, x, y)
    # right: grads = fs.tree_map(lambda g: fs.psum_invariant(g, axis) / axis.size, grads)
    params = {name: fs.Sharded(p.local - 0.1 * grads[name], p.spec) for name, p in state.params.items()}  # <- here
    return state._replace(step=state.step + 1, params=params), fs.objective(loss, like=state.params)


@mistake("unused batch", make=from_step(FULL, batch={"batches": BATCHES}))  # <- here
def microbatch_that_is_forgotten(state, batches):
    batches = batches[:-1]  # <- here; right: pass
    loss, grads = fs.accumulate(lambda p, b: loss_fn(p, *b))(state.params, batches)  # <- here
    return fs.update(TX, state, grads), loss


@mistake("unused batch", make=from_step(FULL, batch={"batches": BATCHES}))  # <- here
def microbatch_that_is_used_twice(state, batches):
    total = fs.tree_map(torch.zeros_like, state.params)
    for number in range(len(batches)):
        batch = batches[0 * number]  # <- here; right: batch = batches[number]
        loss, grads = gradient_of(state.params, *batch)  # <- here
        total = fs.tree_map(lambda t, g: t + g / MICROBATCHES, total, grads)
    return fs.update(TX, state, total), loss


@mistake("unused batch", make=from_step(FULL))  # <- here
def weights_that_are_forgotten(state, x, y, weights):
    def loss_of_rows(params):
        full = fs.gather(params)
        losses = F.cross_entropy(x @ full["w"], y, reduction="none")
        return losses.mean()  # <- here; right: return (losses * weights).mean()

    loss, grads = fs.value_and_grad(loss_of_rows)(state.params)  # <- here
    return fs.update(TX, state, grads), loss


@mistake("buffer differs", "rank's own number", make=from_step(FULL, fs.ddp, key=0))
def noise_that_differs_on_replicated_leaves(state, x, y, axis):
    """Noise is added after each update; under DDP parameters of ranks drift apart."""
    loss, grads = gradient_of(state.params, x, y)
    state = fs.update(TX, state, grads)
    key = fs.fold_in(state.key, state.step)
    key = fs.fold_in(key, axis)  # <- here; right: pass
    noise = (fs.fold_in(key, torch.arange(CLASSES)) & 255) / 255  # <- here
    b = fs.tree_map(lambda b: b + 1e-3 * noise, state.params["b"])  # <- here
    return state._replace(params=state.params | {"b": b}), loss


@mistake("buffer differs", "missing sum", make=from_step(FULL, buffers={"scale": torch.ones(())}))
def loss_scale_of_each_rank(state, x, y, axis):
    scale = state.buffers["scale"]
    loss, grads = fs.value_and_grad(lambda p: scale * loss_fn(p, x, y))(state.params)
    grads = fs.tree_map(lambda g: g / scale, grads)
    overflows = ~torch.stack([grad.local.isfinite().all() for grad in grads.values()]).all()
    # right: overflows = fs.pmax(overflows.float(), axis) > 0
    scale = torch.where(overflows, scale / 2, scale * 1.001)  # <- here
    return fs.update(TX, state, grads)._replace(buffers={"scale": scale}), loss / state.buffers["scale"]
