"""What a jitted function may do, and may not: looks at values, writes, draws, effects, operators of torch's."""

import functools
import inspect
import json
import math
import random
import re
import sysconfig
import traceback
import uuid
from functools import partial
from importlib import import_module
from threading import Thread

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import fshard as fs
from fshard.jit.signature import read_modes
from tests.jit.steps import refused
from tests.trees import assert_same_bits, normal, one_axis

# Eager calls of torch's control flow compile, and tracing imports modules of torch's own that warn.
pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.arange(3.0)
READS_A_VALUE = (
    "jit: the function reads the value of a tensor, which is unknown while it is traced (see the line above). Use "
    "torch.where instead of a branch, keep the tensor instead of calling item(), or use fs.schedules for learning "
    "rates."
)


def branch(x):
    return x if x.sum() > 0 else -x


def log(x):
    print(f"{x.sum():.3f}")


def log_number(x):
    print(f"{x.sum().item():.3f}")


def write_json(x):
    json.dumps(x.sum().item())


def rate_by_math(count):
    return 0.1 * math.cos(count)


def test_looking_at_values_is_refused_and_the_line_stands_above():
    """Also in a schedule; eagerly that may be one of numbers."""
    tx = fs.sgd(lr=rate_by_math)
    state = fs.update(tx, fs.TrainState.create(X, tx), X)
    calls = {branch: lambda: fs.jit(branch)(X), rate_by_math: lambda: fs.jit(partial(fs.update, tx))(state, X)}
    calls |= {function: partial(fs.jit(function), X) for function in (log, log_number, write_json)}
    for function, call in calls.items():
        with refused(READS_A_VALUE) as caught:
            call()
        lines = [frame.line for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
        assert inspect.getsource(function).splitlines()[1].strip() in lines


def test_errors_of_types_keep_their_text():
    """Also those that name the class of a tensor in a trace."""

    def takes_numbers(x):
        raise TypeError(f"expected a number, not a {type(x).__name__}")

    texts = {
        takes_numbers: "expected a number, not a FakeTensor",
        lambda x: x(3): "'FakeTensor' object is not callable",
    }
    for function, text in texts.items():
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            fs.jit(function)(X)


VALUES_IN_ARITHMETIC = (
    lambda x: x * x.sum().item() + 1,
    lambda x: x * sum(x.tolist()),
    lambda x: x[x > 1],
    lambda x: torch.sparse.mm(x.outer(x).to_sparse(), x[:, None]),
    lambda x: x.outer(x).to_sparse().coalesce().values() * 2,
    lambda x: x.outer(x).to_sparse_csr() @ x,
    lambda x: torch.cond(x.sum() > 4, lambda x: x.sin(), lambda x: x * x - 1, (x,)),
)


def test_values_may_be_used_in_arithmetic_and_in_control_flow_of_torch(capsys):
    """Where no branch depends on them: they are computed in each call. Prints show what a trace has, once."""
    for f in VALUES_IN_ARITHMETIC:
        jitted = fs.jit(f)
        for x in (X, X + 1, 2 * X):
            assert jitted(x).equal(f(x))
        assert jitted.traces == ["the first call"]
    jitted = fs.jit(lambda x: (print(x), x)[1])
    assert jitted(X).equal(jitted(X))
    assert capsys.readouterr().out.count("FakeTensor") == 1


CAPTURED = torch.ones(3)
DROPS = fs.functionalize(torch.nn.Dropout())


def writes_to_captured(x):
    CAPTURED.add_(1)
    return x + CAPTURED


WEIGHT = torch.nn.Parameter(torch.ones(3))


def closes_over_a_weight(x):
    return x * WEIGHT


def runs_backward(x):
    (x * WEIGHT).sum().backward()
    return WEIGHT.grad


@functools.cache
def make_mask():
    return torch.ones(3)


def uses_a_cache(x):
    return x * make_mask()


def assigns_data(x):
    result = x + 1
    result.data = 3 * x
    return result


def seeds(x):
    torch.manual_seed(0)
    return x + torch.rand(3)


class DrawsFromGenerator(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand(3, generator=torch.Generator())


def normalizes(x):
    return torch.nn.functional.batch_norm(X.expand(2, 3), x, None, training=True)


def writes_to_argument(tree):
    tree["view"][0].zero_()
    return tree


def scale(x, by):
    return x * by


def makes_a_graph(x):
    return fs.make_graph(torch.sin)(x)


def draws_before_a_key(x):
    return torch.rand(3) + DROPS.apply({}, x, key=0)


def draws_behind_a_key(x):
    return DROPS.apply({}, x, key=0) + torch.rand(3)


def draws_in_a_branch(x):
    return torch.cond(x.sum() > 0, lambda x: x + torch.rand(3), lambda x: -x, (x,))


FOREIGN = (
    ".default, which cannot be part of a graph. Use fs.psum, fs.pmean, fs.all_gather or fs.reduce_scatter over a mesh "
    "axis, or move the call out of the function."
)


def sum_by_torch(x):
    total = 2 * x
    dist.all_reduce(total)
    return total


# A key serves its own call alone, whether it comes before or behind; a branch that draws needs one too.
KEY_IS_MISSING = (
    "aten.rand.default draws random numbers without a key. Pass model.apply(..., key=...) a key that changes "
    "every step, such as fs.fold_in(state.key, state.step)."
)
CLOSES = "the function closes over a "
BY_POSITION = "but the function takes 2 arguments by position. Count from 0."
# Options of a jitted function of two arguments.
OPTIONS = [
    (
        {"static_argnums": ("by",)},
        "expected static_argnums to be one or more positions of arguments, counted from 0, got ('by',)",
    ),
    ({"static_argnums": (1, 2)}, f"static_argnums=(1, 2) names argument 2, {BY_POSITION}"),
    ({"donate_argnums": 3}, f"donate_argnums=(3,) names argument 3, {BY_POSITION}"),
    (
        {"donate_argnums": (0, 1), "static_argnums": 1},
        "argument 1 is static and in donate_argnums. A static argument has no memory to donate.",
    ),
    (
        {"donate_argnums": 1, "static_argnames": "by"},
        "argument 1 is static and in donate_argnums. A static argument has no memory to donate.",
    ),
    ({"static_argnames": (1,)}, "expected static_argnames to be one or more names of arguments, got (1,)"),
    (
        {"static_argnames": "bye"},
        "static_argnames has 'bye', but the function takes no argument of this name. Its arguments are x, by.",
    ),
    ({"backend": "fast"}, "expected backend to be one of ('graph', 'inductor') or a function, got 'fast'"),
    ({"cache": dict}, "expected cache to be one such as fs.graph_cache(directory), got the class dict"),
]
CALLS = [
    (
        lambda: fs.jit(writes_to_captured)(X),
        "aten.add_.Tensor writes in place to a tensor that the function closes over. Pass the tensor as an argument, "
        "and return its new value from the function.",
    ),
    (
        lambda: fs.jit(writes_to_argument)({"view": X.clone()}),
        "aten.zero_.default writes in place to [0][0]['view'], which is not donated. Return a new value, or donate the "
        "argument.",
    ),
    (
        lambda: fs.jit(normalizes)(X.clone()),
        "aten.native_batch_norm.default writes in place to [0][0], which is not donated. Return a new value, or donate "
        "the argument.",
    ),
    (
        lambda: fs.jit(closes_over_a_weight)(X),
        f"{CLOSES}float32 Parameter of shape (3,), which requires a gradient, which a graph does not pass on. Detach "
        "the result, or use torch.no_grad().",
    ),
    (
        lambda: fs.jit(runs_backward)(X),
        f"{CLOSES}float32 Parameter of shape (3,), which gets its .grad from backward(). Return gradients of "
        "fs.value_and_grad or torch.autograd.grad.",
    ),
    (
        lambda: [fs.jit(uses_a_cache)(x) for x in (X, X)],
        f"{CLOSES}float32 FakeTensor of shape (3,), which has no values: an earlier trace left it in a cache, a list "
        "or an attribute. Compute it outside.",
    ),
    (
        lambda: fs.jit(assigns_data)(X),
        "a trace does not see that Tensor.data is assigned. Make a new tensor, or use copy_.",
    ),
    (
        lambda: fs.jit(seeds)(X),
        "later calls would not run torch.manual_seed. Call it outside of the function. For random numbers, give "
        "model.apply(..., key=...) a key.",
    ),
    (
        lambda: fs.jit(lambda x: fs.functionalize(DrawsFromGenerator()).apply({}, x, key=0))(X),
        "aten.rand.generator draws from a torch.Generator, which a graph does not seed. Leave it out, and draw inside "
        "a module that is called with a key.",
    ),
    (
        lambda: fs.jit(scale, backend=lambda *_: None)(X, 2.0),
        "expected backend to return a function, got None",
    ),
    (
        lambda: fs.jit(lambda x: {"x": x, "n": 3, "none": None})(X),
        "the result of the function: leaves are no tensors\n"
        "  ['n']: expected a Sharded leaf or a tensor, got an int\n"
        "To fix: keep other values out of the tree. Of a module, pass the parameters of model.init.",
    ),
    *((lambda f=f: fs.jit(f)(X), KEY_IS_MISSING) for f in (draws_before_a_key, draws_behind_a_key, draws_in_a_branch)),
    (
        lambda: fs.jit(scale, donate_argnums=(0, 1))(X.clone(), by=X.clone()),
        "donate_argnums=(0, 1) names an argument that this call does not pass by position (it passes 1). Count from 0, "
        "and pass donated arguments by position.",
    ),
    (lambda: fs.jit(3), "expected f to be a function, got an int"),
    # Only one trace runs at a time, so that it would wait for itself.
    *(
        (
            lambda make=make: make(makes_a_graph)(X),
            "a function cannot be traced inside another trace. Call fs.make_graph outside of functions of fs.jit and "
            "fs.make_graph.",
        )
        for make in (fs.jit, fs.make_graph)
    ),
    (lambda: fs.jit(sum_by_torch)(X), f"the function calls torch.distributed's c10d.allreduce_{FOREIGN}"),
    (
        lambda: fs.jit(lambda x: funcol.all_reduce(2 * x, "sum", dist.group.WORLD))(X),
        f"the function calls torch.distributed's _c10d_functional.all_reduce{FOREIGN}",
    ),
    (
        lambda: fs.jit(lambda state, x: x, donate_argnums=0)({"a": X}, X.clone()),
        "argument 0 is donated, but no part of the result has its structure (or another donated argument took that "
        "part). Return the new value of the argument, or do not donate it.",
    ),
]
UNHASHABLE = [
    (
        lambda: fs.jit(scale, static_argnums=1)(X, [2]),
        "jit: static argument 1 is a list, which cannot be hashed (unhashable type: 'list'). Pass a hashable value, "
        "such as a tuple.",
    ),
    (
        lambda: fs.jit(scale)(X, by={1}),
        "jit: [1]['by'] is a set, which cannot be hashed (unhashable type: 'set'). Pass tensors in dicts, lists, "
        "tuples or classes of fs.register_dataclass (dict(batch) of a batch of transformers), or a hashable value.",
    ),
]


def test_refusals():
    # The group of all ranks, for collectives of torch.
    one_axis()
    for options, text in OPTIONS:
        with refused(f"jit: {text}"):
            fs.jit(scale, **options)
    for call, text in CALLS:
        with refused(f"jit: {text}"):
            call()
    assert WEIGHT.grad is None
    for call, text in UNHASHABLE:
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            call()


SETTERS = {
    "set_default_dtype": torch.float64,
    "set_deterministic_debug_mode": 1,
    "set_float32_matmul_precision": "medium",
    "use_deterministic_algorithms": True,
}


@pytest.mark.parametrize("name", SETTERS)
def test_modes_that_a_function_sets_are_refused(name):
    """Later calls run the graph, and would not set them; nor would it have them where the function puts them back."""
    modes = read_modes()
    for wrap in (fs.jit, fs.make_graph):
        with pytest.raises(ValueError, match=rf"later calls would not run torch\.{name}\. Call it outside of the func"):
            wrap(lambda x: getattr(torch, name)(SETTERS[name]))(X)
    assert read_modes() == modes


@pytest.mark.parametrize(
    "name",
    (
        *("torch.seed", "torch.initial_seed", "torch.random.seed", "torch.random.initial_seed"),
        *("random.seed", "random.random", "numpy.random.seed", "numpy.random.rand"),
    ),
)
def test_generators_of_the_process_are_refused_in_a_trace_alone(name):
    """A graph would seed none of them, and keep the numbers of the trace. Other threads may draw meanwhile."""
    module_name, _, function_name = name.rpartition(".")
    drawn = []

    def draw():
        drawn.append(getattr(import_module(module_name), function_name)())

    def draws(x):
        thread = Thread(target=draw)
        thread.start()
        thread.join()
        draw()
        return x

    with pytest.raises(ValueError, match=rf"later calls would not run {re.escape(name)}\. Call it outside of the func"):
        fs.jit(draws)(X)
    draw()
    assert len(drawn) == 2


def test_numbers_that_a_library_draws_are_those_of_the_trace():
    """Many are not used. Modes and seeds of torch are refused whoever sets them."""
    # Of three numbers, uuid draws one by `random`.
    fs.jit(lambda x: (uuid.uuid1(node=1), 2 * x)[1])(X)
    library = {"__name__": "library", "torch": torch, "random": random}
    source = "def draw(): return random.random()\ndef set_seed(): torch.manual_seed(0)"
    exec(compile(source, f"{sysconfig.get_path('purelib')}/library.py", "exec"), library)
    fs.jit(lambda x: (library["draw"](), 2 * x)[1])(X)
    with pytest.raises(ValueError, match=r"later calls would not run torch\.manual_seed"):
        fs.jit(lambda x: (library["set_seed"](), x)[1])(X)


@pytest.mark.parametrize(
    ("name", "set_mode", "usual"),
    (
        ("is_grad_enabled", torch.set_grad_enabled, True),
        ("flash_sdp_enabled", torch.backends.cuda.enable_flash_sdp, True),
    ),
)
def test_modes_that_a_function_leaves_changed_are_refused(name, set_mode, usual):
    def leaves_it(x):
        set_mode(not usual)
        return x + 1

    def puts_it_back(x):
        result = leaves_it(x)
        set_mode(usual)
        return result

    try:
        with pytest.raises(ValueError, match=rf"got one that leaves {{'{name}': {not usual}}}; Later calls would not"):
            fs.jit(leaves_it)(X)
        set_mode(usual)
        assert fs.jit(puts_it_back)(X).equal(X + 1)
    finally:
        set_mode(usual)


def test_argnums_may_name_arguments_that_are_passed_by_keyword_or_not_at_all():
    """Only numbers that no call can pass by position are refused."""

    def f(x, by=2.0):
        return x * by

    for call in (f, partial(f), lambda *args: f(*args), fs.jit(f)):
        jitted = fs.jit(call, static_argnums=1)
        assert jitted(X).equal(2 * X)
        assert jitted(X, 3.0).equal(3 * X)
    assert fs.jit(f, static_argnums=1)(X, by=4.0).equal(4 * X)
    assert fs.jit(lambda x, self: x * self)(X, self=X).equal(X * X)


def test_a_number_that_changes_is_refused_and_the_old_one_still_serves():
    """Also one that a static argument has by keyword, and one in the place of a tensor."""
    jitted = fs.jit(scale)
    assert jitted(X, 2.0).equal(2 * X)
    text = (
        "jit: values that the trace fixed have changed\n"
        "  [0][1]: was 2.0 and is 3.0\n"
        "To fix: pass a tensor, or list the argument in static_argnums, which traces once for each value."
    )
    with refused(text):
        jitted(X, 3.0)
    assert jitted(X, 2.0).equal(2 * X)
    assert len(jitted.traces) == 1
    jitted = fs.jit(scale, static_argnums=1)
    jitted(X, by=2.0)
    with pytest.raises(ValueError, match=r"\[1\]\['by'\]: was 2\.0 and is 3\.0"):
        jitted(X, by=3.0)
    jitted = fs.jit(scale)
    jitted(X, X)
    with pytest.raises(ValueError, match=r"\[0\]\[1\]: was a tensor and is 3\.0"):
        jitted(X, 3.0)


SEEN: list[float] = []


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


aten = torch.ops.aten
BACKWARDS = (
    lambda a, b: aten.hardsigmoid_backward(a, b),
    lambda a, b: aten.hardtanh_backward(a, b, -1.0, 1.0),
    lambda a, b: aten.softplus_backward(a, b, 1, 20),
    lambda a, b: aten.hardswish_backward(a, b),
    lambda a, b: aten.logit_backward(a, b / 8),
    # Rightly laid out by torch.
    lambda a, b: aten.silu_backward(a, b),
)


def test_operators_that_torch_lays_out_otherwise_on_tensors_without_values():
    """Were results laid out as the second operand, the view would fail when it runs."""
    a, b = normal()(2, 4, 9).transpose(1, 2).abs(), normal(1)(2, 9, 4).abs()

    def run(a, b):
        return [f(*pair).reshape(18, 4) for f in BACKWARDS for pair in ((a, b), (b, a), (b, b))]

    assert_same_bits(fs.jit(run)(a, b), run(a, b))


LAID_OUT_OTHERWISE = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "logsigmoid": F.logsigmoid,
    "pow": lambda x: 2.0**x,
}


@pytest.mark.parametrize("name", LAID_OUT_OTHERWISE)
def test_results_in_layouts_that_a_trace_does_not_know_are_reshaped_as_in_an_eager_call(name):
    """A view would fail, and at dims of size 1 strides that the graph states would read other elements."""
    f = LAID_OUT_OTHERWISE[name]

    def joined(x):
        return f(x.reshape(2, 4, 6).mT).mT.reshape(8, 6)

    def run(x):
        gradient = torch.func.grad(lambda x: joined(x * 2).square().sum())(x)
        ones = f(x.reshape(1, 1, 8, 6)[..., :4].permute(1, 3, 2, 0)).permute(3, 0, 2, 1).reshape(1, 4, 8)
        return [joined(x), gradient, ones + 0]

    x = normal()(8, 6)
    assert_same_bits(fs.jit(run)(x), run(x))


def test_what_was_written_to_is_reshaped_as_in_an_eager_call():
    def run(x):
        return F.relu(F.logsigmoid(x.reshape(2, 4, 6).mT).mT, inplace=True).reshape(8, 6)

    x = normal()(8, 6)
    assert_same_bits(fs.jit(run)(x), run(x))


def test_reshaped_tensors_of_a_trace_have_the_strides_of_the_kernel_at_dims_of_size_1():
    """Kernels of products are chosen by them, and round differently."""
    strides = []

    def run(x):
        # A slice of one column has a dim of size 1 that steps by 1.
        viewed = x.as_strided((3, 1, 5), (5, 1, 1)).view(3, 1, 5)
        strides.append(viewed.stride())
        return viewed.as_strided((3, 5), viewed.stride()[::2]) + 0

    x = normal()(15)
    assert_same_bits(fs.jit(run)(x), run(x))
    # In the graph too, where a view that seems to change nothing would be left out.
    graph = fs.make_graph(run)(x).module.graph
    (node,) = graph.find_nodes(op="call_function", target=aten.view.default)
    assert [*strides, node.meta["val"].stride()] == [(5, 5, 1)] * 4


def test_torch_compile_of_a_step_is_refused_and_one_that_calls_a_compiled_loss_is_right():
    params = fs.shard({"w": torch.ones(4, 2)}, fs.zero3(one_axis()))
    step = fs.value_and_grad(lambda p: fs.gather(p)["w"].square().sum())
    with pytest.raises(Exception, match=r"torch\.compile cannot trace fshard's functions; use fs\.jit"):
        torch.compile(step, fullgraph=True, backend="eager")(params)
    loss = torch.compile(lambda w: w.square().sum(), backend="eager", fullgraph=True)
    step = fs.value_and_grad(lambda p: loss(fs.gather(p)["w"]))
    # A graph has the operators of what was compiled.
    for run in (step, fs.jit(step)):
        value, grads = run(params)
        assert value.item() == 8.0
        assert fs.unshard(grads)["w"].equal(torch.full((4, 2), 2.0))
