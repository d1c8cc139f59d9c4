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

DELTA, MOMENTUM, COMPARED = 1e-4, 0.9, 5  # the last: steps that plain torch takes as well


def epsilon(share: float, noise: float, steps: int) -> float:
    """Compute the privacy loss at DELTA (Mironov et al., 2019, "Renyi DP of the Sampled Gaussian")."""
    bounds = []
    for order in range(2, 129):
        ks = torch.arange(order + 1, dtype=torch.float64)
        ways = torch.tensor([math.log(math.comb(order, k)) for k in range(order + 1)], dtype=torch.float64)
        logs = ways + (order - ks) * math.log1p(-share) + ks * math.log(share) + ks * (ks - 1) / (2 * noise**2)
        bounds.append((steps * torch.logsumexp(logs, 0).item() - math.log(DELTA)) / (order - 1))
    return min(bounds)


def draw(like: Any, key: torch.Tensor) -> Any:
    """Draw full tensors of normal numbers from a key, equal on every rank."""
    generator = torch.Generator().manual_seed(int(key))
    return {name: torch.randn(t.shape, dtype=t.dtype, generator=generator) for name, t in like.items()}


def sample(count: int, share: float, key: torch.Tensor) -> torch.Tensor:
    """Each of `count` samples by itself with a probability, as the accountant assumes; the same on every rank."""
    return (torch.rand(count, generator=torch.Generator().manual_seed(int(key))) < share).nonzero()[:, 0]


def plain_torch(module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: argparse.Namespace) -> Any:
    """The same steps in one process, one sample after another."""
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), args.rate, momentum=MOMENTUM)
    for step in range(COMPARED):
        key, sums = fs.fold_in(args.seed, step), {name: torch.zeros_like(p) for name, p in params.items()}
        for i in sample(len(y), args.share, fs.fold_in(key, 0)):
            grads = torch.autograd.grad(F.cross_entropy(module(x[i]), y[i]), list(params.values()))
            norm = torch.cat([g.flatten() for g in grads]).norm()
            sums = {name: total + g * min(1.0, args.clip / norm) for (name, total), g in zip(sums.items(), grads)}
        noise = draw(params, fs.fold_in(key, 1))
        for name, parameter in params.items():
            parameter.grad = (sums[name] + args.noise * args.clip * noise[name]) / (args.share * len(y))
        optimizer.step()
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"steps": 200, "share": 0.1, "noise": 2.0, "clip": 1.0, "rate": 0.2, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args, mesh = parser.parse_args(), fs.init_mesh({"shard": -1}, device="cpu")
    torch.set_num_threads(1)
    images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    fifth = torch.arange(len(digits)) % 5 == 0
    x, y = images[~fifth] / 16, digits[~fifth]
    torch.manual_seed(args.seed)
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()
    model, strategy, tx = fs.functionalize(module), fs.zero3(mesh), fs.sgd(args.rate, momentum=MOMENTUM)

    def gradient(full: Any, x: torch.Tensor, y: torch.Tensor) -> Any:  # of one sample
        return grad(lambda p: F.cross_entropy(model.apply(p, x), y))(full)

    def clipped(full: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        grads = gradient(full, x, y)
        norm = torch.stack([leaf.square().sum() for leaf in grads.values()]).sum().sqrt()
        return fs.tree_map(lambda leaf: leaf * (args.clip / norm).clamp(max=1), grads)

    def train_step(state: fs.TrainState, private: bool) -> fs.TrainState:
        key, full = fs.fold_in(args.seed, state.step), fs.gather(state.params)
        mine = sample(len(y), args.share, fs.fold_in(key, 0))[mesh.get_rank() :: mesh.size()]
        rows = vmap(clipped if private else gradient, in_dims=(None, 0, 0))(full, x[mine], y[mine])
        sums = fs.scatter_grads(fs.tree_map(lambda leaf: leaf.sum(0), rows), like=state.params, reduce="sum")
        # Sharded from full tensors, so that the noise of an element is the same at every number of ranks.
        noise, scale = fs.shard(draw(full, fs.fold_in(key, 1)), strategy), args.noise * args.clip * private
        return fs.update(tx, state, fs.tree_map(lambda g, n: (g + scale * n) / (args.share * len(y)), sums, noise))

    def say(text: str) -> None:
        if mesh.get_rank() == 0:
            print(text, flush=True)

    state = fs.TrainState.create(model.init(strategy), tx)
    for private in (True, False):
        trained = state
        for step in range(1, args.steps + 1):
            trained = train_step(trained, private)
            if step == args.steps or (private and step % max(1, args.steps // 5) == 0):
                right = (model.apply(trained.params, images[fifth] / 16).argmax(-1) == digits[fifth]).double().mean()
                spent = f"epsilon {epsilon(args.share, args.noise, step):.2f}" if private else "without privacy"
                say(f"step {step:>4}, {spent:<15}: {100 * right:.1f}% of held-out digits are right")
    for _ in range(COMPARED):
        state = train_step(state, private=True)
    found, expected = fs.unshard(state.params), plain_torch(module, x, y, args)
    gap = max((leaf - expected[name]).abs().max().item() for name, leaf in found.items())
    say(f"delta is {DELTA:g}; largest difference from one process after {COMPARED} steps: {gap:.1e} in a parameter")


if __name__ == "__main__":
    main()
