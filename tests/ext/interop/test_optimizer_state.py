"""To and from the states of torch.optim's optimizers: training goes on in both, and what is refused."""

import copy
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.checkpoint import from_optimizer_state_dict, to_optimizer_state_dict, to_state_dict
from tests.ext.interop.test_state_dict import Net, every_leaf
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, one_axis


def batch(step):
    return torch.randint(11, (5,), generator=torch.Generator().manual_seed(step))


def train(module, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        module(batch(step)).backward()
        optimizer.step()


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"updates": 2}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}, {"updates": 2}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 2, 4)
def test_training_moves_from_torch_and_back(name):
    """Two steps in torch, two in fshard and two in torch again are six in torch, bit for bit.

    All ranks have the same batch, whose gradients' mean is exact over powers of two.
    """
    cls, hyper, counted = OPTIMIZERS[name]
    expected, module, after = Net().eval(), Net().eval(), Net(1).eval()
    train(expected, cls(expected.parameters(), **hyper), range(6))
    optimizer = cls(module.parameters(), **hyper)
    train(module, optimizer, range(2))

    model, tx = fs.functionalize(module), fs.from_torch(cls, **hyper)
    params, buffers = model.init(every_leaf(one_axis())), model.buffers
    fresh = cls(module.parameters(), **hyper)
    opt_state = from_optimizer_state_dict(optimizer.state_dict(), tx.init(params), module, fresh, **counted)
    assert int(opt_state.updates) == 2
    state = fs.TrainState.create(params, tx)._replace(opt_state=opt_state)
    for step in range(2, 4):
        _, grads = fs.value_and_grad(lambda p, x: model.apply(p, x, buffers=buffers)[0])(state.params, batch(step))
        state = fs.update(tx, state, grads)

    exported = to_optimizer_state_dict(state.opt_state, module, fresh)
    alone = to_optimizer_state_dict(state.opt_state, module, fresh, rank0_only=True)
    assert_same_bits(alone.get("state"), None if my_rank() else exported["state"])
    after.load_state_dict(to_state_dict({**state.params, **buffers}, module=module))
    optimizer = cls(after.parameters(), **hyper)
    optimizer.load_state_dict(exported)
    train(after, optimizer, range(4, 6))
    assert_same_bits(dict(after.state_dict()), dict(expected.state_dict()))


def test_groups_have_numbers_and_counts_of_their_own():
    """The second step of torch's optimizer leaves one bias out."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    biases, weights = ([layer.bias for layer in module], [layer.weight for layer in module])
    optimizer = torch.optim.AdamW([{"params": biases, "lr": 2.0}, {"params": weights, "lr": 3.0}])
    parts = {mask: fs.from_torch(torch.optim.AdamW, lr=lr, inject="lr") for mask, lr in (("*bias", 0.5), ("*", 0.25))}
    tx = fs.partition(parts)
    exported = to_optimizer_state_dict(tx.init(params), module, optimizer)
    assert [group["lr"] for group in exported["param_groups"]] == [0.5, 0.25]
    for step in range(2):
        optimizer.zero_grad()
        module(torch.ones(1, 3)).sum().backward()
        if step:
            module[0].bias.grad = None
        optimizer.step()
    state = from_optimizer_state_dict(optimizer.state_dict(), tx.init(params), module, optimizer)
    assert [(part.hyper["lr"].item(), part.updates.item()) for part in state] == [(2.0, 2), (3.0, 2)]


def partition_of(module, cls, **hyper):
    """An optimizer of torch with a group for weights and one for biases, and the same as a partition."""
    groups = [{"params": [module.weight], "lr": 0.25}, {"params": [module.bias], "lr": 0.5}]
    parts = {name: fs.from_torch(cls, lr=lr, inject="lr", **hyper) for name, lr in (("weight", 0.25), ("bias", 0.5))}
    return cls(groups, **hyper), fs.partition(parts)


def test_each_part_of_a_partition_takes_the_state_of_its_own_parameters():
    """A part that also had the others' state would write it back in place of what the steps since have made of it."""
    module = nn.Linear(3, 2)
    params = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer, tx = partition_of(module, torch.optim.SGD, momentum=0.5)
    like = tx.init(params)
    for updates in range(2):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if not updates:
            state = from_optimizer_state_dict(optimizer.state_dict(), like, module, optimizer, updates=1)
    assert [len(fs.tree_leaves(part.slots)) for part in state] == [1, 1]
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    _, state = tx.update(grads, state, params)
    assert_same_bits(to_optimizer_state_dict(state, module, optimizer)["state"], optimizer.state_dict()["state"])


