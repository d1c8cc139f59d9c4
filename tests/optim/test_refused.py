"""Arguments, masks, states and leaves that optimizers refuse, each with the text of its error."""

from functools import partial

import pytest
import torch
from torch import optim

import fshard as fs
from tests.bad_input import text_of
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis

W, SGD = {"w": torch.ones(2)}, fs.sgd(0.1)
PARAMS = {"a": torch.ones(2), "b": torch.ones(2)}
INJECTED = fs.from_torch(optim.AdamW, lr=0.1, inject=("lr", "weight_decay"))
MASK = "expected the mask to be a glob pattern of leaves' names, several, or a function of (name, leaf), got"
KINDS = "must be Optimizers only, or GradientTransformations only. Got"
LEFT = 'no mask matches b. Add a part for "*".'
CLIP = fs.clip_by_value(1.0)


class WithWarmup(optim.SGD):
    """A class that keeps one of its arguments to itself."""

    def __init__(self, params, lr=0.1, warmup=1.0):
        super().__init__(params, lr * warmup)


class CountsItself(optim.SGD):
    """A class that keeps a count on itself."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        super().step(closure)


class CountsInAGroup(optim.SGD):
    """A class that keeps a count in its groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["momentum"] = group["count"] = group.get("count", 0) + 1
        super().step(closure)


def update_by(tx):
    return tx.update(W, tx.init(W), W)


def refused_sums(takes_sums):
    """Calls of functions with their arguments, and the texts of their errors."""
    for name, arguments in takes_sums.items():
        call = partial(getattr(fs, name), **arguments, reduction_order="pairs")
        yield call, f"{name}: expected reduction_order to be \"tree\" or None, got 'pairs'"


def update_state_of_another(cls, other, **hyper):
    return fs.from_torch(cls, lr=0.1, **hyper).update(W, fs.from_torch(other, lr=0.1).init(W), W)


