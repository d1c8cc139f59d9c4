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
    train, test = digits()
    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
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
        out, buffers = model.apply(params, batch[0], buffers=buffers)
        return F.cross_entropy(out.logits, batch[1]), buffers

    def train_step(state: fs.TrainState, batch: Images) -> tuple[fs.TrainState, torch.Tensor]:
        (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params, state.buffers, batch)
        buffers = fs.sync_buffers(buffers, like=state.params, by=args.statistics)
        return fs.update(tx, state, grads)._replace(buffers=buffers), loss

    @fs.jit
    def right(state: fs.TrainState, images: Images) -> torch.Tensor:
        logits = evaluated.apply(state.params, images[0], buffers=state.buffers)[0].logits
        return fs.psum((logits.argmax(1) == images[1]).sum(), fs.axis_of(mesh))

    train_step = fs.jit(train_step, donate_argnums=0)
    mine = tuple(part[mesh.get_rank() :: mesh.size()] for part in train)
    generator = torch.Generator().manual_seed(args.seed)
    bar = progress(range(args.steps), "training", shown=mesh.get_rank() == 0)
    for _ in bar:
        rows = torch.randint(len(mine[0]), (args.batch,), generator=generator)
        state, loss = train_step(state, (mine[0][rows], mine[1][rows]))
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)

    ranks = mesh.size()
    held_out = tuple(part[: len(part) // ranks * ranks][mesh.get_rank() :: ranks] for part in test)
    count = right(state, held_out).item()
    fs.checkpoint.save(args.directory / "state", state)
    if mesh.get_rank() == 0:
        # What an earlier run has written there.
        for name in ("checksums.json", "model.safetensors", "model.safetensors.index.json"):
            (args.directory / "model" / name).unlink(missing_ok=True)
    fs.checkpoint.save_huggingface(args.directory / "model", {**state.params, **state.buffers}, module=module)
    sharded = evaluated.apply(state.params, test[0][:8], buffers=state.buffers)[0].logits
    if mesh.get_rank() == 0:
        config.save_pretrained(args.directory / "model")
        loaded = ResNetForImageClassification.from_pretrained(args.directory / "model").eval()
        with torch.no_grad():
            assert torch.equal(loaded(test[0][:8]).logits, sharded), "from_pretrained gives other logits"
        print(f"loss {loss.item():.3f}, {count} of {len(held_out[0]) * ranks} test images right")
        print(f"{args.directory / 'model'}: from_pretrained gives the logits of the sharded model")


def digits() -> tuple[Images, Images]:
    """Images of shape (n, 1, 32, 32) and labels: for training, and held out."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    images, labels = F.interpolate(images, scale_factor=4), torch.from_numpy(data.target)
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
