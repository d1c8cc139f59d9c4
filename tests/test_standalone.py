"""The core without the extensions: what a program needs to train one model and to restore it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fshard as fs

# What is loaded where it is first used.
HEAVY = ("torch.distributed.tensor", "torch.testing", "torch._dynamo", "torch._inductor", "matplotlib", "cloudpickle")

PROGRAM = """
import sys
import torch
before = set(sys.modules)
import fshard as fs
print(*sys.modules.keys() - before)

def loss_fn(params, x):
    return model.apply(params, x).square().mean()

def step(state, x):
    loss, grads = fs.value_and_grad(loss_fn)(state.params, x)
    return fs.update(tx, state, grads), loss

model = fs.functionalize(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)))
tx = fs.chain(fs.from_torch(torch.optim.AdamW, lr=0.1))
strategy = fs.zero3(fs.init_mesh({"shard": -1}, device="cpu"))
state = fs.TrainState.create(model.init(strategy, seed=0), tx)
blank = state
jitted = fs.jit(step)
batches = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0))
losses = []
for x in batches:
    state, loss = jitted(state, x)
    losses.append(loss.item())
fs.checkpoint.save("run", state, 4)
restored = fs.checkpoint.restore("run", blank)
pairs = zip(fs.tree_leaves(state), fs.tree_leaves(restored), strict=True)
print(losses[-1] < losses[0], all(torch.equal(a, b) for a, b in pairs))
print(jitted(restored, batches[0])[1].equal(step(state, batches[0])[1]))
print([name for name in sys.modules if name.startswith("fshard.ext")])
try:
    fs.pipeline
except ModuleNotFoundError as error:
    print(error)
"""


def test_a_model_is_trained_saved_and_restored(tmp_path):
    """On a copy of the package without the folder of extensions, whose names alone are missing; its import is light."""
    package = tmp_path / "fshard"
    shutil.copytree(Path(fs.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "ext"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    loaded, *printed = run.stdout.splitlines()
    assert printed == ["True True", "True", "[]", "No module named 'fshard.ext'"], run.stderr
    names = loaded.split()
    assert "fshard" in names
    assert not [name for name in names if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)]
