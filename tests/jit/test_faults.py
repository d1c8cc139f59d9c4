"""Memory that a jitted step frees stays with the process: a next step is not handed new pages for it."""

import platform
import subprocess
import sys

import pytest

from tests.test_processes import ROOT

STEPS = """
import resource
import torch
import fshard as fs

torch.set_num_threads(1)
params = [torch.randn(256, 256) for _ in range(16)]
x = torch.randn(1024, 256)

def loss(params):
    out = x
    for w in params:
        out = (out @ w).tanh()
    return out.square().mean()

def step(params):
    grads = torch.func.grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads)]

step = fs.jit(step, donate_argnums=0)
for _ in range(3):
    params = step(params)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    params = step(params)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""
# A step takes 17 MiB, 4,352 pages, beyond its arguments.
PAGES = 400


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_steps_are_not_handed_new_pages():
    out = subprocess.run(
        [sys.executable, "-c", STEPS], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(out.stdout) < PAGES, out.stdout
