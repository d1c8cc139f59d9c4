"""Autograd saves views of gathered weights in every form; gathered again, they are the very same tensors."""

from functools import partial

import pytest
import torch
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import meshes, normal

WIDTH = 6


class Subclass(torch.Tensor):
    pass


# What a function makes of a complex weight of WIDTH x WIDTH.
VIEWS = {
    "plain": lambda w: w,
    "conj": lambda w: w.conj(),
    "mH": lambda w: w.mH,
    "part of mH": lambda w: w.mH[1:, ::2],
    "real": lambda w: w.real,
    "imag": lambda w: w.imag,
    "conj imag": lambda w: w.conj().imag,
    "neg view": torch._neg_view,
    "neg view of conj": lambda w: torch._neg_view(w.conj()),
    "view as real": lambda w: torch.view_as_real(w)[..., 1],
    "conj of view as complex": lambda w: torch.view_as_complex(torch.view_as_real(w)).conj(),
    "dtype": lambda w: w.view(w.real.dtype),
    "subclass": lambda w: w.conj().as_subclass(Subclass),
}
REAL_VIEWS = {
    "plain": lambda w: w,
    "neg view": torch._neg_view,
    "complex": lambda w: torch.view_as_complex(w.reshape(-1, 2)[:WIDTH]),
    "conj of complex": lambda w: torch.view_as_complex(w.reshape(-1, 2)).conj(),
}
CASES = [(dtype, name) for dtype in (torch.complex64, torch.complex128) for name in VIEWS]
CASES += [(torch.float64, name) for name in REAL_VIEWS]
STRATEGIES = {
    "zero3": lambda on: fs.zero3(on.line, min_shard_elements=0, merge_bytes=0),
    "zero2": lambda on: fs.zero2(on.line, min_shard_elements=0),
    "ddp": lambda on: fs.ddp(on.line),
    "hsdp": lambda on: fs.hsdp(on.grid, min_shard_elements=0, merge_bytes=0),
}


def initial(dtype):
    draw = normal(1)
    tree = {name: draw(WIDTH, WIDTH) + 1j * draw(WIDTH, WIDTH) for name in ("first", "second")}
    tree = {**tree, "scale": draw() + 1j * draw()}
    return {name: value.to(dtype) if dtype.is_complex else value.real.clone() for name, value in tree.items()}


def loss_of(view, params, x):
    """Two layers, so that the backward needs the weights; each computes with a weight and with a view of it."""
    for name in ("first", "second"):
        w, scale = fs.gather({"w": params[name], "scale": params["scale"]}).values()
        seen = view(w)
        x = torch.sin(x @ w / WIDTH) * (x.abs().mean() * seen).abs().square().mean() + (x.sum() * seen).sum().abs()
        x = x * (torch.view_as_real(scale)[1] if scale.is_complex() else scale)
    return x.abs().square().sum()


@pytest.mark.rows(1)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@on_ranks(1, 2)
def test_views_of_gathered_weights(world_size):
    expected = {}
    batches = [normal(2 + rank)(2, WIDTH) for rank in range(world_size)]
    for dtype, name in CASES:
        loss = partial(loss_of, (VIEWS if dtype.is_complex else REAL_VIEWS)[name])

        def objective(p, loss=loss, dtype=dtype):
            return sum(loss(p, x.to(dtype)) for x in batches)

        expected[dtype, name] = loss, *grad_and_value(objective)(initial(dtype))
    on = meshes()
    for (dtype, name), (loss, grads, value) in expected.items():
        x = batches[on.line.get_rank()].to(dtype)
        # Sums over two ranks round once more than one process does.
        bound = 16 * torch.finfo(dtype).eps * max(g.abs().max().item() for g in grads.values())
        for strategy, make in STRATEGIES.items():
            params = fs.shard(initial(dtype), make(on))
            run = fs.value_and_grad(loss, reduce="sum")
            # A trace takes its time, and none takes a subclass.
            jitted = dtype is torch.complex128 and strategy == "zero3" and name != "subclass"
            for form in (run, fs.jit(run)) if jitted and world_size > 1 else (run,):
                found = form(params, x)
                try:
                    assert_trees_close((found[0], fs.unshard(found[1])), (value, grads), rtol=0, atol=bound)
                except Exception as error:
                    error.add_note(f"{dtype}, {name}, {strategy}, {'eager' if form is run else 'jitted'}")
                    raise
