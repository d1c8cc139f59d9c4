"""from_torch: any class is a pure function, however its inputs lie; and hyperparameters in its state."""

import inspect
import itertools
from collections import OrderedDict

import pytest
import torch
from torch import func, optim

import fshard as fs
from tests.tolerance import within
from tests.trees import assert_same_bits, copied, normal, tensors


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
    "SGD dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "Adamax": (optim.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"lr": 0.1, "betas": (0.5, 0.6)}),  # rectified from the third step on
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "t0": 2.0, "lambd": 0.01}),  # averages from the third step on
    "RMSprop": (optim.RMSprop, {"lr": 0.1, "weight_decay": 0.1, "centered": True, "momentum": 0.9}),
    "Rprop": (optim.Rprop, {"lr": 0.1}),
}
IMPLEMENTATIONS = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}

CASES = {
    f"{row}, {name}": (cls, hyper | how)
    for row, (cls, hyper) in OPTIMIZERS.items()
    for name, how in IMPLEMENTATIONS.items()
    if next(iter(how)) in inspect.signature(cls).parameters
} | {"Lion": (Lion, {"lr": 0.1})}

# Flags of torch's classes, beside IMPLEMENTATIONS.
FLAGS = {
    "momentum": (0.0, 0.9),
    "weight_decay": (0.0, 0.1, lambda count: 0.1 * (1 - int(count))),
    **dict.fromkeys(("maximize", "nesterov", "amsgrad", "centered", "decoupled_weight_decay"), (False, True)),
}
CLASSES = [*dict.fromkeys(cls for cls, _ in CASES.values()), optim.Adafactor, optim.Muon]


@pytest.mark.rows(4)
@pytest.mark.parametrize("cls", CLASSES)
def test_no_flag_of_a_class_changes_its_inputs(cls, monkeypatch):
    """Gradients never, parameters and state unless they are donated; also where torch chooses foreach by itself."""
    known, module = inspect.signature(cls).parameters, inspect.getmodule(cls)
    monkeypatch.setattr(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, True), raising=False)
    names = [name for name in FLAGS if name in known]
    ways = [{}, *(how for how in IMPLEMENTATIONS.values() if next(iter(how)) in known)]
    params, *grads = ({"w": normal(seed)(3, 2, dtype=torch.float32)} for seed in range(3))
    for donate, how, *values in itertools.product((False, True), ways, *map(FLAGS.get, names)):
        hyper = how | dict(zip(names, values, strict=True))
        # Torch refuses momentum of Nesterov's kind without any.
        if hyper.get("nesterov") and not hyper["momentum"]:
            continue
        tx = fs.from_torch(cls, lr=0.1, **hyper)
        state = fs.TrainState.create(fs.tree_map(torch.clone, params), tx)
        for grad in grads:
            given = tensors((grad, () if donate else (state.params, state.opt_state)))
            before = copied(given)
            state = fs.update(tx, state, grad, donate=donate)
            assert_same_bits(given, before)


def test_strides_and_lazy_conjugates_do_not_matter():
    """Fused CPU kernels take elements in the order of memory; autograd's complex gradients may be conjugated lazily."""
    tx = fs.from_torch(optim.AdamW, lr=0.1, fused=True)
    start, grad = (normal(seed)(6, 4, dtype=torch.float32) for seed in range(2))
    places = (torch.clone, lambda x: x.T.contiguous().T, lambda x: x.repeat_interleave(2, dim=1)[:, ::2])
    results = []
    for place, place_gradient in itertools.product(places, places):
        params = {"w": place(start)}
        results.append(tx.update({"w": place_gradient(grad)}, tx.init(params), params)[0]["w"])
        assert_same_bits(results[-1], results[0])
    z, lazy = torch.complex(start, grad), torch.complex(grad, start).conj()
    tx = fs.from_torch(optim.Adam, lr=0.1)
    assert_same_bits(
        *(tx.update({"z": given}, tx.init({"z": z}), {"z": z})[0] for given in (lazy, lazy.resolve_conj()))
    )


# Hyperparameters that the state holds.
PARAMS = {"w": normal(0)(5, 3), "b": normal(1)(7)}
RATES = (0.1, 0.03, 0.0, 1.0)


