"""from_torch: the class's own arithmetic, bit for bit, as a pure function over full and sharded trees."""

import inspect
import itertools

import pytest
import torch
from torch import optim

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal

STEPS = 5


class Lion(optim.Optimizer):
    """A class from outside torch: it makes its state in its first step, and counts in Python."""

    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=0, average=param.grad.clone())
                state["step"] += 1
                state["average"].lerp_(param.grad, 1 - group["beta"])
                param.sub_(group["lr"] / state["step"] * state["average"].sign())


OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 0.1}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "Adamax": (optim.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"lr": 0.1, "betas": (0.5, 0.6)}),  # rectified from the third step on
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "t0": 2.0, "lambd": 0.01}),  # averages from the third step on
    "RMSprop": (optim.RMSprop, {"lr": 0.1, "weight_decay": 0.1}),
    "RMSprop centered": (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
    "Rprop": (optim.Rprop, {"lr": 0.1}),
}
IMPLEMENTATIONS = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}

CASES = {
    f"{row}, {name}": (cls, hyper | how)
    for row, (cls, hyper) in OPTIMIZERS.items()
    for name, how in IMPLEMENTATIONS.items()
    if next(iter(how)) in inspect.signature(cls).parameters
} | {"Lion": (Lion, {"lr": 0.1})}
FUSED = [case for case in CASES if case.endswith("fused")]

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SHAPES = {"wide": (3, 37), "vector": (7,), "one": (1,), "scalar": (), "empty": (0, 3)}


def tree(case, seed):
    """Leaves of every shape in every dtype; of seed 0 the parameters, of k the gradients of step k."""
    # torch 2.13's fused SGD skips most elements of half precision on a CPU (pytorch issue 191763).
    dtypes = DTYPES[:2] if case in FUSED and CASES[case][0] is optim.SGD else DTYPES
    draw = normal(seed)
    return {f"{dtype} {name}": draw(*shape, dtype=dtype) for dtype in dtypes for name, shape in SHAPES.items()}


def functional(case, place=lambda full: full):
    """What from_torch makes of them: parameters and the states after 0 to STEPS steps."""
    cls, hyper = CASES[case]
    tx = fs.from_torch(cls, **hyper)
    params = place(tree(case, 0))
    states = [tx.init(params)]
    for step in range(1, STEPS + 1):
        params, state = tx.update(place(tree(case, step)), states[-1], params)
        states.append(state)
    return params, states


def assert_close(actual, expected):
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    # A step rounds the parameter, of its own size, and some 16 numbers on the way to its change, which is below 1.
    eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    assert_trees_close(actual, expected, rtol=STEPS * eps, atol=STEPS * 16 * eps)


@pytest.mark.rows(3)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", CASES)
def test_shards_get_the_bits_of_full_trees(case):
    dense, dense_states = functional(case)
    strategy = STRATEGIES["zero2 of every leaf"](meshes())
    params, states = functional(case, place=lambda full: fs.shard(full, strategy))
    assert states[-1].updates.item() == STEPS
    full = {"params": fs.unshard(params), **fs.unshard(states[-1].slots)}
    for slot, values in ({"params": dense} | dense_states[-1].slots).items():
        for path, value in values.items():
            # Fused kernels, and those of half precision, round the last few elements, which fill no vector register,
            # otherwise than those before them.
            same = assert_close if case in FUSED or "bfloat16" in path else assert_same_bits
            same(torch.as_tensor(full[slot][path]), torch.as_tensor(value))


# Flags of torch's classes, beside IMPLEMENTATIONS.
FLAGS = {
    "momentum": (0.0, 0.9),
    "weight_decay": (0.0, 0.1, lambda count: 0.1 * (1 - int(count))),
    **dict.fromkeys(("maximize", "nesterov", "amsgrad", "centered", "decoupled_weight_decay"), (False, True)),
}
CLASSES = [*dict.fromkeys(cls for cls, _ in CASES.values()), optim.Adafactor, optim.Muon]


