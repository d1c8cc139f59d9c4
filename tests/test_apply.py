"""functionalize and apply: any module as a pure function, equal to the module itself."""

import copy

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.modules import EPS, EVERY_LEAF, MODULES, assert_untouched, build, everything, tensors
from tests.trees import STRATEGIES, assert_same_bits, meshes, one_axis


@pytest.mark.parametrize("name", MODULES)
def test_module_is_untouched(name):
    module, args, kwargs = build(name)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = everything(module)
    model = fs.functionalize(module)
    params = model.init(fs.zero2(one_axis(), min_shard_elements=0))

    def loss_fn(params):
        return sum(leaf.sum() for leaf in tensors(model.apply(params, *args, **kwargs)))

    fs.value_and_grad(loss_fn)(params)
    model.apply(fs.gather(params), *args, **kwargs)
    assert_untouched(module, before)
    for submodule in module.modules():
        assert not submodule._forward_hooks
        assert not submodule._forward_pre_hooks
        assert not submodule._backward_hooks
    # Parameters are copies: a module that trains on does not change them.
    with torch.no_grad():
        old = fs.tree_map(torch.clone, params)
        for parameter in module.parameters():
            parameter.add_(1)
    assert_same_bits(fs.tree_leaves(params), fs.tree_leaves(old))


@pytest.mark.parametrize("name", MODULES)
def test_skeleton_holds_no_weights(name):
    module, args, kwargs = build(name)
    model = fs.functionalize(module)
    # A graph of the caller's would keep its own copy of the module, to run parts of it again in its backward.
    with torch.no_grad():
        model.apply(dict(module.named_parameters()), *args, **kwargs)
    (skeleton,) = model._idle
    for copied in (model._bare, skeleton.module):
        assert copied.training == module.training
        assert isinstance(copied, type(module))
        # In lists too, such as a recurrent module's flat weights.
        held = tensors([submodule.__dict__ for submodule in copied.modules()])
        assert all(tensor.is_meta for tensor in held)


MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)


def run_in(mode, run, args, kwargs):
    with mode():
        return run(*args, **kwargs)


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("name", MODULES)
def test_output_is_the_module_s(name, world_size):
    module, args, kwargs = build(name)
    before = {path: parameter.detach().clone() for path, parameter in module.named_parameters()}
    # torch chooses other kernels where a weight requires a gradient, which a gathered one does not.
    reference = copy.deepcopy(module).requires_grad_(False)
    expected = reference(*args, **kwargs)
    by_mode = {mode: run_in(mode, reference, args, kwargs) for mode in MODES}

    def program():
        model = fs.functionalize(module)
        for strategy in ("ddp", EVERY_LEAF, "last dim"):
            params = model.init(STRATEGIES[strategy](meshes()))
            assert list(params) == [path for path, _ in module.named_parameters()]
            assert_same_bits(fs.unshard(params), before)
            for given in (params, fs.gather(params), before):
                out = model.apply(given, *args, **kwargs)
                assert_same_bits(tensors(out), tensors(expected))
                assert_same_bits(tensors(fs.apply(model, given, *args, **kwargs)), tensors(expected))
            for mode in MODES:
                found = tensors(run_in(mode, model.apply, (params, *args), kwargs))
                assert_same_bits(found, tensors(by_mode[mode]))
                assert not any(tensor.requires_grad for tensor in found)
        return out

    for out in spmd(program, world_size):
        if name == "bag":
            assert type(out) is tuple
            assert out[1]["name"] == "b"


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_the_module_s(name, world_size):
    """Each rank sees the same inputs, so that the mean over ranks is what one process has."""
    module, args, kwargs = build(name)
    differs = [p for p in module.parameters() if p.requires_grad]

    def loss_of(outputs):
        return sum((leaf * torch.linspace(0.5, 1.5, leaf.numel()).view_as(leaf)).sum() for leaf in tensors(outputs))

    value = loss_of(module(*args, **kwargs))
    if not differs:
        return
    dense = torch.autograd.grad(value, differs, allow_unused=True)
    paths = [path for path, p in module.named_parameters() if p.requires_grad]
    expected = {path: grad for path, grad in zip(paths, dense) if grad is not None}

    def program():
        model = fs.functionalize(module)
        params = model.init(STRATEGIES[EVERY_LEAF](meshes()))
        found, grads = fs.value_and_grad(lambda p: loss_of(model.apply(p, *args, **kwargs)))(params)
        assert {path for path, grad in grads.items() if grad is None} == set(params) - set(expected)
        return found, fs.unshard({path: grad for path, grad in grads.items() if grad is not None})

    # Products through at most 10 layers, summed over at most 400 terms, in an order that depends on the kernel; the
    # ranks' sum and division add world_size more.
    largest = max(leaf.abs().max().item() for leaf in expected.values())
    atol = (400 + 10 + world_size) * EPS * max(1.0, largest)
    for found, grads in spmd(program, world_size):
        torch.testing.assert_close(found, value.detach(), rtol=400 * EPS, atol=400 * EPS)
        assert_trees_close(grads, expected, rtol=0.0, atol=atol)


def test_tied_parameters_are_one():
    module, (tokens,), _ = build("tied")
    untied = copy.deepcopy(module)
    untied.head.weight = nn.Parameter(module.head.weight.detach().clone())
    model = fs.functionalize(module)
    params = model.init(fs.ddp(one_axis()))
    assert list(params) == ["embedding.weight", "first.weight", "first.bias", "head.bias"]
    _, grads = fs.value_and_grad(lambda p: model.apply(p, tokens).square().sum())(params)
    untied(tokens).square().sum().backward()
    # Autograd adds the two in the same way.
    expected = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(fs.unshard(grads)["embedding.weight"], expected, rtol=4 * EPS, atol=4 * EPS)
    changed = dict(params) | {"embedding.weight": fs.tree_map(torch.zeros_like, params["embedding.weight"])}
    assert_same_bits(model.apply(changed, tokens), module.head.bias.detach().expand(2, 3, 7))


def test_frozen_parameters_have_frozen_leaves():
    module, args, _ = build("frozen")
    model = fs.functionalize(module)
    params = model.init(fs.ddp(one_axis()))
    assert {path: leaf.spec.frozen for path, leaf in params.items()} == {"weight": True, "bias": False}
    _, grads = fs.value_and_grad(lambda p: model.apply(p, *args).sum())(params)
    assert grads["weight"] is None
    assert_same_bits(grads["bias"].local, torch.full((4,), 6.0, dtype=torch.float64))