def gradients(step):
    return {name: normal(10 * step + i)(*value.shape) for i, (name, value) in enumerate(PARAMS.items())}


def test_a_rate_that_is_replaced_in_the_state_is_that_of_a_class_told_so():
    """And a schedule's last value can be read."""
    tensors = {name: torch.nn.Parameter(value.clone()) for name, value in PARAMS.items()}
    optimizer = optim.AdamW(tensors.values(), lr=0.5, weight_decay=0.1)
    tx = fs.from_torch(optim.AdamW, inject=("lr", "weight_decay"), lr=0.5, weight_decay=0.1)
    state = fs.TrainState.create(fs.tree_map(torch.clone, PARAMS), tx)
    scheduled_tx = fs.from_torch(optim.SGD, inject=("lr",), lr=lambda count: RATES[int(count)])
    scheduled = fs.TrainState.create(PARAMS, scheduled_tx)
    assert fs.tree_map(float, state.opt_state.hyper) == {"lr": 0.5, "weight_decay": 0.1}
    # A name by itself, or names of another kind, and a number that the class has by default.
    for inject in ("weight_decay", {"weight_decay"}, {"weight_decay": 0.3}.keys()):
        by_default = fs.from_torch(optim.AdamW, inject=inject).init(PARAMS)
        assert fs.tree_map(float, by_default.hyper) == {"weight_decay": 0.01}
    for step, rate in enumerate(RATES, start=1):
        hyper = {"lr": torch.tensor(rate, dtype=torch.float64), "weight_decay": torch.tensor(rate / 7)}
        state = state._replace(opt_state=state.opt_state._replace(hyper=hyper))
        state = fs.update(tx, state, gradients(step), donate=step % 2 == 0)
        optimizer.param_groups[0].update(lr=rate, weight_decay=float(torch.tensor(rate / 7)))
        for name, grad in gradients(step).items():
            tensors[name].grad = grad
        optimizer.step()
        assert_same_bits(state.params, {name: tensor.detach() for name, tensor in tensors.items()})
        scheduled = fs.update(scheduled_tx, scheduled, gradients(step))
        last_rate = scheduled.opt_state.hyper["lr"]
        assert (last_rate.item(), last_rate.dtype, state.opt_state.hyper["lr"].item()) == (rate, torch.float64, rate)


def test_slots_are_taken_by_the_keys_of_their_parameters():
    params = {"a": normal(1)(3), "b": {"c": normal(2)(2)}}
    grads = {"a": normal(3)(3), "b": {"c": normal(4)(2)}}
    tx = fs.from_torch(optim.AdamW, lr=0.1)
    params, state = tx.update(grads, tx.init(params), params)
    turned = {name: OrderedDict(b=slot["b"], a=slot["a"]) for name, slot in state.slots.items()}
    expected = tx.update(grads, state, params)
    assert_same_bits(tx.update(grads, state._replace(slots=turned), params), expected)
    # A tree at the place of a leaf is none of this structure, and neither is one of other keys.
    for other in ({"a": params["a"], "b": {"c": {"d": params["b"]["c"]}}}, {"a": params["a"]}, params["b"] | params):
        with pytest.raises(ValueError, match=r"^update: trees differ in structure\n"):
            tx.update(grads, state._replace(slots=state.slots | {"exp_avg": other}), params)


def test_slots_and_counts_are_taken_by_keys_in_a_graph_too():
    """There tensors are of another class. Leaves were updated a different number of times."""
    params = {"a": normal(1)(2), "b": normal(2)(2)}
    grads = {"a": normal(3)(2), "b": normal(4)(2)}
    for cls, hyper in ((optim.AdamW, {}), (optim.SGD, {"momentum": 0.9, "dampening": 0.5})):
        tx = fs.from_torch(cls, lr=0.1, **hyper)
        after, state = tx.update(grads | {"a": None}, tx.init(params), params)
        slots = {name: OrderedDict(b=slot["b"], a=slot["a"]) for name, slot in state.slots.items()}
        counts = OrderedDict(b=state.counts["b"], a=state.counts["a"]) if state.counts else ()
        turned = state._replace(slots=slots, counts=counts)
        for update in (tx.update,) if state.counts else (tx.update, fs.jit(tx.update)):
            assert_same_bits(update(grads, turned, after)[0], update(grads, state, after)[0])


