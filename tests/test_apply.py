"""functionalize and apply: any module as a pure function, equal to the module itself, under any call."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import mse_loss

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.modules import EPS, EVERY_LEAF, MODULES, ROWS, assert_untouched, build, everything, tensors
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis


def test_module_is_untouched_and_its_copy_holds_no_weights():
    for name in MODULES:
        module, args, kwargs = build(name)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        before = everything(module)
        model = fs.functionalize(module)
        params = model.init(fs.zero2(one_axis(), min_shard_elements=0))

        def loss_fn(params, model=model, args=args, kwargs=kwargs):
            return sum(leaf.sum() for leaf in tensors(model.apply(params, *args, **kwargs)))

        fs.value_and_grad(loss_fn)(params)
        with torch.no_grad():
            model.apply(fs.gather(params), *args, **kwargs)
        assert_untouched(module, before)
        for submodule in module.modules():
            assert not [*submodule._forward_hooks, *submodule._forward_pre_hooks, *submodule._backward_hooks]
        # In lists too, such as a recurrent module's flat weights.
        for copied in (model._bare, *(skeleton.module for skeleton in model._idle)):
            assert (copied.training, isinstance(copied, type(module))) == (module.training, True)
            assert all(tensor.is_meta for tensor in tensors([submodule.__dict__ for submodule in copied.modules()]))
        # Parameters are copies: a module that trains on does not change them.
        with torch.no_grad():
            old = fs.tree_map(torch.clone, params)
            for parameter in module.parameters():
                parameter.add_(1)
        assert_same_bits(fs.tree_leaves(params), fs.tree_leaves(old))


@on_ranks(1, 3)
def test_output_is_the_module_s():
    for name in MODULES:
        module, args, kwargs = build(name)
        model, before = fs.functionalize(module), {path: p.detach().clone() for path, p in module.named_parameters()}
        # torch chooses other kernels where a weight requires a gradient, which a gathered one does not.
        reference = copy.deepcopy(module).requires_grad_(False)
        for strategy in ("ddp", EVERY_LEAF, "last dim"):
            params = model.init(STRATEGIES[strategy](meshes()))
            assert list(params) == list(before)
            assert_same_bits(fs.unshard(params), before)
            for given in (params, fs.gather(params), before):
                out, expected = fs.apply(model, given, *args, **kwargs), reference(*args, **kwargs)
                assert type(out) is type(expected)
                assert_same_bits(tensors(out), tensors(expected))
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode():
                    found = tensors(model.apply(params, *args, **kwargs))
                    assert_same_bits(found, tensors(reference(*args, **kwargs)))
                assert not any(tensor.requires_grad for tensor in found)


def test_gradients_are_the_module_s():
    """Each rank sees the same inputs, so that the mean over ranks is what one process has."""

    def loss_of(outputs):
        return sum((leaf * torch.linspace(0.5, 1.5, leaf.numel()).view_as(leaf)).sum() for leaf in tensors(outputs))

    def program():
        for module, args, kwargs in built:
            trained = {path: p for path, p in module.named_parameters() if p.requires_grad}
            value = loss_of(module(*args, **kwargs))
            dense = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
            expected = {path: grad for path, grad in zip(trained, dense) if grad is not None}
            model = fs.functionalize(module, units=nn.Module)
            params = model.init(fs.zero3(one_axis(), min_shard_elements=0, merge_bytes=0))
            run = fs.value_and_grad(lambda p, m=model, a=args, k=kwargs: loss_of(m.apply(p, *a, **k)))
            found, grads = run(params)
            assert {path for path, grad in grads.items() if grad is None} == set(params) - set(expected)
            # Products through at most 10 layers, summed over at most 400 terms, in an order that depends on the kernel;
            # the ranks' sum and division add a few more.
            atol = 413 * EPS * max(1.0, *(leaf.abs().max().item() for leaf in expected.values()))
            torch.testing.assert_close(found, value.detach(), rtol=400 * EPS, atol=400 * EPS)
            assert_trees_close(fs.unshard({path: grads[path] for path in expected}), expected, rtol=0.0, atol=atol)

    # The same modules on each rank: their constructors draw from the process's generator.
    built = [build(name) for name in MODULES if list(build(name)[0].parameters())]
    spmd(program, 3)


CALLS, ROUNDS = 4, 3
BARRIER = threading.Barrier(CALLS, timeout=30)


class Meeting(nn.Linear):
    """Waits inside its forward until all calls have come, so that they surely overlap."""

    def forward(self, x):
        half = x @ self.weight.T
        BARRIER.wait()
        return half + self.bias


def test_calls_that_overlap_do_not_mix():
    model, draw = fs.functionalize(Meeting(3, 3).double()), normal()
    params = [{"weight": draw(3, 3), "bias": draw(3)} for _ in range(CALLS)]
    with ThreadPoolExecutor(CALLS) as pool:
        for _ in range(ROUNDS):
            outputs = list(pool.map(lambda given: model.apply(given, ROWS), params))
            assert_same_bits(outputs, [ROWS @ given["weight"].T + given["bias"] for given in params])


# Sums of 33 products a layer, of numbers up to 10, through two layers and a norm.
TRANSFORM_ATOL = 2 * 33 * EPS * 10


@on_ranks(1, 3)
@pytest.mark.parametrize("strategy", ("ddp", EVERY_LEAF, "last dim"))
def test_function_transforms(strategy):
    module, _, _ = build("perceptron")
    full = {path: parameter.detach() for path, parameter in module.named_parameters()}
    model, draw, transform = fs.functionalize(module), normal(3), STRATEGIES[strategy](meshes())
    tangent = {path: draw(*leaf.shape) for path, leaf in full.items()}
    batch, target = draw(4, 6, 3), draw(6, 5)

    def dense(params, x):
        return functional_call(copy.deepcopy(module), params, (x,))

    def loss(run, params, x):
        return mse_loss(run(params, x), target)

    def results(run, params, directions):
        return {
            "vmap": vmap(lambda x: run(params, x))(batch),
            "jvp": jvp(lambda p, x: run(p, x), (params, ROWS), (directions, batch[0])),
            "vmap of grad of inputs": vmap(grad(lambda x: loss(run, params, x)))(batch),
        }

    expected = results(dense, full, tangent) | {"grad": grad(lambda p: loss(dense, p, ROWS))(full)}
    params, directions = fs.shard(full, transform), fs.shard(tangent, transform)
    found = results(model.apply, params, directions) | {
        "grad": fs.unshard(grad(lambda p: fs.objective(loss(model.apply, p, ROWS), like=p))(params))
    }
    assert_trees_close(found, expected, rtol=0.0, atol=TRANSFORM_ATOL)


class Counter(nn.Module):
    """Buffers written every way there is: in place, by assignment, under a second name; one is None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("assigned", torch.ones(2), persistent=False)
        self.register_buffer("constant", torch.full((1,), 5.0))
        self.register_buffer("none", None)
        self.register_buffer("also_in_place", self.in_place)

    def forward(self, x):
        self.also_in_place.add_(1)
        self.assigned = 2 * self.assigned
        return self.linear(x) * self.assigned + self.in_place + self.constant