@on_ranks(2)
def test_ranks_may_hold_states_in_another_order():
    module = nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.zeros(4))})
    params = fs.shard(dict(module.named_parameters()), every_leaf(one_axis()))
    names = "ba" if my_rank() else "ab"
    leaves = OrderedDict((name, params[name]) for name in names)
    tx = fs.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    state = tx.init(params)._replace(slots={"momentum_buffer": leaves}, counts={})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    exported = to_optimizer_state_dict(state, module, optimizer)["state"]
    assert [exported[number]["momentum_buffer"].tolist() for number in range(2)] == [[1] * 4, [0] * 4]


def test_numbers_of_groups_that_states_cannot_have():
    """States without tensors do not say whose they are, and a state has one number for all of its parameters."""
    module = nn.Linear(3, 2)
    params = dict(module.named_parameters())
    optimizer, tx = partition_of(module, torch.optim.SGD)
    text = "expected one lr in each state, and in each group of parameters, got 0.25 and 0.5; give each group of par"
    with pytest.raises(ValueError, match=f"^checkpoint.from_optimizer_state_dict: {text}"):
        from_optimizer_state_dict(optimizer.state_dict(), tx.init(params), module, optimizer, updates=1)
    with pytest.raises(ValueError, match=f"^checkpoint.to_optimizer_state_dict: {text}"):
        to_optimizer_state_dict(tx.init(params), module, optimizer)
    plain, momentum = (fs.from_torch(torch.optim.SGD, lr=1.0, inject="lr", momentum=m) for m in (0.0, 0.5))
    tx = fs.partition({"weight": plain, "bias": momentum})
    groups = [{"params": [module.weight], "lr": 0.25}, {"params": [module.bias], "lr": 0.5, "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups)
    optimizer.state[module.bias]["momentum_buffer"] = torch.ones(2)
    state = from_optimizer_state_dict(optimizer.state_dict(), tx.init(params), module, optimizer, updates=1)
    assert [part.hyper["lr"].item() for part in state] == [0.25, 0.5]
    assert [group["lr"] for group in to_optimizer_state_dict(state, module, optimizer)["param_groups"]] == [0.25, 0.5]


def test_frozen_parameters_have_no_say_in_numbers():
    """A state without tensors counts for all trained parameters of no other state, and not for frozen ones."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    module[0].weight.requires_grad_(False)
    params = fs.functionalize(module).init(every_leaf(one_axis()))
    biases, weights = ([layer.bias for layer in module], [layer.weight for layer in module])
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 2.0}, {"params": biases, "lr": 3.0}])
    optimizer.state[module[1].weight] = {"step": torch.ones(()), "exp_avg": torch.ones(3, 2), "exp_avg_sq": weights[1]}
    plain, adamw = (fs.from_torch(cls, lr=0.5, inject="lr") for cls in (torch.optim.SGD, torch.optim.AdamW))
    like = fs.partition({"*bias": plain, "*": adamw}).init(params)
    state = from_optimizer_state_dict(optimizer.state_dict(), like, module, optimizer, updates=1)
    assert [part.hyper["lr"].item() for part in state] == [3.0, 2.0]
    assert [group["lr"] for group in to_optimizer_state_dict(state, module, optimizer)["param_groups"]] == [2.0, 3.0]
    plain_state = plain.init(dict(module.named_parameters()))
    with pytest.raises(ValueError, match=r"expected a state with \['exp_avg', 'exp_avg_sq', 'step'\], .*, got \[\]"):
        to_optimizer_state_dict(plain_state, module, optimizer)
    # Adafactor keeps other state of matrices than of vectors.
    adafactor = torch.optim.Adafactor(module.parameters())
    vectors = {"0.bias": torch.ones(2), "1.bias": torch.ones(3)}
    state = fs.from_torch(torch.optim.Adafactor).init(vectors)
    assert len(to_optimizer_state_dict(state, module, adafactor)["param_groups"]) == 1
    names_only, like = nn.Linear(3, 2).requires_grad_(False), plain.init(dict(nn.Linear(3, 2).named_parameters()))
    optimizer = torch.optim.SGD(names_only.parameters(), lr=2.0)
    state = from_optimizer_state_dict(optimizer.state_dict(), like, names_only, optimizer, updates=1)
    assert state.hyper["lr"] == 2.0


def test_options_that_keep_the_same_state_are_not_compared():
    """Torch refuses some of them together, or on the CPU. A state may begin to keep an injected momentum later."""
    module = nn.Linear(3, 2)
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    grads = fs.tree_map(torch.ones_like, params)
    for cls, hyper, options in (
        (torch.optim.Adam, {}, {"lr": torch.tensor(0.5), "foreach": True, "capturable": True}),
        (torch.optim.Adadelta, {}, {"foreach": True, "differentiable": True}),
        (torch.optim.SGD, {"momentum": 0.0, "inject": "momentum"}, {"momentum": 0.0}),
    ):
        tx = fs.from_torch(cls, **hyper)
        state = tx.init(params)
        state = state._replace(hyper=fs.tree_map(lambda zero: zero + 0.5, state.hyper))
        _, state = tx.update(grads, state, params)
        exported = to_optimizer_state_dict(state, module, cls(module.parameters(), **options))
        assert exported["state"][0].keys() == state.slots.keys() != set()
        assert exported["param_groups"][0].get("momentum", 0.5) == 0.5


def test_a_parameter_that_never_had_a_gradient_has_no_state():
    module = nn.Linear(3, 2)
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for cls, hyper in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1})):
        tx = fs.from_torch(cls, lr=0.1, **hyper)
        _, state = tx.update({"weight": torch.ones(2, 3), "bias": None}, tx.init(params), params)
        exported = to_optimizer_state_dict(state, module, cls(module.parameters(), lr=0.1, **hyper))
        assert list(exported["state"]) == [0]
        like = tx.init(params)
        back = from_optimizer_state_dict(exported, like, module, cls(module.parameters(), lr=0.1, **hyper), updates=1)
        assert_same_bits(back, state)
        fresh = cls(module.parameters(), lr=0.1, **hyper)
        with pytest.raises(ValueError, match="leaves do not fit"):
            from_optimizer_state_dict(fresh.state_dict(), like, module, fresh, updates=1)


def test_state_that_torch_keeps_of_a_frozen_parameter_is_passed_over():
    """Its Adagrad makes that of all parameters before the first step."""
    module = nn.Linear(3, 2)
    module.weight.requires_grad_(False)
    params = fs.functionalize(module).init(every_leaf(one_axis()))
    optimizer = torch.optim.Adagrad(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    like = fs.from_torch(torch.optim.Adagrad).init(params)
    state = from_optimizer_state_dict(optimizer.state_dict(), like, module, optimizer)
    assert state.slots["sum"]["weight"] is None
    assert_same_bits(fs.unshard(state.slots["sum"]["bias"]), torch.ones(2))


def test_optimizer_states_that_do_not_fit():
    module = Net()
    params = dict(module.named_parameters())
    optimizer = torch.optim.AdamW(module.parameters())
    other = fs.ema(fs.from_torch(torch.optim.AdamW), 0.9)
    text = r"torch's optimizers have no such state\n  average.embedding.weight: is .*, which is not of"
    with pytest.raises(ValueError, match=text):
        to_optimizer_state_dict(other.init(params), module, optimizer)
    with pytest.raises(ValueError, match="parameter 0 of 1 of the optimizer is none of the module's; make"):
        to_optimizer_state_dict((), module, torch.optim.AdamW([torch.ones(1)]))
    state = fs.from_torch(torch.optim.AdamW).init(params)
    with pytest.raises(ValueError, match=r"embedding.weight: has state, but is no parameter of the torch optimizer\n"):
        to_optimizer_state_dict(state, module, torch.optim.AdamW(module.norm.parameters()))
    names = r"\['exp_avg', 'exp_avg_sq', 'step'\]"
    match = rf"expected a state with \['momentum_buffer'\], which this SGD keeps, got {names}; pass"
    with pytest.raises(ValueError, match=match):
        to_optimizer_state_dict(state, module, torch.optim.SGD(module.parameters(), momentum=0.9))
    train(module, optimizer, range(1))
    like = fs.from_torch(torch.optim.AdamW, amsgrad=True).init(params)
    text = r"do not fit\n  max_exp_avg_sq.embedding.weight: expected float32\[11, 7\], got nothing\n(.*\n){4}To fix: "
    with pytest.raises(ValueError, match=text):
        from_optimizer_state_dict(optimizer.state_dict(), like, module, optimizer)
    sgd = torch.optim.SGD(module.parameters())
    with pytest.raises(ValueError, match="the torch class does not count its updates; pass their number as updates="):
        from_optimizer_state_dict(sgd.state_dict(), fs.from_torch(torch.optim.SGD).init(params), module, sgd)


def change_state(**slots):
    return lambda state_dict: state_dict["state"][0].update(slots)


def change_group(**values):
    return lambda state_dict: state_dict["param_groups"][0].update(values)


NO_STATE_DICT = "expected state_dict to be the state dict of a torch optimizer, with state and param_groups, got a dict"
NO_NUMBER = "expected lr of a group of parameters to be a number, got "
MALFORMED = (
    (lambda state_dict: state_dict.update(state=[1]), f"{NO_STATE_DICT}: 'list' object has no"),
    (lambda state_dict: state_dict["state"].update({0: [1]}), f"{NO_STATE_DICT}: 'list' object has no"),
    (lambda state_dict: state_dict.update(param_groups={"lr": 1}), f"{NO_STATE_DICT}: string indices"),
    (lambda state_dict: state_dict["param_groups"][0].pop("params"), f"{NO_STATE_DICT}: 'params'"),
    (change_group(params=[[0]]), f"{NO_STATE_DICT}: unhashable type"),
    (change_state(exp_avg="x"), "expected exp_avg.weight to be a full tensor or a number, got a str"),
    (change_state(exp_avg=torch.ones(2, 3, device="meta")), "expected exp_avg.weight to be a full tensor or a number"),
    (change_state(step=torch.tensor(torch.nan)), "expected counts of updates from 0, got nan"),
    (change_state(step=-1), "expected counts of updates from 0, got -1.0; pass their number as updates="),
    (change_group(lr="fast"), f"{NO_NUMBER}a str"),
    (change_group(lr=torch.ones(2)), f"{NO_NUMBER}a float32 Tensor"),
)


def drop_parameter(state_dict):
    del state_dict["state"][0]


def halve_rate(state_dict):
    state_dict["param_groups"][0]["lr"] /= 2


DIFFERENCES = {
    "no state": (drop_parameter, "different leaves\n  exp_avg.weight: expected state as on .*, got no state on .*=1"),
    "number": (halve_rate, r"of one leaf\n  hyper.lr: expected the same on all ranks, got other values on rank 1"),
    "step": (change_state(step=torch.tensor(2.5)), "expected counts of updates from 0, got 2.5"),
    "group": (change_group(lr="1"), "expected lr of a group of parameters to be a number, got a str"),
    "no state dict": (dict.clear, "expected state_dict to be the state dict of a torch optimizer"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
@on_ranks(2)
def test_a_state_dict_that_differs_on_one_rank_is_refused_on_all(name):
    """Of a leaf that is split, no later check would find that one rank has the old values and another the new ones."""
    change, text = DIFFERENCES[name]
    module = nn.Linear(3, 2)
    params = fs.functionalize(module).init(every_leaf(one_axis()), seed=0)
    like = fs.from_torch(torch.optim.AdamW, inject="lr").init(params)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state_dict = copy.deepcopy(optimizer.state_dict())
    if my_rank():
        change(state_dict)
    with pytest.raises(ValueError, match=f"^checkpoint.from_optimizer_state_dict: .*{text}"):
        from_optimizer_state_dict(state_dict, like, module, optimizer)


def test_state_dicts_that_are_none_of_torchs_are_refused():
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    like = fs.from_torch(torch.optim.AdamW, inject=("lr",), lr=0.1).init(dict(module.named_parameters()))
    for change, text in MALFORMED:
        state_dict = copy.deepcopy(optimizer.state_dict())
        change(state_dict)
        start = re.escape(f"checkpoint.from_optimizer_state_dict: {text}")
        with pytest.raises(ValueError, match=f"^{start}"):
            from_optimizer_state_dict(state_dict, like, module, optimizer)
