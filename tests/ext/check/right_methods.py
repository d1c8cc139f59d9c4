"""Steps of methods of training, without a mistake: contrast, GANs, penalties, codebooks, policies."""

from functools import partial

import torch
import torch.nn.functional as F

import fshard as fs
from tests.ext.check.programs import (
    HIDDEN,
    HYBRID,
    NETWORK,
    ONES,
    TX,
    WIDTH,
    X,
    Y,
    forward,
    from_loss,
    from_step,
    split,
)
from tests.ext.check.right_steps import Right


@from_step(
    {"a": NETWORK["w"], "b": NETWORK["w"], "scale": torch.tensor(2.0)},
    partial(fs.zero3, min_shard_elements=2),
    batch={"images": X, "texts": X + 1},
)
def clip(state, images, texts, axis):
    """CLIP: two towers, a temperature that is learned, rows of all ranks, both ways."""

    def loss_of(params):
        full = fs.gather(params)
        a = F.normalize(images @ full["a"], dim=-1)
        b = F.normalize(texts @ full["b"], dim=-1)
        every_a, every_b = fs.all_gather(a, axis), fs.all_gather(b, axis)
        scale = full["scale"].exp()
        labels = torch.arange(len(a)) + fs.axis_index(axis) * len(a)
        return (F.cross_entropy(scale * a @ every_b.T, labels) + F.cross_entropy(scale * b @ every_a.T, labels)) / 2

    loss, grads = fs.value_and_grad(loss_of)(state.params)
    params = fs.update(TX, state, grads)
    return params, {"loss": loss, "scale": fs.gather(params.params)["scale"].exp()}


@from_loss({"w": NETWORK["w"]})
def whole_batch(params, x, axis):
    """Each rank computes the loss of the rows of all ranks."""
    rows = fs.all_gather(F.normalize(x @ fs.gather(params)["w"], dim=-1), axis)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def adversarial(mesh):
    """GAN: two networks, two optimizers, and a penalty at points that each rank draws for itself."""
    of_generator, of_critic = fs.adamw(1e-4), fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(4e-4))

    def step(state, real, noise, axis):
        generator, critic = state
        key = fs.fold_in(fs.fold_in(critic.key, critic.step), axis)

        def make(full):
            return torch.tanh(noise @ full["w"])

        def loss_of_critic(params):
            full = fs.gather(params)
            fake = make(fs.gather(generator.params)).detach()
            share = (fs.fold_in(key, torch.arange(len(real))) & 255).float()[:, None] / 255
            points = share * real + (1 - share) * fake
            points = points.requires_grad_()
            (slopes,) = torch.autograd.grad(forward(full, points).sum(), points, create_graph=True)
            penalty = (slopes.norm(dim=1) - 1).square().mean()
            return forward(full, fake).mean() - forward(full, real).mean() + 10 * penalty

        loss, grads = fs.value_and_grad(loss_of_critic)(critic.params)
        critic = fs.update(of_critic, critic, grads)

        def loss_of_generator(params):
            return -forward(fs.gather(critic.params), make(fs.gather(params))).mean()

        other_loss, grads = fs.value_and_grad(loss_of_generator)(generator.params)
        generator = fs.update(of_generator, generator, grads)
        return (generator, critic), {"critic": loss, "generator": other_loss}

    generator = fs.TrainState.create(fs.shard({"w": torch.ones(WIDTH, WIDTH)}, split(mesh)), of_generator)
    critic = fs.TrainState.create(fs.shard(NETWORK, split(mesh)), of_critic, key=0)
    return step, (generator, critic), X, X + 1, fs.axis_of(mesh)


@from_step(
    NETWORK,
    partial(fs.hsdp, min_shard_elements=0),
    buffers={"mean": torch.zeros(HIDDEN), "variance": torch.ones(HIDDEN)},
)
def normalized_over_two_axes(state, x, y, replicate, shard):
    """BatchNorm of the rows of all ranks of a grid, by sums and counts."""

    def total(value):
        return fs.psum(fs.psum(value, shard), replicate)

    def loss_of(params):
        full = fs.gather(params)
        out = x @ full["w"]
        count = total(torch.tensor(float(len(x))))
        mean = total(out.sum(0)) / count
        variance = total(out.square().sum(0)) / count - mean.square()
        out = (out - mean) * (variance + 1e-5).rsqrt() + full["b"]
        return F.cross_entropy(out @ full["head"], y), (mean.detach(), variance.detach())

    (loss, (mean, variance)), grads = fs.value_and_grad(loss_of, has_aux=True)(state.params)
    buffers = {
        "mean": 0.9 * state.buffers["mean"] + 0.1 * mean,
        "variance": 0.9 * state.buffers["variance"] + 0.1 * variance,
    }
    return fs.update(TX, state, grads)._replace(buffers=buffers), loss


