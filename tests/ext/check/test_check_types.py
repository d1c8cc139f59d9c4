"""The types of fs.check, as a table of small steps over one axis, and its report."""

import functools

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from tests.ext.check.mistakes import SHARD_TP, check
from tests.ext.check.programs import HYBRID, LAYER, X, Y, from_loss, from_step, parallel, split, state_of, train

MESH = {"shard": 4}
FULL = {"w": torch.ones(8, 6)}


def problems_of(step, *args):
    return [(str(problem.kind), problem.path) for problem in fs.check(step, *args, mesh=MESH).problems]


def state():
    return state_of(FULL, split(fs.init_mesh({"shard": 1}, device="cpu")))


def number(f):
    """A step that changes nothing, and returns a number of the leaf, the batch and the axis."""

    def step(state, x, axis):
        return state, f(state.params["w"], x, axis)

    return step


def precision(x, y):
    return (x * y > 0).sum() / (x > 0).sum()


def f1(x):
    of_first, of_second = precision(x, x), precision(x, -x)
    return 2 * of_first * of_second / (of_first + of_second)


METRICS = {
    "constant": (lambda w, x, axis: torch.zeros(()), None),
    "batch": (lambda w, x, axis: x.sum(), "local metric"),
    "batch in a graph of views": (lambda w, x, axis: x.view(-1)[0], "local metric"),
    "mean over ranks": (lambda w, x, axis: fs.pmean(x.mean(), axis), None),
    "shard": (lambda w, x, axis: w.local.sum(), "local metric"),
    "sum of shards": (lambda w, x, axis: fs.psum(w.local.sum(), axis), None),
    "sum of numbers of shards": (lambda w, x, axis: fs.psum(torch.stack([w.local.sum()] * 2), axis).sum(), None),
    "gathered leaf": (lambda w, x, axis: fs.gather({"w": w})["w"].sum(), None),
    "rows of ranks": (lambda w, x, axis: fs.all_gather(x, axis).sum(), None),
    "exchanged rows": (lambda w, x, axis: fs.all_to_all(x, axis, 0, 0).sum(), None),
    "largest": (lambda w, x, axis: fs.pmax(x.amax(), axis), None),
    "coordinate": (lambda w, x, axis: torch.zeros(()) + fs.axis_index(axis), "rank's own number"),
    "sum of a sum": (lambda w, x, axis: fs.psum(fs.psum(x.sum(), axis), axis), "doubled sum"),
    "mean of a mean": (lambda w, x, axis: fs.pmean(fs.pmean(x.mean(), axis), axis), None),
    "mean of exponentials": (lambda w, x, axis: fs.pmean(x.mean().exp(), axis), "mean of means"),
    "mean of powers of two": (lambda w, x, axis: fs.pmean(x.mean().exp2(), axis), "mean of means"),
    "mean of deviations": (lambda w, x, axis: fs.pmean(x.std(), axis), "mean of means"),
    "mean of variances": (lambda w, x, axis: fs.pmean(x.var(), axis), None),
    "mean of roots of variances": (lambda w, x, axis: fs.pmean(x.var().sqrt(), axis), "mean of means"),
    "mean of powers": (lambda w, x, axis: fs.pmean(x.mean() ** 3, axis), "mean of means"),
    "mean of products": (lambda w, x, axis: fs.pmean(x.mean() * x.std(), axis), None),
    "mean of reciprocals": (lambda w, x, axis: fs.pmean(1 / x.square().sum(), axis), "mean of means"),
    "mean of scaled roots": (lambda w, x, axis: fs.pmean(1 - 2 * x.square().mean().sqrt(), axis), "mean of means"),
    "mean of quotients": (lambda w, x, axis: fs.pmean(torch.ones(()) / x.mean(), axis), "mean of means"),
    "mean of tanh": (lambda w, x, axis: fs.pmean(x.mean().tanh(), axis), "mean of means"),
    "mean of precisions": (lambda w, x, axis: fs.pmean(precision(x, x), axis), "mean of means"),
    "mean of F1": (lambda w, x, axis: fs.pmean(f1(x), axis), "mean of means"),
    "mean of rows of exponentials": (lambda w, x, axis: fs.pmean(x.exp().mean(), axis), None),
    "mean of rows of tanh": (lambda w, x, axis: fs.pmean(x.tanh().mean(), axis), None),
    "mean of rows of products": (lambda w, x, axis: fs.pmean((x * x).sum() / x.numel(), axis), None),
    "mean of deviations of rows": (lambda w, x, axis: fs.pmean(torch.stack([*map(torch.std, x)]).mean(), axis), None),
    "mean of sums over rows": (lambda w, x, axis: fs.pmean(sum(row.std() for row in x) / len(x), axis), None),
    "mean of a loss with a deviation": (lambda w, x, axis: fs.pmean(x.mean() + 0.1 * x.std(), axis), None),
    "mean of a loss with a factor": (lambda w, x, axis: fs.pmean(x.mean() * x[0, 0].exp(), axis), None),
    "mean of counts that are not 0": (
        lambda w, x, axis: fs.pmean(1 / (x > 0).sum().clamp(min=1), axis),
        "mean of means",
    ),
    "mean of squares": (lambda w, x, axis: fs.pmean((x.mean() - fs.pmean(x.mean(), axis)) ** 2, axis).sqrt(), None),
    "mean of squared norms": (lambda w, x, axis: fs.pmean(x.norm() ** 2, axis), None),
    "share of large roots": (lambda w, x, axis: fs.pmean((x.square().sum().sqrt() > 1).float(), axis), None),
    "deviation of all": (lambda w, x, axis: fs.pmean(x.square().mean(), axis).sqrt(), None),
    "sum over ranks": (lambda w, x, axis: fs.psum(x.sum(), axis), None),
    "sum over ranks, over the items of one": (lambda w, x, axis: fs.psum(x.sum(), axis) / x.numel(), "number of ranks"),
    "sum over ranks, over those of all": (lambda w, x, axis: fs.psum(x.sum(), axis) / (x.numel() * axis.size), None),
    "sum of losses": (lambda w, x, axis: fs.psum(F.cross_entropy(x, Y, reduction="sum"), axis), None),
    "sum of means of losses": (lambda w, x, axis: fs.psum(F.cross_entropy(x, Y), axis), "number of ranks"),
    "sum of means, beside a 2": (lambda w, x, axis: fs.psum(F.huber_loss(x, -x, delta=2.0), axis), "number of ranks"),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.rows(len(METRICS))
def test_type_of_a_number(name):
    f, kind = METRICS[name]
    axis = fs.axis_of(fs.init_mesh({"shard": 1}, device="cpu"))
    # Some of the numbers do not depend on the batch.
    kinds = [each for each, _ in problems_of(number(f), state(), X, axis) if each != "unused batch"]
    assert kinds == ([] if kind is None else [kind])


def test_list_operators_type_each_item_alone():
    def step(state, x):
        local, shared = torch._foreach_mul([x, torch.ones(2)], 2.0)
        return state, shared.sum(), local

    assert problems_of(step, state(), X) == []


def test_writes_change_the_type_of_memory():
    def step(state, x):
        buffer = torch.zeros(4)
        view = buffer[:2]
        buffer.add_(x.sum(1))
        return state, view.sum()

    assert problems_of(step, state(), X) == [("local metric", "[1]")]


def loss_fn(params, x, y):
    return F.cross_entropy(x @ fs.gather(params)["w"].T, y)


def test_report_of_a_right_step_shows_its_plan():
    report = fs.check(train(loss_fn), state(), X, Y, mesh=MESH)
    assert report.problems == ()
    assert report.plan.by_axis()["shard"].collectives == 3
    assert str(report).startswith("check: no problems\nmesh shard 4:")


@pytest.mark.parametrize("backend", ("nccl", "gloo"))
def test_the_plan_of_a_report_is_that_of_fs_plan(backend):
    options = {"mesh": MESH, "rank": 3, "backend": backend}
    step, args = train(loss_fn), (state(), X, Y)
    assert str(fs.check(step, *args, **options).plan) == str(fs.plan(step, *args, **options))


def test_report_shows_the_line_and_what_to_do():
    def step(state, x, y):
        loss, _ = fs.value_and_grad(loss_fn)(state.params, x, y)
        return state, loss, x.sum()

    (problem,) = fs.check(step, state(), X, Y, mesh=MESH).problems
    lines = str(problem).splitlines()
    assert lines[0] == (
        "local metric over shard in [2]: each rank returns a number of its own batch; return fs.pmean of it."
    )
    assert lines[1].endswith("in step: return state, loss, x.sum()")


def test_problems_are_in_the_order_of_their_first_lines():
    def step(state, x):
        weight = state.params["w"]
        term = weight.local.square().sum()
        grads = []
        for scaled in (True, False, True):
            if scaled:
                grads.append(fs.tree_map(lambda local: local / term, weight))
            else:
                grads.append(fs.tree_map(lambda local: local * term, weight))
        return state, *grads

    problems = fs.check(step, state(), X, mesh=MESH).problems
    sources = [str(problem).splitlines()[1] for problem in problems if problem.kind == "missing sum"]
    assert [source.split("lambda local: ")[1] for source in sources] == [
        "local / term, weight))",
        "local * term, weight))",
    ]


def test_what_follows_from_a_norm_of_shards_is_no_problem_of_its_own():
    """In a leaf that is whole, in one that is split, and in the norm that is returned."""

    @from_step({"b": torch.ones(6), **FULL}, lambda mesh: fs.zero3(mesh, min_shard_elements=9))
    def clip(state, x):
        grads = state.params
        norm = sum(grad.local.square().sum() for grad in grads.values()).sqrt()
        grads = {name: fs.tree_map(lambda g: g / norm, grad) for name, grad in grads.items()}
        return state._replace(params=grads), norm

    (problem,) = [each for each in check(clip, MESH).problems if each.kind != "unused batch"]
    assert (problem.kind, problem.path) == ("missing sum", "")


def test_an_objective_over_two_axes_has_no_power_of_ranks():
    """It is divided by the ranks of both at once."""

    @from_step(FULL, functools.partial(fs.ddp, axis=("replicate", "shard")))
    def step(state, x):
        full = fs.gather(state.params)["w"]
        return state, fs.objective((x @ full.T).mean(), like=state.params)

    assert check(step, HYBRID).problems == ()


def test_the_number_of_a_rank_may_go_into_terms_of_a_sum():
    """A bias that one rank adds to a sum over ranks whose loss is no mean over them."""

    @from_loss(LAYER, parallel)
    def step(params, x, y, tp):
        full = fs.gather(params)
        x = fs.pcast(x * full["norm"], tp, to="varying")
        bias = fs.pcast(full["bias"], tp, to="varying") * (fs.axis_index(tp) == 0)
        out = fs.psum_invariant((x @ full["up"].T).relu() @ full["down"].T + bias, tp)
        return F.cross_entropy(out @ full["head"].T, y)

    assert check(step, SHARD_TP).problems == ()


def test_sums_that_a_pipeline_hides_in_its_backward_are_not_missed():
    """Stages whose features are split over another axis."""

    def step(params, x, y, tp, pipe):
        def stage(params, h):
            split = torch.tanh(fs.pcast(h, tp, to="varying") @ params["up"][0])
            return h + fs.psum_invariant(split @ params["down"][0], tp)

        loss_fn = fs.pipeline(
            stage, pipe, microbatches=2, last=lambda _, h, y: (h - y).square().mean(), schedule="1f1b"
        )
        loss, _ = fs.value_and_grad(loss_fn)(params, x, y)
        return params, loss

    mesh = fs.init_mesh({"tp": 1, "pipe": 1}, device="cpu")
    tp, pipe = fs.axis_of(mesh["tp"]), fs.axis_of(mesh["pipe"])
    up, down = (fs.masked(fs.split_dim(tp, dim=dim), name) for name, dim in (("up", 2), ("down", 1)))
    layout = fs.compose(fs.split_dim(pipe, dim=0), up, down)
    params = fs.shard({"up": torch.ones(2, 6, 8), "down": torch.ones(2, 8, 6)}, layout)
    assert fs.check(step, params, X, X, tp, pipe, mesh={"tp": 2, "pipe": 2}).problems == ()


def test_the_coordinate_on_an_axis_that_a_step_closes_over_is_that_of_the_planned_mesh():
    """As in a key of dropout: a program of one rank reads its axis from its mesh, and not from an argument."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Dropout(0.5))
    model = fs.functionalize(module)
    axis = fs.axis_of(fs.init_mesh({"shard": 1}, device="cpu"))

    def masked(state, x, *, folded):
        key = fs.fold_in(fs.fold_in(state.key, state.step), folded)
        loss, grads = fs.value_and_grad(lambda params: model.apply(params, x, key=key).square().mean())(state.params)
        return state._replace(params=fs.tree_map(torch.sub, state.params, grads)), loss

    def cut(state, x):
        """The piece of a rank of the axis itself, which is all of the batch."""
        pieces = (x.chunk(axis.size)[fs.comm.rank(axis)], x.chunk(axis.size)[fs.axis_index(axis)])
        return masked(state, sum(pieces), folded=axis)

    params = model.init(fs.ddp(fs.init_mesh({"shard": 1}, device="cpu")))
    start, x = fs.TrainState.create(params, fs.sgd(0.1), key=0), torch.ones(4, 6)
    assert problems_of(functools.partial(masked, folded=axis), start, x) == []
    assert [kind for kind, _ in problems_of(functools.partial(masked, folded=1), start, x)] == ["same random numbers"]
    assert problems_of(cut, start, x) == []


def test_a_jitted_step_keeps_the_decorators_of_its_function():
    """They may change what it does, as one that makes the loss or the batch anew."""

    def with_local_sum(step):
        @functools.wraps(step)
        def run(state, x, axis):
            return state, x.sum()

        return run

    jitted = fs.jit(with_local_sum(number(lambda w, x, axis: torch.zeros(()))))
    axis = fs.axis_of(fs.init_mesh({"shard": 1}, device="cpu"))
    assert [kind for kind, _ in problems_of(jitted, state(), X, axis)] == ["local metric"]


def test_a_product_of_means_over_split_features_may_be_averaged():
    """Unlike one that sums over these features, of which each rank has a part."""

    @from_step(LAYER, parallel)
    def step(state, x, tp):
        full = fs.gather(state.params)
        means = torch.relu(fs.pcast(x, tp, to="varying") @ full["up"].T).mean(1, keepdim=True)
        products = fs.psum_invariant(means @ torch.ones(1, 3), tp) / tp.size
        return state, fs.pmean(products.sum(), state.params["norm"].spec.axes[0])

    assert check(step, SHARD_TP).problems == ()


def test_refusals_of_fshard_are_problems_and_errors_of_the_user_are_raised():
    def refused(state, x):
        return state, fs.psum({"x": 3}, state.params["w"].spec.axes[0])

    def failing(state, x):
        raise ValueError("mine")

    (problem,) = fs.check(refused, state(), X, mesh=MESH).problems
    assert (problem.kind, [frame.function for frame in problem.frames]) == ("refused", ["refused"])
    # As of a program that is typed in, whose lines nobody can read.
    typed = {"fs": fs}
    exec("def step(state, x):\n    return state, fs.psum({'x': 3}, state.params['w'].spec.axes[0])", typed)
    (problem,) = fs.check(typed["step"], state(), X, mesh=MESH).problems
    assert (problem.kind, problem.frames[0].function) == ("refused", "step")
    with pytest.raises(ValueError, match="mine"):
        fs.check(failing, state(), X, mesh=MESH)
    with pytest.raises(ValueError, match="check: mesh has the axes"):
        fs.check(failing, state(), X, mesh={"tp": 4})
