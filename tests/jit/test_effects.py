"""Operators that are there for what they do: asserts and callbacks run in every call of a jitted function."""

import pytest
import torch

import fshard as fs
from tests.trees import normal

SEEN: list[float] = []
# Eager calls of torch's control flow compile, and so do Inductor's modules, which warn when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore")


@torch.library.custom_op("fshard_tests::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    """Note a value."""
    SEEN.append(float(x))


@note.register_fake
def _(x):
    return None


@pytest.mark.parametrize("backend", ("graph", pytest.param("inductor", marks=pytest.mark.slow)))
def test_callbacks_run_in_every_call_and_asserts_raise(backend):
    def f(x):
        note(x.sum())
        torch._assert_async(x.isfinite().all(), "not finite")
        return x * 2

    jitted = fs.jit(f, backend=backend)
    SEEN.clear()
    for n in range(3):
        assert jitted(torch.ones(2) * n).equal(2 * torch.ones(2) * n)
    with pytest.raises(RuntimeError, match="not finite"):
        jitted(torch.tensor([1.0, torch.nan]))
    assert (SEEN[:3], len(jitted.traces)) == ([0.0, 2.0, 4.0], 1)


def test_control_flow_of_torch_is_part_of_a_graph():
    def step(params, x):
        def loss(params, x):
            w = fs.gather(params)["w"]
            return torch.cond(x.sum() > 0, lambda x: (x @ w).sin(), lambda x: x * w - 1, (x,)).square().mean()

        return fs.value_and_grad(loss)(params, x)

    params = fs.shard({"w": normal()(3, 3)}, fs.zero3(fs.init_mesh({"shard": 1}, device="cpu")))
    jitted = fs.jit(step)
    for sign in (1, -1):
        x = sign * normal(1)(3, 3).abs()
        fs.testing.assert_trees_close(jitted(params, x), step(params, x), rtol=1e-12, atol=1e-12)
    assert len(jitted.traces) == 1
    # A branch that draws needs a key too.
    with pytest.raises(ValueError, match=r"expected random numbers with a key, got aten\.rand\.default"):
        fs.jit(lambda x: torch.cond(x.sum() > 0, lambda x: x + torch.rand(3), lambda x: -x, (x,)))(torch.ones(3))
