"""functionalize and apply: any module as a pure function, equal to the module itself."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.functional import dropout, mse_loss
from torch.nn.utils import parametrizations

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.trees import ONE_AXIS, STRATEGIES, assert_same_bits, meshes, normal, one_axis

EPS = torch.finfo(torch.float64).eps
EVERY_LEAF = "zero2 of every leaf"


class Tied(nn.Module):
    """An embedding and a head that share one matrix, and a norm under two names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.first = self.second = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.second(2 * self.first(self.embedding(tokens))))


class Bag(nn.Module):
    """Parameters in containers, keyword arguments, and an output that is a tree."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3, 3), torch.full((3,), 2.0)])
        self.scales = nn.ParameterDict({"a": torch.tensor(3.0), "b": torch.ones(1)})
        self.none = None

    def forward(self, x, *, scale="a", shift=0.0):
        y = x @ self.weights[0] + self.weights[1]
        return y * self.scales[scale], {"shifted": [y + shift * self.scales["b"]], "name": scale}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2, batch_first=True)

    def forward(self, x):
        out, (hidden, cell) = self.lstm(x)
        return out, hidden, cell


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)

    def forward(self, x):
        return self.attention(x, x, x)


def frozen_linear():
    module = nn.Linear(3, 4)
    module.weight.requires_grad_(False)
    return module


DRAW = normal(1)
ROWS, TOKENS = DRAW(6, 3), torch.tensor([[1, 2, 3], [3, 0, 6]])
SEQUENCES, IMAGES = DRAW(2, 5, 6), DRAW(2, 3, 5, 5)

# Each with its arguments and keyword arguments.
MODULES = {
    "linear": (lambda: nn.Linear(3, 4), (ROWS,), {}),
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 33), nn.GELU(), nn.Linear(33, 5), nn.LayerNorm(5)), (ROWS,), {}),
    "tied": (Tied, (TOKENS,), {}),
    "bag": (Bag, (ROWS,), {"scale": "b", "shift": 0.5}),
    "frozen": (frozen_linear, (ROWS,), {}),
    "embedding": (lambda: nn.Embedding(7, 4, padding_idx=0), (TOKENS,), {}),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (IMAGES,), {}),
    "recurrent": (Recurrent, (DRAW(2, 5, 3),), {}),
    "gru": (lambda: nn.GRU(3, 4), (DRAW(5, 2, 3),), {}),
    "cell": (lambda: nn.LSTMCell(3, 4), (ROWS,), {}),
    "attention": (Attention, (SEQUENCES,), {}),
    "attention with keys": (lambda: Attention(add_bias_kv=True, bias=False), (SEQUENCES,), {}),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (SEQUENCES,), {}),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), (ROWS,), {}),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 4)), (ROWS,), {}),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), (ROWS,), {}),
    "buffers": (lambda: nn.BatchNorm1d(3, affine=False).eval(), (ROWS,), {}),
    "nothing": (nn.ReLU, (ROWS,), {}),
}


def build(name):
    """A module of float64 parameters, with values of a generator of its own: ranks share torch's default one."""
    make, args, kwargs = MODULES[name]
    module, draw = make().double(), normal(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape))
    return module, args, kwargs


