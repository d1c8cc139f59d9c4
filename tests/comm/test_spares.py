"""Spare buffers: gathers write to memory that was given up, and to none that anybody still holds."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.comm.spares import LARGE_BYTES
from fshard.testing import spmd
from tests.trees import assert_same_bits, one_axis

SIZE = LARGE_BYTES // 4


def test_a_gather_writes_to_a_spare_of_its_size():
    def program():
        axis = fs.axis_of(one_axis())
        shards = [torch.full((SIZE // 2,), float(fs.comm.rank(axis))), torch.ones(SIZE)]
        spares = [
            fs.comm.spare(torch.empty(SIZE, dtype=dtype)) for dtype in (torch.int32, torch.float32, torch.float32)
        ]
        addresses = [spare.data_ptr() for spare in spares]
        with fs.comm.reusing(spares):
            gathered = fs.comm.all_gather(shards, axis, "gather")
        assert [tensor.data_ptr() in addresses for tensor in gathered] == [True, False]
        assert gathered[0].data_ptr() == addresses[1]
        assert spares == []
        return gathered[0]

    assert_same_bits(spmd(program, 2), [torch.arange(2.0)[:, None].expand(2, SIZE // 2)] * 2)


HOLDERS = {
    "a view": lambda tensor: tensor[:1],
    "an alias": lambda tensor: tensor.detach(),
    "an array": lambda tensor: tensor.numpy(),
    "a parameter": nn.Parameter,
    "its memory": lambda tensor: tensor.untyped_storage(),
    "autograd": lambda tensor: torch.ones(SIZE, requires_grad=True) * tensor,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_is_held_is_no_spare(holder):
    tensor = torch.ones(SIZE)
    held = HOLDERS[holder](tensor)
    assert holder == "autograd" or fs.comm.spare(tensor) is None
    reusable = fs.comm.reusable(tensor)
    del tensor
    assert fs.comm.spare(reusable) is None
    del held
    found = fs.comm.spare(reusable)
    assert found is not None
    assert found.shape == (SIZE,)


def test_a_view_that_is_made_reusable_is_a_spare_once_its_base_is_gone():
    base = torch.arange(2.0 * SIZE)
    view = fs.comm.reusable(base[3:])
    assert view._base is None
    assert view.equal(base[3:])
    assert fs.comm.spare(view) is None
    del base
    assert fs.comm.spare(view).shape == (2 * SIZE,)


def test_what_is_small_is_no_spare():
    assert fs.comm.spare(torch.ones(SIZE - 1)) is None


WIDTH = 300


class Keeper(nn.Module):
    """Layers as large as spares are, of whose weights something is kept for good."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x, keep, kept):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            kept.append(keep(layer.weight))
        return x.square().sum()


KEEPS = {
    "the weight": lambda weight: weight,
    "an alias": lambda weight: weight.detach(),
    "a row": lambda weight: weight[7],
    "an array": lambda weight: weight.detach().numpy(),
}


@pytest.mark.parametrize("trained", (True, False), ids=("trained", "evaluated"))
@pytest.mark.parametrize("keep", KEEPS)
def test_weights_that_a_function_keeps_are_not_written_over(keep, trained):
    module = Keeper()
    model = fs.functionalize(module, units=nn.Linear)

    def program():
        params = model.init(fs.zero3(one_axis(), merge_bytes=0))
        kept = []
        if trained:
            fs.value_and_grad(model.apply)(params, torch.ones(2, WIDTH), KEEPS[keep], kept)
        else:
            with torch.no_grad():
                model.apply(params, torch.ones(2, WIDTH), KEEPS[keep], kept)
        return [torch.as_tensor(found).detach().clone() for found in kept]

    for found in spmd(program, 2):
        expected = [torch.as_tensor(KEEPS[keep](layer.weight)).detach() for layer in module.layers]
        assert_same_bits(found, expected)
