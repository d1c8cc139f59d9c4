"""Law 7: one rank costs nothing: no collectives and no copies; and an in-place write to a weight is found out."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fshard as fs
from fshard import _compat
from tests.ranks import on_ranks
from tests.trees import CASTS, STRATEGIES, TREES, assorted, meshes, normal, one_axis

TX = fs.chain(fs.clip_by_global_norm(0.1), fs.from_torch(torch.optim.AdamW, lr=0.1))


class Operations(_compat.DispatchMode):
    """Notes every operator that is called, and those among them that make new memory."""

    def __init__(self):
        super().__init__()
        self.names, self.allocating = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        if not memory_of(out) <= memory_of((args, kwargs)):
            self.allocating.append(str(function))
        return out


def memory_of(tree):
    return {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def loss_fn(params, x):
    full = fs.gather(params)
    out = torch.tanh(x.to(full["w"].dtype) @ full["w"] * full["scalar"])
    return out.sum() + full["row"].sum() + full["empty"].sum()


def params_of(strategy):
    """Full and sharded parameters, without the None that torch.func does not take."""
    full = {name: leaf for name, leaf in assorted().items() if leaf is not None}
    return full, fs.shard(full, strategy(meshes()), frozen="*row*")


@pytest.mark.parametrize("strategy", STRATEGIES | CASTS)
@on_ranks(1)
def test_no_collectives(strategy):
    _, params = params_of((STRATEGIES | CASTS)[strategy])
    axis, x = fs.axis_of(one_axis()), normal(1)(4, 5)
    state = fs.TrainState.create(params, TX)
    with Operations() as operations, fs.comm.record() as record:
        loss, grads = fs.value_and_grad(loss_fn)(params, x)
        state = fs.update(TX, state, grads)
        full = fs.gather(params)
        grads = fs.scatter_grads(torch.func.grad(loss_fn)(full, x), like=params)
        state = fs.update(TX, state, grads)
        fs.objective((loss, torch.tensor(4)), like=params, reduce="weighted")
        fs.reshard(fs.shard(fs.unshard(state.params), fs.ddp(one_axis())), fs.zero2(one_axis()))
        for collective in (fs.psum, fs.pmean, fs.pvary, fs.psum_invariant, fs.all_gather, fs.reduce_scatter):
            collective(x, axis)
    assert record == []
    assert operations.names
    assert not [name for name in operations.names if name.startswith(("fshard", "c10d", "_c10d"))]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1)
def test_gather_and_unshard_hand_out_the_shards_themselves(strategy, tree):
    params = fs.shard(TREES[tree](), STRATEGIES[strategy](meshes()))
    for verb in (fs.gather, fs.unshard):
        with Operations() as operations:
            full = verb(params)
        assert operations.allocating == []
        for shard, tensor in zip(fs.tree_leaves(params), fs.tree_leaves(full), strict=True):
            assert tensor.data_ptr() == shard.data_ptr()


@pytest.mark.parametrize("reduce", ("mean", "sum"))
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1)
def test_scatter_grads_hands_on_the_gradients_themselves(strategy, reduce):
    full, params = params_of(STRATEGIES[strategy])
    local = fs.tree_map(torch.clone, full)
    with Operations() as operations:
        grads = fs.scatter_grads(local, like=params, reduce=reduce)
    assert operations.allocating == []
    assert grads["w"].local.data_ptr() == local["w"].data_ptr()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1)
def test_value_and_grad_makes_nothing_that_the_loss_does_not(strategy):
    """The operators that make new memory are those of torch.func.grad_and_value on full tensors, one by one."""
    full, params = params_of(STRATEGIES[strategy])
    x, fixed = normal(1)(4, 5), full.pop("row")
    with Operations() as plain:
        torch.func.grad_and_value(lambda p: loss_fn({**p, "row": fixed}, x))(full)
    with Operations() as sharded:
        fs.value_and_grad(loss_fn)(params, x)
    assert plain.allocating
    assert sharded.allocating == plain.allocating


class Writes(nn.Module):
    """A module that writes to one of its weights in its forward."""

    def __init__(self):
        super().__init__()
        self.kept, self.scaled = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        with torch.no_grad():
            self.scaled.mul_(2.0)
        return (x * self.scaled * self.kept).sum()


def write_with_autograd(full):
    full["w"].mul_(2.0)


def write_without_autograd(full):
    with torch.no_grad():
        full["w"].mul_(2.0)


def write_to_a_view(full):
    full["w"][0].zero_()


def write_to_detached(full):
    full["w"].detach().add_(1.0)


WRITES = (write_with_autograd, write_without_autograd, write_to_a_view, write_to_detached)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("differentiate", (False, True))
@on_ranks(1, 2)
def test_a_module_that_writes_to_its_weight_is_refused(differentiate, strategy):
    model = fs.functionalize(Writes())
    params = model.init(STRATEGIES[strategy](meshes()))
    with pytest.raises(ValueError, match=r"\['scaled'\]: expected none, got 1 in-place writes"):
        (fs.value_and_grad(model.apply) if differentiate else model.apply)(params, torch.ones(3))


@pytest.mark.rows(8)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "strategy, world_size", [*((name, 1) for name in STRATEGIES), ("ddp", 2), ("zero2", 2), ("zero2 of every leaf", 2)]
)
@on_ranks()
def test_a_write_to_a_gathered_weight_is_refused(strategy, write):
    """It may be the stored tensor, which would change, or a copy, which may be dropped and gathered again as it was."""
    params = fs.shard({"b": [torch.ones(3)], "w": torch.ones(4, 3)}, STRATEGIES[strategy](meshes()))

    def f(params):
        full = fs.gather(params)
        write(full)
        return (full["w"] * full["b"][0]).sum()

    with pytest.raises(ValueError, match=r"\['w'\]: expected none, got 1 in-place writes") as caught:
        fs.value_and_grad(f)(params)
    assert "['b']" not in str(caught.value)
