"""The buffer pool: gathers write to donated memory, and to none that anybody still holds."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.comm import Pool
from fshard.comm.pool import LARGE_BYTES
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import filled

SIZE = LARGE_BYTES // 4


@on_ranks(2)
def test_a_gather_writes_to_a_buffer_of_its_size():
    axis = fs.axis_of(one_axis())
    shards = [torch.full((SIZE // 2,), float(fs.comm.rank(axis))), torch.ones(SIZE)]
    pool, addresses = Pool(), []
    for dtype in (torch.int32, torch.float32, torch.float32):
        buffer = torch.empty(SIZE, dtype=dtype)
        addresses.append(buffer.data_ptr())
        assert pool.put(buffer)
        del buffer
    assert len(pool) == 3
    with fs.comm.concerning((), pool=pool):
        gathered = fs.comm.all_gather(shards, axis, "gather")
    assert [tensor.data_ptr() in addresses for tensor in gathered] == [True, False]
    assert gathered[0].data_ptr() == addresses[1]
    assert len(pool) == 0
    assert_same_bits(gathered[0], torch.arange(2.0)[:, None].expand(2, SIZE // 2))


HOLDERS = {
    "a view": lambda tensor: tensor[:1],
    "an alias": lambda tensor: tensor.detach(),
    "an array": lambda tensor: tensor.numpy(),
    "a parameter": nn.Parameter,
    "its memory": lambda tensor: tensor.untyped_storage(),
    "autograd": lambda tensor: torch.ones(SIZE, requires_grad=True) * tensor,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_is_held_stays_out(holder):
    tensor = torch.ones(SIZE)
    held = HOLDERS[holder](tensor)
    assert holder == "autograd" or not Pool().put(tensor)
    reusable = fs.comm.reusable(tensor)
    del tensor
    pool = Pool()
    assert not pool.put(reusable)
    del held
    assert pool.put(reusable)
    address = reusable.data_ptr()
    assert pool.empty(reusable, (2, SIZE // 2)).data_ptr() == address


def test_memory_of_a_view_is_taken_whole_once_its_base_is_gone():
    base = torch.arange(2.0 * SIZE)
    view, pool = fs.comm.reusable(base[3:]), Pool()
    assert view._base is None
    assert view.equal(base[3:])
    assert not pool.put(view)
    address = base.data_ptr()
    del base
    assert pool.put(view)
    assert pool.empty(view, (2 * SIZE,)).data_ptr() == address


def test_small_memory_stays_out():
    assert not Pool().put(torch.ones(SIZE - 1))


WIDTH = 300


class Keeper(nn.Module):
    """Layers large enough for the pool, of whose weights something is kept for good."""

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
@on_ranks(2)
def test_weights_that_a_function_keeps_are_not_written_over(keep, trained):
    module, kept = filled(Keeper(), None), []
    model = fs.functionalize(module, units=nn.Linear)
    params = model.init(fs.zero3(one_axis(), merge_bytes=0))
    if trained:
        fs.value_and_grad(model.apply)(params, torch.ones(2, WIDTH), KEEPS[keep], kept)
    else:
        with torch.no_grad():
            model.apply(params, torch.ones(2, WIDTH), KEEPS[keep], kept)
    found = [torch.as_tensor(weight).detach() for weight in kept]
    assert_same_bits(found, [torch.as_tensor(KEEPS[keep](layer.weight)).detach() for layer in module.layers])
