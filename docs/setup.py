"""What the programs of the documentation's pages begin with."""

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs


class Block(nn.Module):
    """A block with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


VOCABULARY, WIDTH, TIME = 64, 32, 16
module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(WIDTH), Block(WIDTH), nn.Linear(WIDTH, VOCABULARY))

mesh = fs.init_mesh({"shard": -1}, device="cpu")
model = fs.functionalize(module, units=Block)
strategy = fs.zero3(mesh, min_shard_elements=0)
params = model.init(strategy, seed=0)
tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=1e-3))
state = fs.TrainState.create(params, tx, key=0)

# Rows of tokens, other ones for each rank; the last token of a row is only predicted.
generator = torch.Generator().manual_seed(mesh.get_rank())
batches = [torch.randint(VOCABULARY, (4, TIME + 1), generator=generator) for _ in range(4)]
batch = batches[0]


def loss_fn(params, batch):
    """The local loss of this rank's rows."""
    logits = model.apply(params, batch[:, :-1], key=0)
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train_step(state, batch):
    """One step: gradients over all ranks, and the next state."""
    loss, grads = fs.value_and_grad(loss_fn)(state.params, batch)
    return fs.update(tx, state, grads), loss
