"""Steps of a model of transformer layers, whose kernels are counted by the number of layers."""

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs

WIDTH = 64
# Parameters are gathered in bfloat16 and gradients reduced in float32, as in mixed precision.
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "bucket_bytes": 0}
ADAMW = {"lr": 1e-3, "fused": True}


class Layer(nn.Module):
    """A transformer layer of 12 leaves, 4 of which are large enough to be split."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        # Written out, because torch's own attention is one kernel on some devices only.
        x = x + self.proj((q @ k.mT).softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_module(layers):
    return nn.Sequential(*[Layer() for _ in range(layers)])


def make_plain_step(device, layers):
    """Make a step of PyTorch alone, in bfloat16 throughout."""
    module = make_module(layers).bfloat16().to(device)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    x = torch.ones(2, 4, WIDTH, dtype=torch.bfloat16, device=device)

    def step():
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    return step


def make_step(mesh, strategy, layers, *, jit):
    """Make a step of fshard with a unit for each layer, which donates its state."""
    model = fs.functionalize(make_module(layers), units=Layer)
    tx = fs.from_torch(torch.optim.AdamW, **ADAMW)
    params = model.init(strategy(mesh, **MIXED), seed=0)
    state = fs.TrainState.create(params, tx)
    x = torch.ones(2, 4, WIDTH, device=mesh.device_type)

    def train_step(state, x):
        loss, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().mean())(state.params)
        return fs.update(tx, state, grads, donate=True), loss

    run = fs.jit(train_step, donate_argnums=0) if jit else train_step

    def step():
        nonlocal state
        state, _ = run(state, x)

    return step


def count_per_layer(make, count):
    """Count the kernels that a second layer adds to a step, once it is traced.

    Args:
        make: Makes a step of a model with so many layers.
        count: Runs a function, and counts the kernels that it starts.
    """
    numbers = []
    for layers in (1, 2):
        step = make(layers)
        step()
        numbers.append(count(step))
    return numbers[1] - numbers[0]
