"""functionalize and apply: any module as a pure function, equal to the module itself, under any call."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.functional import dropout, mse_loss

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.modules import EPS, EVERY_LEAF, MODULES, ROWS, assert_untouched, build, everything, tensors
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis


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


class Twice(nn.Module):
    """Calls a model inside its own call, on parameters of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.depth = 0

    def forward(self, x, inner=None):
        return self.linear(x if inner is None else inner(x)) + self.linear.bias


def test_a_model_inside_itself():
    module = Twice().double()
    model = fs.functionalize(module)
    draw, strategy = normal(), fs.zero2(one_axis(), min_shard_elements=0)
    outer, inner = (fs.shard({"linear.weight": draw(3, 3), "linear.bias": draw(3)}, strategy) for _ in range(2))
    x = draw(5, 3)

    def dense(outer, inner):
        y = x @ inner["linear.weight"].T + 2 * inner["linear.bias"]
        return y @ outer["linear.weight"].T + 2 * outer["linear.bias"]

    def nested(outer, inner):
        return model.apply(outer, x, inner=lambda x: model.apply(inner, x))

    full = fs.unshard(outer), fs.unshard(inner)
    torch.testing.assert_close(nested(outer, inner), dense(*full), rtol=16 * EPS, atol=64 * EPS)
    found = torch.func.grad(lambda pair: nested(*pair).square().sum())((outer, inner))
    expected = torch.func.grad(lambda pair: dense(*pair).square().sum())(full)
    # Sums of up to 5 * 3 products of numbers up to 100.
    assert_trees_close(fs.unshard(found), expected, rtol=0.0, atol=15 * 3 * EPS * 100)


class Meeting(nn.Module):
    """Waits inside its forward until all calls have come, so that they surely overlap."""

    def __init__(self, barrier):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.wait = barrier.wait

    def forward(self, x):
        half = x @ self.linear.weight.T
        self.wait()
        return half + self.linear.bias

    def __deepcopy__(self, memo):
        again = Meeting.__new__(Meeting)
        nn.Module.__init__(again)
        again.linear, again.wait = copy.deepcopy(self.linear, memo), self.wait
        return again


def test_calls_that_overlap_do_not_mix():
    calls, rounds = 4, 3
    model = fs.functionalize(Meeting(threading.Barrier(calls, timeout=30)).double())
    draw = normal()
    params = [{"linear.weight": draw(3, 3), "linear.bias": draw(3)} for _ in range(calls)]
    outputs = [[] for _ in range(calls)]

    def call(i):
        for _ in range(rounds):
            outputs[i].append(model.apply(params[i], ROWS))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(calls):
        assert_same_bits(outputs[i], [ROWS @ params[i]["linear.weight"].T + params[i]["linear.bias"]] * rounds)


