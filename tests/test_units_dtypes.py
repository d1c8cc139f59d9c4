"""Several dtypes in a unit, casts, autocast and views of weights: one process's numbers, rounded as they are."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import normal, one_axis
from tests.unit_models import HIDDEN, Block, filled, full, vectors, zero3


def by_rank(module, batches, dtype):
    """Each rank's loss and gradients in one process, of parameters and inputs in the dtype."""
    found = []
    for batch in batches:
        leaves = {name: cast(p.detach(), dtype).requires_grad_() for name, p in module.named_parameters()}
        loss = functional_call(module, leaves, tuple(cast(x, dtype) for x in batch))
        found.append((loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))))
    return found


def cast(tensor, dtype):
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor.clone()


def mean(ranks, dtype):
    """The mean over ranks, added up in rank order in the dtype."""
    losses, grads = zip(*ranks)
    summed = {name: sum(cast(grad[name], dtype) for grad in grads) / len(ranks) for name in grads[0]}
    return sum(losses) / len(ranks), summed


class Regression(nn.Module):
    """Blocks of floating inputs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*map(Block, (13, HIDDEN, 11)))

    def forward(self, x):
        return torch.tanh(self.blocks(x)).square().mean()


POLICIES = [
    dict(param_dtype=torch.bfloat16),
    dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64),
    dict(reduce_dtype=torch.float64),
]


@on_ranks(3)
def test_casts_by_the_strategy(world_size):
    """Parameters and inputs are cast, gradients computed in that dtype, added up in another and finished in a third."""
    module, batches = filled(Regression(), torch.float32), [(x.float(),) for (x,) in vectors(world_size)]
    model = fs.functionalize(module, nn.Module)
    for options in POLICIES:
        computed, output = options.get("param_dtype", torch.float32), options.get("output_dtype")
        ranks = [(cast(loss, output), grads) for loss, grads in by_rank(module, batches, dtype=computed)]
        reduced = options.get("reduce_dtype", computed)
        expected = mean(ranks, reduced)
        strategies = zero3(**options), partial(fs.zero1, min_shard_elements=0, **options), partial(fs.ddp, **options)
        for strategy in strategies:
            batch, params = batches[one_axis().get_rank()], model.init(strategy(one_axis()))
            value, grads = full(fs.value_and_grad(model.apply)(params, *batch))
            assert value.dtype is expected[0].dtype
            assert_trees_close(value, expected[0], rtol=world_size * torch.finfo(value.dtype).eps, atol=0)
            for name, grad in grads.items():
                # Each addition rounds once, and so does the division.
                largest = max(grads[name].abs().max().item() for _, grads in ranks)
                atol = (world_size + 1) * world_size * torch.finfo(reduced).eps * largest
                rtol = torch.finfo(torch.float32).eps
                torch.testing.assert_close(grad, expected[1][name].float(), rtol=rtol, atol=atol)


# Autograd saves views of gathered weights in every form; gathered again, they are the very same tensors.
SIDE = 6


class Subclass(torch.Tensor):
    pass


# What a function makes of a complex weight of SIDE x SIDE.
VIEWS = {
    "conj": lambda w: w.conj(),
    "part of mH": lambda w: w.mH[1:, ::2],
    "neg view of conj": lambda w: torch._neg_view(w.conj()),
    "view as real": lambda w: torch.view_as_real(w)[..., 1],
    "dtype": lambda w: w.view(w.real.dtype),
    "subclass": lambda w: w.conj().as_subclass(Subclass),
}


def initial():
    draw = normal(1)
    tree = {name: draw(SIDE, SIDE) + 1j * draw(SIDE, SIDE) for name in ("first", "second")}
    return {**tree, "scale": draw() + 1j * draw()}


def loss_of(view, params, x):
    """Two layers, so that the backward needs the weights; each computes with a weight and with a view of it."""
    for name in ("first", "second"):
        w, scale = fs.gather({"w": params[name], "scale": params["scale"]}).values()
        seen = view(w)
        x = torch.sin(x @ w / SIDE) * (x.abs().mean() * seen).abs().square().mean() + (x.sum() * seen).sum().abs()
        x = x * torch.view_as_real(scale)[1]
    return x.abs().square().sum()


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@on_ranks(2)
def test_views_of_gathered_weights(world_size):
    batches = [normal(2 + rank)(2, SIDE).to(torch.complex128) for rank in range(world_size)]
    for name, view in VIEWS.items():
        loss = partial(loss_of, view)
        grads, value = grad_and_value(lambda p, loss=loss: sum(loss(p, x) for x in batches))(initial())
        # Sums over two ranks round once more than one process does.
        bound = 16 * torch.finfo(torch.float64).eps * max(g.abs().max().item() for g in grads.values())
        params, run = fs.shard(initial(), zero3()(one_axis())), fs.value_and_grad(loss, reduce="sum")
        for form in (run, fs.jit(run)) if name == "part of mH" else (run,):
            found = full(form(params, batches[one_axis().get_rank()]))
            assert_trees_close(found, (value, grads), rtol=0, atol=bound)
