"""A transform's state that is missing, or of something else, and what cannot carry one."""

import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused
from tests.transforms.laws import SGD
from tests.transforms.test_transform_state import loss, make_params, microbatches
from tests.trees import normal


class Made:
    """What bad calls are made with, on one rank."""

    def __init__(self, mesh):
        self.params, (self.x,) = make_params(mesh), microbatches(1)
        self.state = fs.transform_state(self.params)
        self.like = {name: self.params[name] for name in ("w", "b")}
        self.full = {"w": normal()(5, 3), "b": [normal()(3)], "fixed": None, "none": None}


REMEDY = "pass transform_state=, first as fs.transform_state(params) makes it, then as this verb returns it"
NEEDED = "leaves that are Sharded over ['shard'], a row for each rank"


OWN = "expected leaves that have a transform, got state of a transform, this rank's own"


def missing(verb):
    lines = (f"  ['{name}']: expected that of its transform, got no state" for name in ("b'][0", "w"))
    return "\n".join([f"{verb}: transforms need their state", *lines]).replace("0']", "0]") + f"\nTo fix: {REMEDY}."


def unfit(verb, *lines):
    return "\n".join([f"{verb}: transform_state does not fit the parameters", *lines, f"To fix: {REMEDY}."])


def scatter(made, state):
    return fs.scatter_grads(made.full, like=made.params, transform_state=state)


def differentiate(made, state):
    return fs.value_and_grad(loss, transform_state=state)(made.params, made.x)


def derived(made):
    def merging(params, x):
        w = fs.Sharded(params["w"].local * 2, params["w"].spec)
        return loss({**params, "w": w}, x)

    return fs.value_and_grad(merging, transform_state=made.state)(made.params, made.x)


def row(name, call, error, issued=()):
    return Row(name, lambda world: (Made(world.mesh),), call, error, issued)


BAD = [
    row("value_and_grad without", lambda m: fs.value_and_grad(loss)(m.params, m.x), missing("value_and_grad")),
    row("value_and_grad with None", lambda m: differentiate(m, None), missing("value_and_grad")),
    row("accumulate without", lambda m: fs.accumulate(loss)(m.params, [m.x]), missing("accumulate")),
    row("scatter_grads without", lambda m: fs.scatter_grads(m.full, like=m.params), missing("scatter_grads")),
    row("scatter_grads with None", lambda m: scatter(m, None), missing("scatter_grads")),
    row(
        "another structure",
        lambda m: scatter(m, {"w": m.state["w"]}),
        f"scatter_grads: expected transform_state to have the structure of the parameters, got leaves ['w']; {REMEDY}",
    ),
    row(
        "a number",
        lambda m: differentiate(m, 0.0),
        "value_and_grad: expected transform_state to have the structure of the parameters, got leaves (root); "
        f"{REMEDY}",
    ),
    row(
        "None for one leaf",
        lambda m: differentiate(m, m.state | {"w": None}),
        unfit("value_and_grad", f"  ['w']: expected {NEEDED}, got None"),
    ),
    row(
        "full rows",
        lambda m: scatter(m, m.state | {"w": torch.zeros(2, 3, 3)}),
        unfit("scatter_grads", f"  ['w']: expected {NEEDED}, got a float32 Tensor of shape (2, 3, 3)"),
    ),
    row(
        "rows of another leaf",
        lambda m: scatter(m, m.state | {"w": m.state["b"][0]}),
        unfit("scatter_grads", "  ['w']: expected rows of shape (2, 3, 3), got rows of shape (2, 2)"),
    ),
    row(
        "a tuple of rows",
        lambda m: scatter(m, m.state | {"w": (m.state["w"],)}),
        unfit("scatter_grads", f"  ['w']: expected {NEEDED}, got a tuple"),
    ),
    row(
        "a state for a frozen leaf",
        lambda m: scatter(m, m.state | {"fixed": m.state["w"]}),
        unfit("scatter_grads", "  ['fixed']: expected None, because its transform has no state, got a Sharded leaf"),
    ),
    Row(
        "a state where none is needed",
        lambda world: (world.full_grads, world.params),
        lambda grads, like: fs.scatter_grads(grads, like=like, transform_state=fs.tree_map(torch.clone, like)),
        unfit(
            "scatter_grads",
            "  ['a']: expected None, because its transform has no state, got a Sharded leaf",
            "  ['b'][0]: expected None, because its transform has no state, got a Sharded leaf",
        ),
    ),
    row(
        "a derived leaf",
        derived,
        "gather: no state\n"
        "  ['w']: expected one of the parameters, got a leaf computed from others whose transform has a state\n"
        "To fix: gather leaves as they are, or give the result the spec of one whose transform has no state.",
    ),
    row(
        "torch.func.grad through gather",
        lambda m: torch.func.grad(loss)({name: m.params[name] for name in ("w", "b")}, m.x),
        "scatter: QuantizeWithFeedback has a state, which autograd cannot carry through fs.gather; differentiate at "
        "gathered parameters and call fs.scatter_grads with transform_state=, or use fs.value_and_grad",
        ("gather",),
    ),
    row(
        "value_and_grad within torch.func.grad",
        lambda m: torch.func.grad(lambda p: differentiate_at(p, m))({name: m.params[name] for name in ("w", "b")}),
        "value_and_grad: expected no state of transforms inside torch.func, got one; differentiate at gathered "
        "parameters, and call fs.scatter_grads outside of it",
    ),
    row(
        "reshard of a TrainState",
        lambda m: fs.reshard(fs.TrainState.create(m.params, SGD), m.params["w"].spec.transform),
        "reshard: leaves belong to their ranks\n  .transform_state['b'][0]: "
        + OWN
        + "\n  .transform_state['w']: "
        + OWN
        + "\nTo fix: reshard without it, and make it anew by fs.transform_state.",
    ),
]


def differentiate_at(params, made):
    state = {name: made.state[name] for name in ("w", "b")}
    return fs.value_and_grad(loss, transform_state=state)(params, made.x)[0]


def test_bad_input_is_refused():
    assert_all_refused(BAD)