def test_a_model_is_copied_after_calls_as_before():
    """Its weightless copies have values in calls alone, and do not travel."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model, params, x = fs.functionalize(module), dict(module.named_parameters()), torch.ones(2, 3)
    before = model.apply(params, x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(again.apply(params, x), before)


def test_a_failed_call_leaves_the_model_whole():
    module, args, _ = build("perceptron")
    model = fs.functionalize(module)
    params = dict(module.named_parameters())
    expected = model.apply(params, *args)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.apply(params, torch.ones(2, 5, dtype=torch.float64))
        assert_same_bits(model.apply(params, *args), expected)


def test_dropout_draws_from_the_ambient_generator():
    module = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)).double()
    trained, evaluated = fs.functionalize(module), fs.functionalize(copy.deepcopy(module).eval())
    params = trained.init(fs.ddp(one_axis()))
    linear = evaluated.apply(params, ROWS)
    outputs = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            outputs.append(trained.apply(params, ROWS))
            torch.manual_seed(seed)
            assert_same_bits(outputs[-1], dropout(linear, 0.5, training=True))
    assert_same_bits(outputs[0], outputs[1])
    assert not outputs[0].equal(outputs[2])


def dense_and_sharded():
    """A perceptron as a function of full parameters, and the model with the same ones sharded."""
    module, _, _ = build("perceptron")
    full = {path: parameter.detach() for path, parameter in module.named_parameters()}
    model = fs.functionalize(module)

    def dense(params, x):
        return functional_call(copy.deepcopy(module), params, (x,))

    return dense, model, full


# Sums of 33 products a layer, of numbers up to 10, through two layers and a norm.
TRANSFORM_ATOL = 2 * 33 * EPS * 10


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", ("ddp", EVERY_LEAF, "last dim"))
def test_function_transforms(strategy):
    dense, model, full = dense_and_sharded()
    draw = normal(3)
    tangent = {path: draw(*leaf.shape) for path, leaf in full.items()}
    batch, target = draw(4, 6, 3), draw(6, 5)

    def loss(run, params, x):
        return mse_loss(run(params, x), target)

    def results(run, params, directions):
        return {
            "vmap": vmap(lambda x: run(params, x))(batch),
            "jvp": jvp(lambda p: run(p, ROWS), (params,), (directions,)),
            "jvp of inputs": jvp(lambda x: run(params, x), (ROWS,), (batch[0],)),
            "vmap of grad of inputs": vmap(grad(lambda x: loss(run, params, x)))(batch),
            "jacrev of inputs": jacrev(lambda x: run(params, x))(ROWS[0]),
        }

    expected = results(dense, full, tangent) | {"grad": grad(lambda p: loss(dense, p, ROWS))(full)}

    transform = STRATEGIES[strategy](meshes())
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


@on_ranks(1, 2, 3)
def test_batch_norm_trains_and_evaluates_as_under_ddp(world_size):
    """DDP gives every rank rank 0's buffers before each forward; statistics are of the rank's own batch."""
    steps, draw = 3, normal()
    batches = [[draw(4, 3) for _ in range(world_size)] for _ in range(steps)]
    start, _, _ = build("batch norm")
    start.train()

    def reference():
        module = copy.deepcopy(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in batches:
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            params = dict(module.named_parameters())
            outputs = [
                functional_call(module, params | {n: b.clone() for n, b in buffers.items()}, x) for x in step[1:]
            ]
            losses = [module(step[0]).square().sum(), *(out.square().sum() for out in outputs)]
            optimizer.zero_grad()
            (sum(losses) / world_size).backward()
            optimizer.step()
        return dict(module.named_parameters()), dict(module.named_buffers()), copy.deepcopy(module).eval()(ROWS)

    model, evaluated, mesh = fs.functionalize(start), fs.functionalize(copy.deepcopy(start).eval()), one_axis()
    tx = fs.from_torch(torch.optim.SGD, lr=0.1)
    state = fs.TrainState.create(model.init(fs.zero2(mesh, min_shard_elements=0)), tx, buffers=model.buffers)

    def loss_fn(params, buffers, x):
        out, buffers = model.apply(params, x, buffers=buffers)
        return out.square().sum(), buffers

    for step in batches:
        buffers = fs.sync_buffers(state.buffers, like=state.params)
        (_, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params, buffers, step[mesh.get_rank()])
        state = fs.update(tx, state._replace(buffers=buffers), grads)
    buffers = fs.sync_buffers(state.buffers, like=state.params)
    out, same = evaluated.apply(state.params, ROWS, buffers=buffers)
    assert_same_bits(same, buffers)
    # A step sums some 50 products of numbers up to 100, and so hands on that many roundings.
    atol = steps * 50 * world_size * EPS * 100
    assert_trees_close((fs.unshard(state.params), buffers, out), reference(), rtol=0.0, atol=atol)
    assert buffers["1.num_batches_tracked"].item() == steps


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sync_buffers(strategy, world_size):
    on = meshes()
    like = fs.shard({"w": torch.ones(3)}, STRATEGIES[strategy](on))
    rank = fs.comm.rank(fs.axis_of(on.line))
    buffers = {"mean": torch.tensor([rank, 2.0 * rank]), "count": torch.tensor(10 + rank), "none": None}
    before = fs.tree_map(torch.clone, buffers)
    first, mean = fs.sync_buffers(buffers, like), fs.sync_buffers(buffers, like, by="mean")
    assert_same_bits(buffers, before)
    middle = (world_size - 1) / 2
    assert_same_bits(first, {"mean": torch.zeros(2), "count": torch.tensor(10), "none": None})
    # Means of small integers over powers of two are exact.
    assert_same_bits(mean, {"mean": torch.tensor([middle, 2 * middle]), "count": torch.tensor(10), "none": None})