@pytest.mark.rows(6)
@pytest.mark.parametrize("donate", (False, True))
@pytest.mark.parametrize("cls", CLASSES)
def test_no_flag_of_a_class_changes_its_inputs(cls, donate, monkeypatch):
    """Gradients never, parameters and state unless they are donated; also where torch chooses foreach by itself."""
    known, module = inspect.signature(cls).parameters, inspect.getmodule(cls)
    names = [name for name in FLAGS if name in known]
    ways = [{}, *(how for how in IMPLEMENTATIONS.values() if next(iter(how)) in known)]
    params, *grads = ({"w": normal(seed)(3, 2, dtype=torch.float32)} for seed in range(3))
    for how, *values in itertools.product(ways, *map(FLAGS.get, names)):
        hyper = how | dict(zip(names, values, strict=True))
        # Torch refuses momentum of Nesterov's kind without any.
        if hyper.get("nesterov") and not hyper["momentum"]:
            continue
        tx = fs.from_torch(cls, lr=0.1, **hyper)
        with monkeypatch.context() as patch:
            if not how and hasattr(module, "_default_to_fused_or_foreach"):
                patch.setattr(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
            state = fs.TrainState.create(fs.tree_map(torch.clone, params), tx)
            for grad in grads:
                given = fs.tree_leaves((grad, () if donate else (state.params, state.opt_state)))
                tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
                before = [tensor.clone() for tensor in tensors]
                state = fs.update(tx, state, grad, donate=donate)
                assert_same_bits(tensors, before)


PLACES = (torch.Tensor.contiguous, lambda x: x.T.contiguous().T, lambda x: x.repeat_interleave(2, dim=1)[:, ::2])


def test_strides_do_not_matter():
    """Fused CPU kernels take elements in the order of memory."""
    tx = fs.from_torch(optim.AdamW, lr=0.1, fused=True)
    start, *grads = (normal(seed)(6, 4, dtype=torch.float32) for seed in range(3))
    found = []
    for place, place_gradient in itertools.product(PLACES, PLACES):
        params = {"w": place(start)}
        state = tx.init(params)
        for grad in grads:
            params, state = tx.update({"w": place_gradient(grad)}, state, {"w": place(params["w"])})
        found.append(params["w"])
        assert_same_bits(found[-1], found[0])


def test_gradients_that_are_conjugated_lazily_get_the_bits_of_torch():
    """Autograd returns such gradients of complex parameters; torch's own are resolved when they are accumulated."""
    z = torch.complex(torch.linspace(-1, 1, 6), torch.linspace(2, 0, 6))
    lazy = torch.complex(torch.linspace(0, 3, 6), torch.linspace(-1, 1, 6)).conj()
    parameter = torch.nn.Parameter(z.clone())
    parameter.grad = lazy.resolve_conj()
    optim.Adam([parameter], lr=0.1).step()
    tx = fs.from_torch(optim.Adam, lr=0.1)
    found, _ = tx.update({"z": lazy}, tx.init({"z": z}), {"z": z})
    assert_same_bits([found["z"]], [parameter.detach()])


# Hyperparameters that the state holds.
PARAMS = {"w": normal(0)(5, 3), "b": normal(1)(7)}
RATES = (0.1, 0.03, 0.0, 1.0)


def gradients(step):
    return {name: normal(10 * step + i)(*value.shape) for i, (name, value) in enumerate(PARAMS.items())}


@pytest.mark.parametrize("donate", (False, True))
def test_a_rate_that_is_replaced_in_the_state_is_that_of_a_class_told_so(donate):
    tensors = {name: torch.nn.Parameter(value.clone()) for name, value in PARAMS.items()}
    optimizer = optim.AdamW(tensors.values(), lr=0.5, weight_decay=0.1)
    tx = fs.from_torch(optim.AdamW, inject=("lr", "weight_decay"), lr=0.5, weight_decay=0.1)
    state = fs.TrainState.create(fs.tree_map(torch.clone, PARAMS), tx)
    assert fs.tree_map(float, state.opt_state.hyper) == {"lr": 0.5, "weight_decay": 0.1}
    for step, rate in enumerate(RATES, start=1):
        hyper = {"lr": torch.tensor(rate, dtype=torch.float64), "weight_decay": torch.tensor(rate / 7)}
        state = state._replace(opt_state=state.opt_state._replace(hyper=hyper))
        state = fs.update(tx, state, gradients(step), donate=donate)
        optimizer.param_groups[0].update(lr=rate, weight_decay=float(torch.tensor(rate / 7)))
        for name, grad in gradients(step).items():
            tensors[name].grad = grad
        optimizer.step()
        assert_same_bits(state.params, {name: tensor.detach() for name, tensor in tensors.items()})
        assert_same_bits(state.opt_state.hyper["lr"], hyper["lr"])


def test_a_schedule_s_last_value_can_be_read():
    tx = fs.from_torch(optim.SGD, inject=("lr",), lr=lambda count: RATES[int(count)])
    state = fs.TrainState.create(PARAMS, tx)
    for step, rate in enumerate(RATES):
        state = fs.update(tx, state, gradients(step))
        assert (state.opt_state.hyper["lr"].item(), state.opt_state.hyper["lr"].dtype) == (rate, torch.float64)
