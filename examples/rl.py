"""Train a policy on some ranks with samples from another rank of the same job.

    torchrun --standalone --nproc_per_node 3 examples/rl.py
    python examples/rl.py

The first rank draws samples. It gets each version of the weights with `fs.receive`, in the layout in which it runs the
policy, and publishes the states, actions and rewards. The other ranks train with REINFORCE (Williams 1992) under
ZeRO-3, and each receives its own rows of the samples. The policy learns to name the largest of four numbers. With
several ranks, the program also trains in one process, and prints how far the two curves of rewards are apart.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fshard as fs

CHOICES, ROWS = 4, 96
Samples = dict[str, torch.Tensor]


def policy() -> fs.Model:
    torch.manual_seed(0)
    return fs.functionalize(nn.Sequential(nn.Linear(CHOICES, 32), nn.Tanh(), nn.Linear(32, CHOICES)).double())


def sample(model: fs.Model, params: Any, version: int) -> Samples:
    """Let the policy act once in each of some states."""
    draw = torch.Generator().manual_seed(version)
    states = torch.randn(ROWS, CHOICES, generator=draw, dtype=torch.float64)
    probabilities = model.apply(params, states).softmax(-1)
    actions = torch.multinomial(probabilities, 1, generator=draw)[:, 0]
    rewards = (actions == states.argmax(-1)).double()
    baseline = rewards.mean().expand(ROWS).clone()
    return {"states": states, "actions": actions, "rewards": rewards, "baseline": baseline}


class Trainer:
    """The policy's state on a mesh."""

    def __init__(self, mesh: DeviceMesh, lr: float) -> None:
        self.model = policy()
        self.tx = fs.adamw(lr)
        strategy = fs.zero3(mesh, min_shard_elements=0)
        self.state = fs.TrainState.create(self.model.init(strategy), self.tx)

    def loss_fn(self, params: Any, samples: Samples) -> torch.Tensor:
        log_probabilities = self.model.apply(params, samples["states"]).log_softmax(-1)
        chosen = log_probabilities.gather(1, samples["actions"][:, None])[:, 0]
        advantages = samples["rewards"] - samples["baseline"]
        return -(chosen * advantages).mean()

    def step(self, samples: Samples) -> None:
        _, grads = fs.value_and_grad(self.loss_fn)(self.state.params, samples)
        self.state = fs.update(self.tx, self.state, grads)


def alone(mesh: DeviceMesh, steps: int, lr: float) -> list[float]:
    """Rewards of one process that trains and samples in turn."""
    trainer = Trainer(mesh, lr)
    rewards = []
    for version in range(steps):
        samples = sample(trainer.model, trainer.state.params, version)
        trainer.step(samples)
        rewards.append(samples["rewards"].mean().item())
    return rewards


def train(mesh: DeviceMesh, sampler: int, steps: int, lr: float) -> None:
    """Train on samples of another rank, of which each rank of the mesh receives its rows."""
    trainer = Trainer(mesh, lr)
    like = fs.shard(sample(trainer.model, trainer.state.params, 0), fs.split_dim(mesh, dim=0))
    for version in range(steps):
        fs.publish(trainer.state.params, [sampler], version=version)
        rows, _ = fs.receive(like, [sampler])
        trainer.step({name: leaf.local for name, leaf in rows.items()})


def act(mesh: DeviceMesh, trainers: list[int], steps: int) -> list[float]:
    """Sample by the weights of other ranks."""
    model = policy()
    like = model.init(fs.ddp(mesh))
    rewards = []
    for _ in range(steps):
        params, version = fs.receive(like, trainers)
        samples = sample(model, params, version)
        fs.publish(samples, trainers, version=version)
        rewards.append(samples["rewards"].mean().item())
    return rewards


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    size = fs.init_mesh({"all": -1}, device="cpu").size()
    sampler, *trainers = range(size)
    # Every rank makes both meshes.
    one = DeviceMesh("cpu", [sampler], mesh_dim_names=("shard",))
    if not trainers:
        report(alone(one, args.steps, args.lr))
        return
    mesh = DeviceMesh("cpu", trainers, mesh_dim_names=("shard",))
    if dist.get_rank() != sampler:
        train(mesh, sampler, args.steps, args.lr)
        return
    rewards = act(one, trainers, args.steps)
    report(rewards)
    apart = max(abs(a - b) for a, b in zip(rewards, alone(one, args.steps, args.lr), strict=True))
    print(f"largest difference from the rewards of one process: {apart:.1e}")


def report(rewards: list[float]) -> None:
    shown = rewards[:: max(len(rewards) // 10, 1)]
    print("rewards:", *(f"{reward:.2f}" for reward in shown))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.02)
    return parser.parse_args()


if __name__ == "__main__":
    main()
