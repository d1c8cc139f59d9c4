"""Train with differential privacy on a sharded model: clip each sample's gradient, sum them and add noise.

    torchrun --standalone --nproc_per_node 2 examples/dp_sgd.py
    python examples/dp_sgd.py --noise 4

The program runs DP-SGD (Abadi et al., 2016, "Deep Learning with Differential Privacy") on scikit-learn's digits.
torch.func.vmap computes the gradient of each sample at gathered weights, and fs.scatter_grads reduces the clipped sum.
Parameters and optimizer state stay sharded. FSDP2 cannot do this: its hooks reduce the gradient of a whole batch, and
vmap does not see hooks. The program prints epsilon and held-out accuracy during training, the accuracy without privacy,
and the distance of the parameters from plain torch in one process with one backward for each sample. The noise comes
from torch's generator, seeded by a key. This is good enough for an experiment, but does not protect real secrets.
"""

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from installed import EXAMPLES, installed_by
from torch import nn
from torch.func import grad, vmap

import fshard as fs

with installed_by(EXAMPLES):
    from sklearn.datasets import load_digits

DELTA = 1e-4
MOMENTUM = 0.9
# So many steps plain torch takes as well.
COMPARED = 5

DEFAULTS = {
    "steps": 200,
    "share": 0.1,
    "noise": 2.0,
    "clip": 1.0,
    "rate": 0.2,
    "seed": 0,
}


def epsilon(share: float, noise: float, steps: int) -> float:
    """Compute the privacy loss at DELTA (Mironov et al., 2019, "Renyi DP of the Sampled Gaussian")."""
    bounds = []
    for order in range(2, 129):
        terms = [log_term(order, k, share, noise) for k in range(order + 1)]
        of_one_step = torch.logsumexp(torch.tensor(terms, dtype=torch.float64), 0)
        moment = steps * of_one_step.item()
        bounds.append((moment - math.log(DELTA)) / (order - 1))
    return min(bounds)


def log_term(order: int, k: int, share: float, noise: float) -> float:
    ways = math.log(math.comb(order, k))
    of_samples = (order - k) * math.log1p(-share) + k * math.log(share)
    of_noise = k * (k - 1) / (2 * noise**2)
    return ways + of_samples + of_noise


def draw(like: Any, key: torch.Tensor) -> Any:
    """Draw full tensors of normal numbers from a key, equal on every rank."""
    generator = torch.Generator().manual_seed(int(key))
    noise = {}
    for name, tensor in like.items():
        noise[name] = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
    return noise


def sample(count: int, share: float, key: torch.Tensor) -> torch.Tensor:
    """Each of `count` samples by itself with a probability, as the accountant assumes; the same on every rank."""
    generator = torch.Generator().manual_seed(int(key))
    is_drawn = torch.rand(count, generator=generator) < share
    return is_drawn.nonzero()[:, 0]


def plain_torch(
    module: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    args: argparse.Namespace,
) -> Any:
    """The same steps in one process, one sample after another."""
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), args.rate, momentum=MOMENTUM)
    expected_count = args.share * len(y)
    for step in range(COMPARED):
        key = fs.fold_in(args.seed, step)
        sums = {}
        for name, parameter in params.items():
            sums[name] = torch.zeros_like(parameter)
        for i in sample(len(y), args.share, fs.fold_in(key, 0)):
            loss = F.cross_entropy(module(x[i]), y[i])
            grads = torch.autograd.grad(loss, list(params.values()))
            flat = torch.cat([grad.flatten() for grad in grads])
            scale = min(1.0, args.clip / flat.norm())
            for name, slope in zip(params, grads):
                sums[name] += slope * scale
        noise = draw(params, fs.fold_in(key, 1))
        for name, parameter in params.items():
            noisy = sums[name] + args.noise * args.clip * noise[name]
            parameter.grad = noisy / expected_count
        optimizer.step()
    return params


class Digits:
    """The images and labels of scikit-learn: to train on, and every fifth held out."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(images) / 16
        labels = torch.from_numpy(labels)
        is_held_out = torch.arange(len(labels)) % 5 == 0
        self.x = images[~is_held_out]
        self.y = labels[~is_held_out]
        self.held_out_x = images[is_held_out]
        self.held_out_y = labels[is_held_out]


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank = mesh.get_rank()
    torch.set_num_threads(1)
    data = Digits()
    count = len(data.y)
    expected_count = args.share * count
    torch.manual_seed(args.seed)
    module = nn.Sequential(
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )
    model = fs.functionalize(module.double())
    strategy = fs.zero3(mesh)
    tx = fs.sgd(args.rate, momentum=MOMENTUM)

    def loss_fn(full: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of one sample."""
        return F.cross_entropy(model.apply(full, x), y)

    def clipped_gradient(full: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        grads = grad(loss_fn)(full, x, y)
        squares = torch.stack([leaf.square().sum() for leaf in grads.values()])
        norm = squares.sum().sqrt()
        scale = (args.clip / norm).clamp(max=1)
        return fs.tree_map(lambda leaf: leaf * scale, grads)

    def add_noise(leaf: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return leaf + args.noise * args.clip * drawn

    def train_step(state: fs.TrainState, is_private: bool) -> fs.TrainState:
        key = fs.fold_in(args.seed, state.step)
        full = fs.gather(state.params)
        rows = sample(count, args.share, fs.fold_in(key, 0))
        mine = rows[rank :: mesh.size()]
        gradient = clipped_gradient if is_private else grad(loss_fn)
        gradients = vmap(gradient, in_dims=(None, 0, 0))(full, data.x[mine], data.y[mine])
        sums = fs.tree_map(lambda leaf: leaf.sum(0), gradients)
        grads = fs.scatter_grads(sums, like=state.params, reduce="sum")
        if is_private:
            # Sharded from full tensors, so that the noise of an element is the same at every number of ranks.
            noise = fs.shard(draw(full, fs.fold_in(key, 1)), strategy)
            grads = fs.tree_map(add_noise, grads, noise)
        means = fs.tree_map(lambda leaf: leaf / expected_count, grads)
        return fs.update(tx, state, means)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    def percent_right(params: Any) -> float:
        logits = model.apply(params, data.held_out_x)
        is_right = logits.argmax(-1) == data.held_out_y
        return 100 * is_right.double().mean().item()

    def train(state: fs.TrainState, is_private: bool, steps_between: int) -> None:
        """Train, and print the held-out accuracy at the end and after every so many steps."""
        for step in range(1, args.steps + 1):
            state = train_step(state, is_private)
            if step < args.steps and step % steps_between:
                continue
            spent = "without privacy"
            if is_private:
                spent = f"epsilon {epsilon(args.share, args.noise, step):.2f}"
            right = percent_right(state.params)
            say(f"step {step:>4}, {spent:<15}: {right:.1f}% of held-out digits are right")

    state = fs.TrainState.create(model.init(strategy), tx)
    train(state, is_private=True, steps_between=max(1, args.steps // 5))
    train(state, is_private=False, steps_between=args.steps)
    for _ in range(COMPARED):
        state = train_step(state, is_private=True)
    params = fs.unshard(state.params)
    expected = plain_torch(module, data.x, data.y, args)
    gaps = []
    for name, leaf in params.items():
        gap = (leaf - expected[name]).abs().max()
        gaps.append(gap.item())
    say(
        f"delta is {DELTA:g}; largest difference from one process after {COMPARED} steps: "
        f"{max(gaps):.1e} in a parameter"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
