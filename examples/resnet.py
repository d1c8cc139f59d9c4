"""Train a ResNet of transformers, with BatchNorm's statistics in the state, and export it.

    python examples/resnet.py
    torchrun --standalone --nproc_per_node 2 examples/resnet.py --statistics rank0

Needs transformers (pip install 'fshard[models,examples]'). BatchNorm normalises the images of its own rank, and a
forward in training mode returns the buffers that it has changed. The buffers are part of the train state, so
checkpoints hold them. After each step, the ranks average their running statistics. With --statistics rank0 they take
those of the first rank, as DDP does. The evaluation uses these statistics. The digits are those of scikit-learn,
enlarged by a factor of four.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from installed import MODELS, installed_by
from progress_bar import progress

import fshard as fs

with installed_by(MODELS):
    from sklearn.datasets import load_digits
    from transformers import ResNetConfig, ResNetForImageClassification

Images = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank = mesh.get_rank()
    ranks = mesh.size()
    train, test = digits()
    config = ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    )
    with torch.device("meta"):
        module = ResNetForImageClassification(config)
    model = fs.functionalize(fs.with_init_weights(module), units=fs.no_split(module))
    evaluated = model.eval()
    params = model.init(fs.zero3(mesh), seed=args.seed)

    rate = fs.schedules.warmup_cosine(0.0, args.lr, warmup_steps=args.steps // 10, decay_steps=args.steps)
    sgd = partial(fs.from_torch, torch.optim.SGD, lr=rate, momentum=0.9, nesterov=True)
    # Weights of BatchNorm, and biases, do not decay.
    tx = fs.partition({lambda name, leaf: leaf.dim() >= 2: sgd(weight_decay=5e-4), "*": sgd()})
    state = fs.TrainState.create(params, tx, buffers=model.buffers)

    def loss_fn(params: Any, buffers: Any, batch: Images) -> tuple[torch.Tensor, Any]:
        images, labels = batch
        out, buffers = model.apply(params, images, buffers=buffers)
        return F.cross_entropy(out.logits, labels), buffers

    def train_step(state: fs.TrainState, batch: Images) -> tuple[fs.TrainState, torch.Tensor]:
        value_and_grad = fs.value_and_grad(loss_fn, has_aux=True)
        (loss, buffers), grads = value_and_grad(state.params, state.buffers, batch)
        buffers = fs.sync_buffers(buffers, like=state.params, by=args.statistics)
        return fs.update(tx, state, grads)._replace(buffers=buffers), loss

    def logits_of(state: fs.TrainState, images: torch.Tensor) -> torch.Tensor:
        out, _ = evaluated.apply(state.params, images, buffers=state.buffers)
        return out.logits

    @fs.jit
    def count_right(state: fs.TrainState, batch: Images) -> torch.Tensor:
        images, labels = batch
        is_right = logits_of(state, images).argmax(1) == labels
        return fs.psum(is_right.sum(), fs.axis_of(mesh))

    train_step = fs.jit(train_step, donate_argnums=0)
    images, labels = (part[rank::ranks] for part in train)
    generator = torch.Generator().manual_seed(args.seed)
    bar = progress(range(args.steps), "training", shown=rank == 0)
    for _ in bar:
        rows = torch.randint(len(images), (args.batch,), generator=generator)
        state, loss = train_step(state, (images[rows], labels[rows]))
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)

    count = len(test[0]) // ranks * ranks
    held_out = tuple(part[:count][rank::ranks] for part in test)
    right = count_right(state, held_out).item()
    fs.checkpoint.save(args.directory / "state", state)
    directory = args.directory / "model"
    if rank == 0:
        remove_weights(directory)
    fs.checkpoint.save_huggingface(directory, {**state.params, **state.buffers}, module=module)
    first_images = test[0][:8]
    logits = logits_of(state, first_images)
    if rank == 0:
        config.save_pretrained(directory)
        print(f"loss {loss.item():.3f}, {right} of {count} test images right")
        compare(directory, first_images, logits)


def remove_weights(directory: Path) -> None:
    """Remove what an earlier run has written."""
    for name in ("checksums.json", "model.safetensors", "model.safetensors.index.json"):
        (directory / name).unlink(missing_ok=True)


def compare(directory: Path, images: torch.Tensor, logits: torch.Tensor) -> None:
    """Load what was exported, in one process."""
    loaded = ResNetForImageClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, logits), "from_pretrained gives other logits"
    print(f"{directory}: from_pretrained gives the logits of the sharded model")


def digits() -> tuple[Images, Images]:
    """Images of shape (n, 1, 32, 32) and labels: for training, and held out."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    images = F.interpolate(images, scale_factor=4)
    labels = torch.from_numpy(data.target)
    train = images[:1437], labels[:1437]
    test = images[1437:], labels[1437:]
    return train, test


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--statistics",
        choices=("mean", "rank0"),
        default="mean",
        help="how ranks combine running statistics after each step",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="images of each rank in a step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/resnet"), help="checkpoint and exported model")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
