"""A jitted step of a plain function over a tree is the eager one, in every layout, spelling and way to accumulate."""

from functools import partial
from itertools import product

import pytest
import torch

import fshard as fs
from tests.jit.steps import STEPS, Case, adamw, assert_on_ranks, trained
from tests.ranks import my_rank
from tests.test_law_ddp import batches as whole_batches
from tests.test_law_ddp import initial, one_rank_of, row_losses
from tests.transforms.feedback import feedback
from tests.transforms.laws import grid
from tests.transforms.test_split_dim import megatron, perceptron
from tests.trees import CASTS, STRATEGIES, meshes, normal, one_axis

LAYOUTS = STRATEGIES | CASTS | {"feedback": lambda on: feedback(on.line)}
REDUCTIONS = ("mean", "sum", "weighted")


def local(reduce, params, batch):
    rows = row_losses(fs.tree_map(torch.Tensor.double, params), batch)
    return (rows.sum(), torch.ones(len(rows)).sum()) if reduce == "weighted" else rows.mean()


def this_rank_s(reduce):
    """Batches of this rank; "weighted" spreads rows so that a rank may have none."""
    return [(one_rank_of(batch, reduce),) for batch in whole_batches()[:STEPS]]


def clipped():
    return fs.chain(fs.clip_by_global_norm(0.05), adamw())


def of_engine(make_layout, reduce):
    def loss(params, batch):
        return local(reduce, fs.gather(params), batch)

    return lambda: trained(
        loss, fs.shard(initial(), make_layout(meshes())), this_rank_s(reduce), clipped(), reduce=reduce
    )


def of_verbs(make_layout, reduce):
    def make():
        tx, params = clipped(), fs.shard(initial(), make_layout(meshes()))

        def step(state, batch):
            full = fs.gather(state.params)
            grads, loss = torch.func.grad_and_value(partial(local, "mean"))(full, batch)
            grads, transform_state = fs.scatter_grads(
                grads, like=state.params, reduce=reduce, transform_state=state.transform_state
            )
            value = fs.objective(loss, like=state.params, reduce=reduce)
            return fs.update(tx, state, grads, transform_state=transform_state), value

        return Case(step, fs.TrainState.create(params, tx), this_rank_s(reduce))

    return make


SPELLINGS = {"value_and_grad": of_engine, "verbs": of_verbs}
ROWS = [row for row in product(SPELLINGS, LAYOUTS, REDUCTIONS) if row[::2] != ("verbs", "weighted")]


@pytest.mark.rows(4)
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("spelling, layout, reduce", ROWS)
def test_layouts(spelling, layout, reduce, world_size):
    assert_on_ranks(SPELLINGS[spelling](LAYOUTS[layout], reduce), world_size)


def blocks():
    draw = normal()
    return {"blocks": [{"w": draw(5, 5), "b": draw(5)} for _ in range(3)], "head": draw(5)}


def chain(params, x):
    for part in params["blocks"]:
        full = fs.gather(part)
        x = torch.tanh(x @ full["w"] + full["b"])
    return (x @ fs.gather(params["head"])).square().mean()


def accumulated(strategy, communicate, reduce):
    def make():
        tx, params = adamw(), fs.shard(blocks(), strategy(one_axis(), min_shard_elements=0))

        def loss(params, x):
            return (chain(params, x), torch.ones(len(x)).sum()) if reduce == "weighted" else chain(params, x)

        def step(state, microbatches):
            run = fs.accumulate(loss, reduce=reduce, communicate=communicate, transform_state=state.transform_state)
            value, grads, transform_state = run(state.params, microbatches)
            return fs.update(tx, state, grads, transform_state=transform_state), value

        draw = normal(my_rank())
        return Case(step, fs.TrainState.create(params, tx), [([draw(2, 5) for _ in range(3)],) for _ in range(STEPS)])

    return make


def tensor_parallel(module):
    def make():
        mesh = grid(torch.distributed.get_world_size())
        model, tp = fs.functionalize(module, units=torch.nn.Linear), fs.axis_of(mesh, "tp")
        params = model.init(megatron(mesh, fs.zero3(mesh, min_shard_elements=0, merge_bytes=0)))
        draw = normal(3 + fs.comm.rank(fs.axis_of(mesh, "shard")))
        batches = [(draw(4, 5), draw(4, 3)) for _ in range(STEPS)]
        return trained(lambda p, x, y: (model.apply(p, x, tp) - y).square().mean(), params, batches)

    return make


def test_accumulation_and_tensor_parallel():
    assert_on_ranks(accumulated(fs.zero3, "once", "mean"), 3)
    assert_on_ranks(accumulated(fs.zero2, "each", "weighted"), 2)
    assert_on_ranks(tensor_parallel(perceptron()), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("layouts", "another layout", "accumulation"))
def test_on_processes(name, workers):
    rows = {
        "layouts": of_verbs(LAYOUTS["zero2 of every leaf"], "mean"),
        "another layout": of_engine(LAYOUTS["two dims"], "weighted"),
        "accumulation": accumulated(fs.zero3, "once", "mean"),
    }
    assert_on_ranks(rows[name], workers(2))
