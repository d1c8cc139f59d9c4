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


def epsilon(share: float, noise: float, steps: int) -> float:
    """Compute the privacy loss at DELTA (Mironov et al., 2019, "Renyi DP of the Sampled Gaussian")."""
    bounds = []
    for order in range(2, 129):
        terms = torch.tensor([log_term(order, k, share, noise) for k in range(order + 1)], dtype=torch.float64)
        moment = steps * torch.logsumexp(terms, 0).item()
        bounds.append((moment - math.log(DELTA)) / (order - 1))
    return min(bounds)


def log_term(order: int, k: int, share: float, noise: float) -> float:
    ways = math.log(math.comb(order, k))
    of_samples = (order - k) * math.log1p(-share) + k * math.log(share)
    return ways + of_samples + k * (k - 1) / (2 * noise**2)


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


def plain_torch(module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: argparse.Namespace) -> Any:
    """The same steps in one process, one sample after another."""
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), args.rate, momentum=MOMENTUM)
    for step in range(COMPARED):
        key = fs.fold_in(args.seed, step)
        sums = {name: torch.zeros_like(parameter) for name, parameter in params.items()}
        for i in sample(len(y), args.share, fs.fold_in(key, 0)):
            loss = F.cross_entropy(module(x[i]), y[i])
            grads = torch.autograd.grad(loss, list(params.values()))
            norm = torch.cat([grad.flatten() for grad in grads]).norm()
            for name, slope in zip(params, grads):
                sums[name] += slope * min(1.0, args.clip / norm)
        noise = draw(params, fs.fold_in(key, 1))
        for name, parameter in params.items():
            noisy = sums[name] + args.noise * args.clip * noise[name]
            parameter.grad = noisy / (args.share * len(y))
        optimizer.step()
    return params


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    torch.set_num_threads(1)
    images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
    is_held_out = torch.arange(len(digits)) % 5 == 0
    x = images[~is_held_out] / 16
    y = digits[~is_held_out]
    expected_count = args.share * len(y)
    torch.manual_seed(args.seed)
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()
    model = fs.functionalize(module)
    strategy = fs.zero3(mesh)
    tx = fs.sgd(args.rate, momentum=MOMENTUM)

    def gradient(full: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        """Of one sample."""
        return grad(lambda params: F.cross_entropy(model.apply(params, x), y))(full)

    def clipped(full: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        grads = gradient(full, x, y)
        squares = torch.stack([leaf.square().sum() for leaf in grads.values()])
        scale = (args.clip / squares.sum().sqrt()).clamp(max=1)
        return fs.tree_map(lambda leaf: leaf * scale, grads)

    def train_step(state: fs.TrainState, is_private: bool) -> fs.TrainState:
        key = fs.fold_in(args.seed, state.step)
        full = fs.gather(state.params)
        mine = sample(len(y), args.share, fs.fold_in(key, 0))[mesh.get_rank() :: mesh.size()]
        one_sample = clipped if is_private else gradient
        rows = vmap(one_sample, in_dims=(None, 0, 0))(full, x[mine], y[mine])
        sums = fs.tree_map(lambda leaf: leaf.sum(0), rows)
        grads = fs.scatter_grads(sums, like=state.params, reduce="sum")
        if is_private:
            # Sharded from full tensors, so that the noise of an element is the same at every number of ranks.
            noise = fs.shard(draw(full, fs.fold_in(key, 1)), strategy)
            grads = fs.tree_map(lambda leaf, drawn: leaf + args.noise * args.clip * drawn, grads, noise)
        return fs.update(tx, state, fs.tree_map(lambda leaf: leaf / expected_count, grads))

    def say(text: str) -> None:
        if mesh.get_rank() == 0:
            print(text, flush=True)

    def percent_right(params: Any) -> float:
        logits = model.apply(params, images[is_held_out] / 16)
        return 100 * (logits.argmax(-1) == digits[is_held_out]).double().mean().item()

    state = fs.TrainState.create(model.init(strategy), tx)
    for is_private in (True, False):
        trained = state
        for step in range(1, args.steps + 1):
            trained = train_step(trained, is_private)
            if step == args.steps or (is_private and step % max(1, args.steps // 5) == 0):
                spent = f"epsilon {epsilon(args.share, args.noise, step):.2f}" if is_private else "without privacy"
                right = percent_right(trained.params)
                say(f"step {step:>4}, {spent:<15}: {right:.1f}% of held-out digits are right")
    for _ in range(COMPARED):
        state = train_step(state, is_private=True)
    params = fs.unshard(state.params)
    expected = plain_torch(module, x, y, args)
    gap = max((leaf - expected[name]).abs().max().item() for name, leaf in params.items())
    say(f"delta is {DELTA:g}; largest difference from one process after {COMPARED} steps: {gap:.1e} in a parameter")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"steps": 200, "share": 0.1, "noise": 2.0, "clip": 1.0, "rate": 0.2, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
