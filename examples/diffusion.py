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
        self.network, self.schedule = network, DDPMScheduler(times)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (batch, 1, 8, 8) to ()
        noise = torch.randn_like(images)
        times = torch.randint(0, len(self.schedule), (len(images),))
        noisy = self.schedule.add_noise(images, noise, times)
        return F.mse_loss(self.network(noisy, times).sample, noise)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    axis, rank, ranks = fs.axis_of(mesh), mesh.get_rank(), mesh.size()
    with torch.device("meta"):
        network = UNet2DModel(
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
    model = fs.functionalize(Denoising(network, args.times), units=20_000)  # parameters from which on a module is one
    params = model.init(fs.zero3(mesh), seed=args.seed)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(fs.schedules.cosine(args.lr, args.steps), weight_decay=0.01))
    tx = fs.ema(tx, decay=args.decay)
    state = fs.TrainState.create(params, tx, key=args.seed)

    def train_step(state: fs.TrainState, images: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        key = fs.fold_in(fs.fold_in(state.key, state.step), axis)  # other noise by step and by rank
        loss, grads = fs.value_and_grad(lambda params: model.apply(params, images, key=key))(state.params)
        return fs.update(tx, state, grads), loss

    @fs.jit
    def held_out_loss(params: Any, images: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return fs.pmean(model.apply(params, images, key=fs.fold_in(key, axis)), axis)

    train_step = fs.jit(train_step, donate_argnums=0)
    images = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1  # (1797, 1, 8, 8), from -1 to 1
    mine, held_out = images[rank:1437:ranks], images[1437:][: 360 // ranks * ranks][rank::ranks]
    before = held_out_loss(state.params, held_out, state.key).item()
    generator = torch.Generator().manual_seed(args.seed)
    bar = progress(range(args.steps), "training", shown=rank == 0)
    for _ in bar:
        state, loss = train_step(state, mine[torch.randint(len(mine), (args.batch,), generator=generator)])
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    average = state.opt_state.average
    after = held_out_loss(average, held_out, state.key).item()

    # Full parameters send nothing: ranks may draw different numbers of samples.
    full = fs.gather({name.removeprefix("network."): leaf for name, leaf in average.items()})
    noise = torch.randn(8, 8, 1, 8, 8, generator=torch.Generator().manual_seed(args.seed))
    mine = noise[rank::ranks].flatten(0, 1)
    drawn = fs.all_gather(sample(fs.functionalize(network), full, mine, args.times, shown=rank == 0), axis)
    if rank == 0:
        args.directory.mkdir(parents=True, exist_ok=True)
        picture(drawn, args.directory / "samples.png")
        print(f"held-out loss {before:.4f} before, {after:.4f} after; samples: {args.directory / 'samples.png'}")


@torch.no_grad()
def sample(model: fs.Model, params: Any, images: torch.Tensor, times: int, shown: bool) -> torch.Tensor:
    """Turn noise into images in half as many steps as there are times."""
    schedule = DDIMScheduler(times)
    schedule.set_timesteps(times // 2)
    for time in progress(schedule.timesteps, "samples", shown=shown):
        noise = model.apply(params, images, time).sample
        images = schedule.step(noise, time, images).prev_sample
    return images


def picture(images: torch.Tensor, path: Path) -> None:
    rows = images.unflatten(0, (8, -1))[:, :, 0]  # (8, columns, 8, 8)
    whole = F.pad(rows, (1, 1, 1, 1), value=-1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    imsave(path, whole.clamp(-1, 1).repeat_interleave(4, 0).repeat_interleave(4, 1), cmap="gray")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
