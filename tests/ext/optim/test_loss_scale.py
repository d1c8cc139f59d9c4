"""dynamic_loss_scale: the scale and the numbers of torch's GradScaler."""

import math

import pytest
import torch
from torch import optim

import fshard as fs
from tests.ext.optim.test_native import tree
from tests.trees import assert_alike

SCALES = {
    "powers of two": {"init_scale": 2.0**4, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2},
    "others": {"init_scale": 11.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1},
}
FINITE = (True, True, False, True, True, True, False, False, True, True, True, True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("case", SCALES)
def test_loss_scale_is_that_of_torch(case, dtype):
    scaler = torch.amp.GradScaler(device="cpu", **SCALES[case])
    scaler.scale(torch.ones(()))
    theirs = {name: torch.nn.Parameter(leaf) for name, leaf in tree(0, dtype).items()}
    optimizer = optim.AdamW(list(theirs.values()), lr=0.1)
    tx = fs.dynamic_loss_scale(fs.from_torch(optim.AdamW, lr=0.1), **SCALES[case])
    ours = {run: (tree(0, dtype), tx.init(tree(0, dtype))) for run in (tx.update, tx.update_donated)}
    for k, finite in enumerate(FINITE):
        grads = tree(1 + k, dtype)
        if not finite:
            grads["w"][k % 5, 1] = math.inf if k % 2 else math.nan
        for name, param in theirs.items():
            param.grad = grads[name].clone()
        scaler.step(optimizer)
        scaler.update()
        for run, (params, state) in ours.items():
            params, state = ours[run] = run(grads, state, params)
            assert (state.scale.item(), state.scale.dtype) == (scaler.get_scale(), torch.float32)
            assert state.good.item() == scaler._get_growth_tracker()
            assert_alike(params, {name: param.detach() for name, param in theirs.items()})
    assert all(state.inner.skipped.item() == FINITE.count(False) for _, state in ours.values())
