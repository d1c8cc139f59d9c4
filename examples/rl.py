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

CHOICES = 4
ROWS = 96

Samples = dict[str, torch.Tensor]


def make_policy() -> fs.Model:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(CHOICES, 32),
        nn.Tanh(),
        nn.Linear(32, CHOICES),
    )
    return fs.functionalize(module.double())


def sample(model: fs.Model, params: Any, version: int) -> Samples:
    """Let the policy act once in each of some states."""
    generator = torch.Generator().manual_seed(version)
    states = torch.randn(ROWS, CHOICES, generator=generator, dtype=torch.float64)
    probabilities = model.apply(params, states).softmax(-1)
    actions = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    best = states.argmax(-1)
    rewards = (actions == best).double()
    baseline = rewards.mean().expand(ROWS).clone()
    return {
        "states": states,
        "actions": actions,
        "rewards": rewards,
        "baseline": baseline,
    }


class Trainer:
    """The policy's state on a mesh."""

    def __init__(self, mesh: DeviceMesh, lr: float) -> None:
        self.model = make_policy()
        self.tx = fs.adamw(lr)
        strategy = fs.zero3(mesh, min_shard_elements=0)
        params = self.model.init(strategy)
        self.state = fs.TrainState.create(params, self.tx)

    def loss_fn(self, params: Any, samples: Samples) -> torch.Tensor:
        logits = self.model.apply(params, samples["states"])
        log_probabilities = logits.log_softmax(-1)  # (rows, CHOICES)
        actions = samples["actions"][:, None]
        chosen = log_probabilities.gather(1, actions)[:, 0]
        advantages = samples["rewards"] - samples["baseline"]
        return -(chosen * advantages).mean()

    def sample(self, version: int) -> Samples:
        return sample(self.model, self.state.params, version)

    def step(self, samples: Samples) -> None:
        value_and_grad = fs.value_and_grad(self.loss_fn)
        _, grads = value_and_grad(self.state.params, samples)
        self.state = fs.update(self.tx, self.state, grads)


def train_alone(mesh: DeviceMesh, steps: int, lr: float) -> list[float]:
    """Rewards of one process that trains and samples in turn."""
    trainer = Trainer(mesh, lr)
    rewards = []
    for version in range(steps):
        samples = trainer.sample(version)
        trainer.step(samples)
        rewards.append(samples["rewards"].mean().item())
    return rewards


def train(mesh: DeviceMesh, sampler: int, steps: int, lr: float) -> None:
    """Train on samples of another rank, of which each rank of the mesh receives its rows."""
    trainer = Trainer(mesh, lr)
    rows_of_each = fs.split_dim(mesh, dim=0)
    like = fs.shard(trainer.sample(0), rows_of_each)
    for version in range(steps):
        fs.publish(trainer.state.params, [sampler], version=version)
        rows, _ = fs.receive(like, [sampler])
        samples = {name: leaf.local for name, leaf in rows.items()}
        trainer.step(samples)


def act(mesh: DeviceMesh, trainers: list[int], steps: int) -> list[float]:
    """Sample by the weights of other ranks."""
    model = make_policy()
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
        report(train_alone(one, args.steps, args.lr))
        return
    mesh = DeviceMesh("cpu", trainers, mesh_dim_names=("shard",))
    if dist.get_rank() != sampler:
        train(mesh, sampler, args.steps, args.lr)
        return
    rewards = act(one, trainers, args.steps)
    report(rewards)
    expected = train_alone(one, args.steps, args.lr)
    gaps = []
    for reward, expected_reward in zip(rewards, expected, strict=True):
        gaps.append(abs(reward - expected_reward))
    print(f"largest difference from the rewards of one process: {max(gaps):.1e}")


def report(rewards: list[float]) -> None:
    stride = max(len(rewards) // 10, 1)
    shown = [f"{reward:.2f}" for reward in rewards[::stride]]
    print("rewards:", *shown)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.02)
    return parser.parse_args()


if __name__ == "__main__":
    main()