def refused_states():
    """Updates of a class by the state of another, and the texts of their errors."""
    for cls, hyper, missing in (
        (optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
        (optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (optim.RMSprop, {}, "square_avg"),
    ):
        text = (
            f"update: {cls.__name__} keeps {missing}, but the state has exp_avg, exp_avg_sq, step of another "
            "optimizer. Make the state with this one, as by TrainState.create(params, tx)."
        )
        yield partial(update_state_of_another, cls, optim.Adam, **hyper), text


ROWS = [
    *(
        (
            partial(fs.from_torch, cls, lr=lambda count: 0.1 * count),
            f"from_torch: {cls.__name__} keeps something between steps that is not in the state of its parameters, "
            "such as a count in its parameter groups. It would be lost. Keep it in self.state[parameter].",
        )
        for cls in (CountsItself, CountsInAGroup)
    ),
    (
        partial(fs.from_torch, optim.SGD, lr=optim.lr_scheduler.ConstantLR(optim.SGD([W["w"]]))),
        "from_torch: SGD refuses its arguments: '<' not supported between instances of 'ConstantLR' and 'float'. A "
        "schedule is a function, as fs.from_torch_scheduler makes of one of torch.",
    ),
    (
        partial(fs.from_torch, optim.SGD, lr=optim.lr_scheduler.StepLR),
        "from_torch: SGD refuses its arguments: '<' not supported between instances of 'type' and 'float'. A schedule "
        "is a function, as fs.from_torch_scheduler makes of one of torch.",
    ),
    (
        lambda: fs.TrainState.create(PARAMS, optim.SGD),
        "TrainState.create: expected tx to be an Optimizer, got the class SGD; end the chain with one, such as "
        "fs.from_torch(torch.optim.AdamW, lr=1e-3)",
    ),
    *refused_states(),
    (lambda: fs.freeze(SGD, {"a": 1, "b": 0}), f"freeze: {MASK} a dict"),
    (
        lambda: fs.partition({"a": SGD, "c*": SGD, "*": SGD}).init(PARAMS),
        "partition: the mask 'c*' matches no leaf. The leaves are a, b.",
    ),
    (lambda: fs.partition({"a": SGD}).init(PARAMS), f"partition: {LEFT}"),
    (lambda: fs.partition({}), f"partition: parts {KINDS} nothing."),
    (lambda: fs.partition({"a": SGD, "*": CLIP}), f"partition: parts {KINDS} an Optimizer, a GradientTransformation."),
    (lambda: fs.masked(3, "a"), f"masked: tx {KINDS} an int."),
    (partial(fs.ema, SGD, decay=-0.1), "ema: expected decay to be a number from 0 to 1, got -0.1"),
    (
        partial(fs.skip_nonfinite, CLIP),
        "skip_nonfinite: expected tx to be an Optimizer, such as fs.from_torch, got a GradientTransformation",
    ),
    *(
        (partial(fs.sgd, 0.1, nesterov=True, **hyper), "sgd: nesterov needs a momentum above 0 and no dampening")
        for hyper in ({}, {"momentum": 0.9, "dampening": torch.tensor(0.0, dtype=torch.float64)})
    ),
    *(
        (partial(adam, 0.1, (1.0, 0.9)), f"{name}: expected betas[0] to be a number, 0 or more and below 1, got 1.0")
        for name, adam in {"adam": fs.adam, "adamw": fs.adamw}.items()
    ),
    *refused_sums(
        {
            "clip_by_global_norm": {"max_norm": 1.0},
            "clip_by_norm": {"max_norm": 1.0},
            "from_torch": {"cls": optim.SGD, "lr": 0.1},
        }
    ),
    (
        lambda: fs.leaf_norms(W, 2.5, reduction_order="tree"),
        'leaf_norms: expected p to be 2 or inf with reduction_order="tree", got 2.5',
    ),
    (
        lambda: update_by(fs.from_torch(WithWarmup, warmup=lambda count: 0.5)),
        "from_torch: warmup cannot change between updates, because WithWarmup does not keep it in its parameter "
        "groups. Pass a number, and do not inject it.",
    ),
    *(
        (
            partial(fs.from_torch, optim.AdamW, lr=0.1, inject=inject),
            f"from_torch: inject has {got}, which is not a numeric argument of this class. It has lr, eps, "
            "weight_decay.",
        )
        for inject, got in ((("lr", "betas"), "'betas'"), ("l", "'l'"), (["amsgrad"], "'amsgrad'"), (5, "5"))
    ),
    (
        lambda: INJECTED.update(PARAMS, INJECTED.init(PARAMS)._replace(hyper={"lr": torch.tensor(0.5)}), PARAMS),
        "update: inject names weight_decay, which hyper of the state does not have. To replace some numbers, keep the "
        "others: state._replace(hyper=state.hyper | {...}).",
    ),
    (
        lambda: INJECTED.update(
            PARAMS,
            INJECTED.init(PARAMS)._replace(hyper={"lr": torch.ones(3), "weight_decay": torch.tensor(0.0)}),
            PARAMS,
        ),
        "update: expected lr to be a finite number, got a float32 Tensor of shape (3,)",
    ),
    (lambda: fs.global_norm(W, 0.0), "global_norm: expected p to be a number above 0, got 0.0"),
]


def test_refusals():
    for call, text in ROWS:
        assert text_of(call) == text


def test_an_error_of_a_schedule_stays_the_error_that_it_raised():
    for tx in (partial(fs.from_torch, optim.SGD), fs.sgd):
        with pytest.raises(TypeError, match=r"^unsupported operand"):
            tx(lr=lambda count: count + None).update(PARAMS, fs.sgd(0.1).init(PARAMS), PARAMS)


def give_state_first(params_or_grads, state):
    return state, params_or_grads


SWAPPED = fs.Optimizer(lambda params: (), lambda grads, state, params: give_state_first(params, state))
SWAPPED_TRANSFORMATION = fs.GradientTransformation(
    lambda params: (), lambda grads, state, params: give_state_first(grads, state)
)
NO_PAIR = fs.Optimizer(lambda params: (), lambda grads, state, params: 3)
# An optimizer, the function that runs the wrong update, the argument it is there, and what it has to return first.
WRONG_RESULTS = [
    (SWAPPED, "update", "tx", "params"),
    (fs.chain(CLIP, SWAPPED), "chain", "transformations[1]", "params"),
    (fs.chain(SWAPPED_TRANSFORMATION, SGD), "chain", "transformations[0]", "grads"),
    (fs.ema(SWAPPED, 0.5), "ema", "tx", "params"),
    (fs.skip_nonfinite(SWAPPED), "skip_nonfinite", "tx", "params"),
    (fs.freeze(SWAPPED, "b"), "freeze", "tx", "params"),
    (fs.masked(SWAPPED_TRANSFORMATION, "a"), "masked", "tx", "grads"),
    (fs.partition({"b": SGD, "*": SWAPPED}), "partition", "parts['*']", "params"),
]


def test_updates_that_return_something_else_than_new_leaves_and_a_state():
    for tx, verb, argument, made in WRONG_RESULTS:
        tx = tx if isinstance(tx, fs.Optimizer) else fs.chain(tx, SGD)
        for donate in (False, True):
            # A donated state is lost, whatever the update returns.
            state = fs.TrainState.create(fs.tree_map(torch.clone, PARAMS), tx)
            assert text_of(partial(fs.update, tx, state, PARAMS, donate=donate)) == (
                f"{verb}: {made} that {argument}.update returned: trees differ in structure\n"
                "  ['a']: missing\n"
                "  ['b']: missing\n"
                f"To fix: return ({made}, state), the new {made} first."
            )
    assert text_of(partial(fs.update, NO_PAIR, fs.TrainState.create(PARAMS, NO_PAIR), PARAMS)) == (
        "update: tx.update must return two values, got an int; return (params, state), the new params first."
    )


def test_plain_tensors_in_the_place_of_sharded_leaves():
    """Ranks that hold a leaf whole would train apart: nobody sums the gradients of a plain tensor."""

    def update(grads, state, params):
        return {name: leaf.local - grads[name].local for name, leaf in params.items()}, state

    def change(grads, state, params):
        return {name: leaf.local for name, leaf in grads.items()}, state

    params = fs.shard(PARAMS, fs.ddp(fs.init_mesh({"shard": -1}, device="cpu")))
    optimizer = fs.Optimizer(lambda params: (), update)
    transformation = fs.GradientTransformation(lambda params: (), change)
    for tx in (optimizer, fs.chain(transformation, SGD)):
        lines = text_of(partial(fs.update, tx, fs.TrainState.create(params, tx), params)).split("\n")
        assert lines[:2] == [
            "update: leaves do not fit the parameters",
            "  ['a']: expected a shard of shape (2,), split by P(), got a tensor of shape (2,)",
        ]
        assert lines[-1].endswith("map them by fs.tree_map.")


def test_an_update_may_return_another_kind_of_number_or_tensor():
    """Ranks take both for the same, and a part of a chain may return gradients of another shape."""
    params = {"number": 2.0, "w": torch.nn.Parameter(torch.ones(2, 2))}
    new = {"number": torch.tensor(3.0), "w": torch.ones(2)}
    tx = fs.Optimizer(lambda params: (), lambda grads, state, params: (new, state))
    updated = fs.update(tx, fs.TrainState.create(params, tx), dict.fromkeys(params)).params
    assert_same_bits(updated, new)


def test_the_state_of_another_optimizer_is_named():
    adamw = fs.from_torch(optim.AdamW, lr=0.1)
    state = fs.TrainState.create(PARAMS, fs.chain(CLIP, adamw))
    for tx, argument in ((adamw, "tx"), (fs.ema(adamw, 0.5), "tx"), (fs.partition({"*": adamw}), "parts['*']")):
        with pytest.raises(AttributeError) as caught:
            fs.update(tx, state._replace(opt_state=((),)), PARAMS)
        assert caught.value.__notes__ == [f"To fix: pass the state that {argument}.init made, not a tuple."]


def check_leaves_are_refused(make, checked_by, takes_complex):
    """The optimizer of a learning rate, the name in its errors, and whether its leaves may be complex."""
    expected = "a floating tensor" if takes_complex else "a real floating tensor"
    dtypes = {"an int64": torch.int64} | ({} if takes_complex else {"a complex64": torch.complex64})
    for name, dtype in dtypes.items():
        text = text_of(partial(make(0.1).init, {"w": torch.ones(2, dtype=dtype)}))
        assert text.startswith(f"{checked_by}: leaves ")
        assert f"\n  ['w']: expected {expected}, got {name} Tensor of shape (2,)\n" in text


def test_leaves_are_refused():
    check_leaves_are_refused(fs.sgd, "sgd", takes_complex=True)
    check_leaves_are_refused(fs.adamw, "scale_by_adam", takes_complex=False)


def test_a_module_in_the_place_of_its_parameters_is_refused():
    for tx in (fs.sgd(0.1), fs.adamw(0.1), fs.from_torch(optim.SGD, lr=0.1)):
        text = text_of(partial(fs.TrainState.create, torch.nn.ReLU(), tx))
        assert "\n  (root): expected a " in text
        assert "floating tensor, got a ReLU\nTo fix: pass the parameters of model.init. " in text


def fused_sgd_steps(dtype):
    """Whether torch's own fused SGD steps every element of a vector on the CPU: not before torch 2.14."""
    weight = torch.nn.Parameter(torch.ones(256, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    optim.SGD([weight], lr=0.5, fused=True).step()
    return bool((weight == 0.5).all())


def test_leaves_that_a_fused_kernel_does_not_step_are_refused():
    tx = fs.from_torch(optim.SGD, lr=lambda count: 0.5 * count, momentum=0.5, fused=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        params = {"w": torch.ones(256, dtype=dtype), "b": torch.ones(3)}
        if fused_sgd_steps(dtype):
            state = tx.init(params)
            for _ in range(2):
                params, state = tx.update({"w": torch.ones_like(params["w"]), "b": torch.ones(3)}, state, params)
            # The second momentum is 1.5, and the second learning rate 0.5.
            assert params["w"].eq(0.25).all()
        else:
            assert text_of(lambda: tx.init(params)) == (  # noqa: B023
                "from_torch: the fused kernel of SGD does not step these leaves\n"
                f"  ['w']: is {str(dtype).removeprefix('torch.')} on the CPU\n"
                "To fix: leave out fused=True, or install torch 2.14."
            )


@on_ranks(2)
def test_gradients_of_another_tree_are_refused_by_an_optimizer_that_is_called_itself():
    params = fs.shard({"v": torch.ones(5), "w": torch.ones(4, 3)}, fs.zero2(one_axis(), min_shard_elements=0))
    for tx in (fs.sgd(0.1), fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW))):
        state = tx.init(params)
        for grads in ({**params, "x": params["v"]}, {"w": params["w"]}, None, {"u": params["v"], "w": params["w"]}):
            with pytest.raises(ValueError, match=r"^update: trees differ in structure\n"):
                tx.update(grads, state, params)
