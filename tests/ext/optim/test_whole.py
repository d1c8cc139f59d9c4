"""whole: optimizers of whole matrices on shards, what they send, and who does the work."""

import pytest
import torch
from torch import optim

import fshard as fs
from fshard.tree import flatten, is_sharded
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

STEPS = 3
SHAPES = {"w": (7, 5), "wide": (3, 37), "tall": (37, 6), "square": (8, 8)}


class Shampoo(optim.Optimizer):
    """A matrix method from outside torch, whose state has other shapes than its leaf and a count in Python."""

    def __init__(self, params, lr=1e-1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state, grad = self.state[param], param.grad
            if not state:
                state.update(step=0, left=grad.new_zeros(len(param), len(param)))
            state["step"] += 1
            state["left"].add_(grad @ grad.T)
            values, vectors = torch.linalg.eigh(state["left"] + 1e-3 * torch.eye(len(param)).to(grad))
            root = vectors @ torch.diag(values ** (-1 / 4)) @ vectors.T
            param.sub_(self.param_groups[0]["lr"] / state["step"] * (root @ grad))


CLASSES = {
    "Muon": (optim.Muon, {"lr": 0.1, "weight_decay": 0.1}),
    "Adafactor": (optim.Adafactor, {"lr": 0.1}),
    "Shampoo": (Shampoo, {}),
    "AdamW": (optim.AdamW, {"lr": 0.1, "amsgrad": True}),
}


def tree(seed):
    draw = normal(seed)
    return {name: draw(*shape) for name, shape in SHAPES.items()}


def stateful(cls, hyper):
    params = {name: torch.nn.Parameter(value) for name, value in tree(0).items()}
    optimizer = cls(params.values(), **hyper)
    for step in range(1, STEPS + 1):
        for name, grad in tree(step).items():
            params[name].grad = grad
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


# Layouts on the ranks in a line.
LINE = {
    "rows": lambda line: fs.zero2(line, min_shard_elements=0),
    "columns": lambda line: fs.fully_shard(line, dim=-1),
    "large ones alone": lambda line: fs.zero2(line, min_shard_elements=100),
    "none": fs.ddp,
}


def owned(grid):
    return fs.masked(
        fs.compose(fs.fully_shard(grid["shard"], dim=1), fs.own_dim(grid["tp"])),
        "square",
        otherwise=fs.hybrid_shard(grid, axis="shard", replicate_axis="tp"),
    )


# Layouts on a grid, with exchanges: there, back and counts, over each axis of each way to put leaves together.
GRID = {
    "two dims": (lambda grid: fs.compose(fs.fully_shard(grid["tp"], dim=1), fs.fully_shard(grid["shard"])), 6),
    "one dim": (lambda grid: fs.compose(fs.fully_shard(grid["tp"]), fs.fully_shard(grid["shard"])), 6),
    "owned": (owned, 3 + 6),
}


def trained(cls, hyper, strategy):
    """A state after some steps, and what the last one sent."""
    tx = fs.whole(fs.from_torch(cls, **hyper))
    state = fs.TrainState.create(fs.shard(tree(0), strategy), tx)
    for step in range(1, STEPS + 1):
        with fs.comm.record() as record:
            state = fs.update(tx, state, fs.shard(tree(step), strategy))
    return state, [entry for entry in record if entry.label == "whole"]


@pytest.mark.rows(1)
@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", CLASSES)
def test_it_is_the_class_itself_bit_for_bit(name):
    expected = stateful(*CLASSES[name])
    for make in LINE.values():
        state, _ = trained(*CLASSES[name], make(one_axis()))
        assert_same_bits(fs.unshard(state.params), expected)


@pytest.mark.rows(1)
@on_ranks(4, 6)
@pytest.mark.parametrize("name", CLASSES)
def test_leaves_over_several_axes_travel_over_one_after_another(name):
    expected = stateful(*CLASSES[name])
    grid = fs.init_mesh({"tp": 2, "shard": -1}, device="cpu")
    for make, exchanges in GRID.values():
        state, sent = trained(*CLASSES[name], make(grid))
        assert_same_bits(fs.unshard(state.params), expected)
        assert len(sent) == exchanges
        shards = [leaf for leaf in flatten(state.opt_state).leaves if is_sharded(leaf)]
        assert all(leaf.local.shape == leaf.spec.local_shape for leaf in shards)


def by_name(grid):
    """Some leaves whole, of which a state with another shape is split, and the others split as none was before."""
    line = fs.fully_shard(grid["shard"], min_shard_elements=300)
    two_dims, _ = GRID["two dims"]
    return fs.masked(fs.compose(fs.replicate(grid["tp"]), line), ("t*", "square"), otherwise=two_dims(grid))


@pytest.mark.rows(1)
@on_ranks(4)
@pytest.mark.parametrize("name", CLASSES)
def test_a_state_is_resharded_by_the_names_of_its_leaves(name):
    cls, hyper = CLASSES[name]
    tx, grid = fs.whole(fs.from_torch(cls, **hyper)), fs.init_mesh({"tp": 2, "shard": -1}, device="cpu")
    state = fs.TrainState.create(fs.shard(tree(0), owned(grid)), tx)
    for step, make in enumerate((owned, by_name, owned), 1):
        state = fs.reshard(state, make(grid))
        state = fs.update(tx, state, fs.shard(tree(step), make(grid)))
    assert_same_bits(fs.unshard(state.params), stateful(cls, hyper))


class RowSums(optim.Optimizer):
    """Keeps a number for each row, and looks at all of them."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            sums = self.state[param].setdefault("sums", param.new_zeros(len(param)))
            sums += param.grad.sum(1)
            param -= self.defaults["lr"] * (sums.cumsum(0)[:, None] + param.grad)


@on_ranks(4)
def test_a_vector_is_split_along_its_one_dim_over_the_axes_of_two_dims_of_its_matrix():
    """As a reshard lays it out: joined in the order of the dims of the matrix, its pieces would not fit together."""
    tx, grid = (
        fs.whole(fs.from_torch(RowSums, defaults={"lr": 0.1})),
        fs.init_mesh({"tp": 2, "shard": -1}, device="cpu"),
    )
    lines = fs.fully_shard(grid["tp"], dim=-1), fs.fully_shard(grid["shard"])
    expected = stateful(RowSums, {"defaults": {"lr": 0.1}})
    for strategy in (fs.compose(*lines), fs.compose(*reversed(lines))):
        state = fs.TrainState.create(fs.shard(tree(0), strategy), tx)
        for step in range(1, STEPS + 1):
            state = fs.update(tx, fs.reshard(state, strategy), fs.shard(tree(step), strategy))
        assert_same_bits(fs.unshard(state.params), expected)


@on_ranks(3)
def test_a_rank_sends_its_share_of_what_is_stepped(world_size):
    """To others: in go parameters, gradients and state, out come parameters and state, without single numbers."""
    full = {f"w{i}": torch.ones(12 * world_size, 8) for i in range(2 * world_size)}
    tx, params = fs.whole(fs.from_torch(optim.Muon, lr=0.1)), fs.shard(full, LINE["rows"](one_axis()))
    state = tx.init(params)
    with fs.comm.record() as record:
        tx.update(params, state, params)
    n = sum(value.nbytes for value in full.values())
    assert [(entry.op, entry.label, entry.bytes) for entry in record if not entry.about.is_comparison] == [
        ("all_to_all", "whole", 3 * n * (world_size - 1) // world_size**2),
        ("all_to_all", "whole", 2 * n * (world_size - 1) // world_size**2),
        # Muon counts nothing; from_torch counts updates once for each leaf, in 8 bytes.
        ("all_to_all", "whole", 8 * 2 * (world_size - 1)),
    ]


@pytest.mark.parametrize("name", ["rows", "whole"])
@on_ranks(2)
def test_an_average_of_leaves_without_a_gradient_is_that_of_each_leaf(name):
    """Whether ranks hold a leaf whole or split, a number too, which is stored with a dim."""
    full = {"w": normal(1)(4, 3), "unused": normal(2)(5), "number": normal(3)()}
    strategy = {"rows": fs.fully_shard, "whole": fs.replicate}[name](one_axis())
    averages = []
    for tx in (fs.whole(fs.ema(fs.adam(0.1), 0.5)), fs.ema(fs.adam(0.1), 0.5)):
        state = fs.TrainState.create(fs.shard(full, strategy), tx)
        for _ in range(STEPS):
            state = fs.update(tx, state, {"w": state.params["w"], "unused": None, "number": None})
        states = getattr(state.opt_state, "leaves", [state.opt_state])
        average = {name: leaf for each in states for name, leaf in each.average.items()}
        averages.append(fs.unshard({name: average[name] for name in full}))
    assert_same_bits(*averages)


@on_ranks(2)
def test_a_rank_that_owns_no_leaf_makes_the_same_updates():
    """It steps nothing, so that ranks must not compare by which numbers they step whole leaves."""
    axis = fs.axis_of(one_axis())
    params = fs.shard({"w": normal(1)(4, 4)}, fs.zero3(axis, min_shard_elements=0))
    tx = fs.whole(fs.from_torch(optim.SGD, lr=fs.schedules.linear(0.1, 0.0, 10)))
    state = fs.TrainState.create(params, tx)
    for step in (fs.update, fs.jit(fs.update, static_argnums=0)):
        state = step(tx, state, params)
        assert fs.psum(torch.ones(()), axis).item() == 2.0
