"""Steps of methods of training, without a mistake: contrast, distillation, GANs, penalties, codebooks."""

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.ext.check.programs import BATCH, CLASSES, HIDDEN, TX, WIDTH, X, Y, split, state_of, train
from tests.ext.check.right_steps import HYBRID, Right

FULL = {"w": torch.ones(WIDTH, HIDDEN), "b": torch.ones(HIDDEN), "head": torch.ones(HIDDEN, CLASSES)}


def forward(full, x):
    return torch.tanh(x @ full["w"] + full["b"]) @ full["head"]


def loss_fn(params, x, y):
    return F.cross_entropy(forward(fs.gather(params), x), y)


def clip(mesh):
    """CLIP: two towers, a temperature that is learned, rows of all ranks, both ways."""

    def step(state, images, texts, axis):
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

    full = {"a": FULL["w"], "b": FULL["w"], "scale": torch.tensor(2.0)}
    return step, state_of(full, fs.zero3(mesh, min_shard_elements=2)), X, X + 1, fs.axis_of(mesh)


def whole_batch(mesh):
    """Each rank computes the loss of the rows of all ranks."""

    def loss_of(params, x, axis):
        rows = fs.all_gather(F.normalize(x @ fs.gather(params)["w"], dim=-1), axis)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    return train(loss_of), state_of({"w": FULL["w"]}, split(mesh)), X, fs.axis_of(mesh)


def teacher(mesh):
    """BYOL: a teacher that is the average of the students, and takes no gradient."""

    def step(state, one, other):
        def loss_of(params):
            student = F.normalize(forward(fs.gather(params), one), dim=-1)
            target = F.normalize(forward(fs.gather(state.buffers), other), dim=-1)
            return 2 - 2 * (student * target.detach()).sum(-1).mean()

        loss, grads = fs.value_and_grad(loss_of)(state.params)
        after = fs.update(TX, state, grads)
        average = fs.tree_map(lambda t, p: 0.99 * t + 0.01 * p, state.buffers, after.params)
        return after._replace(buffers=average), loss

    params = fs.shard(FULL, split(mesh))
    return step, fs.TrainState.create(params, TX, buffers=params), X, X + 1


def centered_teacher(mesh):
    """DINO: targets are centered by an average over the rows of all ranks, which the state keeps."""

    def step(state, x, center_axis):
        center = state.buffers["center"]

        def loss_of(params):
            logits = forward(fs.gather(params), x)
            targets = ((logits.detach() - center) / 0.04).softmax(-1)
            return -(targets * (logits / 0.1).log_softmax(-1)).sum(-1).mean(), logits.detach()

        (loss, logits), grads = fs.value_and_grad(loss_of, has_aux=True)(state.params)
        center = 0.9 * center + 0.1 * fs.pmean(logits.mean(0), center_axis)
        return fs.update(TX, state, grads)._replace(buffers={"center": center}), loss

    return step, state_of(FULL, split(mesh), buffers={"center": torch.zeros(CLASSES)}), X, fs.axis_of(mesh)


def distillation(mesh):
    """A teacher among the arguments, whose leaves are split, too."""

    def loss_of(params, frozen, x, y):
        logits = forward(fs.gather(params), x)
        target = forward(fs.gather(frozen), x).detach()
        soft = F.kl_div(
            (logits / 2).log_softmax(-1), (target / 2).log_softmax(-1), log_target=True, reduction="batchmean"
        )
        return 0.5 * F.cross_entropy(logits, y) + 2 * soft

    return train(loss_of), state_of(FULL, split(mesh)), fs.shard(FULL, split(mesh)), X, Y


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
    critic = fs.TrainState.create(fs.shard(FULL, split(mesh)), of_critic, key=0)
    return step, (generator, critic), X, X + 1, fs.axis_of(mesh)


def normalized_over_two_axes(mesh):
    """BatchNorm of the rows of all ranks of a grid, by sums and counts."""

    def step(state, x, y, replicate, shard):
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

    buffers = {"mean": torch.zeros(HIDDEN), "variance": torch.ones(HIDDEN)}
    axes = fs.axis_of(mesh["replicate"]), fs.axis_of(mesh["shard"])
    return step, state_of(FULL, fs.hsdp(mesh, min_shard_elements=0), buffers=buffers), X, Y, *axes


def codebook(mesh):
    """VQ-VAE, whose codebook is an average over the rows of all ranks."""

    def step(state, x, axis):
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

    buffers = {"counts": torch.ones(3), "totals": torch.ones(3, HIDDEN), "codes": torch.ones(3, HIDDEN)}
    return step, state_of({"w": FULL["w"]}, split(mesh), buffers=buffers), X, fs.axis_of(mesh)


def sharpness(mesh):
    """SAM: a step up by the norm over all ranks, and a gradient there."""

    def step(state, x, y):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, x, y)
        norm = fs.global_norm(grads)
        higher = fs.tree_map(lambda p, g: p + 0.05 * g / (norm + 1e-12), state.params, grads)
        _, grads = fs.value_and_grad(loss_fn)(higher, x, y)
        return fs.update(TX, state, grads), {"loss": loss, "norm": norm}

    return step, state_of(FULL, split(mesh)), X, Y