def test_a_state_that_lacks_nothing_may_be_of_another_class():
    """As after another choice of an option: what a class does not keep stays as it is."""
    grads = {"w": normal(0)(3, 2), "v": normal(1)(2)}
    params = fs.tree_map(torch.ones_like, grads)
    for cls, other, hyper in (
        (optim.AdamW, optim.Adam, {"amsgrad": True}),
        (optim.Adafactor, optim.Adafactor, {}),
        (optim.Adam, optim.SGD, {}),
    ):
        state = fs.from_torch(other, lr=0.1, **hyper).init(params)
        tx = fs.from_torch(cls, lr=0.1)
        updated, _ = tx.update(grads, state, params)
        expected, _ = tx.update(grads, tx.init(params), params)
        assert_same_bits(updated, expected)


LOST = "from_torch: the update is differentiated, but steps of a torch class have no derivative. Use fs.sgd, "
ONE = torch.ones(())


def two_updates(tx, w, hyper=None):
    """A loss after two updates, by the gradient w of w² / 2."""
    state = tx.init({"w": w})
    params = {"w": w}
    for _ in range(2):
        if hyper is not None:
            state = state._replace(hyper={"lr": hyper})
        params, state = tx.update(params, state, params)
    return params["w"].square().sum()


def constant_gradient(tx, w):
    return tx.update({"w": torch.ones(3)}, tx.init({"w": w.detach()}), {"w": w})[0]["w"].sum()


def tracked_update(tx, w):
    w = w.clone().requires_grad_()
    return tx.update({"w": w * 2}, tx.init({"w": w.detach()}), {"w": w.detach()})


# Each would be a gradient of zero.
DIFFERENTIATED = {
    "parameters": lambda tx, w: func.grad(lambda w: two_updates(tx, w))(w),
    "parameters, by a constant gradient": lambda tx, w: func.grad(lambda w: constant_gradient(tx, w))(w),
    "parameters of several members": lambda tx, w: func.grad(
        lambda w: func.vmap(lambda w: constant_gradient(tx, w))(w.expand(2, 3)).sum()
    )(w),
    "gradients in a graph": tracked_update,
    "an injected rate": lambda tx, w: func.grad(lambda rate: two_updates(tx, w, rate))(ONE),
    "an injected rate, forward": lambda tx, w: func.jvp(lambda rate: two_updates(tx, w, rate), (ONE,), (ONE,)),
    "a rate of a schedule": lambda tx, w: func.grad(
        lambda rate: two_updates(fs.from_torch(optim.SGD, lr=lambda count: rate / (count + 1)), w)
    )(ONE),
    "a rate": lambda tx, w: func.grad(lambda rate: two_updates(fs.from_torch(optim.SGD, lr=rate), w))(ONE),
    "a rate, forward": lambda tx, w: func.jvp(
        lambda rate: two_updates(fs.from_torch(optim.SGD, lr=rate), w), (ONE,), (ONE,)
    ),
}


@pytest.mark.rows(9)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_an_update_that_is_differentiated_is_refused(name):
    tx = fs.from_torch(optim.SGD, lr=0.5, inject="lr")
    with pytest.raises(ValueError, match=LOST):
        DIFFERENTIATED[name](tx, torch.arange(3.0))


def test_what_goes_through_an_update_of_a_torch_class():
    """Tangents of parameters, batches of vmap, parameters as torch makes them, and constants of an outer function."""
    tx, native, w = fs.from_torch(optim.SGD, lr=0.5, momentum=0.5), fs.sgd(0.5, 0.5), torch.arange(3.0)
    for transform in (lambda f: func.jvp(f, (w,), (torch.ones(3),)), lambda f: func.vmap(f)(w.expand(2, 3))):
        expected = transform(lambda w: two_updates(native, w))
        actual = transform(lambda w: two_updates(tx, w))
        torch.testing.assert_close(actual, expected, **within(expected, terms=9))
    parameter = w.clone().requires_grad_()
    new_params, _ = tx.update({"w": w}, tx.init({"w": parameter}), {"w": parameter})
    assert not new_params["w"].requires_grad
    assert func.grad(lambda x: (x * two_updates(tx, w.detach())).sum())(ONE) == two_updates(tx, w)
