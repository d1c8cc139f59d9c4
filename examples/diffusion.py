"""Train a diffusion model, the UNet of diffusers, with noise from the key of the state.

    python examples/diffusion.py
    torchrun --standalone --nproc_per_node 2 examples/diffusion.py --steps 2000

Needs diffusers (pip install 'fshard[models,examples]'). The trained module draws its own noise and times, so
`model.apply(params, images, key=key)` returns the loss of denoising (Ho et al. 2020, arXiv:2006.11239). Equal keys draw
equal noise. The program uses this to evaluate held-out digits with the same noise before and after the training.

The sampler of DDIM (Song et al. 2021, arXiv:2010.02502) draws samples with the moving average of the parameters, which
is gathered once. Each rank draws its share of the samples, and the first rank saves a picture of all of them.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from installed import MODELS, installed_by
from progress_bar import progress
from torch import nn

import fshard as fs

with installed_by(MODELS):
    from diffusers import DDIMScheduler, DDPMScheduler, UNet2DModel
    from matplotlib.image import imsave
    from sklearn.datasets import load_digits


class Denoising(nn.Module):
    """The loss of a network that predicts the noise in noisy images."""

    def __init__(self, network: nn.Module, times: int) -> None:
        super().__init__()
        self.network = network
        self.schedule = DDPMScheduler(times)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (batch, 1, 8, 8) to ()
        count = len(images)
        noise = torch.randn_like(images)
        times = torch.randint(0, len(self.schedule), (count,))
        noisy = self.schedule.add_noise(images, noise, times)
        predicted = self.network(noisy, times).sample
        return F.mse_loss(predicted, noise)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    axis = fs.axis_of(mesh)
    rank = mesh.get_rank()
    network = make_network()
    # A module is a unit if it has as many parameters, or more.
    model = fs.functionalize(Denoising(network, args.times), units=20_000)
    params = model.init(fs.zero3(mesh), seed=args.seed)
    rate = fs.schedules.cosine(args.lr, args.steps)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(rate, weight_decay=0.01))
    tx = fs.ema(tx, decay=args.decay)
    state = fs.TrainState.create(params, tx, key=args.seed)

    def train_step(state: fs.TrainState, images: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        # Other noise by step and by rank.
        key = fs.fold_in(state.key, state.step)
        key = fs.fold_in(key, axis)

        def loss_fn(params: Any) -> torch.Tensor:
            return model.apply(params, images, key=key)

        loss, grads = fs.value_and_grad(loss_fn)(state.params)
        return fs.update(tx, state, grads), loss

    @fs.jit
    def held_out_loss(params: Any, images: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        loss = model.apply(params, images, key=fs.fold_in(key, axis))
        return fs.pmean(loss, axis)

    train_step = fs.jit(train_step, donate_argnums=0)
    mine, held_out = digits_of(rank, mesh.size())
    before = held_out_loss(state.params, held_out, state.key).item()
    generator = torch.Generator().manual_seed(args.seed)
    bar = progress(range(args.steps), "training", shown=rank == 0)
    for _ in bar:
        rows = torch.randint(len(mine), (args.batch,), generator=generator)
        state, loss = train_step(state, mine[rows])
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    average = state.opt_state.average
    after = held_out_loss(average, held_out, state.key).item()

    samples = sample_on_all_ranks(network, average, axis, args)
    if rank == 0:
        path = args.directory / "samples.png"
        draw(samples, path)
        print(f"held-out loss {before:.4f} before, {after:.4f} after; samples: {path}")


def make_network() -> nn.Module:
    with torch.device("meta"):
        return UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            block_out_channels=(32, 64),
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )


def digits_of(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's images (n, 1, 8, 8), from -1 to 1: to train on, and held out, of which all ranks have as many."""
    digits = torch.from_numpy(load_digits().images)
    images = digits.float()[:, None] / 8 - 1
    train = images[:1437]
    held_out = images[1437:]
    count = len(held_out) // ranks * ranks
    held_out = held_out[:count]
    return train[rank::ranks], held_out[rank::ranks]


def sample_on_all_ranks(
    network: nn.Module,
    params: Any,
    axis: fs.Axis,
    args: argparse.Namespace,
) -> torch.Tensor:
    """Let each rank draw its share of 64 samples."""
    # Full parameters send nothing: ranks may draw different numbers of samples.
    params_of_network = {}
    for name, leaf in params.items():
        params_of_network[name.removeprefix("network.")] = leaf
    full = fs.gather(params_of_network)
    generator = torch.Generator().manual_seed(args.seed)
    rank = fs.axis_index(axis)
    noise = torch.randn(8, 8, 1, 8, 8, generator=generator)
    mine = noise[rank :: axis.size].flatten(0, 1)
    model = fs.functionalize(network)
    samples = sample(model, full, mine, args.times, shown=rank == 0)
    return fs.all_gather(samples, axis)


@torch.no_grad()
def sample(
    model: fs.Model,
    params: Any,
    images: torch.Tensor,
    times: int,
    shown: bool,
) -> torch.Tensor:
    """Turn noise into images in half as many steps as there are times."""
    schedule = DDIMScheduler(times)
    schedule.set_timesteps(times // 2)
    for time in progress(schedule.timesteps, "samples", shown=shown):
        noise = model.apply(params, images, time).sample
        images = schedule.step(noise, time, images).prev_sample
    return images


def draw(images: torch.Tensor, path: Path) -> None:
    """Write images in eight rows, each with a margin, four times as large."""
    grid = images[:, 0].unflatten(0, (8, -1))  # (8, columns, 8, 8)
    padded = F.pad(grid, (1, 1, 1, 1), value=-1)  # (8, columns, 10, 10)
    lines = padded.transpose(1, 2).flatten(2, 3)  # (8, 10, 10 columns)
    whole = lines.flatten(0, 1)  # (80, 10 columns)
    higher = whole.repeat_interleave(4, 0)
    enlarged = higher.repeat_interleave(4, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, enlarged.clamp(-1, 1), cmap="gray")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64, help="images of each rank in a step")
    parser.add_argument("--times", type=int, default=100, help="number of times of the noise schedule")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.99, help="decay of the average of parameters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/diffusion"), help="directory for the samples")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