def twins(mesh):
    """Barlow Twins: a matrix of correlations over the rows of all ranks."""

    def loss_of(params, one, other, axis):
        w = fs.gather(params)["w"]

        def normalize(rows):
            mean = fs.pmean(rows.mean(0), axis)
            variance = fs.pmean((rows - mean).square().mean(0), axis)
            return (rows - mean) / (variance + 1e-5).sqrt()

        matrix = fs.pmean(normalize(one @ w).T @ normalize(other @ w) / len(one), axis)
        diagonal = torch.diagonal(matrix)
        return (1 - diagonal).square().sum() + 5e-3 * (matrix.square().sum() - diagonal.square().sum())

    return train(loss_of), state_of({"w": FULL["w"]}, split(mesh)), X, X + 1, fs.axis_of(mesh)


def policy(mesh):
    """PPO: advantages are normalized over all ranks, and an update is skipped if policies are too far apart."""

    def step(state, x, actions, logs, advantages, axis):
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

    return step, state_of(FULL, split(mesh)), X, Y, torch.ones(BATCH), torch.ones(BATCH), fs.axis_of(mesh)


def mixed_up(mesh):
    """Mixup, whose shares are drawn by each rank."""

    class Mix(nn.Module):
        def forward(self, x):
            share = torch.rand(len(x), 1)
            return share * x + (1 - share) * x.flip(0), share

    model = fs.functionalize(Mix())

    def step(state, x, y, axis):
        key = fs.fold_in(fs.fold_in(state.key, state.step), axis)
        mixed, share = model.apply({}, x, key=key)

        def loss_of(params):
            losses = F.cross_entropy(forward(fs.gather(params), mixed), y, reduction="none")
            return (share[:, 0] * losses).mean()

        loss, grads = fs.value_and_grad(loss_of)(state.params)
        return fs.update(TX, state, grads), loss

    return step, state_of(FULL, split(mesh), key=0), X, Y, fs.axis_of(mesh)


def deviation_metric(mesh):
    """The deviation of the losses of ranks, and the largest."""

    def step(state, x, y, axis):
        def loss_and_local(params):
            loss = loss_fn(params, x, y)
            return loss, loss.detach()

        (loss, local), grads = fs.value_and_grad(loss_and_local, has_aux=True)(state.params)
        deviation = fs.pmean((local - loss).square(), axis).sqrt()
        rows = fs.all_gather(local[None], axis)
        return fs.update(TX, state, grads), {
            "loss": loss,
            "deviation": deviation,
            "largest": fs.pmax(local, axis),
            "median": rows.median(),
        }

    return step, state_of(FULL, split(mesh)), X, Y, fs.axis_of(mesh)


def sinkhorn(mesh):
    """SwAV: codes whose rows and columns are normalized over the rows of all ranks."""

    def loss_of(params, x, axis):
        scores = x @ fs.gather(params)["w"]
        codes = (scores.detach() / 0.05).exp()
        codes = codes / fs.psum(codes.sum(), axis)
        for _ in range(3):
            codes = codes / fs.psum(codes.sum(0), axis) / codes.shape[1]
            codes = codes / codes.sum(1, keepdim=True) / (len(codes) * axis.size)
        codes = codes * (len(codes) * axis.size)
        return -(codes * (scores / 0.1).log_softmax(-1)).sum(-1).mean()

    return train(loss_of), state_of({"w": FULL["w"]}, split(mesh)), X, fs.axis_of(mesh)


def own_members(mesh):
    """Each rank trains a member of its own, and reports the mean of the losses of all."""

    def step(state, x, y, axis):
        def loss_of(params):
            own = {name: stacked[0] for name, stacked in fs.gather(params).items()}
            return F.cross_entropy(forward(own, x), y)

        loss, grads = fs.value_and_grad(loss_of, reduce="sum")(state.params)
        return fs.update(TX, state, grads), loss / axis.size

    full = {name: leaf.expand(8, *leaf.shape) for name, leaf in FULL.items()}
    strategy = fs.zero3(mesh, layout=fs.own_dim(mesh["shard"]))
    return step, state_of(full, strategy), X, Y, fs.axis_of(mesh)


def rate_scaled_with_ranks(mesh):
    """A learning rate that grows with the batch of all ranks, and a count of rows in the state."""

    def step(state, x, y, axis):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, x, y)
        params = fs.tree_map(lambda p, g: p - 1e-3 * axis.size * g, state.params, grads)
        rows = state.buffers["rows"] + len(x) * axis.size
        return state._replace(params=params, buffers={"rows": rows}), {"loss": loss, "rows": rows}

    return step, state_of(FULL, split(mesh), buffers={"rows": torch.zeros(())}), X, Y, fs.axis_of(mesh)


PROGRAMS = (
    *(clip, whole_batch, teacher, centered_teacher, distillation, adversarial, codebook, sharpness, twins, policy),
    *(mixed_up, deviation_metric, sinkhorn, own_members, rate_scaled_with_ranks),
)
TABLE = {
    **{program.__name__.replace("_", " "): Right(program) for program in PROGRAMS},
    "normalized over two axes": Right(normalized_over_two_axes, HYBRID),
}