def tensors(tree):
    return [leaf for leaf in fs.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def everything(module):
    """All that a module holds, in a form that can be compared."""
    held = {}
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            held[f"{path}.{name}"] = dict(value) if isinstance(value, dict) else copy.copy(value)
    leaves = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {name: (id(t), t._version, t.detach().clone(), t.grad, t.requires_grad) for name, t in leaves.items()}
    return held, values


def assert_untouched(module, before):
    held, values = everything(module)
    assert held.keys() == before[0].keys()
    for path, value in held.items():
        # By identity, because tensors do not compare to a bool; a list of flat weights holds tensors too.
        old = before[0][path]
        assert type(value) is type(old), path
        if isinstance(value, (dict, list)):
            assert [id(v) for v in value] == [id(v) for v in old] or value == old, path
        else:
            assert value is old or value == old, path
    for name, (identity, version, value, gradient, trained) in values.items():
        assert (identity, version, trained) == (before[1][name][0], before[1][name][1], before[1][name][4]), name
        assert gradient is before[1][name][3], name
        assert_same_bits(value, before[1][name][2])


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
    model.apply(dict(module.named_parameters()), *args, **kwargs)
    skeletons = [model._skeleton, *model._idle]
    assert len(skeletons) == 2
    for skeleton in skeletons:
        assert skeleton.training == module.training
        assert type(skeleton) is type(module)
        assert len([*skeleton.parameters()]) == len([*module.parameters()])
        # In lists too, such as a recurrent module's flat weights.
        held = tensors([vars(submodule) for submodule in skeleton.modules()])
        assert all(tensor.is_meta for tensor in held)


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("name", MODULES)
def test_output_is_the_module_s(name, world_size):
    module, args, kwargs = build(name)
    before = {path: parameter.detach().clone() for path, parameter in module.named_parameters()}
    # torch chooses other kernels where a weight requires a gradient, which a gathered one does not.
    reference = copy.deepcopy(module).requires_grad_(False)
    expected = reference(*args, **kwargs)

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
    dense = torch.autograd.grad(value, differs, allow_unused=True, materialize_grads=True)
    expected = dict(zip([path for path, p in module.named_parameters() if p.requires_grad], dense))

    def program():
        model = fs.functionalize(module)
        params = model.init(STRATEGIES[EVERY_LEAF](meshes()))
        found, grads = fs.value_and_grad(lambda p: loss_of(model.apply(p, *args, **kwargs)))(params)
        assert {path for path, grad in grads.items() if grad is None} == set(params) - set(expected)
        return found, fs.unshard({path: grad for path, grad in grads.items() if grad is not None})

    # Products through at most 10 layers, summed over at most 400 terms, in an order that depends on the kernel; the
    # ranks' sum and division add world_size more.
    largest = max(leaf.abs().max().item() for leaf in dense)
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


@pytest.mark.parametrize("world_size", (1, 2, 3))
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

    def program():
        model, evaluated = fs.functionalize(start), fs.functionalize(copy.deepcopy(start).eval())
        mesh = one_axis()
        params = model.init(fs.zero2(mesh, min_shard_elements=0))
        tx = fs.from_torch(torch.optim.SGD, lr=0.1)
        state = fs.TrainState.create(params, tx, buffers=model.buffers)

        def loss_fn(params, buffers, x):
            out, buffers = model.apply(params, x, buffers=buffers)
            return out.square().sum(), buffers

        for step in batches:
            buffers = fs.sync_buffers(state.buffers, like=state.params)
            batch = step[fs.comm.rank(fs.axis_of(mesh))]
            (_, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params, buffers, batch)
            state = fs.update(tx, state._replace(buffers=buffers), grads)
        buffers = fs.sync_buffers(state.buffers, like=state.params)
        out, same = evaluated.apply(state.params, ROWS, buffers=buffers)
        assert_same_bits(same, buffers)
        return fs.unshard(state.params), buffers, out

    expected = reference()
    # A step sums some 50 products of numbers up to 100, and so hands on that many roundings.
    atol = steps * 50 * world_size * EPS * 100
    for found in spmd(program, world_size):
        assert_trees_close(found, expected, rtol=0.0, atol=atol)
        assert found[1]["1.num_batches_tracked"].item() == steps


@pytest.mark.parametrize("world_size", (1, 2, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sync_buffers(strategy, world_size):
    def program():
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

    spmd(program, world_size)


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


class Block(nn.Module):
    """A transformer's block whose modules are made in the order in which they are registered."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))


class Scaled(nn.Module):
    """A parent that changes what its children have drawn."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain)
        with torch.no_grad():
            self.inner.weight.mul_(0.1)


SEEDED = {
    "linear": lambda: nn.Linear(30, 40),
    "sequential": lambda: nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2, bias=False)),
    "blocks": lambda: nn.Sequential(nn.Embedding(7, 6), Block(), Block(), nn.LayerNorm(6)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU()),
    "recurrent": Recurrent,
    "attention": lambda: nn.MultiheadAttention(6, 2),
    "attention of other keys": lambda: nn.MultiheadAttention(6, 2, kdim=3, vdim=4, add_bias_kv=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(6, 2, 8),
    "transformer": lambda: nn.Transformer(6, 2, 1, 1, 8, batch_first=True),
    "scaled": Scaled,
}


def constructed(name, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SEEDED[name]()


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize("name", SEEDED)
def test_seed_draws_what_constructing_the_module_draws(name, device):
    with torch.device(device):
        module = SEEDED[name]()
    model = fs.functionalize(module)
    expected = {path: parameter.detach() for path, parameter in constructed(name, 3).named_parameters()}
    state = torch.get_rng_state()
    for strategy in (fs.ddp(one_axis()), fs.zero2(one_axis(), min_shard_elements=0)):
        params = model.init(strategy, seed=3)
        assert_same_bits(fs.unshard(params), expected)
    assert_same_bits(torch.get_rng_state(), state)
    assert all(parameter.device.type == device for parameter in module.parameters())


@pytest.mark.parametrize("name", ("blocks", "encoder layer"))
def test_seed_draws_the_same_at_every_world_size(name):
    expected = {path: parameter.detach() for path, parameter in constructed(name, 3).named_parameters()}
    other = constructed(name, 4)
    state = torch.get_rng_state()
    for world_size in (1, 2, 3):

        def program():
            model = fs.functionalize(other)
            return [fs.unshard(model.init(make(meshes()), seed=3)) for make in ONE_AXIS.values()]

        for drawn in spmd(program, world_size):
            for full in drawn:
                assert_same_bits(full, expected)
    assert_same_bits(torch.get_rng_state(), state)


def test_seed_leaves_module_and_buffers():
    module, _, _ = build("batch norm")
    before = everything(module)
    model = fs.functionalize(module)
    buffers = fs.tree_map(torch.clone, model.buffers)
    params = model.init(fs.ddp(one_axis()), seed=0)
    assert not fs.unshard(params)["0.weight"].equal(module[0].weight)
    assert_untouched(module, before)
    assert_same_bits(model.buffers, buffers)


class HalfDrawn(nn.Linear):
    """Adds a parameter that Linear's reset_parameters knows nothing of."""

    def __init__(self):
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


def test_what_a_seed_would_leave_undrawn_is_refused():
    with pytest.raises(ValueError, match="drawn from a seed") as caught:
        fs.functionalize(nn.Sequential(nn.Linear(2, 2), HalfDrawn())).init(fs.ddp(one_axis()), seed=0)
    assert str(caught.value) == (
        "model.init: values cannot be drawn from a seed\n"
        "  ['1.scale']: found elements left out by reset_parameters, needed a value for each\n"
        "To fix: draw them in reset_parameters, or leave out seed to take the values the module has."
    )


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("name", ("perceptron", "recurrent", "encoder", "batch norm"))
def test_evaluation(name, world_size, mode):
    module, args, kwargs = build(name)
    reference = copy.deepcopy(module).requires_grad_(False)
    with mode():
        expected = reference(*args, **kwargs)

    def program():
        model = fs.functionalize(module)
        params = model.init(STRATEGIES[EVERY_LEAF](meshes()))
        with mode():
            return tensors(model.apply(params, *args, **kwargs))

    for outputs in spmd(program, world_size):
        assert_same_bits(outputs, tensors(expected))
        assert not any(out.requires_grad for out in outputs)


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


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("strategy", ("ddp", EVERY_LEAF, "last dim"))
def test_function_transforms(strategy, world_size):
    dense, model, full = dense_and_sharded()
    draw = normal(3)
    tangent = {path: draw(*leaf.shape) for path, leaf in full.items()}
    batch, target = draw(4, 6, 3), draw(6, 5)

    def loss(run, params, x):
        return mse_loss(run(params, x), target)

    expected = {
        "grad": grad(lambda p: loss(dense, p, ROWS))(full),
        "vmap": vmap(lambda x: dense(full, x))(batch),
        "jvp": jvp(lambda p: dense(p, ROWS), (full,), (tangent,)),
        "jvp of inputs": jvp(lambda x: dense(full, x), (ROWS,), (batch[0],)),
        "vmap of grad of inputs": vmap(grad(lambda x: loss(dense, full, x)))(batch),
        "jacrev of inputs": jacrev(lambda x: dense(full, x))(ROWS[0]),
    }

    def program():
        transform = STRATEGIES[strategy](meshes())
        params, directions = fs.shard(full, transform), fs.shard(tangent, transform)
        run = model.apply
        found = {
            "grad": fs.unshard(grad(lambda p: fs.objective(loss(run, p, ROWS), like=p))(params)),
            "vmap": vmap(lambda x: run(params, x))(batch),
            "jvp": jvp(lambda p: run(p, ROWS), (params,), (directions,)),
            "jvp of inputs": jvp(lambda x: run(params, x), (ROWS,), (batch[0],)),
            "vmap of grad of inputs": vmap(grad(lambda x: loss(run, params, x)))(batch),
            "jacrev of inputs": jacrev(lambda x: run(params, x))(ROWS[0]),
        }
        assert_trees_close(found, expected, rtol=0.0, atol=TRANSFORM_ATOL)

    spmd(program, world_size)
