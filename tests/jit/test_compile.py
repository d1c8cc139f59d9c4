"""torch.compile of a user's own around fshard's functions: refused with the reason, never wrong without a word."""

import pytest
import torch

import fshard as fs
from tests.trees import one_axis

STEPS = (
    fs.value_and_grad(lambda p: fs.gather(p)["w"].square().sum()),
    lambda p: fs.scatter_grads(torch.func.grad(lambda full: full["w"].square().sum())(fs.gather(p)), like=p),
)


# Tracing imports modules of torch's own that warn.
@pytest.mark.filterwarnings("ignore")
def test_a_whole_step_is_refused_and_one_that_calls_a_compiled_loss_is_right():
    params = fs.shard({"w": torch.ones(4, 2)}, fs.zero3(one_axis()))
    for step in STEPS:
        with pytest.raises(Exception, match=r"torch\.compile cannot trace fshard's functions; use fs\.jit"):
            torch.compile(step, fullgraph=True, backend="eager")(params)
    loss = torch.compile(lambda w: w.square().sum(), backend="eager", fullgraph=True)
    value, grads = fs.value_and_grad(lambda p: loss(fs.gather(p)["w"]))(params)
    assert value.item() == 8.0
    assert fs.unshard(grads)["w"].equal(torch.full((4, 2), 2.0))
