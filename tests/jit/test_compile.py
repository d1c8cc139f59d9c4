"""torch.compile of a user's own around fshard's functions: refused with the reason, never wrong without a word."""

import pytest
import torch

import fshard as fs
from tests.trees import one_axis


def by_value_and_grad(params):
    return fs.value_and_grad(lambda p: fs.gather(p)["w"].square().sum())(params)


def by_verbs(params):
    grads = torch.func.grad(lambda full: full["w"].square().sum())(fs.gather(params))
    return fs.scatter_grads(grads, like=params)


# Tracing imports modules of torch's own that warn.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", (by_value_and_grad, by_verbs))
def test_a_whole_step_is_refused(step):
    params = fs.shard({"w": torch.ones(4, 2)}, fs.zero3(one_axis()))
    with pytest.raises(Exception, match=r"torch\.compile cannot trace fshard's functions; use fs\.jit"):
        torch.compile(step, fullgraph=True, backend="eager")(params)


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_calls_a_compiled_loss_is_right():
    params = fs.shard({"w": torch.ones(4, 2)}, fs.zero3(one_axis()))
    loss = torch.compile(lambda w: w.square().sum(), backend="eager", fullgraph=True)
    value, grads = fs.value_and_grad(lambda p: loss(fs.gather(p)["w"]))(params)
    assert value.item() == 8.0
    assert fs.unshard(grads)["w"].equal(torch.full((4, 2), 2.0))