def test_buffers_go_in_and_out():
    module = Counter()
    reference = copy.deepcopy(module)
    before = everything(module)
    model = fs.functionalize(module)
    params = model.init(fs.zero2(one_axis(), min_shard_elements=0))
    buffers = model.buffers
    assert list(buffers) == ["in_place", "assigned", "constant"]
    for _ in range(3):
        old = fs.tree_map(torch.clone, buffers)
        out, new = model.apply(params, ROWS, buffers=buffers)
        assert_same_bits(buffers, old)
        buffers = new
        torch.testing.assert_close(out, reference(ROWS).detach(), rtol=4 * EPS, atol=4 * EPS)
        assert_same_bits(buffers, dict(reference.named_buffers()))
    assert_untouched(module, before)
    assert_same_bits(model.buffers, dict(module.named_buffers()))
    # Buffers are values like others: the same ones in give the same ones out.
    assert_same_bits(*(model.apply(params, ROWS, buffers=buffers)[1] for _ in range(2)))


@on_ranks(2, 4)
def test_sync_buffers(world_size):
    on = meshes()
    like = fs.shard({"w": torch.ones(3)}, STRATEGIES["two dims"](on))
    rank = fs.comm.rank(fs.axis_of(on.line))
    buffers = {"mean": torch.tensor([rank, 2.0 * rank]), "count": torch.tensor(10 + rank), "none": None}
    before = fs.tree_map(torch.clone, buffers)
    first, mean = fs.sync_buffers(buffers, like), fs.sync_buffers(buffers, like, by="mean")
    assert_same_bits(buffers, before)
    middle = (world_size - 1) / 2
    assert_same_bits(first, {"mean": torch.zeros(2), "count": torch.tensor(10), "none": None})
    # Means of small integers over powers of two are exact.
    assert_same_bits(mean, {"mean": torch.tensor([middle, 2 * middle]), "count": torch.tensor(10), "none": None})