@from_step(
    {"w": NETWORK["w"]},
    buffers={"counts": torch.ones(3), "totals": torch.ones(3, HIDDEN), "codes": torch.ones(3, HIDDEN)},
)
def codebook(state, x, axis):
    """VQ-VAE, whose codebook is an average over the rows of all ranks."""
    codes = state.buffers["codes"]

    def loss_of(params):
        rows = x @ fs.gather(params)["w"]
        number = torch.cdist(rows, codes).argmin(-1)
        nearest = codes[number]
        through = rows + (nearest - rows).detach()
        return (through.square().mean() + 0.25 * (rows - nearest).square().mean()), (rows.detach(), number)

    (loss, (rows, number)), grads = fs.value_and_grad(loss_of, has_aux=True)(state.params)
    chosen = F.one_hot(number, len(codes)).float()
    counts = fs.psum(chosen.sum(0), axis)
    sums = fs.psum(chosen.T @ rows, axis)
    counts = 0.99 * state.buffers["counts"] + 0.01 * counts
    totals = 0.99 * state.buffers["totals"] + 0.01 * sums
    buffers = {"counts": counts, "totals": totals, "codes": totals / (counts[:, None] + 1e-5)}
    return fs.update(TX, state, grads)._replace(buffers=buffers), {"loss": loss, "used": (counts > 0.1).sum()}


@from_loss({"w": NETWORK["w"]})
def twins(params, one, other, axis):
    """Barlow Twins: a matrix of correlations over the rows of all ranks."""
    w = fs.gather(params)["w"]

    def normalize(rows):
        mean = fs.pmean(rows.mean(0), axis)
        variance = fs.pmean((rows - mean).square().mean(0), axis)
        return (rows - mean) / (variance + 1e-5).sqrt()

    matrix = fs.pmean(normalize(one @ w).T @ normalize(other @ w) / len(one), axis)
    diagonal = torch.diagonal(matrix)
    return (1 - diagonal).square().sum() + 5e-3 * (matrix.square().sum() - diagonal.square().sum())


@from_step(NETWORK, batch={"actions": Y, "logs": ONES, "advantages": ONES})
def policy(state, x, actions, logs, advantages, axis):
    """PPO: advantages are normalized over all ranks, and an update is skipped if policies are too far apart."""
    mean = fs.pmean(advantages.mean(), axis)
    deviation = fs.pmean((advantages - mean).square().mean(), axis).sqrt()
    advantages = (advantages - mean) / (deviation + 1e-8)

    def loss_of(params):
        new = forward(fs.gather(params), x).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        ratio = (new - logs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * advantages, clipped * advantages).mean(), (logs - new).detach().mean()

    (loss, distance), grads = fs.value_and_grad(loss_of, has_aux=True)(state.params)
    distance = fs.pmean(distance, axis)
    after = fs.update(TX, state, grads)
    after = fs.tree_map(lambda new, old: torch.where(distance < 0.01, new, old), after, state)
    return after, {"loss": loss, "distance": distance}


@from_step(
    {name: leaf.expand(8, *leaf.shape) for name, leaf in NETWORK.items()},
    lambda mesh: fs.zero3(mesh, layout=fs.own_dim(mesh["shard"])),
)
def own_members(state, x, y, axis):
    """Each rank trains a member of its own, and reports the mean of the losses of all."""

    def loss_of(params):
        own = {name: stacked[0] for name, stacked in fs.gather(params).items()}
        return F.cross_entropy(forward(own, x), y)

    loss, grads = fs.value_and_grad(loss_of, reduce="sum")(state.params)
    return fs.update(TX, state, grads), loss / axis.size


PROGRAMS = (clip, whole_batch, adversarial, codebook, twins, policy, own_members)
TABLE = {
    **{program.__name__.replace("_", " "): Right(program) for program in PROGRAMS},
    "normalized over two axes": Right(normalized_over_two_axes, HYBRID),
}
